"""The source ``Shards``: tar shards (WebDataset's layout) on a disk or in an object store.

A pack is a folder, or any URL that fsspec knows (``s3://bucket/food``), with ``train-00000.tar``, ... and one index a
split, ``train.json``, written last. The index says where in which shard a picture's bytes are, so pictures are read in
any order: order, views and resume are those of every other source. Of a remote pack nothing is fetched but the ranges
that pictures lie in, when they are wanted; they are kept in the user's cache folder (``cache_gb``).
"""

import hashlib
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from kd.data.info import Target
from kd.data.sources.base import Source, Split, cache_bytes_of
from kd.data.sources.files import UNLABELLED
from kd.data.sources.labels import doubts, unused
from kd.data.sources.places import expanded
from kd.data.targets import Masks, Targets
from kd.errors import UserError, first_line
from kd.machine import cache_dir
from kd.storage.decoding import MAX_BYTES
from kd.storage.elsewhere import LARGEST_DATA, json_of, open_descriptor
from kd.storage.objects import Ranged, file_system, in_one_line, is_url, small_file

INDEX_LISTS = ("classes", "shards", "samples", "targets", "checksums")
"""The lists that a pack's index must hold."""
LARGEST_OFFSET = 2**60
"""Bytes; an index that names a larger place in a shard is refused."""


class Shards(Source):
    """A pack made by ``kd-pack``, on a disk or in an object store (extra ``stream``).

    Args:
        root: its folder or URL. An S3 endpoint and credentials are taken from the usual ``AWS_*`` variables.
        cache_gb: of a remote pack at most so much is kept on the local disk, of all processes together; what was used
            longest ago goes. Default: all that was read.
    """

    def __init__(self, root: str, cache_gb: float | None = None) -> None:
        """Expands ``~`` in the root; the arguments are the class's. No index is read yet."""
        self.cache_bytes = cache_bytes_of(cache_gb)
        self.root = expanded(root).rstrip("/")
        self._indices: dict[str, tuple[dict[str, Any], str]] = {}  # content and hash by split

    def load(self, split: str) -> Split:
        """Reads a split's index; the classes become the source's. Shards are not opened.

        Raises:
            UserError: no index or a damaged one, other classes than those of ``train``, or a shard on this disk that is
                missing or shorter than its index says.
        """
        index, digest = self._index(split)
        training_index = index
        if split != "train" and self.has("train"):
            training_index, _ = self._index("train")
        self.classes = list(training_index["classes"])  # ids are those of the training pictures
        if index["classes"] != self.classes:
            raise UserError(
                f"data.source.root: {self.root}/{split}.json lists other classes than train.json; pack "
                "both splits again (kd-pack)"
            )
        if self.classes and "masks" not in training_index:
            self.note(*doubts(self.classes))
            self.note(*unused(self.classes, training_index["targets"]))
        shard_split = ShardSplit(self.root, index, digest, self.cache_bytes)
        if not is_url(self.root):
            self._check_sizes(shard_split)
        return shard_split

    def _check_sizes(self, split: "ShardSplit") -> None:
        """Refuses a shard on this disk that is missing, or shorter than the split's index says."""
        for shard, end in split.ends().items():
            file = Path(self.root, shard)
            size = 0
            if file.is_file():
                size = file.stat().st_size
            if size < end:
                raise UserError(
                    f"data.source.root: {self.root}/{shard} has {size} bytes, its index says {end} or more"
                )

    @property
    def kind(self) -> Targets:  # type: ignore[override]
        """Masks where the training index has them, else class ids; the first use reads the index."""
        if "masks" in self._index("train")[0]:
            return Masks()
        return Targets()

    @property
    def ignore_index(self) -> int | None:  # type: ignore[override]
        """The value of a mask's pixels that take no part; None without masks or such a value."""
        index, _ = self._index("train")
        value: int | None = index.get("ignore_index")
        return value

    def _index(self, split: str) -> tuple[dict[str, Any], str]:
        """A split's index (:func:`kd.data.pack.pack` says what it holds), and a hash of it, 16 hex digits; read once.

        Raises:
            UserError: no index, a damaged one, or one that can't be fetched.
        """
        if split in self._indices:
            return self._indices[split]
        files, path = file_system(self.root)
        try:
            text = small_file(files, f"{path}/{split}.json", f"{self.root} can't be read")
            index = json_of(text)
            check_index(index)
        except FileNotFoundError as error:
            raise UserError(
                f"data.source.root: {self.root} is not a finished pack: no {split}.json"
            ) from error
        except ValueError as error:
            raise UserError(
                f"data.source.root: {self.root}/{split}.json is damaged: {str(error)[:160]}"
            ) from error
        except Exception as error:  # the object stores' clients raise many kinds
            raise UserError(f"data.source.root: {self.root}: {first_line(error)}") from error
        digest = hashlib.sha256(text).hexdigest()[:16]
        self._indices[split] = index, digest
        return index, digest

    def has(self, split: str) -> bool:
        """Whether the split's index, ``SPLIT.json``, is there."""
        files, path = file_system(self.root)
        with in_one_line(f"data.source.root: {self.root}"):
            return bool(files.exists(f"{path}/{split}.json"))


def check_index(index: object) -> None:
    """Refuses an index that is not as ``kd-pack`` writes it: it may come from anywhere, and names files.

    Raises:
        ValueError: the first thing that is wrong, in one line.
    """
    if not isinstance(index, dict) or not all(isinstance(index.get(k), list) for k in INDEX_LISTS):
        raise ValueError(f"it must hold the lists {', '.join(INDEX_LISTS)}")
    classes = index["classes"]
    shards = index["shards"]
    samples = index["samples"]
    targets = index["targets"]
    if not all(isinstance(name, str) for name in classes):
        raise ValueError("classes must be names")
    for shard in shards:
        if not isinstance(shard, str) or not re.fullmatch(r"[\w.-]+\.tar", shard):
            raise ValueError(f"a shard is a file's plain name (NAME.tar), got {shard!r}")
    checksums = index["checksums"]
    if len(checksums) != len(shards):
        raise ValueError(
            f"checksums must be one for each of {len(shards)} shard(s), got {len(checksums)}"
        )
    if not samples or len(samples) != len(targets):
        raise ValueError(
            f"samples and targets must be equally many, >= 1, got {len(samples)} and {len(targets)}"
        )
    _check_masks(index.get("masks"), len(samples), index.get("ignore_index"))
    if classes:
        class_ids = range(len(classes))
    else:
        class_ids = range(UNLABELLED, UNLABELLED + 1)
    for i in range(len(samples)):
        _check_sample(i, samples[i], targets[i], len(shards), class_ids)


def _check_masks(masks: object, count: int, ignored: object) -> None:
    """Refuses places of masks, or a value of ignored pixels, that are not as ``kd-pack`` writes them.

    Args:
        masks: offset and size of each, as the index has them; None without masks.
        count: of the pictures.
        ignored: the value of ignored pixels, or None.

    Raises:
        ValueError: says what is wrong.
    """
    if masks is not None:
        is_list = isinstance(masks, list) and len(masks) == count
        if not is_list or not all(map(_is_place, masks)):  # type: ignore[call-overload]
            raise ValueError(f"masks must be a place for each of {count} samples")
    if ignored is not None:
        is_value = type(ignored) is int and 0 <= ignored <= 255
        if not is_value:
            raise ValueError(f"ignore_index must be a value of a mask, 0 to 255, got {ignored!r}")


def _check_sample(i: int, sample: object, target: object, shards: int, class_ids: range) -> None:
    """Refuses the sample number ``i``, by a ValueError, unless it is [shard, offset, size] and has one of the class ids.

    Args:
        i: its number, for the message.
        sample: its place, from the index.
        target: its class id, likewise.
        shards: how many the pack has.
        class_ids: those that the index may hold; -1 alone without classes.
    """
    if not _are_integers(sample, 3):
        raise ValueError(f"sample {i} must be three whole numbers, got {sample!r}")
    shard_number, *place = sample
    if not 0 <= shard_number < shards or not _is_place(place):
        raise ValueError(f"sample {i} lies at no place in {shards} shard(s): {sample}")
    if type(target) is not int or target not in class_ids:
        raise ValueError(
            f"target {i} must be a class id, {class_ids[0]} to {class_ids[-1]}, got {target!r}"
        )


def _are_integers(value: object, count: int) -> TypeGuard[list[int]]:
    """Whether a value of JSON is a list of ``count`` whole numbers."""
    if not isinstance(value, list) or len(value) != count:
        return False
    return all(type(number) is int for number in value)


def _is_place(value: object) -> bool:
    """Whether a value of JSON is [offset, size] of a picture in a shard, in bytes."""
    if not _are_integers(value, 2):
        return False
    offset, size = value
    return 0 <= offset < LARGEST_OFFSET and 0 < size <= MAX_BYTES


class ShardSplit:
    """One split of a pack. ``kd-pack`` has decoded its pictures: ``check`` reads headers, and nothing by URL.

    Args:
        root: folder or URL of the pack.
        index: the content of the split's index.
        digest: a hash of it.
        cache_bytes: most bytes of a URL's copies on this disk; None: all may be kept.
    """

    def __init__(
        self, root: str, index: dict[str, Any], digest: str, cache_bytes: int | None = None
    ) -> None:
        """Takes an index that was checked (:func:`check_index`); shards are opened when they are first read. The arguments
        are the class's; ``digest`` also names the folder of a URL's copies.
        """
        self.root = root
        self.digest = digest
        self.shards: list[str] = index["shards"]
        self.samples: list[list[int]] = index["samples"]  # shard, offset, size
        self.targets: list[int] = index["targets"]
        # Offset and size of each mask, in the shard of its picture.
        self.masks: list[list[int]] | None = index.get("masks")
        self.check: str | None = "headers"
        self._open: dict[tuple[int, int], int] = {}  # (process, shard) -> descriptor
        self._remote: Ranged | None = None
        if is_url(root):
            self.check = "off"
            name = f"{Path(root).name}-{digest}"
            folder = cache_dir() / "shards" / name
            total_bytes = sum(self.ends().values())
            self._remote = Ranged(root, folder, total_bytes, cache_bytes)

    def read(self, i: int) -> bytes:
        """The encoded picture ``i``, from its bytes in the shard.

        Raises:
            OSError: they can't be read.
        """
        return self._read(*self.samples[i])

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        """``size`` bytes of the shard number ``shard`` from ``offset`` on; each process opens a shard once, and for good.

        Raises:
            OSError: the shard ends before, or can't be opened or fetched.
        """
        if self._remote is not None:
            return self._remote.read(self.shards[shard], offset, size)
        process_and_shard = (os.getpid(), shard)
        if process_and_shard not in self._open:
            file = Path(self.root, self.shards[shard])
            self._open[process_and_shard] = open_descriptor(file, LARGEST_DATA)
        data = os.pread(self._open[process_and_shard], size, offset)
        if len(data) != size:
            raise OSError("the shard is truncated")
        return data

    def target(self, i: int) -> Target:
        """The class id of the picture ``i`` (-1 without a label); where the pack has masks its mask, uint8 ``(1, H, W)``.

        Raises:
            RuntimeError: the mask is damaged.
            OSError: it can't be read.
        """
        if self.masks is None:
            return self.targets[i]
        from torchvision import tv_tensors

        from kd.data.pictures import decode_grey

        shard = self.samples[i][0]
        offset, size = self.masks[i]
        content = self._read(shard, offset, size)
        return tv_tensors.Mask(decode_grey(content))

    def name(self, i: int) -> str:
        """Shard and place of picture ``i``, with the index's digest: no two packs share a name."""
        return f"{self.root}/{self.key(i)}"

    def key(self, i: int) -> str:
        """Where it lies in the pack, and the pack's content: the same for every copy of the pack."""
        shard, offset, size = self.samples[i]
        return f"{self.shards[shard]}@{offset}+{size} ({self.digest})"

    def stamp(self, i: int) -> str:
        """Size and time of change of its shard on a disk; nothing of one fetched, whose copy is kept as it is."""
        return self._stamps[self.samples[i][0]]

    @cached_property
    def _stamps(self) -> list[str]:
        """The stamp of each shard, size and time of its last change; "" at a URL, whose index names its content."""
        if is_url(self.root):
            return [""] * len(self.shards)
        stamps = []
        for shard in self.shards:
            stat = Path(self.root, shard).stat()
            stamps.append(f"{stat.st_size}\0{stat.st_mtime_ns}")
        return stamps

    def ends(self) -> dict[str, int]:
        """By the shard's name, where the last picture or mask of this split ends in it, in bytes."""
        ends: dict[str, int] = {}
        for i, (shard_number, offset, size) in enumerate(self.samples):
            end = offset + size
            if self.masks is not None:
                mask_offset, mask_size = self.masks[i]
                end = max(end, mask_offset + mask_size)
            shard = self.shards[shard_number]
            ends[shard] = max(end, ends.get(shard, 0))
        return ends
