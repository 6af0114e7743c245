"""The interface of a source and of its splits; how two splits differ."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from kd.data.info import Target
from kd.data.sources.arrays import chained, targets_at
from kd.data.sources.files import FileSplit, printable
from kd.data.sources.places import folder_here
from kd.data.targets import Targets


class Split(Protocol):
    """One split of a source: targets, and a picture's bytes and name by its number."""

    @property
    def targets(self) -> Sequence[Target]:
        """Of each picture a class id (-1 without a label), a list of ids or of numbers; 0 where it has a mask. Their number
        is the split's length.
        """

    def read(self, i: int) -> bytes:
        """The encoded picture ``i``."""

    def name(self, i: int) -> str:
        """Its path, or another name that a person can find it by."""

    def target(self, i: int) -> Target:
        """The target of picture ``i``: as ``targets`` has it, or its mask, uint8 ``(1, H, W)``."""

    def stamp(self, i: int) -> str:
        """What differs once the picture's content does (size and time of change), or "" where it can't change."""


class Source:
    """Base of all sources. Subclasses set ``classes`` and return a split in :meth:`load`.

    Arguments of two sources share a name only where they mean the same: replacing a recipe's source on the command line
    carries over the ones that both have.

    Attributes:
        classes: names by class id.
        kind: what a picture is labelled with.
        ignore_index: the value of a mask's pixels that take no part.
    """

    needs: ClassVar[tuple[str, str] | None] = None
    """A package that it imports, and kd's extra that installs the package."""
    listed_early: bool = False
    """Whether its pictures are listed before torch is imported: without a package, a download or long work."""
    takes_folder: ClassVar[bool] = False
    """Whether a recipe's source stays this one where ``data.source=FOLDER`` gives another folder."""

    classes: list[str]
    kind = Targets()
    ignore_index: int | None = None
    root = ""  # of a source that is a folder or a URL
    key = "data.source.root"  # the setting that names it; ``data.probe.root`` for the pictures of the probe

    @property
    def notes(self) -> list[str]:
        """What was guessed or left out, each in a line for the person who reads the run; complete once it is loaded."""
        return list(self.__dict__.get("_notes", ()))

    def note(self, *lines: str) -> None:
        """Adds to :attr:`notes`, which a run prints, the lines that are not there yet."""
        # Not set in __init__: subclasses of others need not call an __init__ of ours.
        notes = self.__dict__.setdefault("_notes", [])
        for line in lines:
            if line not in notes:
                notes.append(line)

    @cached_property
    def folder(self) -> str:
        """``root`` on this disk; of a URL a copy, which the first use brings up to date (:func:`folder_here`)."""
        return folder_here(self.root, self.key)

    def check_there(self) -> None:
        """Refuses what the settings name and this machine lacks, before torch is imported; here nothing. Of a source that is
        :attr:`listed_early`, listing does.

        Raises:
            UserError: names the setting, and the missing folder or file.
        """

    def load(self, split: str) -> Split:
        """The split ``"train"``, ``"val"``, or another one that the source has (``kd-eval split=test``); sets ``classes``.

        Downloads or draws what is missing. Every process of a run calls it.

        Raises:
            UserError: the data is missing or unusable; the message names ``data.source`` and the file or folder.
        """
        raise NotImplementedError

    def check_listed(self, split: Split, name: str, key: str) -> None:
        """Refuses a split whose files are all missing; here nothing.

        Args:
            split: as :meth:`load` gives it.
            name: its name.
            key: the setting that names it, for messages.
        """

    def has(self, split: str) -> bool:
        """Whether the source has a split of that name; here, any. Without ``"val"`` a part of ``"train"`` is held out."""
        return True

    def describe(self) -> str:
        """One line for the person who reads the run."""
        return f"{type(self).__name__} {self.root}".strip()


class Parts:
    """Pictures of other splits under numbers of their own; base of :class:`Subset` and :class:`Joined`."""

    def part(self, i: int) -> tuple[Split, int]:
        """The split that the picture ``i`` is in, and its number there."""
        raise NotImplementedError

    def read(self, i: int) -> bytes:
        """The encoded picture ``i``."""
        split, j = self.part(i)
        return split.read(j)

    def name(self, i: int) -> str:
        """Names the picture ``i`` in messages."""
        split, j = self.part(i)
        return split.name(j)

    def target(self, i: int) -> Target:
        """The target of picture ``i``, as its own split has it."""
        split, j = self.part(i)
        return split.target(j)

    def stamp(self, i: int) -> str:
        """The stamp of picture ``i`` in its own split, see :meth:`Split.stamp`."""
        return stamp_of(*self.part(i))


def whole_of(split: Split, i: int) -> tuple[Split, int]:
    """The split of a source that picture ``i`` is in, below all :class:`Parts`, and its number there."""
    while isinstance(split, Parts):
        split, i = split.part(i)
    return split, i


class Subset(Parts):
    """Some pictures of a split, under new numbers."""

    def __init__(self, split: Split, keep: Sequence[int] | np.ndarray) -> None:
        """A part of a split; ``keep``: numbers of its pictures, in the order that they have here."""
        self.split = split
        self.keep = np.asarray(keep, np.int32)
        self.targets = targets_at(split.targets, self.keep)
        self.check = getattr(split, "check", None)
        self.label = getattr(split, "label", "")

    def part(self, i: int) -> tuple[Split, int]:
        """The whole split, and the number of picture ``i`` there."""
        return self.split, int(self.keep[i])


class Joined(Parts):
    """Two splits, one after the other: labelled and unlabelled pictures, or a probe's training and validation part."""

    def __init__(self, labelled: Split, unlabelled: Split) -> None:
        """Takes both splits: the unlabelled pictures have the numbers after the labelled ones."""
        self.parts = (labelled, unlabelled)
        self.border = len(labelled.targets)  # the number of the second one's first picture
        self.targets: Sequence[Any] = chained(labelled.targets, unlabelled.targets)

    def part(self, i: int) -> tuple[Split, int]:
        """The split that picture ``i`` is from, and its number there."""
        labelled, unlabelled = self.parts
        if i < self.border:
            return labelled, i
        return unlabelled, i - self.border


def labelled(split: Split, label: str) -> Split:
    """The same split, which messages then call ``label`` (:func:`named`)."""
    with suppress(AttributeError):  # one of someone's own may take no attributes
        split.label = label  # type: ignore[attr-defined]
    return split


def named(split: Split, i: int) -> str:
    """How messages name picture ``i``: its split, where a run has named it, and its file."""
    part = split
    if isinstance(split, Joined):
        part = split.part(i)[0]
    label = getattr(part, "label", "")
    name = printable(split.name(i))
    if label:
        return f"{label}: {name}"
    return name


def stamp_of(split: Split, i: int) -> str:
    """The stamp of a picture (:meth:`Split.stamp`); "" where a source of the user's has none."""
    if hasattr(split, "stamp"):
        return split.stamp(i)
    return ""


class SplitFacts(NamedTuple):
    """What tells splits apart: hashes, of 16 hex digits each, of their pictures in order."""

    fingerprint: str
    """Of names, labels and stamps: a cached check of the pictures is found by it. It changes when a file, a label or the
    order does, and when the folder is moved; the identity stays then."""
    content: str
    """Of what the pictures are, whatever their labels; it names a teacher's cache. It changes when a picture's content does.
    A pack's is the same wherever the pack lies; that of all other splits changes with the folder."""
    identity: str
    """Of the names and labels of pictures and the sizes of these and their masks: the same wherever the files lie. A resumed
    run must find it unchanged (:func:`kd.data.datamodule.check_same_samples`); times of change do not count."""


def split_facts(split: Split) -> SplitFacts:
    """The facts of a split. Size and time of each file are read once."""
    digests = [hashlib.sha256() for _ in range(3)]
    for i, target in enumerate(split.targets):
        name = split.name(i)
        whole, j = whole_of(split, i)
        stamp = stamp_of(whole, j)
        key = f"{name}\0{stamp}"
        if hasattr(whole, "key"):  # a pack's: the same wherever it lies
            key = whole.key(j)
        size: int | str = 0  # of pictures in a pack, whose key has it
        if isinstance(whole, FileSplit):
            *sizes_and_times, _ = stamp.split("\0")
            size = " ".join(sizes_and_times[::2]) or 0
        elif hasattr(whole, "sizes"):
            size = whole.sizes[j]
        else:
            with suppress(OSError):
                size = Path(name).stat().st_size
        texts = (f"{name}\0{target}\0{stamp}", f"{key}\0", f"{Path(name).name}\0{target}\0{size}\0")
        for digest, text in zip(digests, texts, strict=True):
            digest.update(text.encode("utf-8", "backslashreplace"))
    return SplitFacts(*(digest.hexdigest()[:16] for digest in digests))


def fingerprint(split: Split) -> str:
    """See :attr:`SplitFacts.fingerprint`."""
    return split_facts(split).fingerprint


def identity(split: Split) -> str:
    """See :attr:`SplitFacts.identity`."""
    return split_facts(split).identity
