"""The case studies' stories with a training that is not kd's: named rightly, cured, and named as cured.

Times are the training's own (``own_time``): what other processes of the machine take decides nothing.
"""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import kd
from kd.report.limits import Limit
from kd.report.records import RunRecords, read_run
from kd.report.rules import Explained
from tests._clock import OwnTime
from tests.monitor._loaders import BATCH, SIDE, STEPS, OwnLoader

torchvision = pytest.importorskip("torchvision")


class Swing(torch.autograd.Function):
    """Its backward pass takes 8 or 31 s in turn, as KT's, whose launching thread waited for a core."""

    seconds = itertools.cycle((8.3, 30.9))

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(next(Swing.seconds))
        return grads[0]


class Classifier(LightningModule):
    """A plain module of torchvision's ResNet, as its author would write it.

    Args:
        forward_s: seconds that its forward pass takes beside computing.
        swings: whether its backward pass does.
    """

    def __init__(self, forward_s: float = 0.0, swings: bool = False) -> None:
        super().__init__()
        self.net = torchvision.models.ResNet(
            torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=4
        )
        self.forward_s = forward_s
        self.swings = swings

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, labels = batch
        time.sleep(self.forward_s)
        logits = self.net(pictures)
        if self.swings:
            logits = Swing.apply(logits)
        return nn.functional.cross_entropy(logits, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Augmented(Dataset):
    """Pictures of ``side`` pixels that are augmented one by one on the CPU, then cut small."""

    def __init__(self, side: int) -> None:
        from torchvision.transforms import v2

        self.picture = torch.randint(0, 256, (3, side, side), dtype=torch.uint8)
        self.augment = v2.Compose(
            [v2.ColorJitter(0.4, 0.4, 0.4, 0.2), v2.RandomResizedCrop(SIDE), v2.ToDtype(torch.float32)]
        )  # fmt: skip

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.augment(self.picture), index % 4


def trained(folder: Path, module: LightningModule, loader: Any) -> RunRecords:
    """The records of an epoch."""
    Trainer(
        max_epochs=1,
        callbacks=[kd.Monitor(folder, interval_s=0.1, rules_every_s=0)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader)
    return read_run(folder)


def data_share(run: RunRecords) -> float:
    """Share of the step that waits for its batch."""
    facts = Explained(run).facts
    return facts.phases["data"] / facts.step_ms


def own_limits(run: RunRecords) -> list[Limit]:
    """The limits, without what other processes of this machine do."""
    return [one for one in Explained(run).limits if "other processes use" not in one.text]


def test_a_loader_that_starves_is_named_and_the_cure_gives_what_was_promised(
    tmp_path: Path, own_time: OwnTime
) -> None:
    """Hyundai's: a loader of their own, slower than the step; no number of loader processes is guessed."""
    before = trained(tmp_path / "before", Classifier(forward_s=5.0), OwnLoader(5.0))
    first = own_limits(before)[0]
    assert first.bound == "data"
    assert first.text.startswith("the step waits 5")
    assert "num_workers" not in first.lever
    assert "data." not in first.lever and "kd-" not in first.lever
    assert "num_workers" not in before.headers[0]
    assert before.headers[0]["batch_size"] == BATCH  # of the first batch
    assert "Dataloader" not in [finding["rule"] for finding in before.summary["findings"]]

    after = trained(tmp_path / "after", Classifier(forward_s=5.0), OwnLoader(0.0))
    assert "data" not in [limit.bound for limit in own_limits(after)]
    reached = Explained(after).facts.images_per_s / Explained(before).facts.images_per_s  # type: ignore[operator]
    assert first.gain == pytest.approx(reached, rel=0.05)
    assert reached == pytest.approx(2, rel=0.1)


def test_a_backward_pass_that_swings_is_named(tmp_path: Path, own_time: OwnTime) -> None:
    """KT's: the data wait is nothing, and backward takes 8 or 31 s of the same shapes."""
    before = trained(tmp_path / "before", Classifier(swings=True), OwnLoader(0.0006))
    texts = {finding["rule"]: finding["text"] for finding in before.summary["findings"]}
    assert texts["PhaseVariation"].startswith("backward takes 8.")
    assert " to 3" in texts["PhaseVariation"]
    assert data_share(before) < 0.01
    facts = Explained(before).facts
    assert facts.phases["backward"] > 0.9 * facts.step_ms

    after = trained(tmp_path / "after", Classifier(forward_s=1.0), OwnLoader(0.0006))
    assert "PhaseVariation" not in [finding["rule"] for finding in after.summary["findings"]]
    assert own_limits(after)[0].text.startswith("the model's own training takes")


def test_augmentation_that_binds_is_named(tmp_path: Path, own_time: OwnTime) -> None:
    """DALI's: large pictures, augmented one by one on the CPU; the cure is to make them small ahead."""
    large = DataLoader(Augmented(900), batch_size=BATCH)
    before = trained(tmp_path / "before", Classifier(), large)
    first = own_limits(before)[0]
    assert first.bound == "data"
    assert first.lever.startswith(("num_workers=", "cheaper pictures"))
    assert data_share(before) > 0.5
    assert (
        Explained(before).facts.loading_busy > 0.9
    )  # the wait is computing, not waiting for a disk

    small = DataLoader(Augmented(SIDE), batch_size=BATCH)
    after = trained(tmp_path / "after", Classifier(), small)
    assert data_share(after) < data_share(before) / 2
