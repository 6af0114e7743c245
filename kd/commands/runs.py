"""``kd-runs``: which runs there are. Needs neither torch nor lightning."""

import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.report.metric import format_metric
from kd.report.records import is_run
from kd.run.request import Request
from kd.storage.checkpoints import holder_of
from kd.storage.elsewhere import mapping_in, mapping_of, number_in, text_in

HELP = """\
kd-runs: the runs in a folder, the newest first.

  kd-runs [RUNS_DIR] [--json]      default: runs

A run is safe to delete (column `delete`) if it has no student, no checkpoint, and is not training.
"""
NUMBERS = ("teacher", "student", "images/s", "age", "MB")
MAIN = ("acc1", "miou", "map", "f1", "knn1", "feature_loss")
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
    """Prints the runs below a folder, the latest first, as a table or JSON.

    Returns:
        The exit status, None to show the help.

    Raises:
        UserError: no such folder, or a wrong word.
    """
    if "help" in request.flags:
        return None
    if len(request.rest) > 1 or request.overrides or request.recipe:
        raise UserError("takes one folder of runs, and --json (kd-runs RUNS_DIR --json)")
    folder = Path(request.rest[0] if request.rest else "runs")
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    paths = sorted([*folder.glob("*"), *folder.glob("*/*")])
    rows = [_described(path) for path in paths if not path.is_symlink() and is_run(path)]
    rows.sort(key=lambda row: -row["changed"])
    if "json" in request.flags:
        print(json.dumps(rows, indent=2))
    elif rows:
        _print(rows)
    else:
        print(f"no runs in {folder}")
    return 0


def _described(folder: Path) -> dict[str, Any]:
    """A run as a row of the table and of the JSON."""
    summary = mapping_of(folder / "summary.json")
    training = bool(holder_of(folder))

    # its regular files: sizes, times, and whether weights are among them
    stats: list[os.stat_result] = []
    has_weights = False
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # a run that trains renames its files
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                stats.append(status)
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
        "changed": max((status.st_mtime for status in stats), default=folder.stat().st_mtime),
        "bytes": sum(status.st_size for status in stats),
        "safe_to_delete": not has_weights and not training,
    }


def _print(rows: list[dict[str, Any]]) -> None:
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
                "safe" if row["safe_to_delete"] else "",
            ]
        )
    left = [column for column in COLUMNS if column not in NUMBERS]
    print_table(None, COLUMNS, cells, left=left, width=160)


def _age(seconds: float) -> str:
    """How long ago, in one unit.

    >>> _age(7300)
    '2 h'
    """
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
