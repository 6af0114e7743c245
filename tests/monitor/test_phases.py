"""Phases: they add up to the step, and a planted delay shows where it was planted."""

import itertools
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from pytorch_lightning import Callback, Trainer

from kd.cli import train_main
from kd.clock import Clock, annotate, process_start, run_clock
from kd.monitor.phases import Phases, phase_of
from kd.monitor.watched import Watched
from kd.report.records import PHASES, RunRecords, percentile, read_run
from tests._clock import HandClock
from tests._forks import run_ranks
from tests._helpers import ROOT, write_recipe
from tests._runs import assert_same, callback, newest_run, resumed, student_of
from tests._runs import run as trained


class StepWatch(Callback):
    """An independent clock: from one batch's start to the next one's."""

    starts: list[float] = []  # noqa: RUF012 (the test reads it)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.starts.append(time.perf_counter())


def median_phase(run: RunRecords, phase: str, rank: int = 0) -> float:
    return percentile([s["p"].get(phase, 0.0) for s in run.steps[rank] if not s.get("first")], 50)


def test_the_phases_of_a_run_add_up_to_its_steps(recipe: Path) -> None:
    StepWatch.starts.clear()
    own = callback("tests.monitor.test_phases.StepWatch")
    trained(recipe, own)
    from tests.monitor.test_phases import StepWatch as Used

    steps = newest_run(recipe).steps[0]
    assert [s["step"] for s in steps] == list(range(12))
    assert [s["step"] for s in steps if s.get("first")] == [0, 6]
    watched = [1000 * (b - a) for a, b in itertools.pairwise(Used.starts[:6])]
    # a step ends where the next batch is asked for, so the two clocks are shifted by one wait for a batch
    before = [s["p"]["data"] + s["p"]["h2d"] for s in steps[:6]]
    told = [s["ms"] - before[i] + before[i + 1] for i, s in enumerate(steps[:5])]
    # loose: the steps are tiny, and a busy machine takes the core between the two clocks' readings; a phase left out or
    # counted twice shows all the same
    ratio = statistics.median(a / b for a, b in zip(told, watched, strict=True))
    assert ratio == pytest.approx(1, abs=0.25)
    for step in steps:
        phases = {k: v for k, v in step["p"].items() if k != "validation"}
        assert sum(phases.values()) == pytest.approx(step["ms"], rel=0.02)
        assert {
            "data",
            "h2d",
            "teacher",
            "student",
            "loss",
            "backward",
            "optimizer",
            "logging",
        } <= set(phases)
        assert set(phases) <= set(PHASES)
    assert steps[5]["p"]["validation"] > 0
    assert steps[5]["p"]["checkpoint"] > 0


class Plant(Callback):
    """Makes the parts of the training slower, each by seconds of its own."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        modules = {
            "teacher": pl_module.teacher.model,
            "student": pl_module.student.model,
            "loss": pl_module.student.objective.losses.kd,
        }
        for part, module in modules.items():
            module.register_forward_pre_hook(lambda *_, part=part: time.sleep(DELAYS[part]))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        time.sleep(DELAYS["optimizer"])


DELAYS = {"teacher": 0.1, "student": 0.2, "loss": 0.4, "optimizer": 0.8}


def test_a_planted_delay_shows_in_its_phase(recipe: Path, hand_clock: HandClock) -> None:
    plant = callback("tests.monitor.test_phases.Plant")
    items = ["trainer.max_epochs=1", "trainer.limit_val_batches=0"]
    run = read_run(trained(recipe, plant, *items))
    for part, seconds in DELAYS.items():
        assert median_phase(run, part) == pytest.approx(1000 * seconds, abs=1), part
    for other in ("backward", "data"):
        assert median_phase(run, other) < 1, other


@pytest.fixture()
def plain(finished: Path) -> RunRecords:
    """A run with nothing special; not to be changed."""
    return read_run(finished)


def test_totals_hold_every_step_but_the_first(plain: RunRecords) -> None:
    run = plain
    steps, total = run.steps[0], run.totals[0]
    assert total["steps"] == len(steps) - 1
    assert total["ms"] == pytest.approx(sum(s["ms"] for s in steps[1:]), rel=1e-3)
    assert total["max_ms"] == max(s["ms"] for s in steps[1:])
    (startup,) = run.events
    assert startup["name"] == "startup"
    assert startup["s"] == pytest.approx(sum(startup["parts"].values()), abs=0.02)


def test_a_resumed_run_goes_on_in_the_same_file(recipe: Path) -> None:
    stop = callback("tests._stop.StopAfterEpoch", epoch=0)
    assert train_main([f"recipe={recipe}", stop]) == 143
    folder = newest_run(recipe).folder
    resumed(folder, "trainer.callbacks=null")
    run = read_run(folder)
    assert [s["step"] for s in run.steps[0]] == list(range(12))
    assert run.totals[0]["steps"] == 10  # without the first step of each process
    assert len(run.events) == 2


def test_monitor_off_leaves_no_records_and_the_same_student(finished: Path, tmp_path: Path) -> None:
    items = [f"recipe={finished.parents[2] / 'tiny.yaml'}", f"runs_dir={tmp_path}"]
    assert train_main([*items, "trainer.max_epochs=1", "monitor.enabled=false"]) == 0
    off = tmp_path / "tiny" / "000"
    assert not (off / "records").exists()
    assert_same(student_of(off), student_of(finished))


def test_communication_of_two_processes_is_timed_and_a_late_rank_is_seen(
    pictures: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(
        tmp_path / "tiny.yaml", pictures, None, data__batch_size=4, trainer__max_epochs=4
    )
    late = callback("tests.monitor.test_phases.LateRank")
    run_ranks([f"recipe={recipe}", "config=ddp_2cpu", late], tmp_path / "log")
    run = newest_run(recipe)
    assert set(run.steps) == {0, 1}
    waited = [median_phase(run, "communication", rank) for rank in (0, 1)]
    assert waited[0] > 150 and waited[0] > waited[1] + 100  # rank 0 waits for the late one
    ((_, samples),) = run.samples.items()
    assert not any(s["workers"] for s in samples)  # a rank is no loader
    verdict = run.summary["verdict"]
    assert verdict["bound"] == "communication"
    assert "rank 1 computes" in verdict["text"]


class LateRank(Callback):
    """Rank 1 computes 200 ms longer than rank 0."""

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(0.2)


def test_the_progress_bar_says_what_limits_the_run_so_far() -> None:
    phases = Phases(Watched(Path()))
    phases.header = {"device": "cpu", "cores": 4, "threads": 1, "num_workers": 0}
    step = {"ms": 100.0, "p": {"data": 60.0, "student": 40.0}, **dict.fromkeys(COUNTED, 0.0)}
    phases.recent.extend([step] * 10)
    assert phases.so_far() == ""  # too few to tell
    phases.recent.extend([step] * 30)
    assert phases.so_far() == "data wait 60%, data-bound"
    starving = {**step, "p": {"data": 1.0, "student": 99.0}, "ready_ms": 70.0}
    phases.recent.extend([starving] * 50)
    assert phases.so_far() == "data wait 1%, host-bound"
    phases.recent.extend([{**step, "p": {"teacher": 60.0, "student": 40.0}}] * 50)
    assert phases.so_far() == "data wait 0%, teacher-bound"


def test_a_resumed_runs_callbacks_are_counted_over_all_starts_as_its_steps_are() -> None:
    """The totals count the steps of all starts: so must the time by which they are divided."""
    written: list[dict[str, Any]] = []
    earlier = {
        "kind": "total",
        "steps": 100,
        "p": {},
        "callbacks": {"Slow.on_train_batch_end": 5000.0},
    }
    phases = Phases(Watched(Path()))
    writer: Any = SimpleNamespace(last_total=earlier, write=written.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kd.monitor.phases.Writer", lambda *_: writer)
        trainer: Any = MagicMock(global_rank=0, num_nodes=1, num_training_batches=math.inf)
        patch.setattr("kd.monitor.phases.device_of", lambda _: torch.device("cpu"))
        phases.watched = MagicMock(step_phase="loss", rest_phase="logging")
        phases.watched.header.return_value = {}
        phases.on_fit_start(trainer, MagicMock())
        phases.on_train_start(trainer, MagicMock())
    assert phases.profiler is not None
    phases.profiler.callbacks_ms = {"Slow.on_train_batch_end": 50.0, "New.on_fit_end": 7.0}
    phases._write_total()
    phases._write_total()
    run_clock(None)
    phases.clock.close()
    expected = {"Slow.on_train_batch_end": 5050.0, "New.on_fit_end": 7.0}
    assert [record["callbacks"] for record in written] == [expected, expected]


COUNTED = ("host_ms", "ready_ms", "data_ready_ms", "data_cpu_ms", "launch_ms")


class Queue(Clock):
    """A thread whose time on the run queue is told by hand."""

    waited = 0.0

    def _ready_ms(self) -> float:
        return self.waited


def test_a_wait_for_a_core_outside_the_step_is_not_the_steps() -> None:
    clock = Queue()
    for _ in range(2):
        clock.waited += 5
        clock.within("validation")
        clock.waited += 100
        clock.within(None)
        clock.waited += 3
        clock.cut()
    assert [step.ready_ms for step in clock.take()] == [8, 8]


def test_a_wait_for_a_core_counts_to_the_data_only_where_it_fell_into_it() -> None:
    """A loader that sleeps on a crowded machine waits for its source: the cores are waited for elsewhere."""
    clock = Queue()
    clock.waited += 100
    clock.turn("data")
    clock.waited += 2
    clock.enter("data")
    clock.enter("h2d")
    clock.waited += 40
    clock.leave()
    clock.waited += 3
    clock.leave()
    clock.turn("logging")
    clock.waited += 50
    clock.cut()
    (step,) = clock.take()
    assert (step.ready_ms, step.data_ready_ms) == (195, 5)


class Device:
    """A stream that runs behind the host: each event happens when its work is done, not when it is recorded."""

    def __init__(self) -> None:
        self.busy_until = 0.0

    def work(self, ms: float) -> None:
        self.busy_until = max(self.busy_until, 1000 * time.perf_counter()) + ms

    def event(self) -> "Event":
        return Event(self)


class Event:
    """What torch.cuda.Event offers."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = max(self.device.busy_until, 1000 * time.perf_counter())

    def query(self) -> bool:
        return self.at <= 1000 * time.perf_counter()

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at / 1000 - time.perf_counter()))

    def elapsed_time(self, later: "Event") -> float:
        return later.at - self.at


def test_device_events_count_work_where_it_runs_and_only_exposed_waits(
    hand_clock: HandClock,
) -> None:
    device = Device()
    clock = Clock(device.event)
    clock.restart()
    for step in range(4):
        clock.enter("data")
        time.sleep(
            0.01 if step < 2 else 0.03
        )  # a wait of 10 ms hides behind the device's 20 ms, 30 ms do not
        clock.leave()
        clock.enter("teacher")
        device.work(15)
        clock.leave()
        clock.enter("student")
        device.work(5)
        clock.leave()
        clock.cut(step)
    steps = clock.take(wait=True)
    assert [s.tag for s in steps] == [0, 1, 2, 3]
    assert steps[1].phases["data"] < 1
    assert steps[3].phases["data"] == pytest.approx(10, abs=0.1)
    assert steps[1].phases["teacher"] == pytest.approx(15, abs=0.1)
    assert steps[1].phases["student"] == pytest.approx(5, abs=0.1)


def test_no_wait_for_a_core_in_a_scope_counts_to_the_step_also_where_another_scope_follows() -> (
    None
):
    clock = Queue()
    for scope in ("between epochs", "validation", None, "between epochs"):
        clock.within(scope)
        clock.waited += 10
    clock.cut()  # inside a scope, as at a run's end
    (step,) = clock.take()
    assert step.ready_ms == 10


def test_a_scope_in_a_wait_for_data_is_no_part_of_that_wait() -> None:
    clock = Queue()
    clock.enter("data")
    for scope in ("validation", None, None):
        clock.waited += 10
        clock.within(scope)
    clock.leave()
    clock.cut()
    (step,) = clock.take()
    assert (step.data_ready_ms, step.ready_ms) == (20, 20)


def test_steps_are_not_waited_for_until_asked(hand_clock: HandClock) -> None:
    device = Device()
    clock = Clock(device.event)
    clock.enter("teacher")
    device.work(200)
    clock.leave()
    clock.cut()
    assert clock.take() == []
    assert len(clock.take(wait=True)) == 1


def test_annotate_is_free_without_a_clock_and_survives_errors(hand_clock: HandClock) -> None:
    @annotate("teacher")
    def fail() -> None:
        raise KeyError("planted")

    clock = Clock()
    run_clock(clock)
    try:
        with pytest.raises(KeyError):
            fail()
        with annotate("teacher"), annotate("my own part"):
            time.sleep(0.01)
        clock.cut()
    finally:
        run_clock(None)
    (step,) = clock.take()
    assert step.phases["teacher"] == pytest.approx(10, abs=0.1)
    assert set(step.phases) == {"teacher", "logging"}


def test_a_process_knows_when_it_started_by_the_clock_of_the_rest() -> None:
    reader, writer = os.pipe()
    before = time.time()
    pid = os.fork()
    if not pid:
        os.write(writer, str(process_start()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    # to the clock's tick of 10 ms, and then whatever the machine took to fork
    assert before - 0.05 < float(os.read(reader, 64)) < time.time() + 0.05


def test_a_shell_that_becomes_the_program_is_no_part_of_its_start() -> None:
    """As with ``bash -c "pip install ...; kd-train ..."``, whose last command takes the shell's process over."""
    without_torch = 'import sys, unittest.mock; sys.modules["torch"] = unittest.mock.MagicMock()'  # which takes seconds
    code = f"{without_torch}; import kd; from kd.clock import process_start; print(process_start() - kd._IMPORTED)"
    line = f"sleep 0.5; exec {sys.executable} -c '{code}'"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(done.stdout) == 0.0  # and not -0.5


def test_an_actions_name_gives_its_phase() -> None:
    assert phase_of("[Strategy]SingleDeviceStrategy.backward") == "backward"
