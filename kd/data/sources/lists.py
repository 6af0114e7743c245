"""Lists of pictures with labels as programs write them: tables, JSON lines, COCO's JSON, Ultralytics' NDJSON."""

import codecs
import csv
import io
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from kd.storage.elsewhere import json_of

TABLES = (".csv", ".tsv", ".txt")
DELIMITERS = "\t,;| "
Column = str | int
Columns = Column | list[str]  # of the labels: one column, or several of numbers


class Unfit(ValueError):
    """What a list lacks, as the end of a sentence about it."""


class Row(NamedTuple):
    """A picture's path, its label or labels, and the split it belongs to where its list says so."""

    path: str
    label: Any
    split: str | None = None


def read_list(
    content: bytes, suffix: str, path: Column, label: Columns, delimiter: str | None
) -> tuple[list[Row], bool]:
    """The rows of a list, and whether it has labels; :class:`Unfit` for columns that are missing.

    A table (:data:`TABLES`) has its columns by name, or by number without a header; other suffixes are JSON.
    """
    text = content.decode("utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig")
    if suffix in TABLES:
        names, records = _table(text, path, delimiter)
    else:
        found = _records(text)
        if isinstance(found, Mapping) or (found and found[0].get("type") == "dataset"):
            if isinstance(label, list):
                raise Unfit("is a list of classes; data.source.targets=[...] reads a table or JSON lines")
            return _coco(found) if isinstance(found, Mapping) else _ultralytics(found)
        names, records = sorted({name for record in found for name in record}), found
        _check_there(path, names, "path_column")
    if len(names) == 1 and not isinstance(label, list):
        return [Row(record[path], None) for record in records], False
    if isinstance(label, list):
        missing = next((name for name in label if name not in names), None)
        if missing is not None:
            raise Unfit(f"has no column {missing} (data.source.targets; it has {', '.join(map(str, names))[:120]})")
        return [Row(record[path], [record.get(name) for name in label]) for record in records], True
    _check_there(label, names, "label_column")
    return [Row(record[path], record[label]) for record in records], True


def _records(text: str) -> Mapping[str, Any] | list[dict[Any, Any]]:
    """COCO's dict, a list of dicts, or one dict a line."""
    try:
        found = json_of(text)
    except ValueError:
        found = None
    if isinstance(found, list) or (isinstance(found, dict) and "annotations" in found and "images" in found):
        return found
    return [json_of(line) for line in text.split("\n") if line.strip()]


def _check_there(name: Column, names: Sequence[Column], given: str) -> None:
    if name not in names:
        there = ", ".join(map(str, names))[:120]
        raise Unfit(f"has no column {name} (it has {there}); data.source.{given}=NAME says which, or a number "
                         "from 0 in a table without a header")  # fmt: skip


def _table(text: str, path: Column, delimiter: str | None) -> tuple[list[Column], list[dict[Any, Any]]]:
    """A table's columns and its rows by column, of which short ones end with None."""
    first = text.lstrip().partition("\n")[0].rstrip("\r")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter or _sniffed(first, path))
    lines = [(reader.line_num, row) for row in reader if row]
    names: list[Column] = []
    if lines:
        names = [*range(len(lines[0][1]))] if isinstance(path, int) else [name.strip() for name in lines.pop(0)[1]]
    _check_there(path, names, "path_column")
    for number, row in lines:
        if len(row) > len(names):
            raise Unfit(f"has {len(row)} columns in line {number}, {len(names)} in the first")
        if len(row) <= names.index(path):
            raise Unfit(f"has no path in line {number}")
    return names, [dict(reversed([*zip_longest(names, row)])) for _, row in lines]  # the first of two of one name


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


def _coco(content: Mapping[str, Any]) -> tuple[list[Row], bool]:
    """Annotations name a picture's categories; several of one category count once."""
    names = {category["id"]: str(category["name"]) for category in content["categories"]}
    found: dict[Any, list[str]] = {picture["id"]: [] for picture in content["images"]}
    for note in content["annotations"]:
        labels, name = found[note["image_id"]], names[note["category_id"]]
        if name not in labels:
            labels.append(name)
    return [Row(picture["file_name"], found[picture["id"]]) for picture in content["images"]], True


def _ultralytics(records: Sequence[Mapping[str, Any]]) -> tuple[list[Row], bool]:
    """The first line describes the data set, each further one a picture with its split and class ids."""
    names = {str(number): str(name) for number, name in dict(records[0].get("class_names") or {}).items()}
    rows = []
    for record in records[1:]:
        ids = (record.get("annotations") or {}).get("classification") or []
        rows.append(Row(record["file"], [names[str(i)] for i in ids], record.get("split") or "train"))
    return rows, True
