"""The source ``Manifest``: a table (CSV, TSV) or JSON lines of pictures and labels; settings name the columns."""

import csv
import io
import os
import posixpath
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np

from kd.data.sources.arrays import Column, Names
from kd.data.sources.base import Source, Split
from kd.data.sources.files import UNLABELLED, FileSplit, printable, said
from kd.data.sources.labels import check_known, doubts, in_order, in_quotes, labels_in
from kd.data.sources.places import (
    IMAGE_SUFFIXES,
    UNUSABLE,
    ending_of,
    expanded,
    is_picture,
    joined,
    list_at,
    pictures_here,
)
from kd.data.sources.split_names import Unfit, column_of_splits, split_in, split_of
from kd.data.targets import LabelSets, Numbers, Targets
from kd.errors import UserError
from kd.storage.elsewhere import json_of, number_of
from kd.storage.objects import is_url

DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": " "}
"""Of tables, by the ending of their names; all other lists are JSON."""


def words_that_read(table: str, folders: Sequence[str]) -> str:
    """The words of a command line that read a table of pictures (``data.source=...``), for a message.

    The first row says which column has the paths, which folder they start at and which ending they lack: the first
    combination of these that is a file. Else the words hold a place for the folder (``FOLDER``).

    Args:
        table: path of a list of pictures.
        folders: where its pictures may be.
    """
    delimiter = DELIMITERS.get(Path(table).suffix.lower())
    rows: Iterator[list[str]] = iter(())
    if delimiter and Path(table).is_file():
        text = list_at(table, "data.source").decode("utf-8-sig", "replace")
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    header = next(rows, [])
    cells = dict(zip(header, next(rows, []), strict=False))
    words = [f"data.source={table}"]
    for column, folder, ending in product(header, folders, ("", *IMAGE_SUFFIXES)):
        if not Path(folder, (cells.get(column) or ".") + ending).is_file():
            continue
        others = [name for name in header if name != column]
        label = others[0] if len(others) == 1 else "NAME"
        words.append(f"data.source.image_dir={folder}")
        words += [f"data.source.path_column={column}"] if column != "path" else []
        words += [f"data.source.label_column={label}"] if others and "label" not in others else []
        words += [f"data.source.ending={ending}"] if ending else []
        return " ".join(words)
    return " ".join([*words, "data.source.image_dir=FOLDER"])


class Rows:
    """What a list says of the pictures of one split."""

    def __init__(self) -> None:
        """No row yet."""
        self.paths: list[str] = []
        self.cells: list[Any] = []
        """Of each picture the cell of its label, or those of its numbers; empty where the list has no labels."""
        self.left_out: Counter[str] = Counter()
        """How many rows name files that are no pictures, by ending."""


class Manifest(Source):
    """Lists of (path, label): CSV with a header ``path,label``, or JSON lines ``{"path": ..., "label": ...}``.

    A column ``split`` names the rows' splits. Labels are class names; ids are their sorted order in the training list, by
    value where all are whole numbers. Relative paths start at ``image_dir``; where they lack the files' ending (``0001``),
    ``ending`` completes them. Lists of the one column ``path`` are pictures without labels. Lists,
    folder and paths may be URLs (``s3://bucket/train.csv``; extra ``stream``).

    Args:
        train: the training list (``.csv``, ``.tsv``, ``.txt``, ``.json``, ``.jsonl``, ``.ndjson``).
        val: the validation list; without one a part of the training list is held out (``data.val_fraction``).
        image_dir: folder that relative paths start at; default: the list's own folder.
        multi_label: a picture has any number of labels: a list (of JSON or Python), or text that ``label_separator``
            parts. Rows of the same picture are joined.
        test: a list of other pictures to judge by (``kd-eval split=test``); the classes are those of the training list.
        path_column: name of the paths' column; a number, counted from 0, where a table has no header.
        label_column: likewise of the labels' column; null: pictures without labels.
        targets: column or columns of numbers to learn in place of labels (``model.task=Regression``); an empty field is
            missing.
        delimiter: between a table's columns; default: a comma in ``.csv``, a tab in ``.tsv``, a blank in ``.txt``.
        split_column: the column that names each row's split (``train``, ``Testing``); default: ``split`` where there is
            one; ``none``: all rows belong to the list's split.
        label_separator: what parts the labels of one cell.
        ending: of the pictures' files, where paths lack it (``.jpg``).
    """

    listed_early = True

    def __init__(
        self,
        train: str,
        val: str | None = None,
        image_dir: str | None = None,
        multi_label: bool = False,
        test: str | None = None,
        path_column: int | str = "path",
        label_column: int | str | None = "label",
        delimiter: str | None = None,
        targets: list[str] | str | None = None,
        split_column: int | str | None = None,
        label_separator: str = ";",
        ending: str = "",
    ) -> None:
        """Checks the arguments, which are the class's; the lists are read when they are first needed.

        Raises:
            ValueError: an argument out of its range, or two that contradict each other; it begins with the argument's
                name.
        """
        if delimiter is not None and len(delimiter) != 1:
            raise ValueError(f"delimiter must be one character, got '{delimiter}'")
        self.delimiter = delimiter
        self.separator = label_separator if multi_label else None
        self.targets = [targets] if isinstance(targets, str) else targets
        if targets is not None and (multi_label or not targets):
            raise ValueError(f"targets must be columns, without multi_label, got {targets}")
        self.path_column = path_column
        self.label_column = label_column
        self.split_column = split_column
        self.ending = ending
        given = {"train": train, "val": val, "test": test}
        self.lists = {split: expanded(file) for split, file in given.items() if file}
        self.image_dir = expanded(image_dir) if image_dir else None
        self.several = multi_label
        self.kind = Numbers() if targets else LabelSets() if multi_label else Targets()
        self._rows: dict[str, dict[str | None, Rows]] = {}
        """By list, then by the split that its rows name (None: they name none); not kept once they are loaded."""
        self._has: dict[str, bool] = {}
        self._loaded: dict[str, FileSplit] = {}

    # -- what a list holds -------------------------------------------------------------------------------------------
    def _file(self, split: str) -> str:
        """Path or URL of the list that has a split's rows: its own, else the training list."""
        return joined(self.lists.get(split) or self.lists["train"])

    def _rows_of(self, split: str) -> tuple[dict[str | None, Rows], str | None]:
        """The rows of a split's list by the split that they name, and the key under which those of ``split`` are.

        The key is None where the split has a list of its own, in which no row names it. A key that is not in the rows: the
        list has none of this split. A test split validates where there is no validation split. Each list is read once.

        Raises:
            UserError: the list is not there, or is no list of pictures.
        """
        key = f"data.source.{split if split in self.lists else 'train'}"
        file = self._file(split)
        if file not in self._rows:
            content = list_at(file, key)
            with _refused(f"{key}: {file}"):
                self._rows[file] = self._read(
                    content.decode("utf-8-sig"), Path(file).suffix.lower()
                )
        rows = self._rows[file]
        name = "test" if split == "val" and "val" not in rows else split
        if name not in rows and split in self.lists:
            return rows, None
        return rows, name

    def _read(self, text: str, suffix: str) -> dict[str | None, Rows]:
        """The rows of a list by the splits that they name (None: no split); only what is needed of each row is kept.

        A row whose file can't be a picture (:data:`UNUSABLE`) is only counted, in ``left_out``.

        Raises:
            Unfit: a column is missing, a row has no path, or names no split.
        """
        parts: dict[str | None, Rows] = {}
        wanted: list[Any] = []
        splits: Any = None
        for number, row in enumerate(self._records(text, suffix), 1):
            if number == 1:
                wanted, splits = self._columns(row)
            cell = row.get(self.path_column)
            path = "" if cell is None else str(cell)
            if not path:
                raise Unfit(f"has no path in row {number}")
            split = None if splits is None else split_in(splits, row.get(splits))
            part = parts.setdefault(split, Rows())
            if ending_of(path) in UNUSABLE:
                part.left_out[ending_of(path)] += 1
                continue
            part.paths.append(path)
            if self.targets:
                part.cells.append([row.get(name) for name in wanted])
            elif wanted:
                cell = row.get(wanted[0])
                part.cells.append(sys.intern(cell) if type(cell) is str else cell)
        return parts or {None: Rows()}

    def _columns(self, first: Mapping[Any, Any]) -> tuple[list[Any], Any]:
        """The columns of labels or numbers, none in a list of paths alone; and the one of splits, None without one.

        Args:
            first: the list's first row.

        Raises:
            Unfit: the list lacks a column; or a column that no setting names has a split's name in the first row.
        """
        there = ", ".join(map(str, first))[:120]
        wanted: list[Any] = self.targets or [self.label_column]
        if not self.targets and (self.label_column is None or [*first] == [self.path_column]):
            wanted = [] if self.label_column in (None, "label") else wanted
        for column in (self.path_column, *wanted):
            if column in first:
                continue
            if self.targets and column != self.path_column:
                raise Unfit(f"has no column {column} (data.source.targets; it has {there})")
            raise Unfit(
                f"has no column {column} (it has {there}); data.source.path_column=NAME and "
                "data.source.label_column=NAME say which (numbers from 0 without a header), data.source.delimiter "
                "what parts them, and scripts/to_list.py makes a table of COCO's JSON, Ultralytics' NDJSON and "
                "columns of 0 and 1"
            )
        others = [column for column in first if column not in (self.path_column, *wanted)]
        splits = column_of_splits(self.split_column, others)
        for column in others if splits is None and self.split_column is None else ():
            if split_of(first[column]):
                raise Unfit(
                    f"has a column {column} that may name splits: data.source.split_column={column} reads it, "
                    "data.source.split_column=none takes all rows"
                )
        return wanted, splits

    def _records(self, text: str, suffix: str) -> Iterator[Mapping[Any, Any]]:
        """The rows of a list by column: of a table, of a JSON list, or of one JSON object a line.

        A row that is shorter than the header lacks its last columns.

        Raises:
            Unfit: something else than an object, a row that is longer than the first, or one in which a quote stays open.
        """
        if suffix not in DELIMITERS:
            records: Any = (json_of(line) for line in text.split("\n") if line.strip())
            with suppress(ValueError):
                content = json_of(text)
                records = content if isinstance(content, list) else [content]
            for record in records:
                if not isinstance(record, dict):
                    raise Unfit("must hold an object a picture")
                yield record
            return
        lines = io.StringIO(text.lstrip("\r\n"), newline="")
        delimiter = self.delimiter or DELIMITERS[suffix]
        table: csv.DictReader[Any] = csv.DictReader(lines, delimiter=delimiter, strict=True)
        first = table.fieldnames or []
        if isinstance(self.path_column, int):  # no header
            table.fieldnames = range(len(first))
            yield dict(enumerate(first))
        else:
            table.fieldnames = [name.strip() for name in first]
        line = table.line_num
        try:
            for row in table:
                line = table.line_num
                if None in row:
                    count = f"{len(first) + len(row[None])} columns in line {line}"
                    raise Unfit(f"has {count}, {len(first)} in the first")
                yield row
        except csv.Error as error:
            raise Unfit(f"can't be read from line {line + 1} on: {error}") from error

    def has(self, split: str) -> bool:
        """Whether there is a list for the split, or the training list names rows of it."""
        if split in self.lists:
            return True
        if split not in self._has:
            rows, name = self._rows_of(split)
            self._has[split] = name in rows
        return self._has[split]

    # -- a split -----------------------------------------------------------------------------------------------------
    def load(self, split: str) -> FileSplit:
        """See :meth:`Source.load`. Any other split has a list of its own (``test``), or rows of the training list.

        Raises:
            UserError: no such split, no pictures, or labels that are missing, unknown, or contradict each other.
        """
        if split in self._loaded:
            return self._loaded[split]
        if split != "train":
            self.load("train")  # names the classes
        key = f"data.source.{split}"
        file = self._file(split)
        by_split, name = self._rows_of(split)
        if name not in by_split:
            why = f"{key}: {file} names no row of {split}; data.source.split_column=none reads all rows"
            if split not in self.lists:
                why = (
                    f"split: these lists have the splits {', '.join(self.lists)}, got '{split}' (data.source.test=FILE "
                    "is a list of test pictures)"
                )
            raise UserError(why)
        rows = by_split[name]
        if not rows.paths:
            raise UserError(f"{key}: {file} lists no pictures{said(rows.left_out)}")
        paths = self._paths_of(rows.paths, split)
        targets: Sequence[Any]
        with _refused(f"{key}: {file}"):
            if self.targets:
                targets = self._numbers(paths, rows.cells)
            else:
                paths, targets = self._ids(paths, rows.cells, split)
        if any(map(is_url, paths)):
            paths = Names(pictures_here(paths, key))
        self._loaded[split] = FileSplit(paths, targets, rows.left_out)
        if all(other in self._loaded for other in ("train", "val") if self.has(other)):
            self._rows.clear()  # their memory is given back
        return self._loaded[split]

    def _ids(self, paths: Names, cells: list[Any], split: str) -> tuple[Names, Sequence[Any]]:
        """The pictures of a split, and their class ids: one each, or with ``multi_label`` a list of any number.

        With ``multi_label`` each picture comes once, with the labels of all its rows. Where the training list has no labels
        all ids are -1. The training pictures also set :attr:`classes`.

        Raises:
            Unfit: a picture has no label or several where it must have one, or is listed with different ones; or there are
                no labels beside a training list with labels.
            UserError: a label that no training picture has.
        """
        if split == "train":
            self.classes = []
        if not cells:
            if self.classes:
                raise Unfit("has no labels, which the training list has")
            return paths, Column(np.full(len(paths), UNLABELLED, np.int32))
        labels = [labels_in(cell, self.separator) for cell in cells]
        paths, labels = self._joined(paths, labels)
        if split == "train":
            self.classes = in_order({*chain.from_iterable(labels)})
            self.note(*doubts(self.classes))
            if self.several and max(map(len, labels), default=0) < 2:
                self.note(
                    "warning: no picture has two labels: data.source.label_separator=TEXT parts those of a cell, "
                    "data.source.multi_label=false model.task=Classification takes one a picture"
                )
        ids = {label: i for i, label in enumerate(self.classes)}
        names = map(printable, paths)
        check_known(zip(names, labels, strict=True), ids, f"data.source.{split}")
        targets = [[ids[label] for label in of_picture] for of_picture in labels]
        if self.several:
            return paths, targets
        return paths, Column(np.array(targets, np.int32).ravel())

    def _joined(self, paths: Names, labels: list[list[str]]) -> tuple[Names, list[list[str]]]:
        """Paths and labels of the rows; with ``multi_label`` the rows of one picture are joined.

        Without it a picture that is listed twice with the same label stays so. A note says how many rows repeat a picture.

        Raises:
            Unfit: without ``multi_label``, a row without a label or with several, or a picture that is listed with two.
        """
        for path, found in zip(paths, labels, strict=True):
            if not self.several and len(found) != 1:
                count = "no label"
                if found:
                    count = f"{len(found)} labels ({', '.join(found[:3])}), which data.source.multi_label=true takes"
                raise Unfit(f"is no list of one label each: {printable(path)} has {count}")
        hashes = np.fromiter(map(hash, paths), np.int64, len(paths))
        if len(np.unique(hashes)) == len(paths):
            return paths, labels
        by_path: dict[str, dict[str, None]] = {}
        for path, found in zip(paths, labels, strict=True):
            of_picture = by_path.setdefault(path, {})
            of_picture.update(dict.fromkeys(found))
            if len(of_picture) > 1 and not self.several:
                raise Unfit(
                    f"lists {printable(path)} twice, with different labels ({in_quotes(of_picture)}); give each picture "
                    "one label, or data.source.multi_label=true joins them"
                )
        self.note(f"rows of pictures that are listed before: {len(paths) - len(by_path)}")
        if self.several:
            return Names(by_path), [*map(list, by_path.values())]
        return paths, labels

    def _numbers(self, paths: Names, cells: list[Any]) -> Column:
        """A number of each column for each picture of a split, NaN where it is missing; sets :attr:`classes` to their names.

        Raises:
            Unfit: a field is no number, or a column has none in this split.
        """
        self.classes = list(self.targets or [])
        numbers = np.empty((len(paths), len(self.classes)))
        for i, fields in enumerate(cells):
            for j, name in enumerate(self.classes):
                text = "" if fields[j] is None else str(fields[j]).strip()
                try:
                    numbers[i, j] = number_of(text)
                except ValueError as error:
                    what = f"'{text[:40]}' for {name} of {printable(paths[i])}"
                    raise Unfit(f"has {what}, which is not a number") from error
        for name, is_missing in zip(self.classes, np.isnan(numbers).T, strict=True):
            if is_missing.all():
                raise Unfit(f"has no value of {name} (data.source.targets)")
        return Column(numbers)

    # -- where the pictures are --------------------------------------------------------------------------------------
    def _folder(self, split: str) -> str:
        """The folder or URL that a split's relative paths start at."""
        return joined(self.image_dir or posixpath.dirname(self._file(split)))

    def _paths_of(self, paths: list[str], split: str) -> Names:
        """The rows' paths from where they start, with the ending that those lack."""
        root = self._folder(split)
        whole = (joined(root, expanded(path)) for path in paths)
        return Names(path if is_picture(path) else path + self.ending for path in whole)

    def check_listed(self, split: Split, name: str, key: str) -> None:
        """Refuses a split of which no file is on this disk, by a UserError."""
        assert isinstance(split, FileSplit)
        first = split.paths[0]
        if any(Path(path).exists() for path in split.paths):
            return
        start = printable(os.path.abspath(self._folder(name)))  # noqa: PTH100 - Path has no ".."
        remedy = "data.source.image_dir=FOLDER says where they start"
        endings = [ending for suffix in IMAGE_SUFFIXES for ending in (suffix, suffix.upper())]
        fitting = [ending for ending in endings if Path(first + ending).is_file()]
        if fitting:
            remedy = f"data.source.ending={fitting[0]} completes them"
        raise UserError(
            f"{key}: none of the {len(split.paths)} files exists: relative paths start at {start} (the first is "
            f"{printable(first)}); {remedy}"
        )

    def describe(self) -> str:
        """The files of the lists."""
        return f"Manifest {', '.join(self.lists.values())}"


@contextmanager
def _refused(start: str) -> Iterator[None]:
    """Inside, what is wrong with a list becomes a UserError whose message begins with ``start``, the key and the file."""
    try:
        yield
    except UserError:
        raise
    except Unfit as error:
        raise UserError(f"{start} {error}") from error
    except (csv.Error, ValueError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{start} is no list of pictures ({reason})") from error


def pictures_in_list(file: str, **arguments: Any) -> list[str]:
    """The paths of all pictures of a list, whose labels are not read.

    Args:
        file: the list.
        arguments: of :class:`Manifest`.

    Raises:
        UserError: no list of pictures, a picture that is named by a URL, or none of its files is on this disk.
    """
    source = Manifest(file, **arguments, label_column=None, split_column="none")
    by_split, name = source._rows_of("train")
    paths = source._paths_of(by_split[name].paths, "train")
    for path in filter(is_url, paths):
        raise UserError(
            f"{file}: pictures must be on this disk, got {printable(path)}; copy them, data.source.image_dir=FOLDER says "
            "where they are"
        )
    source.check_listed(FileSplit(paths, [UNLABELLED] * len(paths)), "train", file)
    return list(paths)
