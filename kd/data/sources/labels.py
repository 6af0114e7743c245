"""What all sources do with labels: how a label is written, which classes there are, what is doubted.

A source finds text or numbers; :func:`plain` makes labels of them, :func:`cells` finds several labels in one cell, and
:func:`in_order` numbers the classes, which are those of the training pictures. The rules are in kd/data/README.md.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kd.data.label_text import plain
from kd.data.sources.split_names import Unfit
from kd.errors import UserError
from kd.storage.elsewhere import json_of

LIKELY = "|,"
"""Marks that are most likely to separate labels, in the order in which they are tried; ";" always does."""
POSSIBLE = "/+& "
"""Marks that may separate labels, but are part of many names too."""
# Of the labels in cells with a mark, the share that other cells have too (0..1):
RECURRING = 0.5
"""from which a mark of LIKELY separates labels, and one of POSSIBLE may."""
CERTAIN = 0.9
"""from which a mark of POSSIBLE separates labels too."""
QUOTED_OR_BARE = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"|([^\s,'\"][^,'\"]*)")
"""A word of a list's text: in single quotes, in double quotes, or bare."""
NAMED = 5  # classes that a message names


def in_order(labels: Iterable[str]) -> list[str]:
    """Labels sorted by name; by value where all are whole numbers, as the column of class ids that they then are.

    >>> in_order(["10", "9"]), in_order(["10", "9", "b"])
    (['9', '10'], ['10', '9', 'b'])
    """
    names = sorted(labels)
    if all(map(_is_number, names)):
        names.sort(key=int)
    return names


def _is_number(name: str) -> bool:
    return bool(re.fullmatch(r"-?[0-9]{1,18}", name))


def in_quotes(names: Iterable[str]) -> str:
    """A few names in quotes, for a message.

    >>> in_quotes("abcdefg")
    "'a', 'b', 'c', 'd', 'e' and 2 more"
    """
    return _some_of([f"'{name[:60]}'" for name in names])


def _some_of(texts: Sequence[str]) -> str:
    """The first of some texts, and how many more there are."""
    text = ", ".join(texts[:NAMED])
    if len(texts) > NAMED:
        text += f" and {len(texts) - NAMED} more"
    return text


MISSING = {"nan", "null", "none", "n/a", "<na>", "na", "-1", "-1.0", "unlabeled", "unlabelled"}
"""Labels, in lower case, that may say that a picture has none."""

FRACTION = re.compile(r"[+-]?\d*\.\d*[1-9]\d*(e[+-]?\d+)?", re.IGNORECASE)
"""A number that is no whole one."""


def doubts(classes: Sequence[str]) -> list[str]:
    """Notes on a list of classes, for the user: names that hardly differ, numbers that are not the class ids, names that
    may mean "no label", names that may be several labels, and numbers that may be measured ones. Empty without doubts.

    >>> doubts(["red round", "red", "blue round", "blue red", "round red", "blue"])[0][:38]
    'warning: 4 classes are made of 3 words'
    >>> doubts(["apple;round", "banana;long", "kiwi;green", "lime;small"])[0][:38]
    'warning: 4 classes are made of 8 words'
    >>> doubts(["Irish setter", "English setter", "Irish terrier", "Welsh terrier", "pug"])
    []
    """
    notes: list[str] = []
    alike: dict[str, list[str]] = {}
    for name in classes:
        loose = re.sub(r"[\W_]+", " ", name.casefold()).strip()
        alike.setdefault(name if _is_number(name) or not loose else loose, []).append(name)
        if _is_number(name) and str(int(name)) != name:
            alike.setdefault(str(int(name)), []).append(name)
    for names in alike.values():
        if len(set(names)) > 1:
            notes.append(
                f"classes that hardly differ stay separate: {in_quotes(dict.fromkeys(names))}"
            )
    if classes and all(map(_is_number, classes)):
        moved = [(name, i) for i, name in enumerate(classes) if int(name) != i]
        if moved:
            name, i = moved[0]
            last, last_id = moved[-1]
            also = ""
            if last != name:
                also = f", '{last}' is class {last_id}"
            notes.append(
                f"classes are numbers that are not the class ids: '{name}' is class {i}{also}"
            )
    without_meaning = [name for name in classes if name.casefold() in MISSING]
    if without_meaning:
        notes.append(
            f"warning: {in_quotes(without_meaning)} {'are classes' if len(without_meaning) > 1 else 'is a class'}; "
            "leave these pictures out of the data if they have no label"
        )
    joined = [name for name in classes if re.search(r"[ ;|]", name)]
    words = {word for name in joined for word in re.split(r"[ ;|]+", name)}
    several = [name for name in joined if re.search("[;|]", name)]
    if len(joined) > 3 and (len(words) < len(joined) or len(several) == len(classes)):
        notes.append(
            f"warning: {len(joined)} classes are made of {len(words)} words, such as {in_quotes(joined)}: several labels in "
            "a cell? data.source.multi_label=true parts them, data.source.label_separator says where"
        )
    measured = [name for name in classes if FRACTION.fullmatch(name)]
    if len(measured) > 1 and 2 * len(measured) > len(classes):
        notes.append(
            f"warning: each number is a class: {in_quotes(measured)}; to learn numbers, take the task Regression "
            "(data.source.targets=[COLUMN])"
        )
    return notes


def unused(classes: Sequence[str], targets: Iterable[int]) -> list[str]:
    """Notes on classes that the data set itself lists, and of which no training picture is: they keep their ids.

    Args:
        classes: names by id.
        targets: class ids of the training pictures.
    """
    used = set(targets)
    empty = [name for i, name in enumerate(classes) if i not in used]
    if not empty:
        return []
    return [
        f"{_classes(len(empty))} without a training picture, kept with their ids: {in_quotes(empty)}"
    ]


def left_out(reasons: Mapping[str, str]) -> str:
    """A note on classes that have no usable picture and so get no id; ``reasons``: by name, why they have none."""
    texts = [f"'{name}' ({reason})" for name, reason in reasons.items()]
    return f"{_classes(len(texts))} without a usable picture left out: {_some_of(texts)}"


def _classes(count: int) -> str:
    return f"{count} class{'es' if count > 1 else ''}"


def check_known(
    labels: Mapping[str, Sequence[str]],
    classes: Iterable[str],
    key: str,
    source: str = "the training pictures",
) -> None:
    """Refuses labels that are not among ``classes``.

    Args:
        labels: of the split that is read: the names of the pictures with each label.
        classes: the labels that are known, mostly those of the training pictures.
        key: the setting that names the split.
        source: what has the known labels.

    Raises:
        UserError: names the labels, and a picture.
    """
    known = set(classes)
    unknown = [label for label in labels if label not in known]
    if not unknown:
        return
    count = sum(len(labels[label]) for label in unknown)
    example = labels[unknown[0]][0]
    raise UserError(
        f"{key}: {len(unknown)} label{'s' * (len(unknown) > 1)} not in {source}: "
        f"{in_quotes(unknown)} ({count} picture{'s' * (count > 1)}, for example {example})"
    )


def by_label(names: Iterable[str], labels: Iterable[Iterable[str]]) -> dict[str, list[str]]:
    """The names of the pictures with each label, in order; ``labels``: those of each picture."""
    pictures: dict[str, list[str]] = {}
    for name, labels_of_picture in zip(names, labels, strict=True):
        for label in labels_of_picture:
            pictures.setdefault(label, []).append(name)
    return pictures


# -- several labels in one cell --------------------------------------------------------------------------------------
class CellLabels(NamedTuple):
    """The labels of each cell, the separator that was used ("none": a cell is one label), and notes."""

    labels: list[list[str]]
    separator: str
    notes: list[str]


def cells(values: Sequence[object], several: bool, separator: str | None = None) -> CellLabels:
    """The labels in each cell of a column, as :func:`plain` writes them; an empty label is none.

    A JSON list, or a list's text (``['red', 'round']``), holds several labels whatever the separator. Text is parted
    where ``separator`` is, or where the cells themselves show that ``;`` ``|`` ``,`` or another character separates
    labels: the parts of one cell are the labels of other cells.

    Args:
        values: the cells; None, and text of blanks, have no label.
        several: whether a picture may have several labels; read where the separator is to be found.
        separator: one character, "none" for cells of one label each, None to find it.

    Raises:
        Unfit: cells look like several labels where a picture has one; or it is not clear what separates them.
    """
    # Cells that are lists, or the text of one; all others are text.
    lists: list[list[str] | None] = []
    texts = []
    for value in values:
        labels = [plain(part) for part in value] if isinstance(value, list) else _list_in(value)
        lists.append(labels)
        if labels is None:
            texts.append(plain(value))
    notes: list[str] = []
    if separator is None:
        separator, notes = _separator(texts, several)

    in_order_of_cells = iter(texts)
    cells_labels = []
    for labels in lists:
        if labels is None:
            labels = _parts(next(in_order_of_cells), separator)
        cells_labels.append([label for label in labels if label])
    return CellLabels(cells_labels, separator, notes)


def _parts(text: str, separator: str) -> list[str]:
    """The labels of a cell of text; one where the separator is "none"."""
    if separator == "none":
        return [text]
    return [plain(part) for part in text.split(separator)]


def _list_in(value: object) -> list[str] | None:
    """The labels of a cell with a list's text, of JSON, Python or NumPy; None for any other cell.

    >>> _list_in('["red", "round"]'), _list_in("['red' 'round']"), _list_in("[red, 3]"), _list_in("red")
    (['red', 'round'], ['red', 'round'], ['red', '3'], None)
    """
    text = ""
    if value is not None:
        text = str(value).strip()
    if len(text) < 2 or text[0] + text[-1] not in ("[]", "()", "{}"):
        return None
    try:
        content = json_of(text)
    except ValueError:
        content = None
    if isinstance(content, list) and not any(isinstance(item, list | dict) for item in content):
        return [plain(item) for item in content]
    inside = text[1:-1].strip()
    if text[0] != "[" and not inside.startswith(("'", '"')):  # (c) and {x} are names
        return None
    if not inside:
        return []
    if not re.search(r"[,'\"]", inside):
        return None
    labels = []
    for match in QUOTED_OR_BARE.finditer(inside):
        label = next(group for group in match.groups() if group is not None)
        labels.append(plain(label))
    return labels


def _separator(texts: Sequence[str], several: bool) -> tuple[str, list[str]]:
    """What separates labels in cells of text, as far as the cells show it ("none": nothing), and notes on it.

    A character separates labels if the parts of the cells that have it are labels of other cells too: of those in
    :data:`LIKELY` at least the share :data:`RECURRING` of the parts, of those in :data:`POSSIBLE` :data:`CERTAIN`. A ``;``
    always does where a picture may have several labels.

    Args:
        texts: of the cells.
        several: whether a picture may have several labels; else cells that look so are refused.

    Raises:
        Unfit: cells look like several labels where a picture has one, or it is not clear what separates them.
    """
    cells_by_text = Counter(text for text in texts if text)
    if several and any(";" in text for text in cells_by_text):
        return ";", []
    if several:
        marks = [*LIKELY, *POSSIBLE]
    else:
        marks = [";", *LIKELY]
    for mark in marks:
        with_mark = [text for text in cells_by_text if mark in text.strip(mark)]
        if not with_mark:
            continue
        # In how many different texts each label is, and the labels of those texts that have the mark.
        texts_by_label: Counter[str] = Counter()
        labels: set[str] = set()
        for text in cells_by_text:
            labels_of_text = {label for label in _parts(text, mark) if label}
            texts_by_label.update(labels_of_text)
            if mark in text.strip(mark):
                labels |= labels_of_text
        # Shares of these labels: those that are in another text too, and those that are a cell by themselves.
        count = max(1, len(labels))
        recurring = sum(texts_by_label[label] > 1 for label in labels) / count
        alone = sum(label in cells_by_text for label in labels) / count
        name = "blanks"
        if mark != " ":
            name = f"'{mark}'"
        example = f"'{with_mark[0][:60]}'"
        if not several:
            if alone >= RECURRING or recurring >= CERTAIN:
                raise Unfit(
                    f"has cells that look like several labels, separated by {name} ({example}): "
                    "data.source.multi_label=true takes several, data.source.label_separator=none takes such a "
                    "cell as one label"
                )
            continue
        is_likely = mark in LIKELY
        if recurring >= (RECURRING if is_likely else CERTAIN):
            cells_with_mark = sum(cells_by_text[text] for text in with_mark)
            note = f"labels are separated by {name} in {cells_with_mark} of {len(texts)} cells, for example {example}"
            return mark, [note]
        if is_likely or recurring >= RECURRING:
            raise Unfit(
                f"has cells that may be several labels, separated by {name} ({example}): "
                f"data.source.label_separator='{mark}' parts them, data.source.label_separator=none takes such "
                "a cell as one label"
            )
    return "none", []


def join_rows(
    paths: Sequence[str], labels: Sequence[list[str]], several: bool
) -> tuple[list[str], list[list[str]], list[str]]:
    """Rows of which no two have the same path and different labels: their paths, their labels, and notes.

    Where a picture may have several labels, those of its rows are joined, and each path has one row. Where all rows of a
    path have the same labels, for every path, the rows stay as they are.

    Args:
        paths: of the rows.
        labels: of each.
        several: whether a picture may have several.

    Raises:
        Unfit: a picture with one label is listed with two.
    """
    joined: dict[str, list[str]] = {}  # all labels of each path
    repeated: dict[str, None] = {}  # as an ordered set
    different: dict[str, None] = {}
    for path, labels_of_row in zip(paths, labels, strict=True):
        if path not in joined:
            joined[path] = labels_of_row
            continue
        repeated[path] = None
        if set(labels_of_row) != set(joined[path]):
            different[path] = None
        new = [label for label in labels_of_row if label not in joined[path]]
        joined[path] = [*joined[path], *new]
    if different and not several:
        path = next(iter(different))
        more = ""
        if len(different) > 1:
            more = f", and {len(different) - 1} more"
        raise Unfit(
            f"lists {path} with {len(joined[path])} labels ({in_quotes(joined[path])}){more}; give each picture one "
            "label, or data.source.multi_label=true joins them"
        )
    if different:
        note = f"pictures listed in several rows: {len(different)}; their labels are joined"
        return list(joined), list(joined.values()), [note]
    notes = []
    if repeated:
        example = next(iter(repeated))
        notes.append(f"pictures listed more than once: {len(repeated)}, for example {example}")
    return list(paths), list(labels), notes
