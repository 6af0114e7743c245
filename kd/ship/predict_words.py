"""What the words of ``kd-predict`` name: pictures, and a place for the answers. Torch is not imported."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kd.data.info import LISTS
from kd.data.sources import pictures_below, pictures_in_list
from kd.errors import UserError
from kd.storage.elsewhere import matching
from kd.storage.objects import is_url
from kd.storage.student_metadata import student_metadata_in

TABLES = (".csv", ".jsonl")
ANSWERS = {
    "Classification": "classification",
    "MultiLabel": "multilabel",
    "Regression": "numbers",
    "Segmentation": "segmentation",
}
"""``answers`` of kd's tasks, by the name of the class."""


def answers_of(student: Path) -> str | None:
    """What a student answers, see :attr:`kd.ship.finished.FinishedRun.kind`; None for a task that is not one of kd's.

    Args:
        student: ``student.safetensors``.

    Raises:
        UserError: its metadata is damaged.
    """
    metadata = student_metadata_in(student)
    if metadata.gives_features:
        return "features"
    if not metadata.task:
        return "classification"
    package, _, name = str(metadata.task["class_path"]).rpartition(".")
    return ANSWERS.get(name) if package == "kd.tasks" else None


def find_pictures(words: Sequence[str], source: Mapping[str, Any] | None = None) -> list[str]:
    """The picture files that files, folders, patterns and lists name, each once, in the order of the words.

    Those of a folder (as a training reads it: at any depth, by their endings, without hidden files and programs'
    folders) or of a pattern are sorted, those of a list as they are in it. Whether a file is a picture shows when it is
    read.

    Args:
        words: of the command line.
        source: the run's ``data.source``; how its lists are read counts for the lists among ``words`` too.

    Raises:
        UserError: a word that names no file on this disk, or a folder without pictures.
    """
    for word in filter(is_url, words):
        allowed = "files, folders, patterns or lists on this disk"
        raise UserError(f"pictures must be {allowed}, got {word}")
    unique: dict[str, None] = {}
    for word in words:
        if Path(word).is_dir():
            files, _ = pictures_below(word)
        elif word.lower().endswith(LISTS) and Path(word).is_file():
            unique |= dict.fromkeys(pictures_in_list(word, **_reading_of(source or {})))
            continue
        elif Path(word).is_file():
            files = [word]
        else:
            files = [file for file in matching(word) if Path(file).is_file()]
        if not files:
            raise UserError(f"no pictures: {word}")
        unique |= dict.fromkeys(sorted(files))
    return list(unique)


def _reading_of(source: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a run's source by which a list's pictures are found; {} for a source that is not a list.

    They are ``image_dir``, ``path_column``, ``delimiter`` and ``ending``, of these those that the source has.

    Args:
        source: ``data.source`` of the run, a class path and its arguments.
    """
    if not source.get("class_path", "").endswith(".Manifest"):
        return {}
    arguments = source["init_args"]
    reading = {}
    for name in ("image_dir", "path_column", "delimiter", "ending"):
        if name in arguments:
            reading[name] = arguments[name]
    return reading


def check_out(kind: str, out: Path | None) -> None:
    """Checks that answers of this kind can be written to ``out``.

    Args:
        kind: see :attr:`kd.ship.finished.FinishedRun.kind`.
        out: a folder for masks, a ``.npz`` for features, else a table; None: the usual place, which is not checked.

    Raises:
        UserError: another ending, or no such folder.
    """
    if out is None:
        return
    if kind == "segmentation":
        if out.is_file() or out.suffix in (*TABLES, ".npz"):
            raise UserError(f"out: masks go to a folder, got '{out}'")
        return
    suffixes = (".npz",) if kind == "features" else TABLES
    if out.suffix not in suffixes:
        raise UserError(f"out: must end in {', '.join(suffixes)} for {kind}, got '{out}'")
    if not out.resolve().parent.is_dir():
        raise UserError(f"out: folder {out.resolve().parent} not found")
