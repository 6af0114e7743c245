"""``kd-runs``: which runs there are, what the cache holds, and what of both may go. Needs neither torch nor lightning."""

import json
import math
import os
import shlex
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from kd.config.kinds import Range
from kd.errors import UserError
from kd.machine import cache_dir
from kd.report.metric import format_metric
from kd.report.records import is_run
from kd.run.options import CommandOptions
from kd.run.request import Request
from kd.storage.cache_parts import PARTS, entries_of
from kd.storage.checkpoints import holder_of
from kd.storage.elsewhere import mapping_in, mapping_of, number_in, text_in, text_of, yaml_of
from kd.storage.shown import on_terminal
from kd.storage.writing import remove

HELP = """\
kd-runs: the runs in a folder, the newest first, and the cache; what may be deleted.

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
"""Keys of each run's settings."""
PAGES = ("report.html", "comparison.html")
"""Files that ``kd-report`` writes, also of runs that it only reads: they make no run younger."""
TEXTS = ("run", "status", "metric", "limit", "delete")
"""Columns that are set to the left."""


class RunsOptions(CommandOptions):
    """What ``kd-runs`` is given."""

    WORDS = (0, 2)
    older: Annotated[float, Range(">= 0 and < 100000")] = DAYS
    """Days without use after which ``clean`` deletes."""


OPTIONS = RunsOptions


def run(request: Request, options: RunsOptions) -> int:
    """Prints the runs below a folder, the latest first, and the cache; or (``clean``) what may go, and deletes it.

    Returns:
        The exit status, 1 where something could not be deleted.

    Raises:
        UserError: no such folder, or a wrong word.
    """
    cleans = request.rest[:1] == ["clean"]
    folders = request.rest[1:] if cleans else request.rest
    if len(folders) > 1 or request.recipe or ("older" in options.given and not cleans):
        words = "clean, RUNS_DIR, older=DAYS and --yes" if cleans else "RUNS_DIR and --json"
        raise UserError(f"takes {words} (kd-runs --help)")
    if request.flags & ({"json"} if cleans else {"yes"}):
        raise UserError("--yes goes with clean, --json without it (kd-runs clean --yes)")
    folder = Path(folders[0] if folders else "runs")
    if folders and not folder.is_dir():
        raise UserError(
            f"folder {folder} not found (kd-runs [RUNS_DIR] lists, kd-runs clean deletes)"
        )
    if cleans:
        again = shlex.join(["kd-runs", *request.rest])
        return _clean(folder, options.older, "yes" in request.flags, again)
    rows = _runs_below(folder)
    if "json" in request.flags:
        print(json.dumps(rows, indent=2))
        return 0
    if rows:
        _print(rows)
    else:
        print(f"no runs in {folder}")
    _print_cache(cache_dir(), any(row["status"] == "training" for row in rows))
    return 0


def _runs_below(folder: Path) -> list[dict[str, Any]]:
    """The runs in a folder and in each folder in it, as rows of :func:`_described`, the latest changed first.

    Of a run's own folder that run alone. Links (``latest``) and what
    they lead to are left out: ``clean`` deletes nothing elsewhere. [] where the folder does not exist.
    """
    if is_run(folder):
        return [_described(folder)]
    rows = []
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        above = path.parent
        is_link = path.is_symlink() or (above != folder and above.is_symlink())
        if not is_link and is_run(path):
            rows.append(_described(path))
    return sorted(rows, key=lambda row: -row["changed"])


def _print_cache(cache: Path, trains: bool) -> None:
    """The parts of the cache: entries, size, what they are, how many may go; nothing without a cache.

    Args:
        cache: the cache folder.
        trains: a run is training, so nothing of the cache may go now.
    """
    from kd.report.terminal import print_table

    entries = entries_of(cache)
    if not entries:
        return
    rows = []
    for name, part in PARTS.items():
        of_part = [entry for entry in entries if entry.part == name]
        if not of_part:
            continue
        megabytes = sum(entry.size for entry in of_part) / 1e6
        goes = "no"
        if part.may_go:
            free = [entry for entry in of_part if not (trains or entry.is_held)]
            old = [entry for entry in free if _days_left(entry.used) == 0]
            goes = f"{len(old)} of {len(of_part)}"
        row = [name, str(len(of_part)), f"{megabytes:,.1f}", part.content, goes, part.loss]
        rows.append(row)
    size = sum(entry.size for entry in entries) / 1e6
    print(f"cache: {cache}, {size:,.1f} MB (KD_CACHE; kd-runs clean lists what may go)")
    columns = ["part", "entries", "MB", "content", "delete now", "what its loss costs"]
    left = ("part", "content", "delete now", "what its loss costs")
    print_table(None, columns, rows, left=left, width=160)


def _clean(runs: Path, days: float, deletes: bool, again: str) -> int:
    """Lists what may go, one line each, and deletes it.

    Args:
        runs: the folder of runs.
        days: without use.
        deletes: else it is only listed.
        again: the command line.

    Returns:
        The exit status: 1 where something could not be deleted.
    """
    status = 0
    size = 0
    goes = _may_go(runs, cache_dir(), time.time() - days * 86_400)
    for path, bytes_of_path, why, locks in goes:
        line = f"{path}  {bytes_of_path / 1e6:,.1f} MB  {why}"
        size += bytes_of_path
        if deletes:
            try:
                for name in (path, *locks):
                    remove(name)
                line = f"deleted: {line}"
            except OSError as error:
                line = f"{path}: can't be deleted: {error.strerror}"
                status = 1
                size -= bytes_of_path
        print(on_terminal(line))
    if not goes:
        recent = f"; what was used in the last {days:g} days stays (older=DAYS)" if days else ""
        print(f"nothing may go{recent}")
    elif deletes:
        print(f"{size / 1e6:,.1f} MB deleted")
    else:
        chosen = "" if days == DAYS else f" older={days:g}"
        ends = f"nothing is deleted yet: {again}{chosen} --yes deletes them"
        print(f"{size / 1e6:,.1f} MB in all; {ends}")
    return status


def _may_go(
    runs: Path, cache: Path, before: float
) -> list[tuple[Path, int, str, tuple[Path, ...]]]:
    """What may be deleted: its path, its bytes, why it may go, and the locks beside it, which go with it.

    Runs come first. While one of the runs trains nothing of the cache may go, and a line is printed that says so.

    Args:
        runs: the folder of runs.
        cache: the cache folder.
        before: Unix time; what was used later stays.
    """
    goes: list[tuple[Path, int, str, tuple[Path, ...]]] = []
    rows = _runs_below(runs)
    for row in rows:
        folder = Path(row["folder"])
        if row["safe_to_delete"] and row["changed"] < before:
            why = f"{row['status']}: no student, no checkpoint"
            goes.append((folder, row["bytes"], why, ()))
    training = [row["run"] for row in rows if row["status"] == "training"]
    if training:
        print(f"the cache stays as it is while {training[0]} trains")
        return goes
    for entry in entries_of(cache):
        part = PARTS[entry.part]
        if part.may_go and entry.used < before and not entry.is_held:
            why = f"{part.content}: {part.loss}"
            goes.append((entry.path, entry.size, why, entry.locks))
    return goes


def _days_left(used: float) -> int:
    """Days until ``clean`` deletes what may go and was used at a Unix time; 0: it would now."""
    left = DAYS - (time.time() - used) / 86_400
    return max(0, math.ceil(left))


def _is_of_kd(folder: Path) -> bool:
    """Whether ``config.yaml`` has the settings of every run of kd: other programs' folders may have such a file too."""
    try:
        config = yaml_of(text_of(folder / "config.yaml"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.keys() >= OF_EVERY_RUN


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
    summary = mapping_of(folder / "summary.json")
    training = bool(holder_of(folder))

    # its regular files: sizes, times, and whether weights are among them
    stats: list[os.stat_result] = []
    changed = 0.0
    has_weights = False
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # a run that trains renames its files
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                stats.append(status)
                if path.name not in PAGES:
                    changed = max(changed, status.st_mtime)
                if path.suffix == ".ckpt" or path.name == "student.safetensors":
                    has_weights = True

    student = mapping_in(summary, "student")
    values = mapping_in(student, "best_val") or mapping_in(student, "val")
    values_of_teacher = mapping_in(mapping_in(summary, "teacher"), "val")
    metric = text_in(summary, "primary")
    if metric not in values:
        metric = next(iter(values), "")
    verdict = text_in(mapping_in(summary, "verdict"), "text")
    return {
        "run": f"{folder.parent.name}/{folder.name}",
        "folder": str(folder),
        "status": "training" if training else text_in(summary, "status", "ended early"),
        "metric": metric or None,
        "teacher": number_in(values_of_teacher, metric),
        "student": number_in(values, metric),
        "images_per_s": number_in(summary, "images_per_s"),
        "verdict": verdict or None,
        "limit": verdict.split(":")[0],
        "changed": changed or folder.stat().st_mtime,
        "bytes": sum(status.st_size for status in stats),
        "safe_to_delete": not has_weights and not training and _is_of_kd(folder),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    """Prints runs as a table.

    Args:
        rows: as ``--json`` prints them: shares in 0..1, sizes in bytes, times in Unix seconds.
    """
    from kd.report.terminal import print_table

    table = []
    for row in rows:
        cells = {name: row[name] or "" for name in ("run", "status", "metric")}
        for model in ("teacher", "student"):
            score = row[model]
            cells[model] = "" if score is None else format_metric(row["metric"], score)
        rate = row["images_per_s"]
        cells["images/s"] = "" if rate is None else f"{rate:,.0f}"
        limit = row["limit"]
        if len(limit) > 24:  # a sentence: "no steps were recorded", for example
            limit = ""
        cells["limit"] = limit
        cells["age"] = _age(time.time() - row["changed"])
        cells["MB"] = f"{row['bytes'] / 1e6:,.1f}"
        cells["delete"] = ""
        if row["safe_to_delete"]:
            days = _days_left(row["changed"])
            cells["delete"] = f"in {days} d" if days else "now"
        table.append(cells)
    columns = [*table[0]]
    texts = [[*cells.values()] for cells in table]
    print_table(None, columns, texts, left=TEXTS, width=160)


def _age(seconds: float) -> str:
    """How long ago, in one unit, for the table.

    >>> _age(7300)
    '2 h'
    """
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
