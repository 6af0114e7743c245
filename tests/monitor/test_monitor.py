"""``kd.Monitor`` on trainings that are not kd's: what it needs, what it names, what it leaves out."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import kd
from kd.errors import UserError
from kd.report.records import RunRecords, percentile, read_run
from kd.report.rules import Explained
from tests._helpers import ROOT

torchvision = pytest.importorskip("torchvision")
STEPS = 24  # a verdict needs 20 after the first
SIDE = 32
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


class Swing(torch.autograd.Function):
    """Its backward pass takes 5 or 120 ms in turn, as one whose threads wait for a core."""

    count = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Swing.count += 1
        time.sleep(0.12 if Swing.count % 2 else 0.005)
        return grads[0]


class Classifier(LightningModule):
    """A plain module, as its author would write it."""

    def __init__(self, width: int = 8, swings: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torchvision.models.ResNet(
            torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=4, width_per_group=64
        )
        self.swings = swings

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, labels = batch
        logits = self.net(pictures)
        if self.swings:
            logits = Swing.apply(logits)
        return nn.functional.cross_entropy(logits, labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        pictures, labels = batch
        right = (self.net(pictures).argmax(1) == labels).float().mean()
        self.log("val/acc1", right)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Starving:
    """A loader of the user's own, which neither says how large its batches are nor how it makes them."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(STEPS):
            time.sleep(self.wait_s)
            yield torch.rand(2, 3, SIDE, SIDE), torch.randint(0, 4, (2,))


class Augmented(Dataset):
    """Pictures that are decoded large, augmented and made small, or that were made small ahead of training."""

    def __init__(self, side: int) -> None:
        from torchvision.transforms import v2

        self.picture = torch.randint(0, 256, (3, side, side), dtype=torch.uint8)
        self.augment = v2.Compose(
            [v2.ColorJitter(0.4, 0.4, 0.4, 0.2), v2.RandomResizedCrop(SIDE, antialias=True), v2.ToDtype(torch.float32)]
        )  # fmt: skip

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.augment(self.picture), index % 4


def pictures(count: int = 2 * STEPS) -> DataLoader:
    return DataLoader(
        TensorDataset(torch.rand(count, 3, SIDE, SIDE), torch.arange(count) % 4), batch_size=2
    )


def trained(folder: Path, module: LightningModule, loader: Any, **settings: Any) -> RunRecords:
    watch = kd.Monitor(folder, interval_s=0.1, rules_every_s=0, **settings)
    Trainer(max_epochs=1, callbacks=[watch], **QUIET).fit(module, loader)
    return read_run(folder)


def shares(run: RunRecords) -> dict[str, float]:
    phases = Explained(run).facts.phases
    step = sum(phases.values())
    return {name: ms / step for name, ms in phases.items()}


def bounds(run: RunRecords) -> list[str]:
    return [limit.bound for limit in Explained(run).limits]


def test_the_20_line_training_of_somebody_else(tmp_path: Path) -> None:
    """In a process of its own: neither timm nor kd's models are imported."""
    code = """
import sys, torch, kd
import pytorch_lightning as pl
from torch import nn

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

data = torch.utils.data.TensorDataset(torch.rand(90, 3, 4, 4), torch.zeros(90, dtype=torch.long))
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=[kd.Monitor("runs/mine")],
                     enable_checkpointing=False)
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=3))
loaded = [name for name in sys.modules if name.partition(".")[0] == "timm" or name.startswith("kd.models")]
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=_environment(),
    )
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "runs" / "mine")
    assert run.notes == []
    assert run.summary["status"] == "done"
    steps = run.steps[0]
    assert [step["step"] for step in steps] == list(range(30))
    for step in steps:
        assert {"data", "forward", "backward", "optimizer"} <= set(step["p"])
        assert not {"teacher", "student", "loss"} & set(step["p"])
        parts = {name: ms for name, ms in step["p"].items() if name != "validation"}
        assert sum(parts.values()) == pytest.approx(step["ms"], rel=0.02, abs=0.05)
    assert run.headers[0]["batch_size"] == 3
    assert run.health[0]["grad_norm"] > 0
    assert run.health[0]["inputs"]["high"] <= 1
    command = "import sys; from kd.cli import report_main; sys.exit(report_main())"
    report = subprocess.run(
        [sys.executable, "-c", command, "runs/mine"], cwd=tmp_path, env=_environment()
    )
    assert report.returncode == 0
    page = (tmp_path / "runs" / "mine" / "report.html").read_text()
    assert '"kind":"phases"' in page
    assert "teacher" not in json.dumps(run.summary)


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


DDP = """
import sys, time, torch, kd
import pytorch_lightning as pl
from torch import nn

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            time.sleep(0.05)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

data = torch.utils.data.TensorDataset(torch.rand(120, 3, 4, 4), torch.zeros(120, dtype=torch.long))
trainer = pl.Trainer(max_epochs=100, accelerator="cpu", devices=2, strategy="ddp", logger=False,
                     enable_checkpointing=False, enable_progress_bar=False,
                     callbacks=[kd.Monitor("runs/mine", max_hours=0.0005, rules_every_s=0)])
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=2))
"""


@pytest.mark.slow  # kd's own runs on two ranks go the same way: test_phases.py, test_control.py
def test_two_ranks_of_somebody_else_stop_at_the_same_step(tmp_path: Path) -> None:
    """One waits for the other's gradients; a limit that rank 0 sees stops both."""
    (tmp_path / "train.py").write_text(DDP)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True,
        env=_environment(), timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "runs" / "mine")
    assert run.summary["status"] == "stopped: MaxHours"
    assert run.summary["world_size"] == 2
    assert {rank: steps[-1]["step"] for rank, steps in run.steps.items()} == {
        rank: run.summary["steps"] - 1 for rank in (0, 1)
    }
    waits = [step["p"].get("communication", 0.0) for step in run.steps[0]]
    assert percentile(waits, 50) > 25


def test_a_loader_that_starves_is_named_and_its_cure_too(tmp_path: Path) -> None:
    """Hyundai's story: batches from a loader of their own; no number of loader processes is guessed."""
    before = trained(tmp_path / "before", Classifier(), Starving(0.4))
    assert shares(before)["data"] > 0.5
    limits = {limit.bound: limit for limit in Explained(before).limits}
    assert "data" in limits
    assert "num_workers" not in limits["data"].lever
    assert "data.engine" not in limits["data"].lever
    assert "num_workers" not in before.headers[0]
    assert before.headers[0]["batch_size"] == 2  # of the first batch
    assert "Dataloader" not in [finding["rule"] for finding in before.summary["findings"]]
    after = trained(tmp_path / "after", Classifier(), Starving(0.0))
    assert "data" not in bounds(after)
    assert shares(after)["data"] < 0.25


def test_a_backward_pass_that_swings_is_named(tmp_path: Path) -> None:
    """KT's story: the same shapes, and a backward pass of 5 or 120 ms."""
    before = trained(tmp_path / "before", Classifier(swings=True), pictures())
    found = {finding["rule"]: finding["text"] for finding in before.summary["findings"]}
    assert found["PhaseVariation"].startswith("backward takes ")
    assert max(shares(before), key=lambda name: shares(before)[name]) == "backward"
    after = trained(tmp_path / "after", Classifier(), pictures())
    backward = [step["p"]["backward"] for step in after.steps[0][1:]]
    assert percentile(backward, 50) < 100


def test_augmentation_that_binds_is_named(tmp_path: Path) -> None:
    """DALI's story: large pictures, augmented one by one on the CPU; the cure is to make them small ahead."""
    before = trained(tmp_path / "before", Classifier(), DataLoader(Augmented(600), batch_size=2))
    assert shares(before)["data"] > 0.5
    data = next(limit for limit in Explained(before).limits if limit.bound == "data")
    assert data.lever.startswith(("num_workers=", "cheaper pictures"))
    facts = Explained(before).facts
    assert facts.loading_busy > 0.1  # the wait is computing, not sleeping
    after = trained(tmp_path / "after", Classifier(), DataLoader(Augmented(40), batch_size=2))
    assert shares(after)["data"] < shares(before)["data"] / 2


def test_validation_is_no_part_of_a_step_and_metrics_are_kept(tmp_path: Path) -> None:
    watch = kd.Monitor(tmp_path / "run", rules_every_s=0)
    trainer = Trainer(max_epochs=2, callbacks=[watch], log_every_n_steps=4, **QUIET)
    trainer.fit(Classifier(), pictures(16), pictures(8))
    run = read_run(tmp_path / "run")
    assert [row["val/acc1"] for row in run.metrics if "val/acc1" in row]
    assert [row["step"] for row in run.metrics if "train/loss" in row] == [3, 7, 11, 15]
    assert any(step["p"].get("validation") for step in run.steps[0])
    assert run.config["module"] == {"width": 8, "swings": False}
    assert run.config["trainer"]["max_epochs"] == 2


def test_a_limit_stops_a_training_of_somebody_else(tmp_path: Path) -> None:
    watch = kd.Monitor(tmp_path / "run", max_hours=1e-4, rules_every_s=0)
    trainer = Trainer(max_epochs=100, callbacks=[watch], **QUIET)
    trainer.fit(Classifier(), Starving(0.05))
    run = read_run(tmp_path / "run")
    assert run.summary["status"] == "stopped: MaxHours"
    assert trainer.current_epoch < 99


def test_one_folder_holds_one_training(tmp_path: Path) -> None:
    trained(tmp_path / "run", Classifier(), pictures(4))
    with pytest.raises(UserError, match="holds the records of an earlier training"):
        trained(tmp_path / "run", Classifier(), pictures(4))
    for settings, message in (
        ({"kernel_at": 3}, "no key 'kernel_at'; did you mean 'kernels_at'"),
        ({"interval_s": 0.0}, "interval_s must be >= 0.05"),
        ({"budget": 3}, "budget"),
    ):
        with pytest.raises(UserError, match=message):
            kd.Monitor(tmp_path / "other", **settings)


def test_a_training_that_fails_leaves_its_reason(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield torch.rand(2, 3, SIDE, SIDE), torch.tensor([0, 1])
        raise RuntimeError("planted")

    class Broken:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return broken()

    with pytest.raises(RuntimeError, match="planted"):
        trained(tmp_path / "run", Classifier(), Broken())
    summary = read_run(tmp_path / "run").summary
    assert summary["status"] == "failed"
    assert summary["error"] == "RuntimeError: planted"


def test_a_plain_loop_is_watched(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with kd.Monitor(tmp_path / "run", interval_s=0.1) as watch:
        for _ in range(2):
            for batch, labels in watch(Starving(0.02)):
                with watch.phase("forward"):
                    loss = nn.functional.cross_entropy(net(batch), labels)
                with watch.phase("backward"):
                    loss.backward()
                with watch.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                watch.log(loss)
            with watch.phase("validation"):
                time.sleep(0.1)
    run = read_run(tmp_path / "run")
    assert run.summary["status"] == "done"
    assert run.summary["epochs"] == 2
    assert [step["step"] for step in run.steps[0]] == list(range(2 * STEPS))
    assert shares(run)["data"] > 0.3
    for step in run.steps[0]:
        assert {"data", "forward", "backward", "optimizer", "rest"} <= set(step["p"])
        assert step["p"]["rest"] < 90  # the time between two epochs is no part of a step
    assert len([row for row in run.metrics if "train/loss" in row]) == 2 * STEPS
    assert "logging" not in shares(run)


def test_a_loop_that_stops_says_why(tmp_path: Path) -> None:
    with kd.Monitor(tmp_path / "run", max_hours=5e-5, rules_every_s=0) as watch:
        epochs = 0
        while not watch.stopped:
            for _ in watch(Starving(0.02)):
                pass
            epochs += 1
    assert watch.stopped == "MaxHours"
    assert epochs < 100
    assert read_run(tmp_path / "run").summary["status"] == "stopped: MaxHours"
