"""The source ``Shards``: tar shards (WebDataset's layout) on a disk or in an object store.

A pack is a folder, or any URL that fsspec knows (``s3://bucket/food``), with ``train-00000.tar``, ... and for each split
an index: ``train.index``, where in which shard each picture's bytes are, and ``train.json``, which is written last. So
pictures are read in any order: order, views and resume are those of every other source. A shard of a remote pack is
copied to the user's cache folder when one of its pictures is first read.
"""

import hashlib
import io
import os
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kd.config.kinds import problem_in
from kd.data.info import Target
from kd.data.sources.arrays import Column
from kd.data.sources.base import Source, Split
from kd.data.sources.files import UNLABELLED
from kd.data.sources.labels import doubts, unused
from kd.data.sources.places import expanded, stamp_of_file
from kd.errors import UserError, first_line
from kd.storage.decoding import MAX_BYTES
from kd.storage.elsewhere import (
    LARGEST_DATA,
    LARGEST_LIST,
    open_regular,
)
from kd.storage.objects import fetched, file_system, in_one_line, is_url, small_file

PICTURE = np.dtype([("shard", "<i4"), ("offset", "<i8"), ("size", "<i4"), ("target", "<i4")])
"""A picture in an index: the number of its shard, its place in it in bytes, and its class id (-1 without labels)."""
LARGEST_OFFSET = 2**60
"""Bytes; an index that names a larger place in a shard is refused."""
MOST_OPEN = 64
"""Shards that a process holds open."""


class PackHead(BaseModel):
    """A pack's ``SPLIT.json``, which may come from anywhere, and names files."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    classes: list[str]
    """Names by class id; empty: pictures without labels."""
    shards: list[Annotated[str, Field(pattern=r"^[\w.-]+\.tar$")]]
    """Plain names of the shards' files."""
    index: str
    """The SHA-256 of ``SPLIT.index``."""


class Shards(Source):
    """A pack made by ``kd-pack``, on a disk or in an object store (extra ``stream``).

    Args:
        root: its folder or URL. An S3 endpoint and credentials are taken from the usual ``AWS_*`` variables.
    """

    listed_early = True

    def __init__(self, root: str) -> None:
        """Expands ``~`` in the root; the arguments are the class's. No index is read yet."""
        self.root = expanded(root).rstrip("/")
        self._heads: dict[str, tuple[PackHead, str]] = {}  # content and hash by split

    def load(self, split: str) -> Split:
        """Reads a split's index; the classes become the source's. Shards are not opened.

        Raises:
            UserError: no index or a damaged one, other classes than those of ``train``, or a shard on this disk that is
                missing or shorter than its index says.
        """
        head, digest = self._head(split)
        train = self._head("train")[0] if self.has("train") else head
        self.classes = list(train.classes)  # ids are those of the training pictures
        if head.classes != self.classes:
            raise UserError(
                f"data.source.root: {self.root}/{split}.json lists other classes than train.json; pack "
                "both splits again (kd-pack)"
            )
        table = self._table(split, head)
        if self.classes:
            self.note(*doubts(self.classes))
            if split == "train":
                self.note(*unused(self.classes, np.unique(table["target"]).tolist()))
        if not is_url(self.root):
            self._check_sizes(head.shards, table)
        return ShardSplit(self.root, head.shards, table, table["target"], digest)

    def _check_sizes(self, shards: list[str], table: np.ndarray) -> None:
        """Refuses a shard on this disk that is missing, or ends before a picture that a split's index has in it."""
        ends = np.zeros(len(shards), np.int64)
        np.maximum.at(ends, table["shard"], table["offset"] + table["size"])
        for shard, end in zip(shards, ends, strict=True):
            file = Path(self.root, shard)
            size = file.stat().st_size if file.is_file() else 0
            if size < end:
                raise UserError(
                    f"data.source.root: {self.root}/{shard} has {size} bytes, its index says {end} or more"
                )

    def _head(self, split: str) -> tuple[PackHead, str]:
        """A split's ``SPLIT.json`` (:func:`kd.data.pack.pack` says what it holds), and a hash of it, 16 hex digits; read
        once.

        Raises:
            UserError: no such file, a damaged one, or one that can't be fetched.
        """
        if split not in self._heads:
            text = self._file(f"{split}.json")
            try:
                head = PackHead.model_validate_json(text)
            except ValidationError as error:
                place, problem = problem_in(error)
                raise self._damaged(f"{split}.json", f"{place}: {problem}") from error
            self._heads[split] = head, hashlib.sha256(text).hexdigest()[:16]
        return self._heads[split]

    def _table(self, split: str, head: PackHead) -> np.ndarray:
        """A split's index, of :data:`PICTURE`; on a disk the pages of the file, which all processes share.

        Raises:
            UserError: no such file, or not the one that was packed.
        """
        name = f"{split}.index"
        try:
            if is_url(self.root):
                table = np.frombuffer(self._file(name), PICTURE)
            else:
                with open_regular(Path(self.root, name), LARGEST_DATA) as file:
                    table = np.memmap(file, PICTURE, mode="r")
            if hashlib.sha256(table.view(np.uint8).data).hexdigest() != head.index:
                raise ValueError(f"it is not the one that {split}.json was written with")
            check_table(table, len(head.shards), len(head.classes))
        except (OSError, ValueError) as error:
            raise self._damaged(name, error) from error
        return table

    def _damaged(self, name: str, error: object) -> UserError:
        """The error, for the caller to raise, of a file of the pack that ``error`` says something of."""
        return UserError(f"data.source.root: {self.root}/{name} is damaged: {str(error)[:160]}")

    def _file(self, name: str) -> bytes:
        """The content of a file of the pack that says where pictures are.

        Raises:
            UserError: no such file, it can't be fetched, or it is larger than :data:`LARGEST_LIST`.
        """
        try:
            return small_file(f"{self.root}/{name}", LARGEST_LIST)
        except FileNotFoundError as error:
            raise UserError(
                f"data.source.root: {self.root} is not a finished pack: no {name} (Shards reads what kd-pack writes)"
            ) from error
        except Exception as error:  # the object stores' clients raise many kinds
            raise UserError(f"data.source.root: {self.root}: {first_line(error)}") from error

    def has(self, split: str) -> bool:
        """Whether the split's ``SPLIT.json`` is there."""
        files, path = file_system(self.root)
        with in_one_line(f"data.source.root: {self.root}"):
            return bool(files.exists(f"{path}/{split}.json"))


def check_table(table: np.ndarray, shards: int, classes: int) -> None:
    """Refuses an index that names a place outside its shards, or an unknown class.

    Args:
        table: of :data:`PICTURE`.
        shards: how many there are.
        classes: likewise; 0: pictures without labels.

    Raises:
        ValueError: names the first such picture.
    """
    if not len(table):
        raise ValueError("it names no pictures")
    bounds = {
        "shard": (0, shards - 1),
        "offset": (0, LARGEST_OFFSET - 1),
        "size": (1, MAX_BYTES),
        "target": (0, classes - 1) if classes else (UNLABELLED, UNLABELLED),
    }
    for name, (first, last) in bounds.items():
        numbers = table[name]
        is_wrong = (numbers < first) | (numbers > last)
        if not is_wrong.any():
            continue
        i = int(is_wrong.argmax())
        if name == "target":
            raise ValueError(f"target {i} must be a class id, {first} to {last}, got {numbers[i]}")
        raise ValueError(f"sample {i} lies at no place in {shards} shard(s): {table[i]}")


class ShardSplit:
    """One split of a pack. ``kd-pack`` has decoded its pictures: ``check`` reads headers, and nothing by URL.

    Args:
        root: folder or URL of the pack.
        shards: names of its shards.
        table: of each picture at least the fields ``shard``, ``offset`` and ``size``, see :data:`PICTURE`; checked.
        targets: class ids, ``(N,)``.
        digest: a hash of the pack's index.
    """

    def __init__(
        self,
        root: str,
        shards: list[str],
        table: np.ndarray,
        targets: np.ndarray,
        digest: str,
    ) -> None:
        """Takes an index that was checked (:func:`check_table`); shards are opened, and copied, when they are read. The
        arguments are the class's.
        """
        self.root = root
        self.digest = digest
        self.shards = shards
        self.samples = table[["shard", "offset", "size"]]
        self.targets = Column(targets)
        self.check: str | None = "off" if is_url(root) else "headers"
        # by process and shard, the newest last
        self._open: dict[tuple[int, int], io.BufferedReader] = {}
        self._paths: dict[int, Path] = {}  # on this machine, by shard

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}, "_paths": {}}

    def read(self, i: int) -> bytes:
        """The encoded picture ``i``, from its bytes in the shard.

        Raises:
            OSError: they can't be read.
            UserError: the shard can't be fetched.
        """
        return self._read(*self.samples[i].tolist())

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        """``size`` bytes of the shard number ``shard`` from ``offset`` on; each process holds the :data:`MOST_OPEN` shards
        open that it read last.

        Raises:
            OSError: the shard ends before, or can't be opened.
            UserError: it can't be fetched.
        """
        key = (os.getpid(), shard)
        # A file is closed once neither this table nor a thread that reads it has it.
        file = self._open.pop(key, None)
        if file is None:
            file = open_regular(self._path(shard), LARGEST_DATA)
        self._open[key] = file
        for old in list(self._open)[:-MOST_OPEN]:
            self._open.pop(old, None)
        data = os.pread(file.fileno(), size, offset)
        if len(data) != size:
            raise OSError("the shard is truncated")
        return data

    def _path(self, shard: int) -> Path:
        """Where a shard lies on this machine; of a pack at a URL, the path of the shard's copy.

        The copy is brought up to date when this object first needs it. A forked process uses the paths that its parent has
        found.

        Raises:
            UserError: it can't be fetched.
        """
        if not is_url(self.root):
            return Path(self.root, self.shards[shard])
        if shard not in self._paths:
            self._paths[shard] = fetched(f"{self.root}/{self.shards[shard]}", "data.source.root")
        return self._paths[shard]

    def target(self, i: int) -> Target:
        """The class id of the picture ``i``; -1 without a label."""
        return self.targets[i]

    def name(self, i: int) -> str:
        """Shard and place of picture ``i``, with the index's digest: no two packs share a name."""
        return f"{self.root}/{self.key(i)}"

    def key(self, i: int) -> str:
        """Where it lies in the pack, and the pack's content: the same for every copy of the pack."""
        shard, offset, size = self.samples[i].tolist()
        return f"{self.shards[shard]}@{offset}+{size} ({self.digest})"

    def stamp(self, i: int) -> str:
        """Size and time of change of its shard on a disk; nothing of one fetched, whose copy is kept as it is."""
        return self._stamps[self.samples["shard"][i]]

    @cached_property
    def _stamps(self) -> list[str]:
        """The stamp of each shard, size and time of its last change; "" of one at a URL, whose index names its content."""
        files = [str(Path(self.root, shard)) for shard in self.shards]
        return [stamp_of_file(file).removesuffix("\0") for file in files]
