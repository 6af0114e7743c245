"""A run's files about its student, each with the digest of the weights that it was made from.

Training goes on replacing the weights (``resume=``) and leaves these files. They are written and read here alone, so no
reader takes those of older weights; ``tests/test_of_weights.py`` finds one that does.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.storage.elsewhere import inside, mapping_of
from kd.storage.student_metadata import weights_digest
from kd.storage.writing import json_text, write_text

EXPORT = "export"
"""Folder of exports, below a run's."""
EXPORTS = f"{EXPORT}/export.json"
"""Exports by name, each as :func:`kd.ship.export.gate.export` describes it."""
LATENCY = f"{EXPORT}/latency.json"
"""Times of the student, its exports and its teacher (``kd-latency``)."""
CASCADE = "cascade.json"
"""What ``kd-eval cascade=true`` has measured, with the rule by which the teacher is asked."""
TABLES = "tables"
"""Folder of the results that page and card show (:mod:`kd.report.tables`)."""
LABELS_ALONE = "labels_alone"
"""The table of what a teacher has added, and the folder of the students that were trained without its answers."""
EVALUATION = "eval_"
"""How the name of a file of figures begins (``kd-eval``)."""
WEIGHTS = "weights"
"""Key of the digest in each file."""

Say = Callable[[str], object]
"""Takes a sentence that names a file which is left out."""


def evaluation(pictures: str) -> str:
    """The file of a student's figures on a split, or on a folder of this name."""
    return f"{EVALUATION}{pictures}.json"


def on_stderr(sentence: str) -> None:
    """Prints a sentence on stderr: what a command passes as :data:`Say`."""
    print(sentence, file=sys.stderr)


def write_of_weights(run: Path, name: str, content: dict[str, Any]) -> Path:
    """Writes one of the files into a run's folder, with the digest of the student's present weights; returns its path."""
    file = run / name
    write_text(file, json_text({**content, WEIGHTS: weights_digest(run)}))
    return file


def read_of_weights(run: Path, name: str, say: Say) -> dict[str, Any]:
    """What one of the files holds about the student's present weights.

    Args:
        run: the run's folder.
        name: of the file.
        say: called where the file is left out: it is damaged, or was made from other weights.

    Returns:
        The content without the digest; {} where there is no such file, or it is left out. A folder without a student has
        nothing to compare with: the file counts as it is.
    """
    file = run / name
    if not file.exists():
        return {}
    content = mapping_of(file)
    if not content:
        say(f"{name} can't be read")
        return {}
    weights = content.pop(WEIGHTS, "")
    student = run / "student.safetensors"
    if student.exists() and weights != weights_digest(run):
        say(f"{name} is left out: it was made from other weights than the student has now")
        return {}
    return content


def read_tables(run: Path, say: Say) -> dict[str, dict[str, Any]]:
    """The files of :data:`TABLES` about the student's present weights, by name; arguments as of
    :func:`read_of_weights`.
    """
    found = {}
    for file in sorted((run / TABLES).glob("*.json")):
        content = read_of_weights(run, f"{TABLES}/{file.name}", say)
        if content:
            found[file.stem] = content
    return found


def exports(run: Path, say: Say) -> dict[str, dict[str, Any]]:
    """The exports of the student's present weights that were kept, by name; arguments as of :func:`read_of_weights`.

    Each as :func:`kd.ship.export.gate.export` describes it, with ``file`` as a path that leads there from here. One
    that lies outside of the run's folder (``out=``) is left out: a run from elsewhere could name any folder of yours.
    """
    kept = {}
    for name, export in read_of_weights(run, EXPORTS, say).items():
        needed = {"file", "to", "kept", "int8"}
        is_whole = isinstance(export, dict) and needed <= export.keys()
        if not is_whole or not export["kept"]:
            continue
        with suppress(UserError):
            file = inside(run, str(export["file"]), EXPORTS)
            kept[name] = {**export, "file": str(file)}
    return kept


def export_at(run: Path, name: str, say: Say) -> Path | None:
    """The file, or folder, of an export of the student's present weights; None without one.

    Arguments as of :func:`read_of_weights`, but for ``name``, the export's.
    """
    export = exports(run, say).get(name)
    file = Path(export["file"]) if export else None
    return file if file and file.exists() else None
