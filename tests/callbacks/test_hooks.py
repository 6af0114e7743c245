"""Callbacks' single hooks, without a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning.profilers import PassThroughProfiler

from kd.callbacks import learning_rate
from kd.callbacks.context import RunContext, output_of, validation_logits
from kd.callbacks.finite import Finite
from kd.callbacks.hooks import SYNC_EVERY, Closing, after_step, ranks_meet
from kd.callbacks.last_checkpoint import LastCheckpoint
from kd.callbacks.learning_rate import LastStep
from kd.callbacks.nodes import _span, own_address
from kd.callbacks.preemption import Preemption
from kd.callbacks.preflight import FOLDER, SharedPreflight
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
    assert validation_logits(None) == {} and output_of({"loss": 1}) == {"loss": 1}  # type: ignore[arg-type, comparison-overlap]


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


@pytest.mark.parametrize("content", [b"", bytes(5000), b"hello world", b"\x80\x02."])
def test_a_preflights_file_of_any_bytes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(SharedPreflight, "_key", lambda self: "key")
    (tmp_path / "key.pt").write_bytes(content)
    run = SimpleNamespace(trainer=SimpleNamespace(strategy=None))
    assert SharedPreflight(run).read() is None  # type: ignore[arg-type]


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
