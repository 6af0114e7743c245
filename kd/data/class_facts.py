"""Numbers that belong to classes: calories of a dish, price of an article."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kd.data.info import ONE_LABEL, DataInfo
from kd.data.label_text import plain
from kd.errors import UserError
from kd.storage.elsewhere import number_of, text_of

ClassFacts = dict[str, list[float | None]]
"""By the name of a fact its value for each class, in the order of the class ids; None where it is not known."""


def read_class_facts(file: str, info: DataInfo) -> ClassFacts:
    """Reads a table whose first column names a class and whose other columns are numbers about it.

    Classes without a row, empty fields and NaN have None. Labels are compared as :func:`plain` writes them.

    Args:
        file: path of a table with commas (CSV); ``~`` is the user's folder.
        info: of the data, whose classes give the order in which the numbers are returned.

    Raises:
        UserError: the file can't be read as such a table, holds text or infinity in place of a number, names a class or a
            number twice or a class that the data does not have; or the data has another kind of target than one label
            a picture.
    """
    if info.kind != ONE_LABEL:
        raise UserError(
            f"data.class_facts: needs one label a picture, data.source gives {info.kind}"
        )
    classes = info.classes
    key = f"data.class_facts: {file}"
    (_, *names), *rows = _table(file, key)
    ids = {name: i for i, name in enumerate(classes)}
    facts: ClassFacts = {name: [None] * len(classes) for name in names}
    seen: set[str] = set()
    for label, *texts in rows:
        if label not in ids:
            raise UserError(f"{key} names the class '{label}', which the data does not have")
        if label in seen:
            raise UserError(f"{key} names the class '{label}' twice")
        seen.add(label)
        for name, text in zip(names, texts, strict=False):  # a shorter row lacks the last numbers
            try:
                value = number_of(text)
            except ValueError as error:
                raise UserError(
                    f"{key}: {name} of '{label}' is '{text}', which is not a number"
                ) from error
            facts[name][ids[label]] = None if math.isnan(value) else value
    return facts


def _table(file: str, key: str) -> list[list[str]]:
    """The header and the rows of a table, without the empty fields at a row's end; a row begins with a class's label.

    Args:
        file: path of the table (CSV).
        key: the setting and the file, for messages.

    Raises:
        UserError: it can't be read, has no numbers, a number's name twice, or a row longer than the header.
    """
    try:
        text = text_of(Path(file).expanduser()).removeprefix("\ufeff")
        rows = []
        for row in csv.reader(io.StringIO(text)):
            while row and not row[-1].strip():  # spreadsheets end rows with empty fields
                row.pop()
            if row:
                rows.append([plain(row[0]), *row[1:]])
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{key} can't be read as CSV: {error}") from error
    if len(rows) < 2 or len(rows[0]) < 2:
        raise UserError(
            f"{key} needs a header (class, name of a number, ...) and rows (a class, its numbers)"
        )
    header = [name.strip() for name in rows[0]]
    for name in header[1:]:
        if header[1:].count(name) > 1:
            raise UserError(f"{key} names the number '{name}' twice")
    for row in rows[1:]:
        if len(row) > len(header):
            raise UserError(
                f"{key} has {len(row)} fields for '{row[0]}', the header has {len(header)}"
            )
    return [header, *rows[1:]]


def facts_of(
    facts: Mapping[str, Sequence[float | None]], p: np.ndarray
) -> dict[str, dict[str, float | None]]:
    """What the facts of the classes say of one picture; the server returns it.

    Args:
        facts: by name, a number for each class; None where it is not known (:data:`ClassFacts`).
        p: the student's probabilities of the classes for this picture, ``(C,)``.

    Returns:
        By name: ``of_label``, the number of the likeliest class, and ``expected``, the mean over the classes with a known
        number, weighted by ``p``. Both rounded to six decimals; None where no such number is known, or (``expected``) the
        classes with one have probability 0.
    """
    facts_of_picture: dict[str, dict[str, float | None]] = {}
    for name, numbers in facts.items():
        values = np.array(numbers, dtype=np.float64)  # None becomes NaN
        known = ~np.isnan(values)
        mass = float(p[known].sum())
        expected = None
        if mass > 0:
            expected = round(float(p[known] @ values[known]) / mass, 6)
        likeliest = float(values[int(p.argmax())])
        of_label = None
        if not math.isnan(likeliest):
            of_label = round(likeliest, 6)
        facts_of_picture[name] = {"of_label": of_label, "expected": expected}
    return facts_of_picture
