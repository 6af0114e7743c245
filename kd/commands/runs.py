"""``kd-runs``: which runs there are, what the cache holds, and what of both may go. Needs neither torch nor lightning."""

import math
import shlex
import sys
import time
from collections.abc import Collection, Iterable, Mapping
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
from kd.storage.cache_parts import PARTS, Entry, entries_of, regular_files, without_links
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
COLUMNS = (
    "run", "status", "metric", "teacher", "student", "images/s", "limit", "changed", "MB", "delete",
)  # fmt: skip
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
    if len(folders) > 1 or ((options.given or deletes) and not cleans):
        raise UserError("takes [RUNS_DIR], or clean [RUNS_DIR] [older=DAYS] [--yes]")
    folder = Path(*folders or ["runs"])
    if folders and not folder.is_dir():
        raise UserError(
            f"folder {folder} not found (kd-runs [RUNS_DIR] lists, kd-runs clean deletes)"
        )
    rows = _runs_below(folder)
    entries = entries_of(cache_dir())
    training = [row["run"] for row in rows if row["status"] == "training"]
    may_go = _may_go(rows, [] if training else entries)
    if cleans:
        result = _clean(may_go, options.older, deletes, shlex.join(["kd-runs", *request.rest]))
        result.notes += [f"the cache stays as it is while {name} trains" for name in training[:1]]
        return result
    parts = [_table_of_runs(rows) if rows else sentences("", [f"no runs in {folder}"])]
    if entries:
        parts.append(_table_of_cache(entries, may_go))
    return Result(rows, parts)


def _runs_below(folder: Path) -> list[dict[str, Any]]:
    """The runs in a folder and in each folder in it, as rows of :func:`_described`, the latest changed first.

    Of a run's own folder that run alone. Links (``latest``) and what
    they lead to are left out: ``clean`` deletes nothing elsewhere. [] where the folder does not exist.
    """
    if is_run(folder):
        return [_described(folder)]
    rows = [_described(path) for path in without_links(folder, "*", "*/*") if is_run(path)]
    return sorted(rows, key=lambda row: -row["changed"])


def _described(folder: Path) -> dict[str, Any]:
    """A run as a row of the table and of the JSON.

    Args:
        folder: of a run, which may be training, or have ended without a summary.

    Returns:
        ``run`` (RECIPE/NAME), ``folder``, ``status``, ``metric`` (that by which its best epoch was chosen), the value in it
        of the ``student`` (the best, else the newest) and of the ``teacher``, ``images_per_s`` and ``verdict`` (what limits
        it), each None where the summary lacks it; ``limit``, the verdict up to its colon, "" of a sentence ("no steps were
        recorded"); ``changed`` (Unix time of its newest file but :data:`PAGES`), ``bytes`` of its files, and
        ``safe_to_delete``: it is a run of kd's without weights that no process trains, however new it is.
    """
    files = dict(regular_files(folder))
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
    limit, _, _ = verdict.partition(":")
    return {
        "run": f"{folder.parent.name}/{folder.name}",
        "folder": str(folder),
        "status": "training" if training else str(summary.get("status", "ended early")),
        "metric": metric or None,
        "teacher": _number(mapping_in(teacher, "val"), metric),
        "student": _number(mapping_in(student, "best_val") or mapping_in(student, "val"), metric),
        "images_per_s": _number(summary, "images_per_s"),
        "verdict": verdict or None,
        "limit": limit if len(limit) <= 24 else "",
        "changed": max(times, default=folder.stat().st_mtime),
        "bytes": sum(status.st_size for status in files.values()),
        "safe_to_delete": is_of_kd and not has_weights and not training,
    }


def _number(values: Json, name: str) -> float | None:
    """A finite number of a summary; None for anything else."""
    value = values.get(name)
    return value if isinstance(value, float | int) and math.isfinite(value) else None


def _table_of_runs(rows: list[dict[str, Any]]) -> Table:
    """The runs for people; ``rows`` as of :func:`_runs_below`."""
    cells: list[list[Cell]] = []
    for row in rows:
        metric = row["metric"]
        left = _days_left(row["changed"])
        cells.append(
            [
                row["run"],
                row["status"],
                metric,
                format_metric(metric, row["teacher"]),
                format_metric(metric, row["student"]),
                row["images_per_s"],
                row["limit"],
                time.strftime("%Y-%m-%d %H:%M", time.localtime(row["changed"])),
                row["bytes"] / 1e6,
                (f"in {left} d" if left else "now") if row["safe_to_delete"] else "",
            ]
        )
    return Table("", COLUMNS, cells)


def _table_of_cache(entries: list[Entry], may_go: Collection[Entry]) -> Table:
    """The parts of the cache: entries, size, what they are, how many may go.

    Args:
        entries: of the cache, one at least.
        may_go: those that may go once they are old.
    """
    rows: list[list[Cell]] = []
    for name, part in PARTS.items():
        of_part = [entry for entry in entries if entry.part == name]
        if not of_part:
            continue
        now = [entry for entry in of_part if entry in may_go and not _days_left(entry.used)]
        goes = f"{len(now)} of {len(of_part)}" if part.may_go else "no"
        rows.append([name, len(of_part), _size_of(of_part), part.content, goes, part.loss])
    columns = ["part", "entries", "MB", "content", "delete now", "what its loss costs"]
    note = (
        f"cache: {cache_dir()}, {_size_of(entries)} MB (KD_CACHE; kd-runs clean lists what may go)"
    )
    return Table("", columns, rows, note)


def _may_go(rows: list[dict[str, Any]], entries: list[Entry]) -> dict[Entry, str]:
    """The runs, and entries of the cache, that may go once they are old; and why each may."""
    may_go = {}
    for row in rows:
        if row["safe_to_delete"]:
            run = Entry(Path(row["folder"]), "", row["bytes"], row["changed"])
            may_go[run] = f"{row['status']}: no student, no checkpoint"
    for entry in entries:
        part = PARTS[entry.part]
        if part.may_go and not entry.is_held:
            may_go[entry] = f"{part.content}: {part.loss}"
    return may_go


def _clean(may_go: Mapping[Entry, str], days: float, deletes: bool, again: str) -> Result:
    """Lists what goes, one line each, and deletes it.

    Args:
        may_go: what may go once it is old, and why.
        days: without use after which it is old.
        deletes: else it is only listed.
        again: the command line.
    """
    gone = {}
    problem = ""
    for entry, why in may_go.items():
        if _days_left(entry.used, days):
            continue
        try:
            for place in (entry.path, *entry.locks) if deletes else ():
                remove(place)
        except OSError as error:
            problem = f"{entry.path} can't be deleted: {error.strerror}"
            continue
        line = f"{entry.path}  {_size_of([entry])} MB  {why}"
        gone[entry] = f"deleted: {line}" if deletes else line
    lines = [*gone.values()]
    note = f"nothing may go that was not used for {days:g} days (older=DAYS)"
    if lines or problem:
        note = f"{_size_of(gone)} MB deleted"
    if lines and not deletes:
        chosen = "" if days == DAYS else f" older={days:g}"
        note = f"{_size_of(gone)} MB in all; nothing is deleted yet: {again}{chosen} --yes deletes them"
    return Result(lines, [sentences("", lines)], [note], problem=problem)


def _size_of(entries: Iterable[Entry]) -> str:
    """Megabytes of all entries."""
    size = sum(entry.size for entry in entries)
    return f"{size / 1e6:,.1f}"


def _days_left(used: float, days: float = DAYS) -> int:
    """Days until what was used at a Unix time is not used for so many ``days``; 0: it goes now."""
    left = days - (time.time() - used) / 86_400
    return max(0, math.ceil(left))
