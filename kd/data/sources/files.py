"""Picture files in folders."""

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from kd.data.batch import Target
from kd.data.pictures import open_regular

PathLike: TypeAlias = str | os.PathLike[str]
UNLABELLED = -1  # the target of a picture without a label
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


class FileSplit:
    """A split of picture files.

    Args:
        paths: of the pictures.
        targets: one each.
        left_out: how many files beside them are no pictures that can be read, by the ending of their names.
    """

    def __init__(
        self, paths: Sequence[PathLike], targets: Sequence[Any], left_out: dict[str, int] | None = None
    ) -> None:
        self.paths = [str(p) for p in paths]  # strings: thousands of Path objects make workers slow to start
        self.targets = list(targets)
        self.left_out = left_out or {}

    def read(self, i: int) -> bytes:
        """The file's content."""
        with open_regular(self.paths[i]) as file:
            return file.read()

    def files(self, i: int) -> list[str]:
        """All files that the sample ``i`` is read from."""
        return [self.paths[i]]

    def stamp(self, i: int) -> str:
        """Size and time of change of each of its files."""
        return "".join(f"{stat.st_size}\0{stat.st_mtime_ns}\0" for stat in self._stats(i))

    def changed(self) -> float:
        """The newest file's time of change."""
        return max((stat.st_mtime for i in range(len(self.paths)) for stat in self._stats(i)), default=0.0)

    def _stats(self, i: int) -> list[os.stat_result]:
        found = []
        for file in self.files(i):
            with suppress(OSError, ValueError):  # a missing file is named by the check that decodes it
                found.append(Path(file).stat())
        return found

    def name(self, i: int) -> str:
        """The file's path."""
        return self.paths[i]

    def target(self, i: int) -> Target:
        """Its target."""
        return self.targets[i]


def pictures_below(root: str) -> tuple[list[str], dict[str, int]]:
    """All pictures below a folder at any depth, sorted by path, and what else is there.

    Args:
        root: the folder.

    Returns:
        Paths of the files with one of :data:`IMAGE_SUFFIXES`, and how many others there are by the ending of their
        names. Hidden files and folders are passed over.
    """
    found: list[str] = []
    others: Counter[str] = Counter()
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if not name.startswith(".")]
        for name in names:
            if name.startswith("."):
                continue
            if name.lower().endswith(IMAGE_SUFFIXES):
                found.append(f"{folder}{os.sep}{name}")
            else:
                others[os.path.splitext(name)[1].lower() or "no ending"] += 1  # noqa: PTH122 - a Path each is slow
    return sorted(found), dict(others)


def printable(name: str) -> str:
    """A file's name as any terminal and JSON file takes it: bytes that are not UTF-8 are written as escapes.

    >>> printable("caf\\udce9.jpg") == "caf" + chr(92) + "udce9.jpg"
    True
    """
    return name.encode("utf-8", "backslashreplace").decode()


def said(left_out: dict[str, int]) -> str:
    """Files that were passed over, for the end of a message.

    >>> said({".heic": 20, ".txt": 1})
    '; left out: 20 of .heic, 1 of .txt'
    """
    most = sorted(left_out.items(), key=lambda item: -item[1])[:5]
    return f"; left out: {', '.join(f'{count} of {ending}' for ending, count in most)}" if most else ""
