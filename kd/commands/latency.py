"""``kd-latency``: how fast a student is, beside its teacher. Heavy imports wait until there is a run."""

import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.errors import UserError
from kd.run.request import Request
from kd.run.trust import made_here
from kd.storage.elsewhere import json_of, text_of

if TYPE_CHECKING:
    import numpy as np

    from kd.commands._finished import FinishedRun
    from kd.ship.export.stopwatch import Stopwatch

HELP = """\
kd-latency: milliseconds, images/s and memory of a run's student and teacher on this machine's CPU.

  kd-latency RUN_FOLDER [runtime=torch,onnx,int8] [batch=1,8,64] [threads=1,2] [seconds=1]

  runtime=    torch, and exports by their names below RUN_FOLDER/export (onnx, openvino, ...); int8: all of int8;
              default: torch and every export that is there
  batch=      pictures at a time
  threads=    of each model; default: 1 and all cores
  seconds=    so long each model is timed at each batch and number of threads

Each model runs in a process of its own; all take turns, so that what else the machine does hits them alike. The table
goes to RUN_FOLDER/export/latency.json and into the report.
"""

ROUNDS = 5
RUNNABLE = ("onnx", "openvino", "torch_export", "triton")
Row = dict[str, Any]


def run(request: Request) -> int:
    """Times, prints, writes."""
    if "help" in request.flags or len(request.rest) != 1:
        print(HELP, end="")
        return 0 if "help" in request.flags else 2
    from kd.commands._finished import open_run
    from kd.machine import cores
    from kd.report.explained import Explained
    from kd.report.html import write_report
    from kd.report.records import read_run
    from kd.run.own_keys import positive, take, whole_numbers
    from kd.run.quiet import quiet_libraries
    from kd.storage.checkpoints import write_whole

    quiet_libraries()
    own = take(request, "runtime", "batch", "threads", "seconds")
    batches = whole_numbers(own, "batch", "1,8,64")  # ascending: memory's peak is that of the batches so far
    threads = whole_numbers(own, "threads", f"1,{cores()}")
    seconds = positive("seconds", own.get("seconds", "1"), 3600)
    opened = open_run(request, ("runtime", "batch", "threads", "seconds"))
    items = [request.rest[0], *request.overrides, *request.trusted]
    runtimes = _runtimes(opened.folder, own.get("runtime"), "trust" in request.flags)
    rows = [row for count in threads for row in _measure(opened, items, runtimes, batches, count, seconds)]
    _compare_with_teacher(rows)
    content = {"machine": _machine(), "rows": rows}
    file = opened.folder / "export" / "latency.json"
    file.parent.mkdir(exist_ok=True)
    write_whole(file, lambda opened_file: opened_file.write((json.dumps(content, indent=2) + "\n").encode()))
    _print(rows)
    page = opened.folder / "report.html"
    if page.is_file():
        write_report(Explained(read_run(opened.folder)), page)
    print(f"written to {file}{f' and {page}' if page.is_file() else ''}")
    return 0


def _runtimes(run: Path, asked: str | None, trust: bool) -> dict[str, dict[str, Any]]:
    """Exports by name, ``torch`` first; what is asked for must be there. A program of torch's can run code of its own:
    one that was not exported on this machine is opened by ``--trust`` alone."""
    file = run / "export" / "export.json"
    known = json_of(text_of(file)) if file.is_file() else {}
    there = {k: v for k, v in known.items() if v["kept"] and v["to"] in RUNNABLE and Path(v["file"]).exists()}
    if not trust:
        there = {k: v for k, v in there.items() if v["to"] != "torch_export" or made_here(Path(v["file"]))}
    if asked is None:
        return {"torch": {}, **{name: found for name, found in there.items() if found["to"] != "triton"}}
    chosen: dict[str, dict[str, Any]] = {}
    for name in asked.split(","):
        found = {k: v for k, v in there.items() if k == name or (name == "int8" and v["int8"])}
        if name == "torch":
            found = {"torch": {}}
        if not found:
            to = "openvino int8=true" if name == "int8" else name
            raise UserError(
                f"runtime: {run} has no export '{name}' (kd-export {run} to={to}), or not this machine's (--trust)"
            )
        chosen |= found
    return chosen


def _measure(
    opened: "FinishedRun",
    items: list[str],
    runtimes: dict[str, dict[str, Any]],
    batches: list[int],
    threads: int,
    seconds: float,
) -> list[Row]:
    """One number of threads: all models at once in memory, in turns at each batch."""
    import numpy as np

    from kd.progress import bar

    watches: dict[tuple[str, str], Stopwatch] = {}
    rows: list[Row] = []
    try:
        for key, load in _loaders(opened, items, runtimes, threads).items():
            watches[key] = _start(load, threads, key)
        shown = bar(label=f"timing, {threads} threads", unit=" turns", total=len(batches) * ROUNDS * len(watches))
        with shown:
            for batch in batches:
                pictures = np.random.RandomState(0).randint(0, 256, (batch, *opened.size, 3), dtype=np.uint8)
                planes = np.ascontiguousarray(pictures.transpose(0, 3, 1, 2))
                given = {key: pictures if _is_nhwc(key, runtimes) else planes for key in watches}
                took: dict[tuple[str, str], list[float]] = {key: [] for key in watches}
                peaks: dict[tuple[str, str], float] = {}
                repeats = {key: _repeats(watch, given[key], seconds) for key, watch in watches.items()}
                for _ in range(ROUNDS):
                    for key, watch in watches.items():
                        ms, peaks[key] = watch.measure(given[key], repeats[key])
                        took[key] += ms
                        shown.update()
                rows += [_row(key, threads, batch, took[key], peaks[key]) for key in watches]
    finally:
        for watch in watches.values():
            watch.close()
    return rows


def _start(load: "Callable[[], Callable[[np.ndarray], object]]", threads: int, key: tuple[str, str]) -> "Stopwatch":
    from kd.ship.export.stopwatch import Stopwatch

    try:
        return Stopwatch(load, threads)
    except UserError as error:
        raise UserError(f"{' on '.join(key)}: {error}") from error


def _is_nhwc(key: tuple[str, str], runtimes: dict[str, dict[str, Any]]) -> bool:
    return runtimes.get(key[1], {}).get("layout", "nhwc") == "nhwc"


def _repeats(watch: "Stopwatch", pictures: "np.ndarray", seconds: float) -> int:
    """So many that a round takes its share of ``seconds``; these first runs warm up."""
    ms, _ = watch.measure(pictures, 3)
    return max(2, min(200, round(1000 * seconds / ROUNDS / max(ms[-1], 0.01))))


def _loaders(
    opened: "FinishedRun", items: list[str], runtimes: dict[str, dict[str, Any]], threads: int
) -> dict[tuple[str, str], Any]:
    """What each process loads, by model and runtime; the teacher as it came, in torch."""
    from kd.commands._finished import TorchModel, teacher_of_run
    from kd.ship.export.stopwatch import ExportedFile

    found: dict[tuple[str, str], Any] = {}
    if "torch" in runtimes:
        if teacher_of_run(opened.config["model"], opened.classes, opened.task) is not None:
            found["teacher", "torch"] = TorchModel(items, "teacher", threads)
        found["student", "torch"] = TorchModel(items, "student", threads)
    for name, export in runtimes.items():
        if export:
            found["student", name] = ExportedFile(export["to"], Path(export["file"]), threads)
    return found


def _row(key: tuple[str, str], threads: int, batch: int, took: list[float], peak: float) -> Row:
    from kd.report.records import percentile

    median = statistics.median(took)
    return {
        "model": key[0], "runtime": key[1], "threads": threads, "batch": batch,
        "median_ms": round(median, 3), "p95_ms": round(percentile(took, 95), 3),
        "images_per_s": round(1000 * batch / median, 1), "peak_memory_mb": round(peak), "runs": len(took),
    }  # fmt: skip


def _compare_with_teacher(rows: list[Row]) -> None:
    teacher = {(row["threads"], row["batch"]): row["median_ms"] for row in rows if row["model"] == "teacher"}
    for row in rows:
        same = teacher.get((row["threads"], row["batch"]))
        if same and row["model"] == "student":
            row["times_the_teacher"] = round(same / row["median_ms"], 2)


def _machine() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _print(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=_machine())
    columns = {
        "model": "", "runtime": "runtime", "threads": "threads", "batch": "batch", "median_ms": "median ms",
        "p95_ms": "p95 ms", "images_per_s": "images/s", "peak_memory_mb": "peak MB", "times_the_teacher": "x teacher",
    }  # fmt: skip
    for key, name in columns.items():
        table.add_column(name, justify="left" if key in ("model", "runtime") else "right")
    for row in rows:
        table.add_row(*(str(row.get(key, "")) for key in columns))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
