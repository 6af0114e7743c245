"""Times a run's student, its exports and its teacher: a process each, in turns."""

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from kd.errors import UserError
from kd.machine import processor
from kd.progress import bar
from kd.report.records import percentile
from kd.ship.export.stopwatch import Stopwatch, open_export
from kd.ship.finished import FinishedRun
from kd.storage.elsewhere import mapping_of

ROUNDS = 5
RUNNABLE = ("onnx", "openvino", "torch_export", "triton")
Row = dict[str, Any]
Runtimes = dict[str, dict[str, Any]]
"""Exports by name, as ``export/export.json`` describes them; ``torch``: nothing."""
Reopen = Callable[[], FinishedRun]
"""Opens the run again in another process; picklable."""
Measure = Callable[[int], tuple[list[float], float]]
"""Runs a model so often: the milliseconds of each run, and its process's peak memory in MB."""
K = TypeVar("K", bound=Hashable)


def open_in_torch(reopen: Reopen, model: str, threads: int) -> Callable[[np.ndarray], object]:
    """A run's ``student`` or ``teacher``, in the process that times it."""
    torch.set_num_threads(threads)
    run = reopen()
    return (run.teacher_runtime("nhwc") if model == "teacher" else None) or run.student_runtime()


def measure(
    run: FinishedRun,
    reopen: Reopen,
    runtimes: Runtimes,
    batches: Sequence[int],
    threads: Sequence[int],
    seconds: float,
) -> dict[str, Any]:
    """The machine and, for each model, runtime, number of threads and batch, a row of its times."""
    rows = [
        row for count in threads for row in _turns(run, reopen, runtimes, batches, count, seconds)
    ]
    _compare_with_teacher(rows)
    return {"machine": processor(), "rows": rows}


def runtimes_of(run: Path, asked: str | None, made_here: Callable[[Path], bool]) -> Runtimes:
    """Exports by name, ``torch`` first; what is asked for must be there."""
    known = mapping_of(run / "export" / "export.json")
    there = {
        k: v
        for k, v in known.items()
        if v["kept"] and v["to"] in RUNNABLE and Path(v["file"]).exists()
    }
    there = {
        k: v for k, v in there.items() if v["to"] != "torch_export" or made_here(Path(v["file"]))
    }
    if asked is None:
        return {
            "torch": {},
            **{name: found for name, found in there.items() if found["to"] != "triton"},
        }
    chosen: Runtimes = {}
    for name in asked.split(","):
        found = {k: v for k, v in there.items() if k == name or (name == "int8" and v["int8"])}
        if name == "torch":
            found = {"torch": {}}
        if not found:
            to = "openvino int8=true" if name == "int8" else name
            made = f"that this machine made (kd-export {run} to={to}; --trust takes any)"
            raise UserError(f"runtime: {run} has no export '{name}' {made}")
        chosen |= found
    return chosen


def _turns(
    run: FinishedRun,
    reopen: Reopen,
    runtimes: Runtimes,
    batches: Sequence[int],
    threads: int,
    seconds: float,
) -> list[Row]:
    watches: dict[tuple[str, str], Stopwatch] = {}
    rows: list[Row] = []
    try:
        for key, load in _loaders(run, reopen, runtimes, threads).items():
            watches[key] = _start(load, threads, key)
        shown = bar(
            label=f"timing, {threads} threads",
            unit=" turns",
            total=len(batches) * ROUNDS * len(watches),
        )
        with shown:
            for batch in batches:
                pictures = np.random.RandomState(0).randint(
                    0, 256, (batch, *run.size, 3), dtype=np.uint8
                )
                planes = np.ascontiguousarray(pictures.transpose(0, 3, 1, 2))
                layouts = {name: export.get("layout", "nhwc") for name, export in runtimes.items()}
                given = {
                    key: pictures if layouts.get(key[1]) == "nhwc" else planes for key in watches
                }
                timed = in_turns(
                    {key: partial(watch.measure, given[key]) for key, watch in watches.items()},
                    seconds,
                    shown,
                )
                rows += [
                    _row(key, threads, batch, took, peak) for key, (took, peak) in timed.items()
                ]
    finally:
        for watch in watches.values():
            watch.close()
    return rows


def in_turns(
    measures: Mapping[K, Measure], seconds: float, shown: tqdm
) -> dict[K, tuple[list[list[float]], float]]:
    """Times models in rounds, each in its turn: of each the milliseconds by round, and its process's peak memory."""
    repeats = {key: _repeats(measure, seconds) for key, measure in measures.items()}
    took: dict[K, list[list[float]]] = {key: [] for key in measures}
    peaks: dict[K, float] = {}
    for _ in range(ROUNDS):
        for key, measure in measures.items():
            ms, peaks[key] = measure(repeats[key])
            took[key].append(ms)
            shown.update()
    return {key: (took[key], peaks[key]) for key in measures}


def _start(
    load: Callable[[], Callable[[np.ndarray], object]], threads: int, key: tuple[str, str]
) -> Stopwatch:
    try:
        return Stopwatch(load, threads)
    except UserError as error:
        raise UserError(f"{' on '.join(key)}: {error}") from error


def _repeats(measure: Measure, seconds: float) -> int:
    """So many that a round takes its share of ``seconds``; these first runs warm up."""
    ms, _ = measure(3)
    return max(2, round(1000 * seconds / ROUNDS / max(ms[-1], 0.01)))


def _loaders(
    run: FinishedRun, reopen: Reopen, runtimes: Runtimes, threads: int
) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    if "torch" in runtimes:
        models = ["teacher", "student"] if run.has_teacher else ["student"]
        found |= {(name, "torch"): partial(open_in_torch, reopen, name, threads) for name in models}
    for name, export in runtimes.items():
        if export:
            found["student", name] = partial(
                open_export, export["to"], Path(export["file"]), threads
            )
    return found


def medians(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Milliseconds: of all runs, of the fastest round, of the slowest."""
    of_rounds = [statistics.median(took) for took in rounds]
    found = statistics.median(sum(map(list, rounds), [])), min(of_rounds), max(of_rounds)
    names = "median_ms", "fastest_round_ms", "slowest_round_ms"
    return {name: round(ms, 3) for name, ms in zip(names, found, strict=True)}


def _row(
    key: tuple[str, str], threads: int, batch: int, rounds: list[list[float]], peak: float
) -> Row:
    found, took = medians(rounds), sum(rounds, [])
    return {
        "model": key[0],
        "runtime": key[1],
        "threads": threads,
        "batch": batch,
        **found,
        "p95_ms": round(percentile(took, 95), 3),
        "images_per_s": round(1000 * batch / found["median_ms"], 1),
        "peak_memory_mb": round(peak),
        "runs": len(took),
    }


def _compare_with_teacher(rows: list[Row]) -> None:
    teacher = {
        (row["threads"], row["batch"]): row["median_ms"]
        for row in rows
        if row["model"] == "teacher"
    }
    for row in rows:
        same = teacher.get((row["threads"], row["batch"]))
        if same and row["model"] == "student":
            row["times_the_teacher"] = round(same / row["median_ms"], 2)
