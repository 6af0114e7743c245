"""A teacher whose answers are in a file: of another program, of people, or of a model that is no longer there."""

import csv
import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kd.data.batch import Batch
from kd.errors import UserError, did_you_mean, needs_extra
from kd.storage.dataset_folder import check_parquet
from kd.storage.elsewhere import (
    LARGEST_LIST,
    LARGEST_WEIGHTS,
    json_of,
    lines_of,
    open_regular,
)
from kd.teachers.answer import ALL, Answer, Wanted
from kd.teachers.probabilities import SMALLEST

KEY = "model.teacher.answers"
ENDINGS = (".csv", ".parquet", ".safetensors")
LONG = ("label", "p")
"""Columns of a file with a line for each class of a picture, beside ``picture``."""
MOST_SHOWN = 5
"""Classes of the data that a message names."""
Rows = dict[str, dict[str, float]]
"""Numbers by class, by picture."""


class AnswersFile:
    """Answers by picture: probabilities or logits, the same for each view of a picture.

    Used as ``model.teacher.answers=FILE``. A picture is named by its path, or by an end of it that no other picture has:
    ``val/class/file.jpg``, ``file.jpg``.

    | file | holds |
    |---|---|
    | ``.csv``, ``.parquet`` | ``picture`` and a column for each class |
    | the same, long | ``picture``, ``label``, ``p``: a line for each class, of any of them |
    | ``.safetensors`` | ``answers`` ``(N, C)``, with metadata ``pictures`` and ``classes``: lists in JSON |

    Where no number of the file is below 0 and those of each picture add up to at most 1 (by 0.01), they are
    probabilities: what is missing of 1 is spread evenly over the classes that are missing. Else all are logits, which
    every class needs.

    Args:
        file: the file.
    """

    elsewhere = "file"

    def __init__(self, file: str) -> None:
        """Checks the file's ending alone: :meth:`build` hashes the file, :meth:`match` reads it.

        Raises:
            ValueError: another ending.
        """
        if not file.endswith(ENDINGS):
            raise ValueError(f"file must be one of {', '.join(ENDINGS)}, got '{file}'")
        self.file = file
        self._logits: dict[str, np.ndarray] = {}  # by split: (N, C) float32, a row a picture
        self._digest = ""

    def build(self, num_classes: int, img_size: object = None) -> "AnswersFile":
        """Computes the file's digest, for :meth:`identity`.

        Args:
            num_classes: not read: :meth:`match` gets the classes' names.
            img_size: not read.

        Raises:
            UserError: no such file.
        """
        if not Path(self.file).is_file():
            raise UserError(f"{KEY}: file {self.file} not found")
        with open_regular(self.file, LARGEST_WEIGHTS) as content:
            self._digest = hashlib.file_digest(content, "sha256").hexdigest()[:16]
        return self

    def identity(self) -> dict[str, Any]:
        """A digest of the file."""
        return {"answers": self._digest}

    def match(self, split: str, names: Sequence[str], classes: Sequence[str]) -> None:
        """Reads the file and finds the answer to each picture of a split.

        Args:
            split: ``train``, or ``val`` for the split whose batches name no view.
            names: of its pictures, by number.
            classes: of the data, by class id.

        Raises:
            UserError: an unreadable file, a picture without an answer, an answer that two pictures' paths end with, a
                class that the data does not have, a class without a logit, or a number that is not finite.
        """
        rows = read_rows(self.file)
        logits = _logits_of(self.file, rows, classes)
        row_of = {_ends(picture)[0]: row for row, picture in enumerate(rows)}
        places = []
        missing = []
        named: dict[int, str] = {}
        for name in names:
            place = next((row_of[end] for end in _ends(name) if end in row_of), None)
            if place is None:
                missing.append(name)
                continue
            if named.setdefault(place, name) != name:
                raise UserError(
                    f"{KEY}: {self.file}: {list(rows)[place]} is the end of {named[place]} and of {name}; write more of "
                    "their paths"
                )
            places.append(place)
        if missing:
            raise UserError(
                f"{KEY}: {self.file} has no answer to {len(missing):,} of {len(names):,} pictures of {split}, such as "
                f"{missing[0]}"
            )
        self._logits[split] = logits[places]

    def answer(self, batch: Batch, wanted: Wanted) -> Answer:
        """The logits of the batch's pictures, float32 ``(N, C)``, on their device; padding gets picture 0's.

        A batch that names a view is of the training split. ``wanted`` is not read.

        Raises:
            UserError: the batch has no pictures' numbers (a loader of one's own), or its split was not matched.
        """
        split = "train" if "view" in batch else "val"
        if "index" not in batch or split not in self._logits:
            raise UserError(
                f"{KEY}: answers of a file need kd's own loaders, and model.teacher.cache=off: they are read, not computed"
            )
        numbers = batch["index"].clamp_min(0).cpu().numpy()
        rows = self._logits[split][numbers]
        return Answer({ALL: torch.from_numpy(rows).to(batch["image"].device)})


def read_rows(file: str) -> Rows:
    """The numbers of a file of answers, by picture and class, in the file's order; their classes are not checked.

    Raises:
        UserError: an unreadable file, missing columns, a number that is not finite, or two answers for one picture (and
            class).
    """
    if file.endswith(".safetensors"):
        return _safetensors_rows(file)
    columns, lines = _parquet(file) if file.endswith(".parquet") else _csv(file)
    if "picture" not in columns:
        raise UserError(f"{KEY}: {file} has no column 'picture' ({', '.join(columns[:8])})")
    rows: Rows = {}
    long = set(LONG) <= set(columns)
    for number, line in enumerate(lines, 1):
        picture = str(line["picture"])
        if long:
            row = rows.setdefault(picture, {})
            given = {str(line["label"]): line["p"]}
        else:
            if picture in rows:
                raise UserError(f"{KEY}: {file}: {picture} has two answers (row {number})")
            row = rows[picture] = {}
            given = {str(key): value for key, value in line.items() if key != "picture"}
        for label, value in given.items():
            if label in row:
                raise UserError(
                    f"{KEY}: {file}: {picture} has two answers for {label} (row {number})"
                )
            row[label] = _number(value, f"{file}, row {number}, {label}")
    return rows


def _number(value: object, where: str) -> float:
    """A cell as a float; :class:`~kd.errors.UserError` names the place ``where`` of what is not a finite number."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{KEY}: {where}: must be a finite number, got '{value}'")
    return number


def _csv(file: str) -> tuple[list[str], Iterator[dict[str, Any]]]:
    reader = csv.DictReader(lines_of(file, LARGEST_LIST))
    return list(reader.fieldnames or []), iter(reader)


def _parquet(file: str) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """The columns of a parquet file, and its rows by column; needs pyarrow."""
    try:
        from pyarrow import parquet

        check_parquet(Path(file))
    except ImportError as error:
        raise UserError(f"{KEY}: {file} {needs_extra('hf')}") from error
    try:
        table = parquet.read_table(file)
    except Exception as error:  # its errors have no common class
        raise UserError(
            f"{KEY}: {file} can't be read: {str(error).splitlines()[0][:160]}"
        ) from error
    return list(table.column_names), iter(table.to_pylist())


def _safetensors_rows(file: str) -> Rows:
    """The rows of a safetensors file: by picture, the answer by class.

    The file holds the tensor ``answers``, ``(pictures, classes)``, and in its metadata ``pictures`` and ``classes``,
    each a JSON list in the order of rows and columns.

    Raises:
        UserError: it can't be read, sizes or names contradict each other, or a number is not finite.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as content:
            said = content.metadata() or {}
            answers = np.asarray(content.get_tensor("answers"), np.float64)
        pictures = json_of(said["pictures"])
        classes = json_of(said["classes"])
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise UserError(
            f"{KEY}: {file} must hold the tensor 'answers' and the metadata 'pictures' and 'classes': {error}"
        ) from error
    if answers.shape != (len(pictures), len(classes)):
        raise UserError(
            f"{KEY}: {file}: answers {answers.shape}, but {len(pictures)} pictures and {len(classes)} classes"
        )
    if len(set(pictures)) < len(pictures):
        raise UserError(f"{KEY}: {file}: a picture has two answers")
    if len(set(classes)) < len(classes):
        raise UserError(f"{KEY}: {file}: a class has two columns")
    rows: Rows = {}
    for picture, numbers in zip(pictures, answers.tolist(), strict=True):
        row = {}
        for label, value in zip(classes, numbers, strict=True):
            row[str(label)] = _number(value, f"{file}, {picture}, {label}")
        rows[str(picture)] = row
    return rows


def _logits_of(file: str, rows: Rows, classes: Sequence[str]) -> np.ndarray:
    """Logits ``(N, C)``, float32, in the order of the file's pictures and of the data's classes.

    The whole file holds either probabilities or logits (see :class:`AnswersFile`).

    Raises:
        UserError: a class that the data does not have, or logits without one of its classes.
    """
    numbers = _numbers_of(file, rows, classes)
    known = ~np.isnan(numbers)
    total = np.nansum(numbers, axis=1)
    are_probabilities = (np.nan_to_num(numbers) >= 0).all() and (total <= 1.01).all()
    if are_probabilities:
        # Classes without a number share what is left of 1.
        missing = len(classes) - known.sum(1)
        left = np.clip(1 - total, 0, 1)
        rest = left / np.maximum(missing, 1)
        probabilities = np.where(known, numbers, rest[:, None])
        logits = np.log(np.clip(probabilities, SMALLEST, 1))
        return logits.astype(np.float32)
    if not known.all():
        of_all_rows = known.all(0)
        lacking = classes[int(np.argmin(of_all_rows))]
        raise UserError(f"{KEY}: {file} has logits, which all classes need; '{lacking}' is missing")
    return numbers.astype(np.float32)


def _numbers_of(file: str, rows: Rows, classes: Sequence[str]) -> np.ndarray:
    """The file's numbers ``(N, C)``, NaN where it has none; an error where it names another class."""
    place = {name: i for i, name in enumerate(classes)}
    numbers = np.full((len(rows), len(classes)), np.nan)
    for i, row in enumerate(rows.values()):
        for label, value in row.items():
            if label not in place:
                suggestion = did_you_mean(label, classes) or f"; its classes are {_few(classes)}"
                raise UserError(f"{KEY}: {file}: the data has no class '{label}'{suggestion}")
            numbers[i, place[label]] = value
    return numbers


def _few(names: Sequence[str]) -> str:
    """The first :data:`MOST_SHOWN` names with commas between, and dots for others.

    >>> _few(["a", "b"]), _few(list("abcdefg"))
    ('a, b', 'a, b, c, d, e, ...')
    """
    shown = list(names[:MOST_SHOWN])
    if len(names) > MOST_SHOWN:
        shown.append("...")
    return ", ".join(shown)


def _ends(name: str) -> list[str]:
    """A path, and what is left of it without its first folders, the longest first."""
    parts = Path(name).parts
    return ["/".join(parts[first:]) for first in range(len(parts))]
