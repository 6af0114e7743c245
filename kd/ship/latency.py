"""Times a run's student, its exports and its teacher: a process each, in turns."""

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from kd.errors import UserError
from kd.machine import processor
from kd.progress import bar
from kd.report.metric import counted
from kd.report.records import percentile
from kd.ship.export.stopwatch import Stopwatch, open_export, timed
from kd.ship.finished import FinishedRun
from kd.ship.timed_exports import Runtimes

ROUNDS = 5
"""Each model is timed so often at each batch, in turns with the others."""
Row = dict[str, Any]
"""One line of the table: a model at a batch size and number of threads."""
Reopen = Callable[[], FinishedRun]
"""Opens the run again in another process; picklable."""
Measure = Callable[[int], tuple[list[float], float]]
"""Runs a model so often: the milliseconds of each run, and its process's peak memory in MB."""
K = TypeVar("K", bound=Hashable)


def open_in_torch(reopen: Reopen, model: str, threads: int) -> Callable[[np.ndarray], object]:
    """Opens a run's ``student`` or ``teacher`` in the process that times it, and sets torch's threads there.

    Args:
        reopen: opens the run.
        model: ``student`` or ``teacher``.
        threads: of torch.

    Returns:
        Pictures uint8 ``(N, H, W, 3)`` -> logits.
    """
    torch.set_num_threads(threads)
    run = reopen()
    if model == "teacher":
        teacher = run.teacher_runtime()
        assert teacher is not None, "timed only where the run has one"
        return teacher
    return run.student_runtime()


def measure_latency(
    run: FinishedRun,
    reopen: Reopen,
    runtimes: Runtimes,
    batches: Sequence[int],
    threads: Sequence[int],
    seconds: float,
) -> dict[str, Any]:
    """The machine and, for each model, runtime, number of threads and batch, a row of its times.

    Args:
        run: whose student, exports and teacher are timed.
        reopen: opens it again in another process.
        runtimes: settings of each, by name.
        batches: pictures at a time.
        threads: numbers of threads that each model is timed with.
        seconds: that a model is timed at each batch and number of threads, over all rounds.

    Returns:
        ``latency.json``'s content: ``machine`` (:func:`kd.machine.processor`) and ``rows`` (:func:`_row`; the student's
        have ``times_the_teacher``, too, where the teacher is timed).

    Raises:
        UserError: a model can't be loaded, or its process has ended.
    """
    rows: list[Row] = []
    for count in threads:
        loaders = _loaders(run, reopen, runtimes, count)
        with ExitStack() as processes:
            watches = {}
            for key in bar(list(loaders), label="loading the models", unit=" models"):
                watch = _start(loaders[key], count, key)
                watches[key] = processes.enter_context(closing(watch))
            for batch in batches:
                pictures = random_pictures(batch, run.size)
                measures: dict[tuple[str, str], Measure] = {}
                for key, watch in watches.items():
                    measures[key] = partial(watch.measure, pictures)
                label = f"timing batch {batch}, {counted(count, 'thread')}"
                for key, (rounds, peak_mb) in in_turns(measures, seconds, label).items():
                    rows.append(_row(key, count, batch, rounds, peak_mb))
    _compare_with_teacher(rows)
    return {"machine": processor(), "rows": rows}


def random_pictures(batch: int, size: tuple[int, int]) -> np.ndarray:
    """The same pictures each time, uint8 ``(N, H, W, 3)``."""
    return np.random.RandomState(0).randint(0, 256, (batch, *size, 3), dtype=np.uint8)


def in_turns(
    measures: Mapping[K, Measure], seconds: float, label: str
) -> dict[K, tuple[list[list[float]], float]]:
    """Times models in rounds, each in its turn: what else the machine does hits all alike.

    Args:
        measures: times a model so many runs, by the model's key.
        seconds: that a model is timed, over all rounds; at least two runs a round.
        label: of the bar.

    Returns:
        By key, the milliseconds of each run, a list a round, and the peak memory in MB of the model's process.
    """
    repeats: dict[K, int] = {}
    timed: dict[K, tuple[list[list[float]], float]] = {}
    turns = [*measures] * (ROUNDS + 1)
    for key in bar(turns, label=label, unit=" turns"):
        measure_once = measures[key]
        if key not in repeats:  # the first turn warms up and finds out how long a run takes
            repeats[key] = _repeats(measure_once, seconds)
            timed[key] = ([], 0.0)
            continue
        ms, peak_mb = measure_once(repeats[key])
        rounds, _ = timed[key]
        rounds.append(ms)
        timed[key] = (rounds, peak_mb)
    return timed


def times_here(
    calls: Mapping[K, Callable[[], object]], seconds: float, label: str
) -> dict[K, float]:
    """Median milliseconds of calls that this process makes, in turns.

    Args:
        calls: by name.
        seconds: for which each is timed.
        label: of the bar.
    """
    measures = {}
    for key, call in calls.items():
        measures[key] = partial(_measure_here, call)
    times = {}
    for key, (rounds, _) in in_turns(measures, seconds, label).items():
        times[key] = medians(rounds)["median_ms"]
    return times


def _measure_here(call: Callable[[], object], runs: int) -> tuple[list[float], float]:
    """A :data:`Measure` in this process; the memory is given as 0, since the process holds more than the model."""
    return timed(call, runs), 0.0


def _start(
    load: Callable[[], Callable[[np.ndarray], object]], threads: int, key: tuple[str, str]
) -> Stopwatch:
    """A process that has loaded a model with ``load`` and runs it on ``threads``.

    Raises:
        UserError: the model can't be loaded; the message names model and runtime, ``key``.
    """
    try:
        return Stopwatch(load, threads)
    except UserError as error:
        raise UserError(f"{' on '.join(key)}: {error}") from error


def _repeats(measure: Measure, seconds: float) -> int:
    """How many runs make a round, at least 2, so that :data:`ROUNDS` rounds take ``seconds``. Three runs warm the model up;
    the last of them tells how long one takes.
    """
    ms, _ = measure(3)
    return max(2, round(1000 * seconds / ROUNDS / max(ms[-1], 0.01)))


def _loaders(
    run: FinishedRun, reopen: Reopen, runtimes: Runtimes, threads: int
) -> dict[tuple[str, str], Any]:
    """What opens each model in its process, by model (``student``, ``teacher``) and runtime; picklable.

    The teacher's only runtime is ``torch``, where this is wanted and the teacher takes any picture.

    The arguments are those of :func:`measure_latency`, ``threads`` one of its numbers.
    """
    loaders: dict[tuple[str, str], Any] = {}
    if "torch" in runtimes:
        models = ["teacher", "student"] if run.teacher_takes_pictures else ["student"]
        for model in models:
            loaders[model, "torch"] = partial(open_in_torch, reopen, model, threads)
    for name, export in runtimes.items():
        if export:
            file = Path(export["file"])
            loaders["student", name] = partial(open_export, export["to"], file, threads)
    return loaders


def medians(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Medians in milliseconds: ``median_ms`` of all runs, those of the fastest and of the slowest round.

    Args:
        rounds: ms of each run, by round.
    """
    all_runs = [ms for round_ms in rounds for ms in round_ms]
    round_medians = [statistics.median(round_ms) for round_ms in rounds]
    return {
        "median_ms": round(statistics.median(all_runs), 3),
        "fastest_round_ms": round(min(round_medians), 3),
        "slowest_round_ms": round(max(round_medians), 3),
    }


def _row(
    key: tuple[str, str], threads: int, batch: int, rounds: list[list[float]], peak_mb: float
) -> Row:
    """A row of ``latency.json``, which card and report read: times in ms of a batch, memory in MB.

    Args:
        key: model and runtime.
        threads: of the model.
        batch: pictures at a time.
        rounds: ms of each run, by round.
        peak_mb: memory of its process.
    """
    model, runtime = key
    all_runs = [ms for round_ms in rounds for ms in round_ms]
    ms = medians(rounds)
    return {
        "model": model,
        "runtime": runtime,
        "threads": threads,
        "batch": batch,
        **ms,
        "p95_ms": round(percentile(all_runs, 95), 3),
        "images_per_s": round(1000 * batch / ms["median_ms"], 1),
        "peak_memory_mb": round(peak_mb),
        "runs": len(all_runs),
    }


def _compare_with_teacher(rows: list[Row]) -> None:
    """Adds ``times_the_teacher`` to the student's rows: how often it answers while the teacher answers once.

    Both have as many threads and the same batch; the teacher runs in torch, the student in the row's runtime. Rows without
    such a time of the teacher get none.
    """
    teacher_ms = {}
    for row in rows:
        if row["model"] == "teacher":
            teacher_ms[row["threads"], row["batch"]] = row["median_ms"]
    for row in rows:
        conditions = row["threads"], row["batch"]
        ms = teacher_ms.get(conditions)
        if ms and row["model"] == "student":
            row["times_the_teacher"] = round(ms / row["median_ms"], 2)
