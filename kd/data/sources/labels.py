"""What all sources do with labels: how a label is written, which classes there are, what is doubted.

A source finds text or numbers; :func:`plain_label` makes labels of them, :func:`labels_in` finds several labels in one cell,
and :func:`in_order` numbers the classes, which are those of the training pictures. The rules are in kd/data/README.md.
"""

import re
from ast import literal_eval
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from kd.data.label_text import plain_label
from kd.errors import UserError

NAMED = 5  # classes that a message names
MISSING = {"nan", "null", "none", "n/a", "<na>", "na", "-1", "-1.0", "unlabeled", "unlabelled"}
"""Labels, in lower case, that may say that a picture has none."""
FRACTION = re.compile(r"[+-]?\d*\.0*[1-9]\d*(e[+-]?\d+)?", re.IGNORECASE)
"""A number that is no whole one."""


def in_order(labels: Iterable[str]) -> list[str]:
    """Labels sorted by name; by value where all are whole numbers, as the column of class ids that they then are.

    >>> in_order(["10", "9"]), in_order(["10", "9", "b"])
    (['9', '10'], ['10', '9', 'b'])
    """
    names = sorted(labels)
    if all(map(is_number, names)):
        names.sort(key=int)
    return names


def is_number(name: str) -> bool:
    """Whether a label is a whole number, of 18 digits at most."""
    return bool(re.fullmatch(r"-?[0-9]{1,18}", name))


def in_quotes(names: Iterable[str]) -> str:
    """A few names in quotes, for a message.

    >>> in_quotes("abcdefg")
    "'a', 'b', 'c', 'd', 'e' and 2 more"
    """
    texts = [f"'{name[:60]}'" for name in names]
    text = ", ".join(texts[:NAMED])
    if len(texts) > NAMED:
        text += f" and {len(texts) - NAMED} more"
    return text


def doubts(classes: Sequence[str]) -> list[str]:
    """Notes on a list of classes, for the user: names that hardly differ, numbers that are not the class ids, names that
    may mean "no label", and numbers that may be measured ones. Empty without doubts.

    >>> doubts(["red", "Red"])
    ["classes that hardly differ stay separate: 'red', 'Red'"]
    >>> doubts(["Irish setter", "English setter", "Irish terrier", "Welsh terrier", "pug"])
    []
    >>> doubts(["0.5", "1.5", "full", "empty"])
    []
    """
    notes: list[str] = []
    alike: dict[str, list[str]] = {}
    for name in classes:
        loose = re.sub(r"[\W_]+", " ", name.casefold()).strip() or name
        alike.setdefault(str(int(name)) if is_number(name) else loose, []).append(name)
    for names in alike.values():
        if len(names) > 1:
            notes.append(f"classes that hardly differ stay separate: {in_quotes(names)}")
    if all(map(is_number, classes)):
        moved = [f"'{name}' is class {i}" for i, name in enumerate(classes) if int(name) != i]
        if moved:
            ends = ", ".join(dict.fromkeys([moved[0], moved[-1]]))
            notes.append(f"classes are numbers that are not the class ids: {ends}")
    without_meaning = [name for name in classes if name.casefold() in MISSING]
    if without_meaning:
        notes.append(
            f"warning: {in_quotes(without_meaning)} {'are classes' if len(without_meaning) > 1 else 'is a class'}; "
            "leave these pictures out of the data if they have no label"
        )
    measured = [name for name in classes if FRACTION.fullmatch(name)]
    if 2 * len(measured) > len(classes):
        notes.append(
            f"warning: each number is a class: {in_quotes(measured)}; to learn numbers, take the task Regression "
            "(data.source.targets=[COLUMN])"
        )
    return notes


def unused(classes: Sequence[str], targets: Iterable[int]) -> list[str]:
    """A note on the classes that the data set itself lists but no training picture has: they keep their ids. [] without.

    Args:
        classes: names by id.
        targets: class ids of the training pictures.
    """
    used = set(targets)
    empty = [name for i, name in enumerate(classes) if i not in used]
    if not empty:
        return []
    count = f"{len(empty)} class{'es' if len(empty) > 1 else ''}"
    return [f"{count} without a training picture, kept with their ids: {in_quotes(empty)}"]


def check_known(
    pictures: Iterable[tuple[str, Sequence[str]]],
    classes: Iterable[str],
    key: str,
) -> None:
    """Refuses labels that are not among ``classes``.

    Args:
        pictures: of the split that is read: the name of each, and its labels.
        classes: those of the training pictures.
        key: the setting that names the split.

    Raises:
        UserError: names the labels, and a picture.
    """
    known = set(classes)
    unknown = [(label, name) for name, labels in pictures for label in labels if label not in known]
    if not unknown:
        return
    counts = Counter(label for label, _ in unknown)
    raise UserError(
        f"{key}: {len(counts)} label{'s' * (len(counts) > 1)} not in the training pictures: {in_quotes(counts)} "
        f"({len(unknown)} picture{'s' * (len(unknown) > 1)}, for example {unknown[0][1]})"
    )


class Numbered(NamedTuple):
    """The classes of a source with one label a picture, a class id of each picture, and notes for the user."""

    classes: list[str]
    ids: np.ndarray
    notes: list[str]


def numbered(
    pictures: Iterable[tuple[str, str]],
    train: Sequence[str],
    key: str,
    remedy: str,
    declared: list[str] | None = None,
) -> Numbered:
    """The class ids of a split's pictures; -1 for all where no training picture has a label.

    Args:
        pictures: of the split: the name of each, and its label, "" without one.
        train: the labels of the training pictures.
        key: the setting that names the split.
        remedy: the setting that reads pictures alone.
        declared: the classes that the data set itself lists, which keep their ids; None: those of ``train``, in order.

    Raises:
        UserError: a picture without a label beside others, or an unknown label.
    """
    listed = list(pictures)
    if not any(train):
        return Numbered(declared or [], np.full(len(listed), -1, np.int32), [])
    unlabelled = next((name for name, label in listed if not label), None)
    if unlabelled is not None:
        raise UserError(
            f"{key}: {unlabelled} has no label, others have; {remedy} reads pictures alone"
        )
    classes = declared or in_order({*train} - {""})
    ids = {name: i for i, name in enumerate(classes)}
    check_known(((name, [label]) for name, label in listed), ids, key)
    notes = doubts(classes)
    if declared:
        notes += unused(classes, (ids[label] for label in train if label in ids))
    targets = np.array([ids[label] for _, label in listed], np.int32)
    return Numbered(classes, targets, notes)


# -- several labels in one cell --------------------------------------------------------------------------------------
def labels_in(cell: object, separator: str | None = None) -> list[str]:
    """The labels of a cell, as :func:`plain_label` writes them; an empty label is none.

    A list, of JSON or as Python writes it, holds several labels whatever the separator.

    Args:
        cell: of a table, or of JSON.
        separator: between labels; None: text is one label.

    >>> labels_in("red; round", ";"), labels_in("['red', 'round']"), labels_in([3, "a;b"], ";"), labels_in(None, ";")
    (['red', 'round'], ['red', 'round'], ['3', 'a;b'], [])
    """
    parts: Sequence[object] = [cell]
    if isinstance(cell, list):
        parts = cell
    elif isinstance(cell, str):
        text = cell.strip()
        content = None
        if text[:1] + text[-1:] == "[]":
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                content = literal_eval(text)
        if isinstance(content, list):
            parts = content
        elif separator:
            parts = text.split(separator)
    return [label for label in map(plain_label, parts) if label]
