"""Splits of picture files."""

import os
from collections.abc import Iterable, Sequence
from typing import IO, Any, TypeAlias

from kd.data.info import Target
from kd.data.sources.arrays import Column, Names, shared
from kd.data.sources.places import stamp_of_file
from kd.storage.decoding import MAX_BYTES
from kd.storage.elsewhere import open_regular

PathLike: TypeAlias = str | os.PathLike[str]
UNLABELLED = -1  # the target of a picture without a label


class FileSplit:
    """A split of picture files.

    Args:
        paths: of the pictures.
        targets: one each, in the same order.
        left_out: how many other files lie beside them, by the ending of their names; for messages.
    """

    def __init__(
        self,
        paths: Iterable[PathLike],
        targets: Sequence[Any],
        left_out: dict[str, int] | None = None,
    ) -> None:
        """Stores paths and targets in arrays; the arguments are the class's."""
        self.paths = paths if isinstance(paths, Names) else Names(map(str, paths))
        self.targets = Column.of(targets)
        self.left_out = left_out or {}

    def share(self) -> None:
        """Moves names and targets to where all processes of a machine share them."""
        self.paths.share()
        if isinstance(self.targets, Column):
            self.targets.values = shared(self.targets.values)

    def open(self, i: int) -> IO[bytes]:
        """Opens the picture's file, a regular one no larger than any picture; an OSError says why it can't be read."""
        return open_regular(self.paths[i], MAX_BYTES)

    def read(self, i: int) -> bytes:
        """The encoded picture ``i``.

        Raises:
            OSError: it can't be read.
        """
        with self.open(i) as file:
            return file.read()

    def files(self, i: int) -> list[str]:
        """Paths of all files that sample ``i`` is read from."""
        return [self.paths[i]]

    def stamp(self, i: int) -> str:
        """Size and time of change of each of its files, one after another (:func:`stamp_of_file`)."""
        return "".join(map(stamp_of_file, self.files(i)))

    def name(self, i: int) -> str:
        """Path of the picture's file."""
        return self.paths[i]

    def target(self, i: int) -> Target:
        """The target of sample ``i``, as ``targets`` has it: a class id (-1 without a label), ids, or numbers."""
        return self.targets[i]


def printable(name: str) -> str:
    """A file's name as text that any stream and JSON file can encode: bytes that are not UTF-8 are written as escapes.

    Control characters stay: what shows the name escapes them (:mod:`kd.storage.shown`, a command's stream).

    >>> printable("caf\\udce9.jpg") == "caf" + chr(92) + "udce9.jpg"
    True
    """
    return name.encode("utf-8", "backslashreplace").decode()


def said(left_out: dict[str, int]) -> str:
    """Files that were passed over, for the end of a message: the five most frequent endings; "" for no files.

    >>> said({".heic": 20, ".txt": 1})
    '; left out: 20 of .heic, 1 of .txt'
    """
    if not left_out:
        return ""
    most = sorted(left_out.items(), key=lambda item: -item[1])[:5]
    counts = [f"{count} of {ending}" for ending, count in most]
    return f"; left out: {', '.join(counts)}"
