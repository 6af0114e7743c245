"""The source ``Manifest``: lists of paths and labels."""

import csv
import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kd.data.label_text import plain
from kd.data.sources.base import Source, cache_bytes_of
from kd.data.sources.endings import check_some_exist, complete_endings
from kd.data.sources.files import UNLABELLED, FileSplit, printable, said
from kd.data.sources.labels import (
    by_label,
    cells,
    check_known,
    doubts,
    in_order,
    join_rows,
    left_out,
)
from kd.data.sources.lists import ListColumns, ListContent, Row, read_list
from kd.data.sources.places import (
    DISK,
    UNUSABLE,
    Place,
    Store,
    ending_of,
    expanded,
    joined,
    list_at,
)
from kd.data.sources.split_names import Unfit, numbers_in
from kd.data.targets import LabelSets, Numbers, Targets
from kd.errors import UserError
from kd.storage.elsewhere import number_of
from kd.storage.objects import is_url


class ListedPictures(NamedTuple):
    """The pictures of a split: paths, the labels of each, and how many files were left out, by ending.

    Labels are a list for each picture: empty without a label; for a regression the cells of the columns of numbers, None
    for a missing one.
    """

    paths: list[str]
    labels: list[list[Any]]
    left_out: dict[str, int]


class Manifest(Source):
    """Lists of (path, label): CSV with a header ``path,label``, or JSON lines ``{"path": ..., "label": ...}``.

    COCO's JSON (the categories of a picture's annotations) and Ultralytics' NDJSON for classification are read as they
    are. A list may name its rows' splits. Labels are class names; ids are their sorted order in the training list, by
    value where all are whole numbers. Relative paths start at ``image_dir``; one that lacks its file's ending
    (``0001``) is completed where one picture fits (``0001.jpg``). Lists of the one column ``path`` are
    pictures without labels. Lists, folder and paths may be URLs (``s3://bucket/train.csv``; extra ``stream``).

    Args:
        train: the training list (``.csv``, ``.tsv``, ``.txt``, ``.json``, ``.jsonl``, ``.ndjson``).
        val: the validation list; without one a part of the training list is held out (``data.val_fraction``).
        image_dir: folder that relative paths start at; default: the list's own folder.
        multi_label: a picture has any number of labels: a list (of JSON or Python), or text that ``label_separator``
            parts. Rows of the same picture are joined.
        test: a list of other pictures to judge by (``kd-eval split=test``); the classes are those of the training list.
        cache_gb: as of :class:`~kd.data.sources.ImageFolder`.
        path_column: name of the paths' column; a number, counted from 0, where a table has no header. Without a column
            ``path`` the only one whose cells end as pictures' files do is taken, and reported.
        label_column: likewise of the labels' column; with ``multi_label`` also several columns, of a label each. Without
            a column ``label`` one called ``labels``, ``class``, ``category``, ``tags`` or alike is taken, and reported.
        targets: column or columns of numbers to learn in place of labels (``model.task=Regression``); an empty field is
            missing.
        delimiter: between a table's columns; default: the tab, comma, semicolon, bar or blank of its first line.
        split_column: the column that names each row's split (``train``, ``Testing``, or yes and no in ``is_valid``);
            default: found by its name and values; ``none``: all rows belong to the list's split.
        label_separator: the character between the labels of one cell; default: ``;``, or the one that the cells
            themselves show (``red,round`` beside ``red`` and ``round``); ``none``: a cell is one label.
    """

    def __init__(
        self,
        train: str,
        val: str | None = None,
        image_dir: str | None = None,
        multi_label: bool = False,
        test: str | None = None,
        cache_gb: float | None = None,
        path_column: int | str = "path",
        label_column: int | str | list[str] = "label",
        delimiter: str | None = None,
        targets: list[str] | str | None = None,
        split_column: int | str | None = None,
        label_separator: str | None = None,
    ) -> None:
        """Checks the arguments, which are the class's; the lists are read when they are first needed.

        Raises:
            ValueError: an argument out of its range, or two that contradict each other; it begins with the argument's
                name.
        """
        if delimiter in ("\\t", "tab"):
            delimiter = "\t"
        if delimiter is not None and len(delimiter) != 1:
            raise ValueError(f"delimiter must be one character (or tab), got '{delimiter}'")
        if isinstance(label_column, list) and not (label_column and multi_label):
            raise ValueError(
                f"label_column must be one column, or several with multi_label=true, got {label_column}"
            )
        if (
            isinstance(path_column, int) != isinstance(label_column, int)
            and label_column != "label"
        ):
            raise ValueError(
                f"label_column must be a name or a number as path_column is, got {label_column}"
            )
        if isinstance(targets, str):
            targets = [targets]
        if targets is not None and (not targets or len(set(targets)) < len(targets) or multi_label):
            raise ValueError(
                f"targets must be different columns, without multi_label, got {targets}"
            )
        label_separator = {"\\t": "\t", "tab": "\t", "blank": " "}.get(
            label_separator or "", label_separator
        )
        if label_separator is not None and label_separator != "none" and len(label_separator) != 1:
            raise ValueError(
                f"label_separator must be one character (or tab, blank, none), got '{label_separator}'"
            )
        self.targets = targets
        self.columns = ListColumns(
            path_column, targets or label_column, delimiter, split_column, numbers=bool(targets)
        )
        self.separator = label_separator
        self.cache_bytes = cache_bytes_of(cache_gb)
        self.lists = {"train": expanded(train)}
        for split, file in (("val", val), ("test", test)):
            if file:
                self.lists[split] = expanded(file)
        self.image_dir = expanded(image_dir) if image_dir else image_dir
        self._contents: dict[str, ListContent] = {}  # by file: each is read once
        self._pictures: dict[str, ListedPictures] = {}  # by split
        self.kind = Numbers() if targets else LabelSets() if multi_label else Targets()
        self._several = multi_label

    def load(self, split: str) -> FileSplit:
        """See :meth:`Source.load`. Any other split has a list of its own (``test``), or rows of the training list."""
        train = self._listed("train")
        pictures = train
        if split != "train":
            pictures = self._listed(split)
        if self.targets:
            targets = self._numbers(split, pictures)
        else:
            targets = self._ids(split, pictures, train)
        return FileSplit(
            pictures.paths, targets, pictures.left_out, self._place(split, pictures.paths)
        )

    def _ids(self, split: str, pictures: ListedPictures, train: ListedPictures) -> list[Any]:
        """The targets of a split: class ids, with ``multi_label`` lists of them (empty for a picture without a label), or -1
        for all where no training picture has a label.

        Also sets :attr:`classes`, from the training pictures.

        Raises:
            UserError: a label that no training picture has, or a list without labels beside a training list with labels.
        """
        self.classes = in_order({label for labels in train.labels for label in labels})
        self.note(*doubts(self.classes))
        listed_classes = [plain(name) for name in self._content("train").classes]
        empty = [name for name in listed_classes if name not in self.classes]
        if empty:
            self.note(left_out(dict.fromkeys(empty, "no training picture")))
        if self.classes and not self._content(split).labelled:
            raise UserError(
                f"data.source.{split}: {self._file(split)} has no labels, which the training list has"
            )
        ids = {label: i for i, label in enumerate(self.classes)}
        names = [printable(path) for path in pictures.paths]
        names_by_label = by_label(names, pictures.labels)
        check_known(names_by_label, ids, f"data.source.{split}")
        if not self.classes:
            return [UNLABELLED] * len(pictures.paths)
        targets = []
        for labels in pictures.labels:
            target = [ids[label] for label in labels]
            targets.append(target if self._several else target[0])
        return targets

    def _numbers(self, split: str, pictures: ListedPictures) -> list[list[float]]:
        """The targets of a split for a regression: for each picture a number of each column, NaN where it is missing.

        Also sets :attr:`classes` to the names of the columns.

        Raises:
            UserError: a field is no number, or a column has none in this split.
        """
        self.classes = list(self.targets or [])
        where = f"data.source.{split}: {self._file(split)}"
        rows = []
        for path, fields in zip(pictures.paths, pictures.labels, strict=True):
            row = []
            for name, field in zip(self.classes, fields, strict=True):
                text = ""
                if field is not None:
                    text = str(field).strip()
                try:
                    row.append(number_of(text))
                except ValueError as error:
                    reason = f"{name} of {printable(path)} is '{text[:40]}', which is not a number"
                    raise UserError(f"{where}: {reason}") from error
            rows.append(row)
        for name, column in zip(self.classes, zip(*rows, strict=True), strict=True):
            if all(math.isnan(number) for number in column):
                raise UserError(f"{where} has no value of {name} (data.source.targets)")
        return rows

    def _place(self, split: str, paths: list[str]) -> Place:
        """Where a split's pictures are: a store of the URLs among its paths, whose folders are listed here; else this disk.

        The training list names the store's copies on this disk, for all splits.
        """
        urls = [path for path in paths if is_url(path)]
        if not urls:
            return DISK
        return Store.holding(
            str(self.lists["train"]), urls, f"data.source.{split}", self.cache_bytes
        )

    # -- what a list holds -------------------------------------------------------------------------------------------
    def _file(self, split: str) -> str:
        """Path or URL of the list that has a split's rows: its own, else the training list."""
        return joined(self.lists.get(split) or self.lists["train"] or "")

    def folder_of(self, split: str) -> str:
        """The folder or URL that a split's relative paths start at."""
        file = self._file(split)
        if self.image_dir:
            return self.image_dir
        if is_url(file):
            return joined(file, "..")
        return str(Path(file).parent)

    def check_files(self, paths: Sequence[str], split: str, key: str) -> None:
        """Refuses a split of which no file is on this disk; ``key`` begins the message. Not for lists of URLs.

        Raises:
            UserError: see :func:`~kd.data.sources.endings.check_some_exist`.
        """
        list_folder = str(Path(self._file(split)).parent)
        check_some_exist(paths, key, list_folder, self.image_dir)

    def _paths_of(self, rows: Sequence[Row], split: str, key: str) -> tuple[list[str], str]:
        """The rows' paths from where they start, with their endings; and :func:`complete_endings`' note."""
        root = self.folder_of(split)
        return complete_endings([joined(root, expanded(row.path)) for row in rows], key)

    def _content(self, split: str) -> ListContent:
        """The whole list of a split, which may hold other splits too; read once, and its notes are added to the source's.

        Raises:
            UserError: the list is not there, or is no list of pictures.
        """
        is_listed_apart = bool(self.lists.get(split))
        key = f"data.source.{split if is_listed_apart else 'train'}"
        file = self._file(split)
        if file not in self._contents:
            content = list_at(file, key)
            try:
                self._contents[file] = read_list(content, Path(file).suffix.lower(), self.columns)
            except Unfit as error:
                raise UserError(f"{key}: {file} {error}") from error
            except (csv.Error, KeyError, TypeError, ValueError, AttributeError) as error:
                raise UserError(
                    f"{key}: {file} is no list of pictures ({type(error).__name__}: {error})"
                ) from error
            self.note(*self._contents[file].notes)
        return self._contents[file]

    def _rows(self, split: str) -> list[Row]:
        """The rows of a split; none where its list was not given, and no row of the training list belongs to it.

        Raises:
            UserError: the split's list names splits, but no row of this one.
        """
        content = self._content(split)
        rows = content.rows
        listed_apart = bool(self.lists.get(split))
        if not content.splits:
            return rows if listed_apart else []
        row_splits = [row.split for row in rows]
        chosen = [rows[i] for i in numbers_in(row_splits, split)]
        if rows and not chosen and listed_apart:
            counts = [
                f"{count} of {name or 'no split'}" for name, count in Counter(row_splits).items()
            ]
            raise UserError(
                f"data.source.{split}: {self._file(split)} names no row of {split} ({', '.join(counts)}); "
                "data.source.split_column=none reads all rows"
            )
        return chosen

    def has(self, split: str) -> bool:
        """Whether there is a list for the split, or the training list names rows of it."""
        return bool(self.lists.get(split)) or bool(self._rows(split))

    def _listed(self, split: str) -> ListedPictures:
        """The pictures of a split, read once."""
        if split not in self._pictures:
            self._pictures[split] = self._read(split)
        return self._pictures[split]

    def _read(self, split: str) -> ListedPictures:
        """The pictures of a split with their labels; files that no reader decodes are left out and counted.

        Raises:
            UserError: no such split, no pictures, or labels that are missing, contradict each other or can't be parted.
        """
        file = self._file(split)
        where = f"data.source.{split}: {file}"
        listed_rows = self._rows(split)
        if not listed_rows and split not in ("train", "val", *self.lists):
            names = ", ".join(self.lists)
            raise UserError(
                f"split: these lists have the splits {names}, got '{split}' (data.source.test=FILE is a list of "
                "test pictures)"
            )
        rows = []
        unusable: Counter[str] = Counter()
        for row in listed_rows:
            ending = ending_of(row.path)
            if ending in UNUSABLE:
                unusable[ending] += 1
            else:
                rows.append(row)
        left_out = dict(unusable)
        if not rows:
            raise UserError(f"{where} lists no pictures{said(left_out)}")

        paths, note = self._paths_of(rows, split, f"data.source.{split}")
        if note:
            self.note(f"{split}: {note}")
        values = [row.label for row in rows]
        if self.targets:
            _check_same_numbers(paths, values, where)
            return ListedPictures(paths, values, left_out)
        if not self._content(split).labelled:
            return ListedPictures(paths, [[] for _ in paths], left_out)
        separator = self.separator
        try:
            if separator is None and split != "train":
                separator = self._train_separator
            labels = self._labels(paths, values, separator)
            paths, labels, notes = join_rows(paths, labels, self._several)
        except Unfit as error:
            raise UserError(f"{where} {error}") from error
        self.note(*(f"{split}: {note}" for note in notes))
        return ListedPictures(paths, labels, left_out)

    @cached_property
    def _train_separator(self) -> str:
        """What separates labels in the training list's cells ("none": nothing), and so in all other lists."""
        values = [row.label for row in self._rows("train")]
        return cells(values, self._several).separator

    def _labels(
        self, paths: Sequence[str], values: Sequence[object], separator: str | None
    ) -> list[list[str]]:
        """The labels of each picture: one, or with ``multi_label`` any number.

        Args:
            paths: for messages.
            values: the cells with the labels.
            separator: as of :func:`cells`; None: found in the values themselves.

        Raises:
            Unfit: a picture has no label, or several, where it must have one.
        """
        read = cells(values, self._several, separator)
        self.note(*read.notes)
        if self._several:
            return read.labels
        for path, labels in zip(paths, read.labels, strict=True):
            if len(labels) != 1:
                count = "no label"
                if labels:
                    count = f"{len(labels)} labels ({', '.join(labels[:3])}), which data.source.multi_label=true takes"
                raise Unfit(f"is no list of one label each: {printable(path)} has {count}")
        return read.labels

    def describe(self) -> str:
        """The files of the lists."""
        return f"Manifest {', '.join(self.lists.values())}"


def _check_same_numbers(
    paths: Sequence[str], values: Sequence[Sequence[object]], where: str
) -> None:
    """Refuses a picture that is listed twice, with different numbers.

    Args:
        paths: of the rows.
        values: numbers of each.
        where: the list, which begins the message.
    """
    texts_by_path: dict[str, list[str]] = {}
    for path, numbers in zip(paths, values, strict=True):
        texts = [str(number) for number in numbers]
        first_texts = texts_by_path.setdefault(path, texts)
        if texts != first_texts:
            shown = printable(path)
            raise UserError(f"{where} lists {shown} twice, with different numbers")


def pictures_in_list(
    file: str,
    image_dir: str | None = None,
    path_column: int | str = "path",
    delimiter: str | None = None,
) -> list[str]:
    """The paths of all pictures of a list, whose labels are not read. The arguments are those of :class:`Manifest`.

    Raises:
        UserError: no list of pictures, a picture that is named by a URL, or none of its files is on this disk.
    """
    source = Manifest(file, image_dir=image_dir, path_column=path_column, delimiter=delimiter)
    source.columns = source.columns._replace(label=[])
    rows = source._content("train").rows
    for row in rows:
        path = joined(source.folder_of("train"), expanded(row.path))
        if is_url(path):
            remedy = "copy the pictures, and list their paths"
            if not is_url(row.path):
                remedy = "data.source.image_dir=FOLDER says where the list's relative paths start"
            problem = f"pictures must be on this disk, got {printable(path)}"
            raise UserError(f"{file}: {problem}; {remedy}")
    paths, _ = source._paths_of(rows, "train", file)
    source.check_files(paths, "train", file)
    return paths
