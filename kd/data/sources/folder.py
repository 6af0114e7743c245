"""The source ``ImageFolder``: a folder with one subfolder a class."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kd.data.sources.base import Source
from kd.data.sources.files import IMAGE_SUFFIXES, FileSplit, PathLike, pictures_below, printable, said
from kd.errors import UserError


class ImageFolder(Source):
    """A folder with one subfolder a class: ``root/train/<class>/*.jpg`` and ``root/val/<class>/*.jpg``.

    Class ids come from ``train`` (sorted by name); ``val`` may hold fewer classes, but none that ``train`` lacks.

    Args:
        root: the folder.
        train: name of the training split's folder below ``root``.
        val: name of the validation split's.
    """

    def __init__(self, root: str, train: str = "train", val: str = "val") -> None:
        self.root = root
        self.folders = {"train": train, "val": val}

    def load(self, split: str) -> FileSplit:
        """See :meth:`Source.load`. Any other split's name is taken as a folder below ``root``."""
        self.classes = class_folders(Path(self.root, self.folders["train"]), "data.source.root")
        return labelled_folder(Path(self.root, self.folders.get(split, split)), self.classes, "data.source.root")

    def has(self, split: str) -> bool:
        """See :meth:`Source.has`."""
        named = self.folders.get(split, split)
        return named != split or Path(self.root, named).is_dir()  # a name that was given must be there

    def describe(self) -> str:
        """One line."""
        return f"ImageFolder {self.root}"


def class_folders(path: Path, key: str) -> list[str]:
    """The sorted names of the folders in ``path``; ``key`` is named in errors."""
    if not path.is_dir():
        raise UserError(f"{key}: there is no folder {path}")
    names = sorted(e.name for e in os.scandir(path) if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise UserError(f"{key}: no class folders in {path} (expected <class>/*.jpg)")
    for name in names:
        if printable(name) != name:
            raise UserError(f"{key}: the name of the class folder {path}/{printable(name)} is not UTF-8; rename it")
    return names


def labelled_folder(path: Path, classes: Sequence[str], key: str) -> FileSplit:
    """The pictures below ``path/<class>``, at any depth, with ids from ``classes``, of which ``path`` may lack some.

    Raises:
        UserError: no pictures, or a folder that is none of the classes.
    """
    ids = {name: i for i, name in enumerate(classes)}
    paths: list[PathLike] = []
    targets: list[int] = []
    left_out: Counter[str] = Counter()
    for name in class_folders(path, key):
        if name not in ids:
            raise UserError(f"{key}: {path / name} is none of the {len(ids)} known classes")
        found, others = pictures_below(str(path / name))
        paths += found
        targets += [ids[name]] * len(found)
        left_out.update(others)
    if not paths:
        raise UserError(f"{key}: no pictures below {path} ({', '.join(IMAGE_SUFFIXES)}){said(left_out)}")
    return FileSplit(paths, targets, dict(left_out))
