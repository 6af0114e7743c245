"""What ``kd.Monitor`` promises, output by output, of a training that is not kd's: on one process and on two."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

import kd
from kd.cli import report_main
from kd.errors import UserError
from kd.monitor import control
from kd.report.records import RunRecords, read_run
from kd.report.rules import Explained
from kd.storage import mirror as mirror_module
from kd.storage import objects
from kd.storage.objects import file_system
from tests._collector import Receiver, collector  # noqa: F401 (a fixture)
from tests._forks import free_port, run_ranks, wait_until
from tests._helpers import ROOT, Command
from tests.monitor._foreign import Classifier, linear, loader, plain_loop, trainer_with

LATE_S = 0.2  # of rank 1, in each step: long against what a step computes, on a busy machine too


def get(address: str) -> str:
    """What is served there."""
    with urllib.request.urlopen(address, timeout=30) as answer:
        return str(answer.read().decode())


class Meanwhile(Callback):
    """Calls something while the training runs, at batch 15.

    Args:
        call: the something.
    """

    def __init__(self, call: Any) -> None:
        self.call = call

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == 15:
            self.call()


class Skipping(Classifier):
    """Skips the rest of the first epoch at its third batch."""

    def on_train_batch_start(self, batch: object, batch_idx: int) -> int | None:
        if self.trainer.current_epoch == 0 and batch_idx == 2:
            return -1
        return None


def test_a_batch_that_is_skipped_is_not_read(tmp_path: Path) -> None:
    """Lightning ends the epoch before ``on_train_batch_end``: no hook stays on the model, no reading is left."""
    hooks: list[int] = []

    class Hooks(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            hooks.append(len(pl_module._forward_hooks))

    watch = kd.Monitor(tmp_path / "run", health_every=1)
    trainer_with(watch, Hooks(), max_epochs=2, limit_train_batches=4).fit(Skipping(), loader(4))
    steps = [record["step"] for record in read_run(tmp_path / "run").health]
    assert hooks == [0, 0]
    assert len(steps) == 6 and steps == sorted(
        set(steps)
    )  # two of the first epoch, four of the second


def test_a_batch_that_is_skipped_is_no_step(tmp_path: Path) -> None:
    """The third of nine batches is fetched and not trained. The profiler counts neither it nor the validation."""
    watch = kd.Monitor(tmp_path / "run", kernels_at=1, kernels_steps=5)
    trainer_with(watch, max_epochs=3, limit_train_batches=3).fit(Skipping(), loader(4), loader(4))
    trained = [0, 1, 3, 4, 5, 6, 7, 8]
    run = read_run(tmp_path / "run")
    assert [record["step"] for record in run.steps[0]] == trained
    assert [record["step"] for record in run.steps[0] if record.get("first")] == [0, 3, 6]
    assert run.totals[0]["steps"] == len(trained) - 1  # the run's first step warms up
    (window,) = run.kernels
    assert (window["first"], window["last"]) == (1, 6)
    (layer,) = [row for row in window["top"] if row["name"] == "aten::addmm"]
    assert layer["calls"] == 1


# -- what it needs -----------------------------------------------------------------------------------------------------
NEEDS = """
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
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=[kd.Monitor("mine")],
                     enable_checkpointing=False)
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=3))
rooms = ("timm", "kd.models", "kd.teachers", "kd.distill", "kd.module", "kd.losses", "kd.tasks",
         "kd.data", "kd.run", "kd.ship", "kd.fleet", "kd.callbacks.context")
loaded = [name for name in sys.modules if any(name == room or name.startswith(room + ".") for room in rooms)]
assert not loaded, loaded
"""


def test_it_imports_neither_timm_nor_what_distills(tmp_path: Path) -> None:
    """In a process of its own, the first 20 lines of somebody else's training; and nothing is said of old files."""
    done = subprocess.run(
        [sys.executable, "-c", NEEDS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "Experiment logs directory" not in done.stderr
    line = "kd.Monitor: report.html and records are in mine; kd-report mine --open shows them\n"
    assert done.stderr.endswith(line)
    run = read_run(tmp_path / "mine")
    assert run.notes == []
    assert run.summary["status"] == "done"
    for step in run.steps[0]:
        assert {"data", "forward", "backward", "optimizer"} <= set(step["p"])
        assert not {"teacher", "student", "loss"} & set(step["p"])
        parts = sum(ms for name, ms in step["p"].items() if name != "validation")
        assert parts == pytest.approx(step["ms"], rel=0.02, abs=0.05)


# -- what it gives -----------------------------------------------------------------------------------------------------
def test_prometheus(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    port = int(free_port())
    pages: list[str] = []
    watch = kd.Monitor(tmp_path / "run", prometheus_port=port, interval_s=0.1)
    scrape = Meanwhile(lambda: pages.append(get(f"http://127.0.0.1:{port}/metrics")))
    trainer_with(watch, scrape).fit(Classifier(), loader())
    assert 'kd_phase_seconds{phase="forward"}' in pages[0]
    assert "kd_images_per_second" in pages[0]
    assert 'phase="teacher"' not in pages[0]


def test_otlp(tmp_path: Path, collector: str) -> None:  # noqa: F811
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    Receiver.bodies.clear()
    watch = kd.Monitor(tmp_path / "run", otlp=collector, interval_s=0.1)
    trainer_with(watch).fit(Classifier(), loader())
    assert b"kd.phase_seconds" in Receiver.bodies[-1]
    assert b"forward" in Receiver.bodies[-1]


def test_cloudwatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a folder without a parent in its name."""
    monkeypatch.chdir(tmp_path)
    trainer_with(kd.Monitor("mine", cloudwatch="KD/Foreign", interval_s=0.1)).fit(
        Classifier(), loader()
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if "_aws" in line]
    newest = json.loads(lines[-1])
    assert newest["phase_seconds.forward"] > 0 and newest["phase_seconds.backward"] > 0
    assert (newest["Recipe"], newest["Run"]) == (tmp_path.name, "mine")


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainings: of Lightning's Trainer, with a price; of a plain loop."""
    folder = tmp_path_factory.mktemp("runs")
    watch = kd.Monitor(folder / "lightning", rules_every_s=0, price_per_hour=3.0, interval_s=0.1)
    trainer_with(watch, max_epochs=2).fit(Classifier(), loader())
    with kd.Monitor(folder / "plain", rules_every_s=0) as watch:
        plain_loop(watch, watch(iter(loader())), linear())  # no length, no batch size
    return folder


def test_page_verdict_and_comparison(two_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(two_runs / name) for name in ("lightning", "plain")]
    for folder in folders:
        assert report_main([folder]) == 0
        page = Path(folder, "report.html").read_text()
        assert '"kind":"phases"' in page
        for word in (
            "student",
            "teacher",
            "data.num_workers",
            "optim.",
            "kd-train",
        ):
            assert word not in page.partition('id="data"')[2].partition("</script>")[0], word
    assert report_main(folders) == 0
    assert "forward" in (two_runs / "plain" / "comparison.html").read_text()
    summary = read_run(two_runs / "lightning").summary
    assert summary["verdict"]["bound"] in {"model", "host", "data", "none"}


def test_what_if(two_runs: Path, prints: Command, refusal) -> None:
    """What the records do not say is refused, not answered with 1.00x."""
    run = str(two_runs / "lightning")
    table = prints("report", [run, "--what-if", "gpus=8", "epochs=100", "price=24"])
    assert "8.00x" in table
    assert "cost" in table
    for folder, change, message in (
        (run, "cache=on", "has no teacher whose answers could be kept"),
        (str(two_runs / "plain"), "workers=2", "does not say how many processes it has"),
    ):
        assert message in refusal("report", [folder, "--what-if", change])


# -- on and off from outside -------------------------------------------------------------------------------------------
def test_words_reach_a_training_whose_run_is_in_an_object_store(
    monkeypatch: pytest.MonkeyPatch, refusal, own_cache: Path
) -> None:
    """``kd-report FOLDER --set kernels=2`` on the machine that trains; the store is refused."""
    url = "memory://foreign/mine/a"
    monkeypatch.setattr(control, "LOOK_EVERY_S", 0.0)
    watch = kd.Monitor(url, rules_every_s=0)
    folder = watch.phases.watched._folder

    files, _ = file_system(url, "")

    def order() -> None:
        wait_until(lambda: files.exists(f"{url}/config.yaml"))
        assert "must be a run's folder on the machine that trains" in refusal(
            "report", [url, "--set", "kernels=2"]
        )
        assert "'colour=blue' is not known" in refusal(
            "report", [str(folder), "--set", "kernels=2", "colour=blue"]
        )
        assert report_main([str(folder), "--set", "kernels=2"]) == 0
        wait_until((folder / "monitor").exists)

    with mock.patch.object(mirror_module, "EVERY_S", 0.05):
        trainer_with(watch, Meanwhile(order)).fit(Classifier(), loader())
    (window,) = read_run(folder).kernels
    assert window["first"] >= 15
    assert window["last"] == window["first"] + 1
    assert b'"status": "done"' in files.cat_file(f"{url}/summary.json")


@pytest.mark.parametrize(("place", "message"), [
    ("s3://bucket/run", "must be a URL such as s3://BUCKET/NAME/RUN, got s3://bucket/run"),
    ("s3://../../../run", "'s3/../../../run' leads out of "),
    ("smoke://signals/mine/a", "must be a URL of s3, "),
    ("http://127.0.0.1:9/runs/mine/a", "http://127.0.0.1:9/runs can't be written: "),
])  # fmt: skip
def test_a_wrong_place_is_told_by_the_argument_that_gave_it(
    place: str, message: str, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    """Who calls ``kd.Monitor`` has typed no ``runs_dir``."""
    monkeypatch.setattr(objects, "PAUSE_S", 0.0)
    with pytest.raises(UserError) as error:
        trainer_with(kd.Monitor(place)).fit(Classifier(), loader())
    assert str(error.value).startswith("kd.Monitor: folder: ")
    assert message in str(error.value)


# -- two processes -----------------------------------------------------------------------------------------------------
def lightning_ranks(items: list[str]) -> int:
    """A program of a rank: Lightning's DDP, until a limit ends it."""
    watch = kd.Monitor(items[0], max_hours=8 / 3600, rules_every_s=0)
    strategy = {"devices": 2, "strategy": "ddp", "max_epochs": 100}
    trainer_with(watch, **strategy).fit(Classifier(forward_s=LATE_S, rank=1), loader(2 * 10))
    return 0


def plain_ranks(items: list[str]) -> int:
    """A program of a rank: a loop around DistributedDataParallel."""
    rank = int(
        os.environ.pop("LOCAL_RANK")
    )  # as torch.multiprocessing.spawn has it: in no variable
    dist.init_process_group("gloo", rank=rank, world_size=2)
    net = DistributedDataParallel(linear())
    with kd.Monitor(items[0], rules_every_s=0) as watch:
        plain_loop(watch, watch(loader(24), net), net, LATE_S * rank)
    return 0


def check_that_rank_1_is_named(run: RunRecords) -> None:
    """The other waits for its gradients; both have done the same steps."""
    assert set(run.steps) == {0, 1}
    assert run.steps[0][-1]["step"] == run.steps[1][-1]["step"]
    facts = Explained(run).facts
    assert facts.phases["communication"] > 0.3 * facts.step_ms
    communication = [limit for limit in Explained(run).limits if limit.bound == "communication"]
    assert "because rank 1 computes" in communication[0].text


def test_two_ranks_of_lightnings_ddp_stop_at_the_same_step(tmp_path: Path) -> None:
    run_ranks([str(tmp_path / "run")], tmp_path / "log", program=lightning_ranks)
    run = read_run(tmp_path / "run")
    assert run.summary["status"] == "stopped: MaxHours"
    assert run.summary["world_size"] == 2
    check_that_rank_1_is_named(run)


def test_two_ranks_of_a_plain_loop(tmp_path: Path) -> None:
    run_ranks([str(tmp_path / "run")], tmp_path / "log", program=plain_ranks)
    run = read_run(tmp_path / "run")
    assert (run.headers[0]["world_size"], run.headers[1]["processes"]) == (2, 2)
    assert [row["step"] for row in run.metrics] == [*range(24)]  # of rank 0 alone
    check_that_rank_1_is_named(run)
