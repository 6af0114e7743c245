"""The source ``Manifest``: lists of paths and labels."""

import csv
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kd.data.sources.base import Source, bytes_of
from kd.data.sources.files import UNLABELLED, FileSplit, printable
from kd.data.sources.folder import VALIDATION
from kd.data.sources.lists import TABLES, Column, Columns, Row, Unfit, read_list
from kd.data.sources.places import DISK, Place, Store, joined, list_at
from kd.data.targets import LabelSets, Numbers, Targets
from kd.errors import UserError
from kd.storage.elsewhere import number_of
from kd.storage.objects import is_url

Labelled = tuple[str, list[str]]  # A picture's path and its labels


class Manifest(Source):
    """Lists of (path, label): CSV with a header ``path,label``, or JSON lines ``{"path": ..., "label": ...}``.

    COCO's JSON (the categories of a picture's annotations) and Ultralytics' NDJSON for classification, whose rows name
    their splits, are read as they are. Labels are class names; ids are their sorted order in the training list, by
    value where all are whole numbers. Relative paths start at ``image_dir``. Lists of the one column ``path`` are
    pictures without labels. Lists, folder and paths may be URLs (``s3://bucket/train.csv``; extra ``stream``).

    Args:
        train: the training list (``.csv``, ``.tsv``, ``.txt``, ``.json``, ``.jsonl``, ``.ndjson``).
        val: the validation list; without one a part of the training list is held out (``data.val_fraction``).
        image_dir: folder that relative paths start at; default: the list's own folder.
        multi_label: a picture has any number of labels, separated by ``;`` (or a JSON list).
        cache_gb: as of :class:`~kd.data.sources.ImageFolder`.
        path_column: name of the paths' column; a number, counted from 0, where a table has no header.
        label_column: likewise of the labels' column.
        targets: columns of numbers to learn in place of labels (``model.task=Regression``); an empty field is missing.
        delimiter: between a table's columns; default: the tab, comma, semicolon, bar or blank of its first line.
    """

    def __init__(
        self, train: str, val: str | None = None, image_dir: str | None = None, multi_label: bool = False,
        cache_gb: float | None = None, path_column: int | str = "path", label_column: int | str = "label",
        delimiter: str | None = None, targets: list[str] | None = None,
    ) -> None:  # fmt: skip
        delimiter = "\t" if delimiter in ("\\t", "tab") else delimiter
        if delimiter is not None and len(delimiter) != 1:
            raise ValueError(f"delimiter must be one character (or tab), got '{delimiter}'")
        if isinstance(path_column, int) != isinstance(label_column, int) and label_column != "label":
            raise ValueError(f"label_column must be a name or a number as path_column is, got {label_column}")
        if targets is not None and (not targets or len(set(targets)) < len(targets) or multi_label):
            raise ValueError(f"targets must be different columns, without multi_label, got {targets}")
        self.targets = targets
        self.columns: tuple[Column, Columns, str | None] = path_column, targets or label_column, delimiter
        self.cache_bytes = bytes_of(cache_gb)
        self.lists = {"train": train, "val": val}
        self.image_dir = image_dir
        self.kind = Numbers() if targets else LabelSets() if multi_label else Targets()
        self._several = multi_label

    def load(self, split: str) -> FileSplit:
        """Reads a split's rows; class ids follow the training list.

        Raises:
            UserError: a list that can't be read, or a label or number that does not fit the training list.
        """
        train = self._rows("train")
        rows = train if split == "train" else self._rows(split)
        targets = self._numbers(split, rows) if self.targets else self._ids(split, rows, train)
        paths = [path for path, _ in rows]
        return FileSplit(paths, targets, place=self._place(split, paths))

    def _ids(self, split: str, rows: list[Labelled], train: list[Labelled]) -> list[Any]:
        self.classes = in_order({label for _, labels in train for label in labels})
        ids = {label: i for i, label in enumerate(self.classes)}
        unknown = next(((path, label) for path, labels in rows for label in labels if label not in ids), None)
        if unknown:
            label, picture = unknown[1], unknown[0]
            raise UserError(f"data.source.{split}: label '{label}' of {picture} is not in {self.lists['train']}")
        if not self.classes:
            return [UNLABELLED] * len(rows)
        targets = [[ids[label] for label in labels] for _, labels in rows]
        return targets if self._several else [t[0] for t in targets]

    def _numbers(self, split: str, rows: list[Labelled]) -> list[list[float]]:
        self.classes = list(self.targets or [])
        key, file = f"data.source.{split}", self._file(split)
        numbers = [[self._number(x, name, path, file, key) for name, x in zip(self.classes, given, strict=True)]
                   for path, given in rows]  # fmt: skip
        for name, column in zip(self.classes, zip(*numbers, strict=True), strict=True):
            if all(math.isnan(x) for x in column):
                raise UserError(f"{key}: {file} has no value of {name} (data.source.targets)")
        return numbers

    def _number(self, given: object, name: str, path: str, file: str, key: str) -> float:
        text = "" if given is None else str(given).strip()
        try:
            return number_of(text)
        except ValueError as error:
            reason = f"{name} of {printable(path)} is '{text[:40]}', which is not a number"
            raise UserError(f"{key}: {file}: {reason}") from error

    def _place(self, split: str, paths: list[str]) -> Place:
        urls = [path for path in paths if is_url(path)]
        return Store.holding(str(self.lists["train"]), urls, f"data.source.{split}", self.cache_bytes) if urls else DISK

    def _labels(self, given: object) -> list[str]:
        if self.targets:
            return list(given)  # type: ignore[call-overload]
        parts = given if isinstance(given, list) else str(given).split(";") if self._several else [given]
        parts = ["" if part is None else str(part) for part in parts]
        return [part.strip() if self._several else part for part in parts if part.strip()]

    def _listed(self, split: str) -> tuple[list[Row], bool]:
        """What the list of a split holds; a list that names its rows' splits gives those of this one."""
        key, file = f"data.source.{split}", self._file(split)
        content = list_at(file, key)
        try:
            rows, labelled = read_list(content, Path(file).suffix.lower(), *self.columns)
        except Unfit as error:
            raise UserError(f"{key}: {file} {error}") from error
        except (csv.Error, KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{key}: {file} is no list of pictures ({type(error).__name__}: {error})") from error
        there = {row.split for row in rows}
        wanted = next((name for name in (VALIDATION if split == "val" else (split,)) if name in there), None)
        if wanted is None and not self.lists.get(split):
            return [], labelled
        return [row for row in rows if wanted in (None, row.split)], labelled

    def _file(self, split: str) -> str:
        return joined(self.lists.get(split) or self.lists["train"] or "")

    def _rows(self, split: str) -> list[Labelled]:
        key, file = f"data.source.{split}", self._file(split)
        rows, labelled = self._listed(split)
        if not rows and split not in self.lists:
            raise UserError(f"data.source: a manifest has the splits train and val, got '{split}'")
        if not rows:
            raise UserError(f"{key}: {file} lists no pictures")
        root = self.image_dir or (joined(file, "..") if is_url(file) else str(Path(file).parent))
        found = [(joined(root, row.path), self._labels(row.label) if labelled else []) for row in rows]
        one = labelled and not self._several and not self.targets
        for path, labels in ([row for row in found if len(row[1]) != 1] if one else [])[:1]:
            several = f"{len(labels)} labels ({', '.join(labels[:3])}), which data.source.multi_label=true takes"
            raise UserError(f"{key}: {file}: {printable(path)} has {several if labels else 'no label'}")
        return found

    def has(self, split: str) -> bool:
        """Whether there is a list for the split, or rows of it in a table with a column ``split``."""
        if self.lists.get(split) is not None or Path(self._file(split)).suffix.lower() in TABLES:
            return self.lists.get(split) is not None
        return any(row.split for row in self._listed(split)[0])

    def describe(self) -> str:
        """The files of the lists."""
        return f"Manifest {', '.join(str(file) for file in self.lists.values() if file is not None)}"


def in_order(labels: Iterable[str]) -> list[str]:
    """Labels sorted by name; by value where all are whole numbers, as the column of class ids that they then are.

    >>> in_order(["10", "9"]), in_order(["10", "9", "b"])
    (['9', '10'], ['10', '9', 'b'])
    """
    names = sorted(labels)
    return sorted(names, key=int) if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names) else names
