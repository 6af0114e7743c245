"""Lists of pictures with labels as programs write them: tables, JSON lines, COCO's JSON, Ultralytics' NDJSON."""

import codecs
import csv
import io
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from kd.data.sources.split_names import Column, Unfit, split_of, splits_by_row
from kd.storage.elsewhere import json_of

TABLES = (".csv", ".tsv", ".txt")
DELIMITERS = "\t,;| "
Columns = Column | list[str]  # of the labels: one column, or several of numbers
FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "": False, "false": False, "true": True}


class ListColumns(NamedTuple):
    """Where a list has what: columns by name, or by number in a table without a header."""

    path: Column = "path"
    label: Columns = "label"
    delimiter: str | None = None  # None: found by the first line
    split: Column | None = (
        None  # None: found by its name and values; "none": no column names splits
    )


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
    """The rows of a list; :class:`Unfit` for columns that are missing, and for contents that contradict each other.

    A table (:data:`TABLES`) has its columns by name, or by number without a header; other suffixes are JSON.
    """
    text = content.decode(
        "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    )
    path, label = columns.path, columns.label
    if suffix in TABLES:
        names, records = _table(text, path, columns.delimiter)
    else:
        found = _records(text)
        if isinstance(found, Mapping) or (found and found[0].get("type") == "dataset"):
            if isinstance(label, list):
                raise Unfit(
                    "is a list of classes; data.source.targets=[...] reads a table or JSON lines"
                )
            return (
                _coco(found, columns.split) if isinstance(found, Mapping) else _ultralytics(found)
            )
        names, records = sorted({name for record in found for name in record}), found
        _check_there(path, names, "path_column")
    targets = label if isinstance(label, list) else [label]
    others = {
        name: [record.get(name) for record in records]
        for name in names
        if name not in (path, *targets)
    }
    splits, notes, split_columns = splits_by_row(
        others, columns.split, one_hot=not {*targets} & {*names}
    )
    row_splits: list[str | None] = [None] * len(records) if splits is None else splits
    rest = {name: values for name, values in others.items() if name not in split_columns}
    rows, labelled = _labelled_rows(names, records, columns, rest, notes)
    return ListContent(
        [row._replace(split=split) for row, split in zip(rows, row_splits, strict=True)],
        labelled,
        splits is not None,
        notes,
    )


def _labelled_rows(
    names: Sequence[Column],
    records: Sequence[Mapping[Any, Any]],
    columns: ListColumns,
    rest: Mapping[Column, Sequence[object]],
    notes: list[str],
) -> tuple[list[Row], bool]:
    """The rows, and whether they have labels; ``rest``: columns without a use so far. Adds to ``notes``."""
    path, label = columns.path, columns.label
    if isinstance(label, list):
        missing = next((name for name in label if name not in names), None)
        if missing is not None:
            raise Unfit(
                f"has no column {missing} (data.source.targets; it has {', '.join(map(str, names))[:120]})"
            )
        return [Row(record[path], [record.get(name) for name in label]) for record in records], True
    if label in names:
        return [Row(record[path], record.get(label)) for record in records], True
    if not rest:
        return [Row(record[path], None) for record in records], False
    flags = {name: values for name, values in rest.items() if _is_one_hot(values)}
    if label == ListColumns().label and len(flags) > 1:
        labels = [
            [str(name) for name in flags if FLAGS[_flag_text(record.get(name))]]
            for record in records
        ]
        notes.append(
            f"the columns {', '.join(map(str, flags))[:120]} hold 0 and 1: each 1 is a label"
        )
        return [Row(record[path], own) for record, own in zip(records, labels, strict=True)], True
    _check_there(label, names, "label_column")
    raise AssertionError("the label's column is missing")


def _flag_text(value: object) -> str:
    return "" if value is None else str(value).strip().lower()


def _is_one_hot(values: Sequence[object]) -> bool:
    texts = {_flag_text(value) for value in values}
    return texts <= {*FLAGS} and any(FLAGS[text] for text in texts)


def _records(text: str) -> Mapping[str, Any] | list[dict[Any, Any]]:
    """COCO's dict, a list of dicts, or one dict a line."""
    try:
        found = json_of(text)
    except ValueError:
        found = None
    if isinstance(found, list) or (
        isinstance(found, dict) and "annotations" in found and "images" in found
    ):
        return found
    return [json_of(line) for line in text.split("\n") if line.strip()]


def _check_there(name: Column, names: Sequence[Column], given: str) -> None:
    if name not in names:
        there = ", ".join(map(str, names))[:120]
        raise Unfit(
            f"has no column {name} (it has {there}); data.source.{given}=NAME says which, or a number "
            "from 0 in a table without a header"
        )


def _table(
    text: str, path: Column, delimiter: str | None
) -> tuple[list[Column], list[dict[Any, Any]]]:
    """A table's columns and its rows by column, of which short ones end with None."""
    first = text.lstrip().partition("\n")[0].rstrip("\r")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter or _sniffed(first, path))
    lines = [(reader.line_num, row) for row in reader if row]
    names: list[Column] = []
    if lines:
        names = (
            [*range(len(lines[0][1]))]
            if isinstance(path, int)
            else [name.strip() for name in lines.pop(0)[1]]
        )
    _check_there(path, names, "path_column")
    for number, row in lines:
        if len(row) > len(names):
            raise Unfit(f"has {len(row)} columns in line {number}, {len(names)} in the first")
        if len(row) <= names.index(path):
            raise Unfit(f"has no path in line {number}")
    return names, [
        dict(reversed([*zip_longest(names, row)])) for _, row in lines
    ]  # the first of two of one name


def _sniffed(first: str, path: Column) -> str:
    """The delimiter by which the first line has the column of the paths.

    >>> _sniffed("id;path;label", "path"), _sniffed("a.jpg\\tx;y", 0), _sniffed("path", "path")
    (';', '\\t', ',')
    """
    for delimiter in DELIMITERS:
        names = [name.strip().strip('"') for name in first.split(delimiter)]
        if len(names) > 1 and (isinstance(path, int) or path in names):
            return delimiter
    return next((delimiter for delimiter in DELIMITERS if delimiter in first), ",")


def _coco(content: Mapping[str, Any], split_column: Column | None) -> ListContent:
    """Annotations name a picture's categories; several of one category count once."""
    names = {category["id"]: str(category["name"]) for category in content["categories"]}
    pictures = content["images"]
    labels_by_picture: dict[Any, list[str]] = {picture["id"]: [] for picture in pictures}
    if len(labels_by_picture) < len(pictures):
        raise Unfit("has two pictures of one id")
    for number, note in enumerate(content["annotations"]):
        for key, known in (("image_id", labels_by_picture), ("category_id", names)):
            if note[key] not in known:
                what = {"image_id": "images", "category_id": "categories"}[key]
                raise Unfit(
                    f"has an annotation (number {number + 1}) of {key} {note[key]}, which is not among its "
                    f"{len(known)} {what} ({', '.join(map(str, known))[:80]})"
                )
        labels, name = labels_by_picture[note["image_id"]], names[note["category_id"]]
        if name not in labels:
            labels.append(name)
    keys = sorted({key for picture in pictures for key in picture} - {"id", "file_name"})
    splits, notes, _ = splits_by_row(
        {key: [picture.get(key) for picture in pictures] for key in keys}, split_column
    )
    row_splits = [None] * len(pictures) if splits is None else splits
    rows = [
        Row(picture["file_name"], labels_by_picture[picture["id"]], split)
        for picture, split in zip(pictures, row_splits, strict=True)
    ]
    return ListContent(rows, True, splits is not None, notes, [*names.values()])


def _ultralytics(records: Sequence[Mapping[str, Any]]) -> ListContent:
    """The first line describes the data set, each further one a picture with its split and class ids."""
    names = {
        str(number): str(name) for number, name in dict(records[0].get("class_names") or {}).items()
    }
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
        rows.append(Row(record["file"], [names[str(i)] for i in ids], split))
    return ListContent(rows, True, True, [], [*names.values()])
