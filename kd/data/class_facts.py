"""Numbers that belong to classes: calories of a dish, price of an article."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kd.data.info import ONE_LABEL, DataInfo
from kd.data.label_text import plain_label
from kd.errors import UserError
from kd.storage.elsewhere import lines_of, number_of

ClassFacts = dict[str, list[float | None]]
"""By the name of a fact its value for each class, in the order of the class ids; None where it is not known."""


def read_class_facts(file: str, info: DataInfo) -> ClassFacts:
    """Reads a table whose first column names a class and whose other columns are numbers about it.

    Classes without a row, empty fields and NaN have None. Labels are compared as :func:`plain_label` writes them.

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
    key = f"data.class_facts: {file}"
    try:
        with lines_of(Path(file).expanduser()) as lines:
            table = csv.DictReader(lines, strict=True)
            rows = [row for row in table if any(row.values())]
            label_column, *names = table.fieldnames or [""]
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{key} can't be read as CSV: {error}") from error
    named = [name for name in names if name.strip()]
    columns = {name.strip(): name for name in named}
    if not rows or not columns:
        raise UserError(
            f"{key} needs a header (class, name of a number, ...) and rows (a class, its numbers)"
        )
    if len(columns) < len(named):
        raise UserError(f"{key} names a number twice: {', '.join(map(str.strip, names))}")
    ids = {name: i for i, name in enumerate(info.classes)}
    facts: ClassFacts = {name: [None] * len(ids) for name in columns}
    seen: set[str] = set()
    for row in rows:
        label = plain_label(row[label_column])
        if label not in ids or label in seen:
            problem = "twice" if label in seen else "that the data does not have"
            raise UserError(f"{key} names the class '{label}' {problem}")
        if any(row.get(None) or ()):
            raise UserError(f"{key} has more fields for '{label}' than the header")
        seen.add(label)
        for name, column in columns.items():
            text = row[column] or ""
            try:
                value = number_of(text)
            except ValueError as error:
                raise UserError(
                    f"{key}: {name} of '{label}' is '{text}', which is not a number"
                ) from error
            facts[name][ids[label]] = None if math.isnan(value) else value
    return facts


def picture_facts(
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

    >>> picture_facts({"kcal": [100.0, 300.0, None]}, np.array([0.2, 0.3, 0.5]))
    {'kcal': {'of_label': None, 'expected': 220.0}}
    >>> picture_facts({"kcal": [100.0, 300.0, None]}, np.array([0.1, 0.9, 0.0]))
    {'kcal': {'of_label': 300.0, 'expected': 280.0}}
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
