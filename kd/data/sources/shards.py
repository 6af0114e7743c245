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
from typing import Any

from torchvision import tv_tensors

from kd.data.batch import Target
from kd.data.pictures import MAX_BYTES, decode_grey
from kd.data.sources.base import Source, Split, bytes_of
from kd.data.sources.files import UNLABELLED
from kd.data.sources.labels import doubts, unused
from kd.data.sources.places import expanded
from kd.data.targets import Masks, Targets
from kd.errors import UserError, first_line
from kd.machine import cache_dir
from kd.storage.elsewhere import LARGEST_DATA, json_of, open_descriptor
from kd.storage.objects import Ranged, file_system, in_one_line, is_url, small_file

INDEX_LISTS = ("classes", "shards", "samples", "targets")


class Shards(Source):
    """A pack made by ``kd-pack``, on a disk or in an object store (extra ``stream``).

    Args:
        root: its folder or URL. An S3 endpoint and credentials are taken from the usual ``AWS_*`` variables.
        cache_gb: of a remote pack at most so much is kept on the local disk, of all processes together; what was used
            longest ago goes. Default: all that was read.
    """

    def __init__(self, root: str, cache_gb: float | None = None) -> None:
        self.cache_bytes = bytes_of(cache_gb)
        self.root = expanded(root).rstrip("/")
        self._indices: dict[str, tuple[dict[str, Any], str]] = {}

    def load(self, split: str) -> Split:
        """Reads a split's index; the classes become the source's.

        Raises:
            UserError: no index or a damaged one, or a shard on this disk that is shorter than its index says.
        """
        index, digest = self._index(split)
        training = self._index("train")[0] if split != "train" and self.has("train") else index
        self.classes = list(training["classes"])  # ids are those of the training pictures
        if index["classes"] != self.classes:
            raise UserError(
                f"data.source.root: {self.root}/{split}.json lists other classes than train.json; pack "
                "both splits again (kd-pack)"
            )
        if self.classes and "masks" not in training:
            self.note(*doubts(self.classes), *unused(self.classes, training["targets"]))
        found = ShardSplit(self.root, index, digest, self.cache_bytes)
        for shard, end in found.ends().items() if not is_url(self.root) else ():
            size = Path(self.root, shard).stat().st_size if Path(self.root, shard).is_file() else 0
            if size < end:
                raise UserError(
                    f"data.source.root: {self.root}/{shard} has {size} bytes, its index says {end} or more"
                )
        return found

    @property
    def kind(self) -> Targets:  # type: ignore[override]
        """Masks where the training index has them, else class ids."""
        return Masks() if "masks" in self._index("train")[0] else Targets()

    @property
    def ignore_index(self) -> int | None:  # type: ignore[override]
        """The value of a mask's pixels that take no part."""
        found: int | None = self._index("train")[0].get("ignore_index")
        return found

    def _index(self, split: str) -> tuple[dict[str, Any], str]:
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
        self._indices[split] = index, hashlib.sha256(text).hexdigest()[:16]
        return self._indices[split]

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
    classes, shards, samples, targets = (index[name] for name in INDEX_LISTS)
    if not all(isinstance(name, str) for name in classes):
        raise ValueError("classes must be names")
    for shard in shards:
        if not (isinstance(shard, str) and re.fullmatch(r"[\w.-]+\.tar", shard)):
            raise ValueError(f"a shard is a file's plain name (NAME.tar), got {shard!r}")
    if not samples or len(samples) != len(targets):
        raise ValueError(
            f"samples and targets must be equally many, >= 1, got {len(samples)} and {len(targets)}"
        )
    masks = index.get("masks")
    if masks is not None and not (
        isinstance(masks, list) and len(masks) == len(samples) and all(map(_is_place, masks))
    ):
        raise ValueError(f"masks must be a place for each of {len(samples)} samples")
    ignored = index.get("ignore_index")
    if ignored is not None and not (type(ignored) is int and 0 <= ignored <= 255):
        raise ValueError(f"ignore_index must be a value of a mask, 0 to 255, got {ignored!r}")
    for i, (sample, target) in enumerate(zip(samples, targets, strict=True)):
        if not (
            isinstance(sample, list) and len(sample) == 3 and all(type(n) is int for n in sample)
        ):
            raise ValueError(f"sample {i} must be three whole numbers, got {sample!r}")
        shard, offset, size = sample
        if not (0 <= shard < len(shards) and 0 <= offset < 2**60 and 0 < size <= MAX_BYTES):
            raise ValueError(f"sample {i} lies at no place in {len(shards)} shard(s): {sample}")
        known = range(len(classes)) if classes else range(UNLABELLED, UNLABELLED + 1)
        if type(target) is not int or target not in known:
            raise ValueError(
                f"target {i} must be a class id, {known[0]} to {known[-1]}, got {target!r}"
            )


def _is_place(given: object) -> bool:
    whole = isinstance(given, list) and len(given) == 2 and all(type(n) is int for n in given)
    return whole and 0 <= given[0] < 2**60 and 0 < given[1] <= MAX_BYTES  # type: ignore[index]


class ShardSplit:
    """One split of a pack. ``kd-pack`` has decoded its pictures: ``check`` reads headers, and nothing by URL.

    Args:
        root: folder or URL of the pack.
        index: the content of the split's index.
        digest: a hash of it.
        cache_bytes: see :class:`Shards`.
    """

    def __init__(
        self, root: str, index: dict[str, Any], digest: str, cache_bytes: int | None = None
    ) -> None:
        self.root, self.digest = root, digest
        self.check: str | None = "off" if is_url(root) else "headers"
        self.sums: list[int] = index.get("checksums", [])
        self.shards: list[str] = index["shards"]
        self.samples: list[list[int]] = index["samples"]  # shard, offset, size
        self.targets: list[int] = index["targets"]
        self.masks: list[list[int]] | None = index.get(
            "masks"
        )  # offset, size: in the shard of the picture
        self._open: dict[tuple[int, int], int] = {}  # (process, shard) -> descriptor
        kept = cache_dir() / "shards" / f"{Path(root).name}-{digest}"
        self._remote = (
            Ranged(root, kept, sum(self.ends().values()), cache_bytes) if is_url(root) else None
        )

    def read(self, i: int) -> bytes:
        """The encoded picture ``i``, from its bytes in the shard.

        Raises:
            OSError: they can't be read.
        """
        return self._read(*self.samples[i])

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        if self._remote is not None:
            return self._remote.read(self.shards[shard], offset, size)
        data = os.pread(self._opened(shard), size, offset)
        if len(data) != size:
            raise OSError("the shard is truncated")
        return data

    def _opened(self, shard: int) -> int:
        key = (os.getpid(), shard)
        if key not in self._open:
            self._open[key] = open_descriptor(Path(self.root, self.shards[shard]), LARGEST_DATA)
        return self._open[key]

    def target(self, i: int) -> Target:
        """The target of the picture ``i``; where the pack has masks its mask, uint8 ``(1, H, W)``."""
        if self.masks is None:
            return self.targets[i]
        return tv_tensors.Mask(decode_grey(self._read(self.samples[i][0], *self.masks[i])))

    def name(self, i: int) -> str:
        """Shard and place of picture ``i``, with the index's digest: no two packs share a name."""
        shard, offset, size = self.samples[i]
        return f"{self.root}/{self.shards[shard]}@{offset}+{size} ({self.digest})"

    def key(self, i: int) -> str:
        """Where it lies in the pack, and the pack's content: the same for every copy of the pack."""
        shard, offset, size = self.samples[i]
        if not self.sums:  # packed before there were checksums
            return f"{self.name(i)}\0{self.stamp(i)}"
        return f"{self.shards[shard]}@{offset}+{size} ({self.digest})"

    def stamp(self, i: int) -> str:
        """Size and time of change of its shard on a disk; nothing of one fetched, whose copy is kept as it is."""
        return self._stamps[self.samples[i][0]]

    @cached_property
    def _stamps(self) -> list[str]:
        stats = (
            [] if is_url(self.root) else [Path(self.root, shard).stat() for shard in self.shards]
        )
        return [f"{stat.st_size}\0{stat.st_mtime_ns}" for stat in stats] or [""] * len(self.shards)

    def ends(self) -> dict[str, int]:
        """Where the last picture of each shard ends, in bytes."""
        ends: dict[str, int] = {}
        for shard, offset, size in self.samples:
            ends[self.shards[shard]] = max(offset + size, ends.get(self.shards[shard], 0))
        for (shard, _, _), (offset, size) in zip(self.samples, self.masks or [], strict=False):
            ends[self.shards[shard]] = max(offset + size, ends[self.shards[shard]])
        return ends
