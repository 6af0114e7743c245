"""Lists of pictures with labels as programs write them: tables, JSON lines, COCO's JSON, Ultralytics' NDJSON."""

import codecs
import csv
import io
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from kd.data.sources.places import IMAGE_SUFFIXES
from kd.data.sources.split_names import Column, Unfit, split_of, splits_by_row
from kd.storage.elsewhere import json_of, number_of

TABLES = (".csv", ".tsv", ".txt")
LISTS = (*TABLES, ".json", ".jsonl", ".ndjson")
DELIMITERS = "\t,;| "
Columns = Column | list[str]  # of the labels: one column, or several of numbers
LABELS = {
    "labels", "class", "classes", "class_name", "category", "categories", "tag", "tags", "target", "species", "breed",
}  # fmt: skip
"""Names of columns that usually hold labels, in lower case."""
# Values of a one-hot column, in lower case: whether the row has the column's label.
FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "": False, "false": False, "true": True}


class ListColumns(NamedTuple):
    """Where a list has what: columns by name, or by number in a table without a header."""

    path: Column = "path"
    label: Columns = "label"  # []: labels are not read
    delimiter: str | None = None  # None: found by the first line
    # None: found by its name and values; "none": no column names splits.
    split: Column | None = None
    numbers: bool = False  # the columns of ``label`` hold numbers to learn


class Row(NamedTuple):
    """A picture's path, its label or labels, and the split it belongs to where its list says so."""

    path: str
    label: Any
    split: str | None = None


class ListContent(NamedTuple):
    """The rows of a list, and what it says of all of them."""

    rows: list[Row]
    labelled: bool
    splits: bool  # each row has its split
    notes: list[str]  # what was guessed, for a person to read
    classes: Sequence[str] = ()  # that it names itself, whether they have pictures or not


def read_list(content: bytes, suffix: str, columns: ListColumns) -> ListContent:
    """The rows of a list.

    A table (:data:`TABLES`) has its columns by name, or by number without a header; other suffixes are JSON.

    Args:
        content: of the file.
        suffix: of its name, such as ``.csv``.
        columns: which ones hold path, label and split.

    Raises:
        Unfit: columns are missing, or contents contradict each other.
        csv.Error, KeyError, TypeError, ValueError, AttributeError: it is no such list.
    """
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    path = columns.path
    label = columns.label
    if suffix in TABLES:
        names, records, path = _table(text, path, columns.delimiter)
    else:
        value = _records(text)
        if isinstance(value, Mapping):
            _check_labels_are_classes(label)
            return _coco(value, columns.split)
        if value and value[0].get("type") == "dataset":
            _check_labels_are_classes(label)
            return _ultralytics(value)
        records = value
        names = sorted({name for record in records for name in record})
        path = _path_among(names, records, path)

    # The columns that are neither paths nor labels may name splits, and what is left may be one-hot labels.
    label_columns = label if isinstance(label, list) else [label]
    others = {}
    for name in names:
        if name != path and name not in label_columns:
            others[name] = [record.get(name) for record in records]
    has_labels = not set(label_columns).isdisjoint(names)
    splits, notes, split_columns = splits_by_row(others, columns.split, one_hot=not has_labels)
    rest = {name: values for name, values in others.items() if name not in split_columns}
    if path != columns.path:
        notes.append(f"paths are those of the column {path} (data.source.path_column)")
    used = columns._replace(path=path)
    if label == ListColumns().label and not has_labels:
        likely = [name for name in rest if str(name).lower() in LABELS]
        if len(likely) == 1:
            used = used._replace(label=likely[0])
            notes.append(f"labels are those of the column {likely[0]} (data.source.label_column)")
    rows, labelled = _labelled_rows(names, records, used, rest, notes)
    if splits is None:
        return ListContent(rows, labelled=labelled, splits=False, notes=notes)
    rows = [row._replace(split=split) for row, split in zip(rows, splits, strict=True)]
    return ListContent(rows, labelled=labelled, splits=True, notes=notes)


def _check_labels_are_classes(label: Columns) -> None:
    """Refuses columns of numbers to learn, or several of labels, which COCO's and Ultralytics' lists do not have."""
    if isinstance(label, list) and label:
        raise Unfit("is a list of classes; data.source.targets=[...] reads a table or JSON lines")


def _labelled_rows(
    names: Sequence[Column],
    records: Sequence[Mapping[Any, Any]],
    columns: ListColumns,
    rest: Mapping[Column, Sequence[object]],
    notes: list[str],
) -> tuple[list[Row], bool]:
    """The rows, and whether they have labels.

    A label is the cell of the one column, a list of the cells of several (empty where labels are not read), a list of
    the names of one-hot columns with a 1, or None where the list has paths alone.

    Args:
        names: of all columns.
        records: the rows, by column.
        columns: which ones hold path and label.
        rest: values of the columns without a use so far, which may be one-hot.
        notes: what was guessed is added.

    Raises:
        Unfit: a column of labels or numbers is missing.
    """
    path = columns.path
    label = columns.label
    if isinstance(label, list):
        for name in label:
            if name not in names:
                raise _no_column(name, names, records, path, columns.numbers)
        rows = []
        for record in records:
            numbers = [record.get(name) for name in label]
            rows.append(Row(str(record[path]), label=numbers))
        return rows, True
    if label in names:
        return [Row(str(record[path]), label=record.get(label)) for record in records], True
    if not rest:
        if label != ListColumns().label:  # a column that the settings name
            _check_there(label, names, "label_column")
        return [Row(str(record[path]), label=None) for record in records], False

    one_hot = [name for name, values in rest.items() if _is_one_hot(values)]
    if label != ListColumns().label or len(one_hot) < 2:
        _check_there(label, names, "label_column", [str(name) for name in rest])
    notes.append(
        f"the columns {', '.join(map(str, one_hot))[:120]} hold 0 and 1: each 1 is a label"
    )
    rows = []
    for record in records:
        labels = [str(name) for name in one_hot if FLAGS[_flag_text(record.get(name))]]
        rows.append(Row(str(record[path]), label=labels))
    return rows, True


def _no_column(
    name: Column,
    names: Sequence[Column],
    records: Sequence[Mapping[Any, Any]],
    path: Column,
    numbers: bool,
) -> Unfit:
    """The error, for the caller to raise, of a column ``name`` that a list does not have.

    Args:
        name: of labels, or of numbers.
        names: of all columns.
        records: the rows, by column.
        path: the column of the paths.
        numbers: whether it is of numbers: then the columns that have some are suggested.
    """
    there = ", ".join(map(str, names))[:120]
    if not numbers:
        return Unfit(f"has no column {name} (data.source.label_column; it has {there})")
    likely = []
    for other in names:
        texts = [str(record.get(other) or "").strip() for record in records]
        if other != path and any(texts) and all(not text or _is_number(text) for text in texts):
            likely.append(str(other))
    suggestion = ""
    if likely:
        suggestion = f"; numbers are in {', '.join(likely)[:120]}: data.source.targets={likely[0]}"
    return Unfit(f"has no column {name} (data.source.targets; it has {there}){suggestion}")


def _is_number(text: str) -> bool:
    """Whether a cell holds a number, as :func:`~kd.storage.elsewhere.number_of` reads it; an empty one and NaN count."""
    try:
        number_of(text)
    except ValueError:
        return False
    return True


def _flag_text(value: object) -> str:
    """A cell as a key of :data:`FLAGS`, where it is one."""
    if value is None:
        return ""
    return str(value).strip().lower()


def _is_one_hot(values: Sequence[object]) -> bool:
    """Whether a column holds 0 and 1 (or false and true) alone, and at least one 1; an empty cell is 0."""
    texts = {_flag_text(value) for value in values}
    return texts <= {*FLAGS} and any(FLAGS[text] for text in texts)


def _records(text: str) -> Mapping[str, Any] | list[dict[Any, Any]]:
    """What a JSON file holds: COCO's dict, or the rows, from a list of dicts or one dict a line.

    Raises:
        ValueError: a line is no JSON.
    """
    try:
        content = json_of(text)
    except ValueError:
        content = None
    if isinstance(content, list):
        return content
    if isinstance(content, dict) and "annotations" in content and "images" in content:
        return content
    return [json_of(line) for line in text.split("\n") if line.strip()]


def _path_among(
    names: Sequence[Column], records: Sequence[Mapping[Any, Any]], path: Column
) -> Column:
    """The column of paths: the one that is named; else, for the default name in a table with a header, the only one whose
    cells all end as pictures' files do.

    Args:
        names: of all columns.
        records: the rows, by column.
        path: as the settings name it.

    Raises:
        Unfit: no such column.
    """
    has_header = not any(str(name).lower().endswith(IMAGE_SUFFIXES) for name in names)
    if path not in names and path == ListColumns().path and has_header:
        likely = []
        for name in names:
            texts = [str(record.get(name)).strip().lower() for record in records]
            if texts and all(text.endswith(IMAGE_SUFFIXES) for text in texts):
                likely.append(name)
        if len(likely) == 1:
            return likely[0]
    _check_there(path, names, "path_column")
    return path


def _check_there(
    name: Column, names: Sequence[Column], given: str, unused: Sequence[str] = ()
) -> None:
    """Refuses a column that a list does not have.

    Args:
        name: of the column.
        names: of all columns.
        given: the key below ``data.source`` that names the column.
        unused: columns that may all hold labels.
    """
    if name in names:
        return
    there = ", ".join(map(str, names))[:120]
    says = f"data.source.{given}=NAME says which, or a number from 0 in a table without a header"
    files = [i for i, text in enumerate(names) if str(text).lower().endswith(IMAGE_SUFFIXES)]
    if given == "path_column" and len(names) == 2:
        first, second = names
        if files:  # what was taken for the header is a row
            first, second = files[0], 1 - files[0]
        says += f": data.source.path_column={first} data.source.label_column={second}?"
    if len(unused) > 1:
        says += f"; a label in each: 'data.source.label_column=[{', '.join(unused)[:120]}]'"
    raise Unfit(f"has no column {name} (it has {there}); {says}")


def _table(
    text: str, path: Column, delimiter: str | None
) -> tuple[list[Column], list[dict[Any, Any]], Column]:
    """A table's columns, its rows as {column: text}, and the column of the paths.

    A row that is shorter than the header has None for the rest; of two columns of one name the first counts.

    Args:
        text: of the file.
        path: the column of the paths, by name; by number the table has no header, and its columns are numbers.
        delimiter: between columns; None: found by the first line.

    Raises:
        Unfit: a row that is longer than the header or has no path, or no column of paths.
    """
    if delimiter is None:
        first_line = text.lstrip().partition("\n")[0].rstrip("\r")
        delimiter = _sniffed(first_line, path)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    lines = [(reader.line_num, row) for row in reader if row]
    names: list[Column] = []
    if lines and isinstance(path, int):  # without a header
        names += range(len(lines[0][1]))
    elif lines:
        _, header = lines.pop(0)
        names += [name.strip() for name in header]
    records = []
    for number, row in lines:
        if len(row) > len(names):
            raise Unfit(f"has {len(row)} columns in line {number}, {len(names)} in the first")
        cells_of_row = reversed([*zip_longest(names, row)])  # the first of two columns of one name
        records.append(dict(cells_of_row))
    path = _path_among(names, records, path)
    for number, row in lines:
        if len(row) <= names.index(path):
            raise Unfit(f"has no path in line {number}")
    return names, records, path


def _sniffed(first: str, path: Column) -> str:
    """The delimiter by which the first line has the column of the paths; else, and where that is a number, the first of
    :data:`DELIMITERS` that is in the line, or a comma.

    >>> _sniffed("id;path;label", "path"), _sniffed("a.jpg\\tx;y", 0), _sniffed("path", "path")
    (';', '\\t', ',')
    """
    delimiters = [delimiter for delimiter in DELIMITERS if delimiter in first]
    for delimiter in delimiters:
        names = [name.strip().strip('"') for name in first.split(delimiter)]
        if isinstance(path, int) or path in names:
            return delimiter
    return delimiters[0] if delimiters else ","


def _coco(content: Mapping[str, Any], split_column: Column | None) -> ListContent:
    """The rows of COCO's JSON: annotations name a picture's categories; several of one category count once.

    Args:
        content: of the file.
        split_column: a field of its pictures that names their split; None: found by its name and values; "none": no
            field does.

    Raises:
        Unfit: two pictures of one id, or an annotation of an unknown picture or category.
    """
    names = {category["id"]: str(category["name"]) for category in content["categories"]}
    pictures = content["images"]
    labels_by_picture: dict[Any, list[str]] = {picture["id"]: [] for picture in pictures}
    if len(labels_by_picture) < len(pictures):
        raise Unfit("has two pictures of one id")
    references: list[tuple[str, Mapping[Any, Any], str]] = [
        ("image_id", labels_by_picture, "images"),
        ("category_id", names, "categories"),
    ]
    for number, annotation in enumerate(content["annotations"]):
        for key, known, what in references:
            if annotation[key] not in known:
                raise Unfit(
                    f"has an annotation (number {number + 1}) of {key} {annotation[key]}, which is not among its "
                    f"{len(known)} {what} ({', '.join(map(str, known))[:80]})"
                )
        labels = labels_by_picture[annotation["image_id"]]
        name = names[annotation["category_id"]]
        if name not in labels:
            labels.append(name)

    keys = sorted({key for picture in pictures for key in picture} - {"id", "file_name"})
    columns = {key: [picture.get(key) for picture in pictures] for key in keys}
    splits, notes, _ = splits_by_row(columns, split_column)
    rows = []
    for i, picture in enumerate(pictures):
        split = None
        if splits is not None:
            split = splits[i]
        rows.append(Row(picture["file_name"], label=labels_by_picture[picture["id"]], split=split))
    return ListContent(
        rows, labelled=True, splits=splits is not None, notes=notes, classes=list(names.values())
    )


def _ultralytics(records: Sequence[Mapping[str, Any]]) -> ListContent:
    """The rows of Ultralytics' NDJSON: its first line describes the data set, each further one a picture.

    A picture without a split is of ``train``; its label is a list of class names, empty without one.

    Raises:
        Unfit: a class or a split that is unknown.
    """
    names = {}
    for number, name in dict(records[0].get("class_names") or {}).items():
        names[str(number)] = str(name)
    rows: list[Row] = []
    for record in records[1:]:
        ids = (record.get("annotations") or {}).get("classification") or []
        unknown = [i for i in ids if str(i) not in names]
        if unknown:
            raise Unfit(
                f"gives {record['file']} the class {unknown[0]}, which is not among its {len(names)} class_names"
            )
        split = split_of(record.get("split") or "train")
        if split is None:
            raise Unfit(
                f"gives {record['file']} the split '{record['split']}', which is not train, val or test"
            )
        rows.append(Row(record["file"], label=[names[str(i)] for i in ids], split=split))
    return ListContent(rows, labelled=True, splits=True, notes=[], classes=[*names.values()])
