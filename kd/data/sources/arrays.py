"""Names and targets of millions of pictures in a few arrays, which all loader processes of a training share."""

import atexit
import hashlib
from array import array
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from kd.data.info import Target
from kd.machine import cache_dir
from kd.storage.elsewhere import LARGEST_DATA, open_regular
from kd.storage.writing import write_bytes

SHARED = 2**20
"""Bytes; larger arrays are shared by the processes of a machine."""


def shared(array: np.ndarray) -> np.ndarray:
    """The same array as pages of a file in the cache folder, which all processes that hold it share.

    An array smaller than :data:`SHARED`, or for which the disk has no room, is returned as it is. The process that has
    written the file deletes it when it ends: the others keep its pages.
    """
    if array.nbytes < SHARED:
        return array
    content = np.ascontiguousarray(array).data.cast("B")
    file = cache_dir() / "lists" / hashlib.sha256(content).hexdigest()[:32]
    try:
        if not file.exists():
            write_bytes(file, bytes(content))
            atexit.register(file.unlink, missing_ok=True)
        with open_regular(file, LARGEST_DATA) as opened:
            pages: np.ndarray = np.memmap(opened, array.dtype, "r", shape=array.shape)
        return pages
    except (OSError, ValueError):
        return array


def _ends(lengths: array) -> np.ndarray:
    """Where parts of these lengths end in a row; in four bytes each, in the same memory, where the last end fits."""
    ends = np.asarray(lengths)
    if ends.sum(dtype=np.int64) >= 2**32:
        return ends.cumsum(dtype=np.int64)
    return np.cumsum(ends, out=ends)


class Names(Sequence[str]):
    """Paths or URLs as one buffer of names and the number of each one's folder: about 10 bytes a path beside its name.

    A list of Python's takes 100 bytes a path, and as many again in each loader process that reads it.

    Args:
        paths: in order; they are read once.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        """Packs the paths; the arguments are the class's."""
        numbers: dict[str, int] = {}
        folder_of = array("i")
        lengths = array("I", [0])
        names = bytearray()
        for path in paths:
            folder, slash, name = path.rpartition("/")
            folder_of.append(numbers.setdefault(folder + slash, len(numbers)))
            content = name.encode("utf-8", "surrogatepass")
            names += content
            lengths.append(len(content))
        self.folders = list(numbers)
        self.folder_of = np.asarray(folder_of)
        self.ends = _ends(lengths)
        self.names = np.frombuffer(names, np.uint8)

    def __len__(self) -> int:
        return len(self.folder_of)

    def __getitem__(self, i: int) -> str:  # type: ignore[override]  # no slices
        """One path."""
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        start = self.ends[i]
        end = self.ends[i + 1]
        content = self.names[start:end].tobytes()
        name = content.decode("utf-8", "surrogatepass")
        folder = self.folders[self.folder_of[i]]
        return folder + name

    def share(self) -> None:
        """Moves the arrays to where other processes share them (:func:`shared`)."""
        self.folder_of, self.ends, self.names = map(shared, (self.folder_of, self.ends, self.names))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


class Column(Sequence[Target]):
    """Class ids ``(N,)`` or numbers ``(N, K)`` as one array; each target is read as Python's own numbers.

    Args:
        values: the array.
    """

    def __init__(self, values: np.ndarray) -> None:
        """Stores the array."""
        self.values = values

    @classmethod
    def of(cls, targets: Sequence[Any]) -> Sequence[Any]:
        """Class ids as a column of four bytes each; other targets as they are."""
        if isinstance(targets, Column) or not all(isinstance(t, Integral) for t in targets):
            return targets
        return cls(np.asarray(targets, np.int32))

    @property
    def holds_ids(self) -> bool:
        """Whether each target is one class id."""
        return self.values.ndim == 1

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int | slice) -> Target:  # type: ignore[override]
        """The target of a picture; a column of those of a slice."""
        values = self.values[i]
        if isinstance(i, slice):
            return Column(values)  # type: ignore[return-value]
        target: Target = values.tolist()
        return target

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """The values, for NumPy."""
        return np.asarray(self.values, dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


def targets_at(targets: Sequence[Any], numbers: np.ndarray) -> Sequence[Any]:
    """The targets of the pictures of these numbers."""
    if isinstance(targets, Column):
        return Column(targets.values[numbers])
    return [targets[i] for i in numbers]


def chained(first: Sequence[Any], second: Sequence[Any]) -> Sequence[Any]:
    """Targets one after another: as one column where both are class ids."""
    columns = []
    for part in (first, second):
        if isinstance(part, Column) and part.holds_ids:
            columns.append(part.values)
    if len(columns) == 2:
        return Column(np.concatenate(columns))
    return [*first, *second]


def by_value(ids: np.ndarray) -> list[np.ndarray]:
    """The numbers of the pictures of each class id, ascending, in the order of the ids; by one stable sort.

    >>> by_value(np.array([3, 1, 3]))
    [array([1]), array([0, 2])]
    """
    order = ids.argsort(kind="stable")
    return np.split(order, np.flatnonzero(np.diff(ids[order])) + 1)
