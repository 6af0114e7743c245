"""Answers of another program, of people, or of a model that is no longer there, in a file: ``kd-cache from=FILE``."""

import csv
import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kd.config.suggest import near
from kd.errors import UserError, first_line, needs_extra
from kd.storage.elsewhere import (
    LARGEST_LIST,
    LARGEST_WEIGHTS,
    json_of,
    lines_of,
    open_regular,
)
from kd.storage.parquet_files import check_parquet
from kd.teachers.probabilities import SMALLEST

LONG = ("label", "p")
"""Columns of a file with a line for each class of a picture, beside ``picture``."""
ROWS = 1000
"""Of a parquet file that are in memory at once."""
ROUNDING = 0.1
"""By how much probabilities of a picture may add up to more than 1: a thousand classes, rounded to four digits, by 0.05."""
MOST_PARTS = 256
"""Folders of an end of a picture's path that are compared."""
MOST_SHOWN = 5
"""Classes of the data that a message names."""
Cell = tuple[str, str, str, object]
"""Where a number is, for messages; its picture, its class, and the number as the file has it."""


class AnswersFile:
    """Answers by picture: probabilities or logits, the same for each view of a picture.

    A picture is named by its path, or by an end of it that no other picture has: ``val/class/file.jpg``, ``file.jpg``.

    | file | holds |
    |---|---|
    | ``.csv``, ``.parquet`` | ``picture`` and a column for each class |
    | the same, long | ``picture``, ``label``, ``p``: a line for each class, of any of them |
    | ``.safetensors`` | ``answers`` ``(N, C)``, with metadata ``pictures`` and ``classes``: lists in JSON |

    Where no number of the file is below 0 and those of each picture add up to at most 1 (by :data:`ROUNDING`), they are
    probabilities: what is missing of 1 is spread evenly over the classes that are missing. Else all are logits, which
    every class needs; a file of which most pictures have probabilities, but not all, is refused.

    Args:
        file: the file.
        classes: of the data, by class id.
        shares: whether numbers may be probabilities, which needs one class a picture; else all are logits.
    """

    def __init__(self, file: str, classes: Sequence[str], shares: bool = True) -> None:
        """Reads the file; the arguments are the class's.

        Raises:
            UserError: an unreadable file or one without answers, a class that the data does not have, two answers for one
                class of a picture, a class without a logit, a number that is not finite, percentages, or numbers that are
                probabilities for most pictures but not for all.
        """
        self.file = file
        with open_regular(file, LARGEST_WEIGHTS) as content:
            self._digest = hashlib.file_digest(content, "sha256").hexdigest()[:16]
        place = {name: i for i, name in enumerate(classes)}
        rows: dict[str, np.ndarray] = {}
        for where, picture, label, value in _cells(file):
            class_id = place.get(label)
            if class_id is None:
                few = ", ".join(classes[:MOST_SHOWN])
                suggestion = near(label, classes) or f"; its first classes are {few}"
                raise UserError(f"from: {file}: the data has no class '{label}'{suggestion}")
            if picture not in rows:
                rows[picture] = np.full(len(classes), np.nan)
            row = rows[picture]
            if not np.isnan(row[class_id]):
                raise UserError(f"from: {file}: {picture} has two answers for {label} ({where})")
            row[class_id] = _number(value, f"{file}, {where}, {label}")
        if not rows:
            raise UserError(f"from: {file} has no answers")
        self.pictures = list(rows)
        self._named: dict[int, str] = {}
        """The picture that a row is of, of all splits."""
        self._row_of: dict[str, int] = {}
        for number, picture in enumerate(self.pictures):
            name = next(_ends(picture))
            if name in self._row_of:
                raise UserError(f"from: {file}: {picture} has two answers")
            self._row_of[name] = number
        numbers = np.stack([*rows.values()])
        self.are_probabilities = shares and _are_shares(file, self.pictures, numbers)
        self._logits = _logits_of(file, numbers, classes, self.are_probabilities)

    def identity(self) -> dict[str, Any]:
        """The file's name, and a digest of its content."""
        return {"arch": Path(self.file).name, "answers": self._digest}

    def logits_of(self, names: Sequence[str]) -> tuple[np.ndarray, list[str]]:
        """The answers to pictures that the file has, and the names of those that it has not.

        Args:
            names: of pictures, by number.

        Returns:
            Logits ``(N, C)``, float32, NaN for a picture without an answer; the names of these pictures.

        Raises:
            UserError: an answer whose name two pictures' paths end with, also of another call (split); a picture whose path
                ends with two answers' names.
        """
        logits = np.full((len(names), self._logits.shape[1]), np.nan, np.float32)
        missing = []
        for number, name in enumerate(names):
            found = [self._row_of[end] for end in _ends(name) if end in self._row_of]
            if not found:
                missing.append(name)
                continue
            if len(found) > 1:
                both = " and ".join(self.pictures[row] for row in found[:2])
                raise UserError(f"from: {self.file}: {name} has two answers: {both}")
            row = found[0]
            other = self._named.setdefault(row, name)
            if other != name:
                raise UserError(
                    f"from: {self.file}: {self.pictures[row]} is the end of {other} and of {name}; write more of their "
                    "paths"
                )
            logits[number] = self._logits[row]
        return logits, missing


def _cells(file: str) -> Iterator[Cell]:
    """The numbers of a file, one after the other: place, picture, class and number; classes and numbers are not checked.

    Raises:
        UserError: an unreadable file, or missing columns.
    """
    if file.endswith(".safetensors"):
        yield from _safetensors_cells(file)
        return
    try:
        columns, lines = _parquet(file) if file.endswith(".parquet") else _csv(file)
        if "picture" not in columns:
            raise UserError(f"from: {file} has no column 'picture' ({', '.join(columns[:8])})")
        is_long = set(LONG) <= set(columns)
        for number, line in enumerate(lines, 1):
            picture = str(line.pop("picture"))
            if is_long:
                line = {str(line["label"]): line["p"]}
            for label, value in line.items():
                yield f"row {number}", picture, str(label), value
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"from: {file} is no table in UTF-8: {first_line(error)}") from error


def _number(value: object, where: str) -> float:
    """A cell as a float; :class:`~kd.errors.UserError` names the place ``where`` of what is not a finite number."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"from: {where}: must be a finite number, got '{value}'")
    return number


def _csv(file: str) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """The columns of a CSV file, and its rows by column."""
    reader = csv.DictReader(lines_of(file, LARGEST_LIST))
    return list(reader.fieldnames or []), reader


def _parquet(file: str) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """The columns of a parquet file, and its rows by column.

    Raises:
        UserError: pyarrow is not installed, or the file can't be read or names more rows than it has bytes.
    """
    try:
        from pyarrow import parquet

        check_parquet(Path(file))
    except ImportError as error:
        raise UserError(f"from: {file} {needs_extra('hf')}") from error
    try:
        content = parquet.ParquetFile(file)
    except Exception as error:  # its errors have no common class
        raise UserError(
            f"from: {file} can't be read: {str(error).splitlines()[0][:160]}"
        ) from error
    if content.metadata.num_rows > Path(file).stat().st_size:
        raise UserError(f"from: {file} says that it has more rows than bytes")
    rows = (row for part in content.iter_batches(ROWS) for row in part.to_pylist())
    return list(content.schema_arrow.names), rows


def _safetensors_cells(file: str) -> Iterator[Cell]:
    """The numbers of a safetensors file.

    It holds the tensor ``answers``, ``(pictures, classes)``, and in its metadata ``pictures`` and ``classes``, each a JSON
    list in the order of rows and columns.

    Raises:
        UserError: it can't be read, or sizes or names contradict each other.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as content:
            said = content.metadata() or {}
            answers = np.asarray(content.get_tensor("answers"))
        pictures = json_of(said["pictures"])
        classes = json_of(said["classes"])
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise UserError(
            f"from: {file} must hold the tensor 'answers' and the metadata 'pictures' and 'classes': {error}"
        ) from error
    if answers.shape != (len(pictures), len(classes)):
        raise UserError(
            f"from: {file}: answers {answers.shape}, but {len(pictures)} pictures and {len(classes)} classes"
        )
    for picture, numbers in zip(pictures, answers, strict=True):
        for label, value in zip(classes, numbers.tolist(), strict=True):
            yield str(picture), str(picture), str(label), value


def _are_shares(file: str, pictures: Sequence[str], numbers: np.ndarray) -> bool:
    """Whether a file's numbers ``(N, C)``, NaN where it has none, are probabilities (see :class:`AnswersFile`).

    Raises:
        UserError: the numbers of most pictures are probabilities, but not those of all; or most add up to 100.
    """
    given = np.nan_to_num(numbers)
    total = given.sum(1)
    not_negative = (given >= 0).all(1)
    are_shares = not_negative & (total <= 1 + ROUNDING)
    if are_shares.all():
        return True
    if (not_negative & (abs(total - 100) <= 100 * ROUNDING)).mean() > 0.5:
        raise UserError(f"from: {file}: the numbers of a picture add up to 100; divide them by 100")
    if are_shares.mean() > 0.5:
        first = int(np.argmin(are_shares))
        fault = f"add up to {total[first]:.4g}" if not_negative[first] else "hold one below 0"
        raise UserError(
            f"from: {file}: most pictures have probabilities, but the numbers of {pictures[first]} {fault}"
        )
    return False


def _logits_of(
    file: str, numbers: np.ndarray, classes: Sequence[str], are_probabilities: bool
) -> np.ndarray:
    """Logits ``(N, C)``, float32, without NaN, from a file's numbers ``(N, C)``, which are NaN where the file has none.

    Raises:
        UserError: logits without one of the classes.
    """
    known = ~np.isnan(numbers)
    if are_probabilities:
        # classes without a number share what is left of 1
        missing = len(classes) - known.sum(1)
        left = np.clip(1 - np.nansum(numbers, 1), 0, 1)
        rest = left / np.maximum(missing, 1)
        probabilities = np.where(known, numbers, rest[:, None])
        logits = np.log(np.clip(probabilities, SMALLEST, 1))
        return logits.astype(np.float32)
    if not known.all():
        lacking = classes[int(np.argmin(known.all(0)))]
        raise UserError(f"from: {file} has logits, which all classes need; '{lacking}' is missing")
    return numbers.astype(np.float32)


def _ends(name: str) -> Iterator[str]:
    """A path, then what is left of it without its first folder, its first two, and so on, down to the file's name.

    What is left has at most :data:`MOST_PARTS` parts: of a deeper path the longest ends are passed over.
    """
    parts = Path(name).parts
    yield "/".join(parts)
    for first in range(max(1, len(parts) - MOST_PARTS), len(parts)):
        yield "/".join(parts[first:])
