"""The interface of a source and of its splits; how two splits differ."""

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, Protocol

from kd.data.batch import Target
from kd.data.sources.files import FileSplit, printable
from kd.data.targets import Targets
from kd.machine import cache_dir as cache_dir


class Split(Protocol):
    """One split of a source: targets, and a picture's bytes and name by its number."""

    @property
    def targets(self) -> Sequence[Target]:
        """Class ids, or lists of them."""

    def read(self, i: int) -> bytes:
        """The encoded picture ``i``."""

    def name(self, i: int) -> str:
        """Its path, or another name that a person can find it by."""

    def target(self, i: int) -> Target:
        """A class id, a list of ids (several labels), or a mask (uint8, ``(1, H, W)``)."""

    def stamp(self, i: int) -> str:
        """What differs once the picture's content does (size and time of change), or nothing where it can't change."""

    def changed(self) -> float:
        """When any picture was changed last, in seconds since 1970; infinite where that is not known."""


class Source:
    """Base of all sources. Subclasses fill ``classes`` and the two splits in :meth:`load`.

    Arguments of two sources share a name only where they mean the same: replacing a recipe's source on the command line
    carries over the ones that both have.

    Attributes:
        classes: names by class id.
        kind: what a picture is labelled with.
        ignore_index: the value of a mask's pixels that take no part.
    """

    classes: list[str]
    kind = Targets()
    ignore_index: int | None = None

    def load(self, split: str) -> Split:
        """The split ``"train"`` or ``"val"``; sets ``classes`` too. Downloads or draws what is missing.

        Raises:
            UserError: the data is missing or unusable; the message names ``data.source`` and the file or folder.
        """
        raise NotImplementedError

    def has(self, split: str) -> bool:
        """Whether the source has a split of that name. Without ``"val"`` a part of ``"train"`` is held out for it."""
        return True

    def describe(self) -> str:
        """One line for the person who reads the run."""
        return type(self).__name__


class Parts:
    """Pictures of other splits under numbers of their own."""

    def part(self, i: int) -> tuple[Split, int]:
        """The split that the picture ``i`` is in, and its number there."""
        raise NotImplementedError

    def read(self, i: int) -> bytes:
        split, j = self.part(i)
        return split.read(j)

    def name(self, i: int) -> str:
        split, j = self.part(i)
        return split.name(j)

    def target(self, i: int) -> Target:
        split, j = self.part(i)
        return split.target(j)

    def stamp(self, i: int) -> str:
        return stamp_of(*self.part(i))

    def key(self, i: int) -> str:
        return key_of(*self.part(i))

    def size(self, i: int) -> int:
        return size_of(*self.part(i))


class Subset(Parts):
    """Some pictures of a split, under new numbers."""

    def __init__(self, split: Split, keep: Sequence[int]) -> None:
        self.split, self.keep = split, list(keep)
        self.targets = [split.targets[i] for i in self.keep]
        self.check = getattr(split, "check", None)
        self.label = getattr(split, "label", "")

    def part(self, i: int) -> tuple[Split, int]:
        return self.split, self.keep[i]

    def changed(self) -> float:
        return changed(self.split)

    def fetch(self, numbers: Iterable[int]) -> None:
        fetch(self.split, [self.keep[i] for i in numbers])


class Joined(Parts):
    """A labelled split, and after it the pictures of an unlabelled one."""

    def __init__(self, labelled: Split, unlabelled: Split) -> None:
        self.parts = (labelled, unlabelled)
        self.border = len(labelled.targets)
        self.targets: Sequence[Any] = [*labelled.targets, *unlabelled.targets]

    def part(self, i: int) -> tuple[Split, int]:
        return (self.parts[0], i) if i < self.border else (self.parts[1], i - self.border)

    def changed(self) -> float:
        return max(map(changed, self.parts))

    def fetch(self, numbers: Iterable[int]) -> None:
        places = [self.part(i) for i in numbers]
        for part in self.parts:
            fetch(part, [j for split, j in places if split is part])


def bytes_of(cache_gb: float | None) -> int | None:
    """What ``cache_gb`` allows, in bytes."""
    if cache_gb is not None and not cache_gb > 0:
        raise ValueError(f"cache_gb must be > 0, got {cache_gb}")
    return None if cache_gb is None else int(cache_gb * 1e9)


def fetch(split: Split, numbers: Iterable[int]) -> None:
    """Before pictures are read: brings those that lie elsewhere onto this disk, several at once."""
    if hasattr(split, "fetch"):
        split.fetch(numbers)


def size_of(split: Split, i: int) -> int:
    """Bytes of a picture's file; 0 where it has none of its own."""
    if hasattr(split, "size"):
        return int(split.size(i))
    with suppress(OSError):  # not every source has files
        return Path(split.name(i)).stat().st_size
    return 0


def labelled(split: Split, label: str) -> Split:
    """The same split, of which messages say which one it is."""
    with suppress(AttributeError):  # one of someone's own may take no attributes
        split.label = label  # type: ignore[attr-defined]
    return split


def named(split: Split, i: int) -> str:
    """How messages name a picture: its split, where a run has named it, and its file."""
    label = getattr(split.part(i)[0] if isinstance(split, Joined) else split, "label", "")
    return f"{label}: {printable(split.name(i))}" if label else printable(split.name(i))


def stamp_of(split: Split, i: int) -> str:
    """The stamp of a picture; nothing where a source of someone's own has none."""
    return split.stamp(i) if hasattr(split, "stamp") else ""


def key_of(split: Split, i: int) -> str:
    """What a picture is: it changes when the picture's content does; a pack's is the same wherever the pack lies."""
    return split.key(i) if hasattr(split, "key") else f"{split.name(i)}\0{stamp_of(split, i)}"


def changed(split: Split) -> float:
    """When a picture was changed last; infinite where a source of someone's own does not say."""
    return split.changed() if hasattr(split, "changed") else inf


def fingerprint(split: Split, stamps: bool = True) -> str:
    """A hash of a split's names, labels and stamps; without ``stamps`` as in older caches, but for files."""
    digest = hashlib.sha256()
    for i, target in enumerate(split.targets):
        digest.update(f"{split.name(i)}\0{target}\0".encode("utf-8", "backslashreplace"))
        if stamps or isinstance(split, FileSplit):
            digest.update(stamp_of(split, i).encode())
    return digest.hexdigest()[:16]


def content(split: Split) -> str:
    """A hash of a split's pictures in order, whatever their labels."""
    digest = hashlib.sha256()
    for i in range(len(split.targets)):
        digest.update(f"{key_of(split, i)}\0".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()[:16]


def identity(split: Split) -> str:
    """A hash of a split's file names, sizes and labels in order: the same wherever the files lie."""
    digest = hashlib.sha256()
    for i, target in enumerate(split.targets):
        name, size = Path(split.name(i)).name, size_of(split, i)
        digest.update(f"{name}\0{target}\0{size}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]
