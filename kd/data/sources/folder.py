"""The source ``ImageFolder``: a folder with one subfolder a class."""

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kd.data.label_text import plain_label
from kd.data.sources.arrays import Column, Names
from kd.data.sources.base import Source
from kd.data.sources.files import FileSplit, printable, said
from kd.data.sources.labels import check_known, doubts, in_quotes
from kd.data.sources.manifest import words_that_read
from kd.data.sources.places import (
    IMAGE_SUFFIXES,
    expanded,
    folder_here,
    folders_in,
    is_picture,
    joined,
    pictures_below,
)
from kd.data.sources.split_names import choose_split_name, split_of
from kd.errors import UserError

Note = Callable[[str], None]  # takes a line for the person who reads the run

TABLES = (".csv", ".tsv", ".jsonl")
"""Endings of files that are most likely tables of pictures, where they lie beside these."""


class SplitFolders(NamedTuple):
    """Names of the split folders below a root; ``.`` where the root has the class folders itself."""

    train: str
    val: str | None  # None: no folder validates


class ImageFolder(Source):
    """A folder with one subfolder a class: ``root/train/<class>/*.jpg`` and ``root/val/<class>/*.jpg``.

    Pictures in ``root/test/<class>`` are left to ``kd-eval``: certificates and cascades are judged by them.

    Split folders may have other usual names (``Training``, ``seg_test``). Class ids come from the folders of the
    training split that have a picture, sorted by name; ``val`` may hold fewer classes, but none that ``train`` lacks.
    Without split folders, ``root/<class>/*.jpg`` is the training split, and a part of it is held out
    (``data.val_fraction``).

    Args:
        root: the folder, or its URL (``s3://bucket/food``; extra ``stream``).
        train: name of the training split's folder below ``root``, ``.`` for ``root`` itself; default: the folder whose
            name means training.
        val: name of the validation split's; default: ``val``, ``valid``, ``validation`` or ``test``, or a folder whose
            name means one of these.
    """

    listed_early = True

    def __init__(
        self,
        root: str,
        train: str | None = None,
        val: str | None = None,
    ) -> None:
        """Expands ``~`` in the root; the arguments are the class's. Nothing is listed yet."""
        self.root = expanded(root)
        self.folders = {"train": train, "val": val}
        self._loaded: dict[str, FileSplit] = {}  # by split: each is listed once

    def load(self, split: str) -> FileSplit:
        """See :meth:`Source.load`. Any other split is the folder of its name below ``root``, or one whose name means it.

        Raises:
            UserError: no such folder, no pictures, or a class that the training split lacks.
        """
        if split in self._loaded:
            return self._loaded[split]
        if split != "train":
            self.load("train")  # names the classes
        folder = self._folder(split)
        if not Path(folder).is_dir():
            raise self._no_folder(split, folder)
        note = self._noted(split)
        if split != "train":
            listed = labelled_folder(folder, self.classes, self.key, note)
        else:
            names = sorted({plain_label(name) for name in folders_in(folder)})
            self._check_classes(folder, names)
            listed = labelled_folder(folder, names, self.key, note)
            # Folders without a picture are no classes: the others are numbered without them.
            used, ids = np.unique(np.asarray(listed.targets), return_inverse=True)
            self.classes = [names[i] for i in used]
            listed.targets = Column(ids.astype(np.int32))
            self.note(*doubts(self.classes))
        self._loaded[split] = listed
        return listed

    def _noted(self, split: str) -> Note:
        """A function that adds a line to the source's notes, with the split's name before it."""
        return lambda line: self.note(f"{split}: {line}")

    def _no_folder(self, split: str, folder: str) -> UserError:
        """The error, for the caller to raise, of a split without a folder; it names the setting that decides the folder.

        Args:
            split: ``train``, ``val``, or a name from a command.
            folder: that was looked for.
        """
        if not Path(self.folder).is_dir():
            reads = "ImageFolder reads train/<class>/*.jpg and val/<class>/*.jpg in it"
            return UserError(f"{self.key}: folder {self.root} not found ({reads})")
        names = ", ".join(map(printable, folders_in(self.folder))) or "no folders"
        says = ""
        # of another name: a command reads it by its option
        key = self.key if split in self.folders else "split"
        if self.folders.get(split) is not None:
            key = f"data.source.{split}"
        elif key == Source.key:
            says = f"; data.source.{split}=NAME names another"
        return UserError(f"{key}: folder {folder} not found; {self.root} has {names}{says}")

    def _check_classes(self, folder: str, names: Sequence[str]) -> None:
        """Refuses a training folder without class folders, and one of a single class where a table lies in the root.

        Args:
            folder: of the training pictures.
            names: of its class folders.

        Raises:
            UserError: names the folder, and the words that read the table.
        """
        root = self.folder
        tables = []
        if len(names) < 2:
            tables = [file.name for file in Path(root).iterdir() if file.suffix.lower() in TABLES]
        if tables:
            table = "train.csv" if "train.csv" in tables else min(tables)
            folders = [folder, root, *(joined(root, name) for name in folders_in(root))]
            words = words_that_read(joined(root, table), folders)
            found = f"one class folder ('{printable(names[0])}')" if names else "no class folders"
            raise UserError(
                f"{self.key}: {found} in {folder}, but tables in {root}: {words} reads {table}"
            )
        if not names:
            raise UserError(
                f"{self.key}: no class folders in {folder} (expected train/<class>/*.jpg and val/<class>/*.jpg, or "
                "<class>/*.jpg; recipe=foundation_vit takes pictures without labels)"
            )

    # -- which folders are the splits --------------------------------------------------------------------------------
    @cached_property
    def _layout(self) -> SplitFolders:
        """Which folders are the splits: those of the settings, else by their names.

        Where no setting and no name says so, the root has the class folders itself. Folders that hold folders are chosen
        first; one that holds none may be ``train``, but not ``val``. A note names the folders that are not read.

        Raises:
            UserError: folders that may be splits or classes, or two that may be the same split.
        """
        root = self.folder
        names = folders_in(root)
        named = [name for name in names if split_of(name)]
        train, val = self.folders["train"], self.folders["val"]
        if train is None and val is None:
            self._doubt(names, named)
            if not named:
                return SplitFolders(train=".", val=None)
        holders = [name for name in named if folders_in(joined(root, name))]
        if train is None:
            train = self._choose(holders, "train") or self._choose(named, "train") or "train"
            train = self._inner(train)
        if train == ".":
            return SplitFolders(train, val)
        first = train.partition("/")[0]
        if val is None:
            val = self._choose([name for name in holders if name != first], "val")
            val = val and self._inner(val)
        used = {first, *holders, str(val).partition("/")[0]}
        unread = [printable(name) for name in names if name not in used]
        if unread:
            self.note(f"folders beside the splits are not read: {', '.join(unread[:5])}")
        return SplitFolders(train, val)

    def _doubt(self, names: Sequence[str], named: Sequence[str]) -> None:
        """Refuses folders that may be splits or classes.

        There is doubt where a single folder has a split's name, beside folders of pictures. Or none has such a name, and
        more than half of the folders hold the same two or more folders (``entrenamiento``, ``prueba``).

        Args:
            names: of the folders in the root.
            named: those that mean a split.

        Raises:
            UserError: names the folders, and the settings that decide.
        """
        suspects: list[str] = []
        root = self.folder
        others = [name for name in names if name not in named]
        if len(named) == 1:
            suspects = [name for name in others if self._has_pictures(joined(root, name))]
        elif not named:
            inner = {name: tuple(folders_in(joined(root, name))) for name in others}
            for folders, count in Counter(inner.values()).items():
                if len(folders) > 1 and 2 * count > max(2, len(others)):
                    suspects = [name for name in others if inner[name] == folders]
        if suspects:
            among = ", ".join(map(printable, [*named, *suspects][:3]))
            says = "expected train/<class>/*.jpg and val/<class>/*.jpg"
            if self.key == Source.key:
                says = "data.source.train=NAME data.source.val=NAME name splits, data.source.train=. classes"
            raise UserError(f"{self.key}: {among} in {root} may be splits or classes; {says}")

    def _choose(self, names: Sequence[str], split: str) -> str | None:
        """Which folder is ``train`` or ``val``, None for none; ``data.probe`` has no setting for them."""
        return choose_split_name(names, split, self.key, self.root, self.key == Source.key)

    def _has_pictures(self, folder: str) -> bool:
        """Whether pictures lie in the folder itself."""
        return any(map(is_picture, os.listdir(folder)))  # noqa: PTH208 - of texts

    def _inner(self, name: str) -> str:
        """A split's folder below the root: ``name``, or ``name/inner`` where its only folder means the same split.

        ``seg_train/seg_train``, as some archives unpack.
        """
        split = split_of(name)
        folders = folders_in(joined(self.folder, name))
        if split is None or len(folders) != 1:
            return name
        inner = folders[0]
        if split_of(inner) == split:
            return f"{name}/{inner}"
        return name

    def _folder(self, split: str) -> str:
        """The path of a split's folder, which need not exist.

        ``train`` and ``val`` are those of the layout. Any other split is the folder of its name, else one whose name means
        it.
        """
        names = folders_in(self.folder)
        if split in self.folders:
            name = getattr(self._layout, split) or split
        else:
            name = choose_split_name(names, split, self.key, self.root, has_setting=False) or split
        return joined(self.folder, name)

    def has(self, split: str) -> bool:
        """Whether the split has a folder; a name of ``val`` in the settings counts: :meth:`load` refuses a missing one."""
        if split == "val":
            return self._layout.val is not None
        return Path(self._folder(split)).is_dir()

    def describe(self) -> str:
        """The folder, and the folders of the splits where their names are not ``train`` and ``val``."""
        train, val = self._layout
        text = f"ImageFolder {self.root}"
        if train not in ("train", "."):
            text += f", trained with {train}"
        if val not in ("val", None):
            text += f", validated with {val}"
        return text


def class_folders(path: str, key: str) -> list[str]:
    """The sorted names of the folders in ``path``, but those that programs leave behind.

    Args:
        path: a folder.
        key: the setting that names it, for messages.

    Raises:
        UserError: no such folder, no folders in it, or a name that is not UTF-8.
    """
    if not Path(path).is_dir():
        raise UserError(f"{key}: folder {path} not found")
    names = folders_in(path)
    if not names:
        raise UserError(f"{key}: no class folders in {path} (expected <class>/*.jpg)")
    for name in map(printable, names):
        if name not in names:
            raise UserError(
                f"{key}: the name of the class folder {path}/{name} is not UTF-8; rename it"
            )
    return names


def classes_below(folder: str, key: str) -> list[str]:
    """The labels that the folders in ``folder``, a path or URL, stand for, sorted; errors as of :func:`class_folders`."""
    root = folder_here(expanded(folder), key)
    return sorted({plain_label(name) for name in class_folders(root, key)})


def labelled_folder(
    path: str, classes: Sequence[str], key: str, note: Note | None = None
) -> FileSplit:
    """The pictures below ``path/<class>``, at any depth, with ids from ``classes``, of which ``path`` may lack some.

    Args:
        path: a folder.
        classes: names of the classes by id, as :func:`plain_label` writes them.
        key: the setting that names the folder, for messages.
        note: takes a line about folders without a usable picture, which are left out; None: it is dropped.

    Raises:
        UserError: no folders or pictures, or a folder with pictures that is not among ``classes``.
    """
    ids = {name: i for i, name in enumerate(classes)}
    targets = array("i")
    others: Counter[str] = Counter()
    empty: list[str] = []
    unknown: list[tuple[str, Sequence[str]]] = []

    def pictures() -> Iterator[str]:
        """The pictures of known classes; notes the target of each, and what else is there."""
        for folder in class_folders(path, key):
            label = plain_label(folder)
            files, other_files = pictures_below(joined(path, folder))
            others.update(other_files)
            if label not in ids:
                unknown.extend((file, [label]) for file in files)
            else:
                targets.extend([ids[label]] * len(files))
                yield from files
            if not files:
                empty.append(f"{label}{said(other_files)}")

    names = Names(pictures())
    check_known(unknown, ids, key)
    if not len(names):
        raise UserError(
            f"{key}: no pictures below {path} ({', '.join(IMAGE_SUFFIXES)}){said(dict(others))}"
        )
    if empty and note is not None:
        note(f"{len(empty)} folder(s) without a usable picture are no classes: {in_quotes(empty)}")
    return FileSplit(names, Column(np.asarray(targets)), dict(others))
