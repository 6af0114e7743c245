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

    Args:
        file: ``.csv``.
        info: of the data, whose classes give the order in which the numbers are returned.

    Raises:
        UserError: the file can't be read as such a table, or the data has no classes.
    """
    if info.kind != ONE_LABEL:
        raise UserError(
            f"data.class_facts: needs one label a picture, data.source gives {info.kind}"
        )
    classes = info.classes
    key = f"data.class_facts: {file}"
    try:
        rows = [
            row
            for row in csv.reader(
                io.StringIO(text_of(Path(file).expanduser()).removeprefix("\ufeff"))
            )
            if row
        ]
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{key} can't be read as CSV: {error}") from error
    if len(rows) < 2 or len(rows[0]) < 2:
        raise UserError(
            f"{key} needs a header (class, name of a number, ...) and a row for each class"
        )
    names = [name.strip() for name in rows[0][1:]]
    ids = {name: i for i, name in enumerate(classes)}
    facts: ClassFacts = {name: [None] * len(classes) for name in names}
    for row in rows[1:]:
        row[0] = plain(row[0])
        if row[0] not in ids:
            raise UserError(f"{key} names the class '{row[0]}', which the data does not have")
        for name, text in zip(names, row[1:], strict=False):
            try:
                value = number_of(text)
            except ValueError as error:
                raise UserError(
                    f"{key}: {name} of '{row[0]}' is '{text}', which is not a number"
                ) from error
            facts[name][ids[row[0]]] = None if math.isnan(value) else value
    return facts


def facts_of(
    facts: Mapping[str, Sequence[float | None]], p: np.ndarray
) -> dict[str, dict[str, float | None]]:
    """A picture's facts: ``of_label``, the likeliest class's, and ``expected`` under probabilities ``p`` ``(C,)``."""
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
