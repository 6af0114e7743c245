"""``kd.Monitor`` on trainings that are not kd's: what it needs, what it names, what it leaves out."""

import re
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

import kd
from kd.monitor.control import Control
from kd.monitor.health import Health
from kd.monitor.kernels import Kernels
from kd.monitor.keys import MonitorSpec
from kd.monitor.loop import PlainLoop
from kd.monitor.own_run import OwnRun, _class_counts
from kd.monitor.phases import Phases
from kd.monitor.prometheus import Prometheus
from kd.monitor.results import BeginResults, WatchedResults
from kd.monitor.stopping import Stopping
from kd.monitor.system import System
from kd.monitor.tier import TierRecord
from kd.monitor.watch import Watch
from kd.monitor.watched import Watched
from kd.report.records import RunRecords, read_run
from kd.report.rules import Explained
from tests._helpers import refuses
from tests.monitor._foreign import (
    SIDE,
    STEPS,
    Classifier,
    OwnLoader,
    linear,
    loader,
    plain_loop,
    trained,
    trainer_with,
)


def shares(run: RunRecords) -> dict[str, float]:
    phases = Explained(run).facts.phases
    step = sum(phases.values())
    return {name: ms / step for name, ms in phases.items()}


def test_a_class_without_pictures_counts_as_one() -> None:
    """The last one, too: no picture names it."""
    assert _class_counts([0, 0, 2], 4) == [2, 0, 1, 0]


def test_validation_is_no_part_of_a_step_and_metrics_are_kept(tmp_path: Path) -> None:
    class Module(Classifier):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    watch = kd.Monitor(tmp_path / "run", rules_every_s=0)
    trainer = trainer_with(watch, max_epochs=2, log_every_n_steps=4)
    trainer.fit(Module(8), loader(8), loader(4))
    run = read_run(tmp_path / "run")
    assert [row["val/acc1"] for row in run.metrics if "val/acc1" in row]
    assert [row["step"] for row in run.metrics if "train/loss" in row] == [3, 7, 11, 15]
    assert any(step["p"].get("validation") for step in run.steps[0])
    assert run.config["module"] == {"width": 8}
    assert run.config["trainer"]["max_epochs"] == 2


def test_the_loss_of_accumulated_batches_is_a_batchs_own(tmp_path: Path) -> None:
    """Lightning hands callbacks the loss divided by the number of accumulated batches."""

    class Three(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return 0 * super().training_step(batch, batch_idx) + 3.0

    watch = kd.Monitor(tmp_path / "run", rules_every_s=0)
    trainer = trainer_with(watch, accumulate_grad_batches=4, log_every_n_steps=1)
    trainer.fit(Three(), loader(8))
    losses = [row["train/loss"] for row in read_run(tmp_path / "run").metrics]
    assert losses == [3.0] * len(losses) and losses


def test_a_training_that_resumes_has_each_step_once_in_its_metrics(tmp_path: Path) -> None:
    files = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    arguments = {"max_epochs": 2, "log_every_n_steps": 1, "enable_checkpointing": True}
    for checkpoint in (None, tmp_path / "epoch=0.ckpt"):
        watch = kd.Monitor(tmp_path / "run", rules_every_s=0)
        trainer = trainer_with(watch, files, **arguments)
        trainer.fit(Classifier(), loader(4), ckpt_path=checkpoint, weights_only=False)
    rows = read_run(tmp_path / "run").metrics
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(8))


def test_a_loader_without_a_length_has_no_last_batch_of_the_loader_before() -> None:
    loop = PlainLoop()
    loop.expect([1, 2])
    assert [loop.is_last_batch for _ in loop.fetch([1, 2])] == [False, True]
    loop.expect(iter([1, 2, 3]))
    assert [loop.is_last_batch for _ in loop.fetch(iter([1, 2, 3]))] == [False, False, False]


def test_a_limit_stops_a_training_of_somebody_else(tmp_path: Path) -> None:
    watch = kd.Monitor(tmp_path / "run", max_hours=1e-4, rules_every_s=0)
    trainer = trainer_with(watch, max_epochs=100)
    trainer.fit(Classifier(), OwnLoader(0.05))
    run = read_run(tmp_path / "run")
    assert run.summary["status"] == "stopped: MaxHours"
    assert trainer.current_epoch < 99


def test_a_file_in_the_folders_place_is_no_earlier_training(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with refuses("run: can't be written: a file has the place of this folder, or"):
        trained(tmp_path / "run", Classifier(), loader(2))


def test_one_folder_holds_one_training(tmp_path: Path) -> None:
    trained(tmp_path / "run", Classifier(), loader(2))
    with refuses("holds the records of an earlier training"):
        trained(tmp_path / "run", Classifier(), loader(2))
    for settings, message in (
        ({"kernel_at": 3}, "no key 'kernel_at'; did you mean 'kernels_at'"),
        ({"interval_s": 0.0}, "interval_s must be >= 0.05"),
        ({"budget": 3}, "budget"),
    ):
        with refuses(message):
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
    net = linear()
    with kd.Monitor(tmp_path / "run", interval_s=0.1) as watch:
        for cut in (STEPS, None):
            plain_loop(watch, islice(watch(OwnLoader(0.02)), cut), net)
            with watch.phase("validation"):
                time.sleep(0.1)
            time.sleep(0.1)
    run = read_run(tmp_path / "run")
    assert run.summary["status"] == "done"
    assert (run.summary["epochs"], run.summary["steps"]) == (1, 2 * STEPS)  # one was broken off
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
            for _ in watch(OwnLoader(0.02)):
                watch.log(0.5)
                with refuses(r"watch.log: must be one number, got shape \(2,\)"):
                    watch.log(torch.ones(2))
            epochs += 1
    assert watch.stopped == "MaxHours"
    assert epochs < 100
    run = read_run(tmp_path / "run")
    assert run.summary["status"] == "stopped: MaxHours"
    assert run.metrics[0]["train/loss"] == 0.5


def test_a_problem_names_its_setting_and_is_printed_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An address or a rule's text may hold the word that precedes the settings of kd's own runs."""
    problem = "http://monitor.lan:4318 does not take the numbers"
    Watched(tmp_path).report(problem, "otlp")
    assert capsys.readouterr().err == f"kd.Monitor: otlp: {problem}\n"
    OwnRun().report(problem, "otlp")
    assert capsys.readouterr().err == f"kd-train: monitor.otlp: {problem}\n"


@pytest.mark.parametrize(("settings", "message"), [
    ({"webhook": "ftp://monitor.lan/hook", "actions": {"LossRising": "webhook"}},
     "webhook: an http(s) address to post LossRising to, got 'ftp://monitor.lan/hook'"),
    ({"prices": "monitor.yaml", "instances": ["a"]}, "prices: monitor.yaml"),
    ({"budget": 5}, "budget: 5 needs price_per_hour, "),
    ({"instances": ["a"]}, "prices, instances: must be given together"),
])  # fmt: skip
def test_a_mistake_names_the_setting_as_it_was_given_and_the_value_whole(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    """In kd's own runs the settings are below ``monitor``, a word that addresses and files may hold too."""
    with refuses(re.escape(f"kd.Monitor: {message}")):
        kd.Monitor(tmp_path / "run", **settings)


def test_kds_own_runs_are_watched_by_the_same_parts(tmp_path: Path) -> None:
    """Nothing twice: a run of kd's adds what such runs alone have, another training its results and its way to stop."""
    spec = MonitorSpec(prometheus_port=9000)
    own = kd.Monitor.of_own_run(OwnRun(), spec, lambda rule: None)
    other = kd.Monitor(tmp_path / "run", prometheus_port=9000)
    shared = {Phases, System, Watch, Health, Kernels, Control, Prometheus}
    assert {type(part) for part in own.parts} == shared | {TierRecord}
    assert {type(part) for part in other.parts} == shared | {BeginResults, Stopping, WatchedResults}
