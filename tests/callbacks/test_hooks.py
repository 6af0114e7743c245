"""Callbacks' single hooks, without a run."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.profilers import PassThroughProfiler

from kd.callbacks import learning_rate
from kd.callbacks.context import RunContext, output_of, validation_logits
from kd.callbacks.fidelity import FidelityRecord
from kd.callbacks.finite import Finite
from kd.callbacks.hooks import SYNC_EVERY, Closing, after_step, ranks_meet
from kd.callbacks.last_checkpoint import LastCheckpoint
from kd.callbacks.learning_rate import LastStep
from kd.callbacks.metrics_csv import MetricsCSV
from kd.callbacks.nodes import _span, own_address
from kd.callbacks.preemption import Preemption, RunStopped
from kd.callbacks.preflight import Preflight
from kd.callbacks.progress import Progress
from kd.clock import Clock
from kd.errors import RunError
from kd.monitor.phases import PhaseProfiler, Phases
from kd.monitor.watched import Watched
from tests._helpers import error_in_a_thread


def test_what_is_open_is_closed_when_training_ends_well_or_not() -> None:
    class Open(Closing):
        closed = 0

        def close(self, trainer: object) -> None:  # type: ignore[override]
            self.closed += 1

    held = Open()
    held.on_train_end(None, None)  # type: ignore[arg-type]
    held.on_exception(None, None, RuntimeError())  # type: ignore[arg-type]
    assert held.closed == 2


def test_the_last_step_of_a_bounded_run_stops_it_and_that_of_an_epoch_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[object] = []
    monkeypatch.setattr(learning_rate, "log_last_step", logged.append)
    for step, last, stops in ((3, False, False), (4, True, False), (5, True, True)):
        trainer = SimpleNamespace(
            global_step=step, max_steps=5, is_last_batch=last, should_stop=False
        )
        LastStep().on_train_batch_end(trainer, None)  # type: ignore[arg-type]
        assert (trainer.should_stop, logged[-1:] == [trainer]) == (stops, last and not stops)


def test_ranks_of_a_machine_are_a_span_and_its_address_reaches_the_main_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (_span([3]), _span([4, 5, 6]), _span([0, 2])) == ("3", "4-6", "0, 2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address().endswith(" (127.0.0.1)")
    monkeypatch.setenv("MASTER_ADDR", "no such name")
    assert "(" not in own_address()


def test_a_validation_step_may_give_nothing() -> None:
    assert validation_logits(None) is None and output_of({"loss": 1}) == {"loss": 1}  # type: ignore[arg-type, comparison-overlap]


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    """``kd.train`` may run in any thread."""
    preemption = Preemption(LastCheckpoint())
    assert error_in_a_thread(lambda: preemption.on_train_start(None, None)) is None  # type: ignore[arg-type]
    preemption.close(None)  # type: ignore[arg-type]
    preemption.close(None)  # type: ignore[arg-type]


def test_a_run_that_ends_before_its_first_step_closes_its_clock() -> None:
    phases, clock = Phases(Watched(Path())), Clock()
    phases.clock = clock
    phases.profiler = PhaseProfiler(clock, PassThroughProfiler(), lambda: None)
    phases.close(SimpleNamespace())  # type: ignore[arg-type]
    assert clock._schedstat is None


# -- when a step ends, and ranks meet --------


def trainer_of(accumulate: int = 1, world: int = 1, last: bool = False) -> SimpleNamespace:
    return SimpleNamespace(accumulate_grad_batches=accumulate, world_size=world, is_last_batch=last)


@pytest.mark.parametrize(("accumulate", "last", "expected"), [
    (1, False, [True] * 4), (2, False, [False, True, False, True]), (4, True, [True] * 4),
])  # fmt: skip
def test_a_step_ends_with_its_last_batch(accumulate: int, last: bool, expected: list[bool]) -> None:
    assert [after_step(trainer_of(accumulate, last=last), i) for i in range(4)] == expected  # type: ignore[arg-type]


def test_several_ranks_meet_only_every_few_batches() -> None:
    assert [i for i in range(30) if ranks_meet(trainer_of(world=2), i)] == [
        SYNC_EVERY - 1,
        2 * SYNC_EVERY - 1,
        29,
    ]  # type: ignore[arg-type]
    assert all(ranks_meet(trainer_of(), i) for i in range(30))  # type: ignore[arg-type]
    assert [i for i in range(24) if ranks_meet(trainer_of(4, world=2), i)] == [11, 23]  # type: ignore[arg-type]
    assert ranks_meet(trainer_of(world=2, last=True), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("worst", [None, 1.0, torch.nan])
def test_a_process_whose_shards_are_empty_has_no_bad_weights(
    monkeypatch: pytest.MonkeyPatch, worst: float | None
) -> None:
    """A frozen backbone and a classifier of fewer classes than processes: the last ones' shards have no rows."""
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(0, 4))])
    if worst is not None:
        module.append(torch.nn.Parameter(torch.tensor([0.0, worst])))
    monkeypatch.setattr(RunContext, "of", lambda trainer: SimpleNamespace(module=module))
    trainer = SimpleNamespace(global_step=7)
    if worst is torch.nan:
        with pytest.raises(RunError, match="NaN or infinite after step 7"):
            Finite().on_save_checkpoint(trainer, None, {})  # type: ignore[arg-type]
    else:
        Finite().on_save_checkpoint(trainer, None, {})  # type: ignore[arg-type]


def test_a_loss_that_is_nan_is_named_with_its_step_where_batches_are_accumulated() -> None:
    """Ten batches an epoch, four to a step: the third step of an epoch has two."""
    finite = Finite()
    losses = [2.0] * 18 + [8.0, math.nan]
    for number, loss in enumerate(losses):
        epoch, batch_idx = divmod(number, 10)
        is_last = batch_idx == 9
        steps = 3 * epoch + (3 if is_last else (batch_idx + 1) // 4)
        trainer: Any = SimpleNamespace(
            fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(total_batch_idx=number)),
            accumulate_grad_batches=4,
            is_last_batch=is_last,
            global_step=steps,
            current_epoch=epoch,
            global_rank=0,
        )
        outputs = {"terms": {"loss": torch.tensor(loss)}}
        finite.on_train_batch_end(trainer, None, outputs, {"index": torch.arange(2)}, batch_idx)  # type: ignore[arg-type]
    with pytest.raises(RunError) as error:
        finite.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
    text = str(error.value)
    assert "in batch 19 of the run (step 5, epoch 2, rank 0)" in text
    assert text.endswith("the loss was 8 in the batch before, 2 at the start")


@pytest.mark.parametrize(("before", "was_normal"), [(2.5, True), (40.0, False)])
def test_a_rate_that_is_too_high_is_named_and_pictures_only_where_the_loss_was_normal_before(
    before: float, was_normal: bool
) -> None:
    finite = Finite("optim.lr=0.5 (the recipe's: 0.001)")
    for number, loss in enumerate((2.0, before, math.nan)):
        loop = SimpleNamespace(epoch_loop=SimpleNamespace(total_batch_idx=number))
        trainer: Any = SimpleNamespace(fit_loop=loop, accumulate_grad_batches=1, current_epoch=0, global_rank=0,
                                       world_size=1, is_global_zero=False, global_step=number + 1)  # fmt: skip
        outputs = {"terms": {"loss": torch.tensor(loss)}}
        finite.on_train_batch_end(trainer, None, outputs, {"index": torch.arange(4)}, number)  # type: ignore[arg-type]
        if number == 1:
            finite.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
    with pytest.raises(RunError) as error:
        finite.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
    text = str(error.value)
    assert "the usual reason is optim.lr=0.5 (the recipe's: 0.001)" in text
    assert ("training pictures" in text) == was_normal
    assert ("the loss was 40 in the batch before, 2 at the start" in text) != was_normal


def test_a_resumed_run_keeps_rows_of_metrics_whose_names_have_commas(tmp_path: Path) -> None:
    """Numbers of a regression bear the names of a table's columns."""
    name = "val/mae_height, cm"
    logger = MetricsCSV(tmp_path)
    for step in range(3):
        logger.log_metrics({name: 1.0 + step}, step)
    resumed = MetricsCSV(tmp_path)
    resumed.drop_from(2)
    resumed.log_metrics({name: 5.0}, 2)
    with (tmp_path / "metrics.csv").open() as file:
        rows = [(row["step"], row[name]) for row in csv.DictReader(file)]
    assert rows == [("0", "1.0"), ("1", "2.0"), ("2", "5.0")]


def test_the_bar_of_a_resumed_run_is_at_its_share_whatever_the_size_of_its_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four epochs of 100 batches of 8 pictures; resumed after two of them, and half of the third, with batches of 16."""
    data = SimpleNamespace(
        resumed_at=(2, 400), batch_size=16, batches_before=lambda samples: samples // 16
    )
    monkeypatch.setattr(RunContext, "of", lambda trainer: SimpleNamespace(data=data))
    trainer: Any = SimpleNamespace(
        is_global_zero=True,
        world_size=1,
        current_epoch=2,
        max_epochs=4,
        max_steps=-1,
        num_training_batches=50,
        accumulate_grad_batches=1,
        global_step=250,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(total_batch_idx=249)),
    )
    progress = Progress()
    progress.on_train_start(trainer, None)  # type: ignore[arg-type]
    bar = progress._bar
    assert bar is not None and (bar.n, bar.total) == (2000, 3200)
    assert bar.desc == "epoch 3/4"  # a run that resumes in mid-epoch starts no epoch
    progress.close(trainer)
    trainer.max_steps = 300  # of which 250 are made
    progress.on_train_start(trainer, None)  # type: ignore[arg-type]
    bar = progress._bar
    assert bar is not None and (bar.n, bar.total) == (2000, 2800)
    progress.close(trainer)


def test_the_fidelity_of_a_start_is_removed_where_a_rule_stops_the_run_before_a_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that are exported then were not compared."""
    file = tmp_path / "fidelity.json"
    file.touch()
    run = SimpleNamespace(folder=tmp_path)
    monkeypatch.setattr(RunContext, "of", lambda trainer: run)
    record = FidelityRecord(Preflight(), SimpleNamespace(best={}))  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(is_global_zero=True)
    record.on_exception(trainer, None, RuntimeError())  # type: ignore[arg-type]
    assert file.exists()
    record.on_exception(trainer, None, RunStopped("BudgetSpent", tmp_path))  # type: ignore[arg-type]
    assert not file.exists()
