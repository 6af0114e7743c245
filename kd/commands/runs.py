"""``kd-runs``: which runs there are, what the cache holds, and what of both may go. Needs neither torch nor lightning."""

import math
import os
import shlex
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from kd.config.kinds import Range
from kd.errors import UserError
from kd.machine import cache_dir
from kd.report.metric import format_metric
from kd.report.records import is_run
from kd.report.tables import Cell, Result, Table, sentences
from kd.run.options import CommandOptions
from kd.run.request import Request
from kd.storage.cache_parts import PARTS, Entry, entries_of
from kd.storage.checkpoints import holder_of
from kd.storage.elsewhere import Json, mapping_in, mapping_of
from kd.storage.objects import TIMES
from kd.storage.writing import remove

HELP = """\
  kd-runs [RUNS_DIR] [--json]                    default: runs; --json: the runs alone
  kd-runs clean [RUNS_DIR] [older=DAYS]          what would be deleted, one line each; deletes nothing
  kd-runs clean [RUNS_DIR] [older=DAYS] --yes    deletes it

{options}

A run may go if it has no student, no checkpoint, and is not training. Of the cache go copies, what is made again when
needed, and interrupted trainings of teachers, not trained teachers; nothing of it goes while a run in RUNS_DIR trains.
Both stay if they were used in the last 7 days (older=DAYS). Nothing else is deleted (kd/data/README.md). The column
`delete` says `now` of what `clean` deletes, and `in 3 d` of what it deletes later.
"""
FLAGS = ("--json", "--yes")
"""Options that take no value."""
DAYS = 7
"""Days without use after which ``clean`` deletes."""
OF_EVERY_RUN = {"recipe", "runs_dir", "data", "model", "trainer"}
"""Keys of each run's settings, by which a run is told from a folder of another program with a ``config.yaml``."""
PAGES = ("report.html", "comparison.html")
"""Files that ``kd-report`` writes, also of runs that it only reads: they make no run younger."""


class RunsOptions(CommandOptions):
    """What ``kd-runs`` is given."""

    WORDS = (0, sys.maxsize)
    older: Annotated[float, Range(">= 0 and < 100000")] = DAYS
    """Days without use after which ``clean`` deletes."""


OPTIONS = RunsOptions


def run(request: Request, options: RunsOptions) -> Result:
    """The runs below a folder, the latest first, and the cache; or (``clean``) what may go, which ``--yes`` deletes.

    Raises:
        UserError: no such folder, or a wrong word.
    """
    cleans = request.rest[:1] == ["clean"]
    folders = request.rest[1:] if cleans else request.rest
    deletes = "yes" in request.flags
    if len(folders) > 1 or request.recipe or ((options.given or deletes) and not cleans):
        raise UserError("takes [RUNS_DIR], or clean [RUNS_DIR] [older=DAYS] [--yes]")
    folder = Path(*folders or ["runs"])
    if folders and not folder.is_dir():
        raise UserError(
            f"folder {folder} not found (kd-runs [RUNS_DIR] lists, kd-runs clean deletes)"
        )
    rows = _runs_below(folder)
    training = [row["run"] for row in rows if row["status"] == "training"]
    entries = entries_of(cache_dir())
    free = []
    if not training:
        free = [entry for entry in entries if PARTS[entry.part].may_go and not entry.is_held]
    if cleans:
        result = _clean(rows, free, options.older, deletes, shlex.join(["kd-runs", *request.rest]))
        result.notes += [f"the cache stays as it is while {name} trains" for name in training[:1]]
        return result
    parts = [_table_of_runs(rows) if rows else sentences("", [f"no runs in {folder}"])]
    if entries:
        parts.append(_table_of_cache(entries, free))
    return Result(rows, parts)


def _runs_below(folder: Path) -> list[dict[str, Any]]:
    """The runs in a folder and in each folder in it, as rows of :func:`_described`, the latest changed first.

    Of a run's own folder that run alone. Links (``latest``) and what
    they lead to are left out: ``clean`` deletes nothing elsewhere. [] where the folder does not exist.
    """
    if is_run(folder):
        return [_described(folder)]
    root = folder.resolve()
    rows = []
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        is_link = path.resolve() != root / path.relative_to(folder)
        if is_run(path) and not is_link:
            rows.append(_described(path))
    return sorted(rows, key=lambda row: -row["changed"])


def _described(folder: Path) -> dict[str, Any]:
    """A run as a row of the table and of the JSON.

    Args:
        folder: of a run, which may be training, or have ended without a summary.

    Returns:
        ``run`` (RECIPE/NAME), ``folder``, ``status``, ``metric`` (that by which its best epoch was chosen), the value in it
        of the ``student`` (the best, else the newest) and of the ``teacher``, ``images_per_s`` and ``verdict`` (what limits
        it), each None where the summary lacks it; ``limit``, the verdict up
        to its colon; ``changed`` (Unix time of its newest file but :data:`PAGES`), ``bytes`` of its files, and
        ``safe_to_delete``: it is a run of kd's without weights that no process trains, however new it is.
    """
    files: dict[Path, os.stat_result] = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # a run that trains renames its files
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                files[path] = status
    of_run = [status.st_mtime for path, status in files.items() if path.name not in PAGES]
    times = [mtime for mtime in of_run if mtime >= TIMES]  # a copy from a store has no time
    has_weights = any(
        path.suffix == ".ckpt" or path.name == "student.safetensors" for path in files
    )
    training = bool(holder_of(folder))
    is_of_kd = mapping_of(folder / "config.yaml").keys() >= OF_EVERY_RUN

    summary = mapping_of(folder / "summary.json")
    metric = str(summary.get("primary", ""))
    student = mapping_in(summary, "student")
    teacher = mapping_in(summary, "teacher")
    verdict = str(mapping_in(summary, "verdict").get("text", ""))
    return {
        "run": f"{folder.parent.name}/{folder.name}",
        "folder": str(folder),
        "status": "training" if training else str(summary.get("status", "ended early")),
        "metric": metric or None,
        "teacher": _number(mapping_in(teacher, "val"), metric),
        "student": _number(mapping_in(student, "best_val") or mapping_in(student, "val"), metric),
        "images_per_s": _number(summary, "images_per_s"),
        "verdict": verdict or None,
        "limit": verdict.split(":")[0],
        "changed": max(times, default=folder.stat().st_mtime),
        "bytes": sum(status.st_size for status in files.values()),
        "safe_to_delete": is_of_kd and not has_weights and not training,
    }


def _number(values: Json, name: str) -> float | None:
    """A finite number of a summary; None for anything else."""
    value = values.get(name)
    return value if isinstance(value, float | int) and math.isfinite(value) else None


def _table_of_runs(rows: list[dict[str, Any]]) -> Table:
    """The runs for people; ``rows`` as of :func:`_runs_below`, one at least."""
    cells: list[dict[str, Cell]] = []
    for row in rows:
        metric = row["metric"]
        days = _days_left(row["changed"])
        cells.append(
            {
                "run": row["run"],
                "status": row["status"],
                "metric": metric,
                "teacher": format_metric(metric, row["teacher"]),
                "student": format_metric(metric, row["student"]),
                "images/s": row["images_per_s"],
                # a longer one is a sentence: "no steps were recorded", for example
                "limit": row["limit"] if len(row["limit"]) <= 24 else "",
                "changed": time.strftime("%Y-%m-%d %H:%M", time.localtime(row["changed"])),
                "MB": _megabytes(row["bytes"]),
                "delete": (f"in {days} d" if days else "now") if row["safe_to_delete"] else "",
            }
        )
    return Table("", [*cells[0]], [[*row.values()] for row in cells])


def _table_of_cache(entries: list[Entry], free: list[Entry]) -> Table:
    """The parts of the cache: entries, size, what they are, how many may go.

    Args:
        entries: of the cache, one at least.
        free: those that may go once they are old.
    """
    rows: list[list[Cell]] = []
    for name, part in PARTS.items():
        sizes = [entry.size for entry in entries if entry.part == name]
        if not sizes:
            continue
        days = [_days_left(entry.used) for entry in free if entry.part == name]
        goes = "no"
        if part.may_go:
            goes = f"{days.count(0)} of {len(sizes)}"
        size = _megabytes(sum(sizes))
        rows.append([name, len(sizes), size, part.content, goes, part.loss])
    columns = ["part", "entries", "MB", "content", "delete now", "what its loss costs"]
    size = _megabytes(sum(entry.size for entry in entries))
    note = f"cache: {cache_dir()}, {size} MB (KD_CACHE; kd-runs clean lists what may go)"
    return Table("", columns, rows, note)


def _clean(
    rows: list[dict[str, Any]], free: list[Entry], days: float, deletes: bool, again: str
) -> Result:
    """Lists what may go, one line each, and deletes it.

    Args:
        rows: the runs.
        free: entries of the cache that may go once they are old.
        days: without use.
        deletes: else it is only listed.
        again: the command line.
    """
    may_go = {}
    for row in rows:
        if row["safe_to_delete"]:
            entry = Entry(Path(row["folder"]), "runs", row["bytes"], row["changed"])
            may_go[entry] = f"{row['status']}: no student, no checkpoint"
    for entry in free:
        part = PARTS[entry.part]
        may_go[entry] = f"{part.content}: {part.loss}"

    lines = []
    size = 0
    problem = ""
    for entry, why in may_go.items():
        if entry.used >= time.time() - days * 86_400:
            continue
        line = f"{entry.path}  {_megabytes(entry.size)} MB  {why}"
        try:
            for name in (entry.path, *entry.locks) if deletes else ():
                remove(name)
        except OSError as error:
            problem = f"{entry.path} can't be deleted: {error.strerror}"
            continue
        size += entry.size
        lines.append(f"deleted: {line}" if deletes else line)
    note = f"{_megabytes(size)} MB deleted"
    if not deletes:
        chosen = "" if days == DAYS else f" older={days:g}"
        note = f"{_megabytes(size)} MB in all; nothing is deleted yet: {again}{chosen} --yes deletes them"
    if not (lines or problem):
        note = f"nothing may go that was not used for {days:g} days (older=DAYS)"
    return Result(lines, [sentences("", lines)], [note], problem=problem)


def _megabytes(size: int) -> str:
    """Bytes as megabytes."""
    return f"{size / 1e6:,.1f}"


def _days_left(used: float) -> int:
    """Days until ``clean`` deletes what may go and was used at a Unix time; 0: it would now."""
    left = DAYS - (time.time() - used) / 86_400
    return max(0, math.ceil(left))
