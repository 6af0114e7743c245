"""``kd-runs``: which runs there are, what the cache holds, and what of both may go. Needs neither torch nor lightning."""

import json
import math
import os
import shlex
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from kd.config.kinds import Range
from kd.errors import UserError
from kd.machine import cache_dir
from kd.report.metric import format_metric
from kd.report.records import is_run
from kd.run.options import option, take
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

A run may go if it has no student, no checkpoint, and is not training. Of the cache go copies, what is made again when
needed, and interrupted trainings of teachers, not trained teachers; nothing of it goes while a run in RUNS_DIR trains.
Both stay if they were used in the last 7 days (older=DAYS). Nothing else is deleted (recipes/CACHE.md). The column
`delete` says `now` of what `clean` deletes, and `in 3 d` of what it deletes later.
"""
FLAGS = (
    "--json",
    "--yes",
)
"""Options that take no value."""
DAYS = 7
"""Days without use after which ``clean`` deletes."""
OF_EVERY_RUN = {"recipe", "runs_dir", "data", "model", "trainer"}
"""Keys of each run's settings."""
PAGES = ("report.html", "comparison.html")
"""Files that ``kd-report`` writes, also of runs that it only reads: they make no run younger."""
NUMBERS = ("teacher", "student", "images/s", "age", "MB")
"""Columns that are set to the right."""
MAIN = ("acc1", "miou", "map", "f1", "knn1", "feature_loss")
"""A run's row shows the first of these metrics that it has."""
COLUMNS = (
    "run",
    "status",
    "metric",
    "teacher",
    "student",
    "images/s",
    "limit",
    "age",
    "MB",
    "delete",
)


def run(request: Request) -> int | None:
    """Prints the runs below a folder, the latest first, and the cache; or (``clean``) what may go, and deletes it.

    Returns:
        The exit status, 1 where something could not be deleted; None to show the help.

    Raises:
        UserError: no such folder, or a wrong word.
    """
    if "help" in request.flags:
        return None
    if request.rest[:1] == ["clean"]:
        return _clean(request)
    if len(request.rest) > 1 or request.overrides or request.recipe:
        raise UserError("takes one folder of runs, and --json (kd-runs RUNS_DIR --json)")
    if "yes" in request.flags:
        raise UserError("--yes goes with clean (kd-runs clean --yes)")
    folder = Path(request.rest[0] if request.rest else "runs")
    if request.rest and not folder.is_dir():
        raise UserError(
            f"folder {folder} not found (kd-runs [RUNS_DIR] lists, kd-runs clean deletes)"
        )
    rows = _runs_below(folder)
    if "json" in request.flags:
        print(json.dumps(rows, indent=2))
        return 0
    if rows:
        _print(rows)
    else:
        print(f"no runs in {folder}")
    trains = any(row["status"] == "training" for row in rows)
    _print_cache(cache_dir(), trains)
    return 0


def _runs_below(folder: Path) -> list[dict[str, Any]]:
    """The runs in a folder and in each folder in it, as rows of :func:`_described`, the latest changed first.

    Of a run's own folder that run alone. Links (``latest``) and what
    they lead to are left out: ``clean`` deletes nothing elsewhere. [] where the folder does not exist.
    """
    if is_run(folder):
        return [_described(folder)]
    rows = []
    paths = [*folder.glob("*"), *folder.glob("*/*")]
    for path in sorted(paths):
        above = path.parent
        is_below_link = above != folder and above.is_symlink()
        if path.is_symlink() or is_below_link:
            continue
        if is_run(path):
            rows.append(_described(path))
    rows.sort(key=lambda row: -row["changed"])
    return rows


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
        if of_part:
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


def _clean(request: Request) -> int:
    """Lists what may go, one line each, and deletes it with ``--yes``.

    Returns:
        The exit status: 1 where something could not be deleted.

    Raises:
        UserError: no such folder, or a wrong word.
    """
    _, *folders = request.rest
    kind = Annotated[float, Range(">= 0 and < 100000")]
    days = option(take(request, "older"), "older", kind, DAYS)
    if len(folders) > 1 or request.overrides or request.recipe or "json" in request.flags:
        raise UserError("clean takes one folder of runs, older=DAYS and --yes")
    runs = Path(folders[0] if folders else "runs")
    if folders and not runs.is_dir():
        raise UserError(f"folder {runs} not found")
    deletes = "yes" in request.flags
    status = 0
    size = 0
    goes = _may_go(runs, cache_dir(), time.time() - days * 86_400)
    for path, bytes_of_path, why, locks in goes:
        line = f"{path}  {bytes_of_path / 1e6:,.1f} MB  {why}"
        if deletes:
            try:
                for name in (path, *locks):
                    remove(name)
                line = f"deleted: {line}"
            except OSError as error:
                line = f"{path}: can't be deleted: {error.strerror}"
                status = 1
                bytes_of_path = 0
        size += bytes_of_path
        print(on_terminal(line))
    if not goes:
        recent = f"; what was used in the last {days:g} days stays (older=DAYS)" if days else ""
        print(f"nothing may go{recent}")
    elif deletes:
        print(f"{size / 1e6:,.1f} MB deleted")
    else:
        again = " ".join(["kd-runs", *map(shlex.quote, request.rest)])
        chosen = ""
        if days != DAYS:
            chosen = f" older={days:g}"
        print(
            f"{size / 1e6:,.1f} MB in all; nothing is deleted yet: {again}{chosen} --yes deletes them"
        )
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
        ``run`` (RECIPE/NAME), ``folder``, ``status``, ``metric`` (the first of :data:`MAIN` that it has, else its first),
        the value in it of the ``student`` (of several the first; the best, else the newest) and of the ``teacher``,
        ``images_per_s`` and ``verdict`` (what limits it), each None where the summary lacks it; ``limit``, the verdict up
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
    metric = next((name for name in MAIN if name in values), next(iter(values), ""))
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

    cells = []
    for row in rows:
        scores = []
        for model in ("teacher", "student"):
            score = row[model]
            scores.append("" if score is None else format_metric(row["metric"], score))
        images_per_s = row["images_per_s"]
        limit = row["limit"]
        if len(limit) > 24:  # a sentence: "no steps were recorded", for example
            limit = ""
        cells.append(
            [
                row["run"],
                row["status"],
                row["metric"] or "",
                *scores,
                "" if images_per_s is None else f"{images_per_s:,.0f}",
                limit,
                _age(time.time() - row["changed"]),
                f"{row['bytes'] / 1e6:,.1f}",
                _when_it_goes(row),
            ]
        )
    left = [column for column in COLUMNS if column not in NUMBERS]
    print_table(None, COLUMNS, cells, left=left, width=160)


def _when_it_goes(row: Mapping[str, Any]) -> str:
    """When ``kd-runs clean`` deletes a run, by :data:`DAYS`: ``now``, or ``in 3 d``; "" where it never does.

    Args:
        row: of :func:`_described`.
    """
    if not row["safe_to_delete"]:
        return ""
    days = _days_left(row["changed"])
    return f"in {days} d" if days else "now"


def _age(seconds: float) -> str:
    """How long ago, in one unit, for the table.

    >>> _age(7300)
    '2 h'
    """
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
