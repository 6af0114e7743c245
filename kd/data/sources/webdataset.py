"""The source ``WebDataset``: tar shards as others have made them, read where they lie.

A sample is the members of one shard with the same name up to the first dot after the last slash. The headers of a shard
are read once; where each picture lies, and its label, is kept in the user's cache folder.
"""

import glob
import hashlib
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from kd.data.label_text import plain_label
from kd.data.once import once
from kd.data.sources.arrays import Names
from kd.data.sources.base import Source
from kd.data.sources.files import said
from kd.data.sources.labels import is_number, numbered
from kd.data.sources.places import IMAGE_SUFFIXES, expanded, stamp_of_file
from kd.data.sources.shards import PICTURE, ShardSplit
from kd.data.sources.split_names import split_of
from kd.errors import UserError
from kd.machine import cache_dir
from kd.progress import bar
from kd.storage.archives import members_of, opened
from kd.storage.decoding import MAX_BYTES
from kd.storage.elsewhere import LARGEST_DATA, json_of, matching, open_regular
from kd.storage.objects import is_url

LABELS = ("cls", "json", "txt")
"""Endings of a sample's files that may hold its label."""
MAX_LABEL = 2**20  # bytes of a member that holds a label
MOST_SHARDS = 1_000_000
FORMAT = 4  # of an index in the user's cache folder


class Shard(NamedTuple):
    """What a tar file holds: of each sample with a picture, in order, the picture's name, place and label."""

    names: list[str]
    places: list[list[int]]
    """First byte and size of each picture."""
    labels: list[str]
    """"" without one."""
    left_out: dict[str, int]
    """Of samples without a readable picture, how many files there are by ending, but for those of labels; "no picture"
    counts the samples that have files of labels alone.
    """


class WebDataset(Source):
    """Tar shards in WebDataset's layout, made by anyone: ``KEY.jpg`` beside ``KEY.cls``, ``KEY.json`` or ``KEY.txt``.

    Nothing is converted, and pictures are read in any order: order, views and resume are those of every other source.
    Class ids are the places in ``classes``; without it, of the training shards' labels sorted, by value where all are
    whole numbers.

    Args:
        train: the training shards: a folder of ``*.tar``, a pattern (``DIR/train-{0000..0146}.tar``, ``DIR/*.tar``), or a
            list of these.
        val: likewise; without them a part of the training pictures is held out (``data.val_fraction``).
        label: the member with the label: ``cls``, ``txt`` or ``json.FIELD``; ``none`` reads pictures alone.
        classes: names by class id, where the labels are numbers.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | None = None,
        label: str = "cls",
        classes: list[str] | None = None,
    ) -> None:
        """Checks ``label`` (a ValueError for any other); the arguments are the class's. No shard is read yet."""
        if not re.fullmatch(r"none|cls|txt|json\..+", label):
            raise ValueError(f"label must be cls, txt, json.FIELD or none, got '{label}'")
        self.places: dict[str, list[str]] = {}
        for split, given in (("train", train), ("val", val)):
            if given:
                places = [given] if isinstance(given, str) else given
                self.places[split] = list(map(expanded, places))
        self.label = label
        self.names = [plain_label(name) for name in classes] if classes else None
        self._shards: dict[str, dict[str, Shard]] = {}  # by split

    def check_there(self) -> None:
        """Refuses places without shards; none is read."""
        for split in self.places:
            self._files(split)

    def load(self, split: str) -> "TarSplit":
        """See :meth:`Source.load`.

        Raises:
            UserError: no such split, or labels that are missing, unknown or not clear.
        """
        train = self._labels("train")
        shards = self._read(split)
        names = [f"{name} in {file}" for file, shard in shards.items() for name in shard.names]
        pictures = zip(names, self._labels(split), strict=True)
        remedy = "data.source.label=none"
        found = numbered(pictures, train, f"data.source.{split}", remedy, self.names)
        self.classes = found.classes
        self.note(*found.notes)
        return TarSplit(shards, found.ids)

    def _labels(self, split: str) -> list[str]:
        """The label of each sample as all sources write it, "" without one; the name of a class where its id is given."""
        labels = [
            plain_label(label) for shard in self._read(split).values() for label in shard.labels
        ]
        names = dict(enumerate(self.names or []))
        return [names.get(int(label), label) if is_number(label) else label for label in labels]

    def has(self, split: str) -> bool:
        """Whether shards were given for the split."""
        return split in self.places

    def describe(self) -> str:
        """Where the training shards are."""
        return f"WebDataset {', '.join(self.places['train'])}"

    def _files(self, split: str) -> list[str]:
        """Paths of the shards of a split that was given.

        Raises:
            UserError: a split that was not given, or as of :func:`shards_at`.
        """
        if split not in self.places:
            raise UserError(
                f"split: WebDataset has the splits {', '.join(self.places)}, got '{split}'"
            )
        key = f"data.source.{split}"
        return [file for place in self.places[split] for file in shards_at(place, key)]

    def _read(self, split: str) -> dict[str, Shard]:
        """What the shards of a split hold, by path; read once.

        Raises:
            UserError: no such split, no shards, or no pictures in them.
        """
        if split not in self._shards:
            key = f"data.source.{split}"
            files = self._files(split)
            with_bar = bar(files, label=f"{split}: index of the shards", unit=" shards")
            shards = {file: index(file, self.label, key) for file in with_bar}
            if not any(shard.names for shard in shards.values()):
                raise UserError(
                    f"{key}: no pictures in {len(shards)} shard(s) ({', '.join(IMAGE_SUFFIXES)})"
                    f"{said(_left_out(shards))}"
                )
            self._shards[split] = shards
        return self._shards[split]


class TarSplit(ShardSplit):
    """A split of shards that have no index of their own.

    Args:
        shards: by path.
        targets: class ids of all samples in the order of the shards; -1 without labels.
    """

    def __init__(self, shards: dict[str, Shard], targets: np.ndarray) -> None:
        """Takes the samples of all shards in order; the arguments are the class's."""
        self.names = Names(name for shard in shards.values() for name in shard.names)
        rows = [
            (number, *place, 0)
            for number, shard in enumerate(shards.values())
            for place in shard.places
        ]
        super().__init__("", list(shards), np.array(rows, PICTURE), targets, digest="")
        self.sizes = self.samples["size"]
        self.left_out = _left_out(shards)
        self.check = None  # nobody has looked at the pictures yet

    def name(self, i: int) -> str:
        """Shard and member of picture ``i``."""
        return f"{self.shards[self.samples[i][0]]}/{self.names[i]}"

    def key(self, i: int) -> str:
        """Its name and its shard's stamp: nothing else says what an unpacked shard holds."""
        return f"{self.name(i)}\0{self.stamp(i)}"


def _left_out(shards: dict[str, Shard]) -> dict[str, int]:
    """As :attr:`Shard.left_out`, of all shards together."""
    counts: Counter[str] = Counter()
    for shard in shards.values():
        counts.update(shard.left_out)
    return dict(counts)


# -- which files a place names -----------------------------------------------------------------------------------------
def shards_at(place: str, key: str) -> list[str]:
    """Paths of the tar files that a folder or a pattern names, in order.

    A pattern has numbers in braces (:func:`braces`), and ``*``, ``?``, ``[]`` and ``**`` as of
    :func:`~kd.storage.elsewhere.matching`.

    Raises:
        UserError: no tar files, a missing one, a URL, or a folder with shards whose names mean several splits, or for
            ``data.source.train`` another split.
    """
    if is_url(place) or place.startswith("pipe:"):
        raise UserError(
            f"{key}: {place} is not on a disk; copy the shards there, or pack them (kd-pack)"
        )
    if Path(place).is_dir():
        place = f"{glob.escape(place)}/*.tar"
        meant = {split_of(Path(file).stem) for file in matching(place)} - {None}
        if len(meant) > 1 or (key == "data.source.train" and meant - {"train"}):
            names = ", ".join(sorted(map(str, meant)))
            raise UserError(
                f"{key}: {Path(place).parent} has shards of {names}; patterns say which are read: "
                "data.source.train='DIR/train-*.tar' data.source.val='DIR/val-*.tar'"
            )
    files: list[str] = []
    for name in braces(place, key):
        files += matching(name) if glob.has_magic(name) else [name]
    missing = next((file for file in files if not Path(file).is_file()), None)
    if missing is not None:
        raise UserError(f"{key}: {missing} not found")
    if not files:
        raise UserError(f"{key}: no tar files: {place}")
    return files


def braces(pattern: str, key: str = "") -> list[str]:
    """A pattern's names, as a shell writes numbers in braces; a UserError with ``key`` refuses more than
    :data:`MOST_SHARDS`.

    >>> braces("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    >>> braces("{0..1}/{5..6}")
    ['0/5', '0/6', '1/5', '1/6']
    """
    start, *rest = re.split(r"\{(\d{1,9})\.\.(\d{1,9})\}", pattern, maxsplit=1)
    if not rest:
        return [pattern]
    first, last, end = rest
    width = len(first) if first.startswith("0") else 1
    numbers = range(int(first), int(last) + 1)
    ends = braces(end, key)
    if len(numbers) * len(ends) > MOST_SHARDS:
        raise UserError(f"{key}: {pattern[:200]} must name at most {MOST_SHARDS:,} shards")
    return [f"{start}{number:0{width}d}{end}" for number in numbers for end in ends]


# -- what a shard holds ------------------------------------------------------------------------------------------------
def index(shard: str, label: str, key: str) -> Shard:
    """What a shard holds, read by one process of a machine (:func:`~kd.data.once.once`), again where the shard (path, size,
    time) or ``label`` has changed.

    Args:
        shard: path of the tar file.
        label: the setting of :class:`WebDataset`, which decides what is read as the label.
        key: the setting that names the shard, for messages.

    Raises:
        UserError: not a tar file, a compressed or a truncated one, one that holds a member twice or two pictures in a
            sample, one in which no sample has the member that ``label`` names, or a label that can't be read.
    """
    place = Path(shard).resolve()
    facts = f"{place}\0{stamp_of_file(shard)}{label}\0{FORMAT}"
    encoded = facts.encode(errors="surrogateescape")
    digest = hashlib.sha256(encoded).hexdigest()[:32]
    file = cache_dir() / "webdataset" / f"{digest}.json"
    read = partial(_read, shard, label, key)
    return once(file, TypeAdapter(Shard), read)


def _read(shard: str, label: str, key: str) -> Shard:
    """What a shard holds, from its headers and its labels; arguments and errors as of :func:`index`."""
    left_out: Counter[str] = Counter()
    content = Shard([], [], [], left_out)
    ending, _, field = label.partition(".")
    kinds: set[str] = set()
    with open_regular(shard, LARGEST_DATA) as stream:
        for name, members in _members(shard, key).items():
            pictures = [kind for kind in members if f".{kind}".endswith(IMAGE_SUFFIXES)]
            if len(pictures) > 1:
                raise UserError(
                    f"{key}: {name} in {shard} has several pictures: {', '.join(pictures)}"
                )
            if not pictures:
                others = [f".{kind}" for kind in members if kind not in LABELS]
                left_out.update(others or ["no picture"])
                continue
            kinds |= members.keys()
            found = ""
            if ending in members:
                start, size = members[ending]
                where = f"{ending} of {name} in {shard}"
                if size > MAX_LABEL:
                    raise UserError(f"data.source.label: the {where} is no label: {size:,} bytes")
                stream.seek(start)
                found = _label(stream.read(size), field, where)
            content.names.append(f"{name}.{pictures[0]}")
            content.places.append([*members[pictures[0]]])
            content.labels.append(found)
    if kinds and ending not in kinds | {"none"}:
        raise UserError(
            f"data.source.label: no sample of {shard} has '{ending}' (they have {', '.join(sorted(kinds))[:120]}); "
            "data.source.label=cls, txt, json.FIELD or none says which"
        )
    return content


def _label(content: bytes, field: str, where: str) -> str:
    """A sample's label from the member that has it, "" for an empty one; ``field``: of JSON.

    Raises:
        UserError: it is no text, no JSON, has no such field, or holds a list or an object; names ``where``.
    """
    try:
        found: Any = content.decode().strip()
        if field:
            found = json_of(found)
    except ValueError as error:
        raise UserError(f"data.source.label: the {where} can't be read") from error
    if field and isinstance(found, dict):
        if field not in found:
            has = ", ".join(found)[:120]
            raise UserError(
                f"data.source.label: the {where} has no '{field}'; it has {has} (data.source.label=json.FIELD)"
            )
        found = found[field]
    if isinstance(found, list | dict):
        raise UserError(
            f"data.source.label: the {where} holds no single label, but {type(found).__name__}"
        )
    return "" if found is None else str(found)


def _members(shard: str, key: str) -> dict[str, dict[str, tuple[int, int]]]:
    """(first byte, bytes) of each member, by the sample's name, then by what follows its first dot, in lower case.

    Members without a dot, or with nothing before or after it, are passed over.

    Raises:
        UserError: the shard is no uncompressed tar file, is truncated, or holds a member twice.
    """
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    shard_size = Path(shard).stat().st_size
    with opened(Path(shard), f"{key}: {shard}", compressed=False) as tar:
        for member in members_of(tar):
            found = re.fullmatch(r"((?:.*/)?[^/.]+)\.([^/]+)", member.name, re.DOTALL)
            if found is None or member.issparse() or not member.isreg():
                continue
            if member.offset_data + member.size > shard_size or member.size > MAX_BYTES:
                raise UserError(f"{key}: {shard} is truncated: it ends within {member.name}")
            members = samples.setdefault(found[1], {})
            kind = found[2].lower()
            if kind in members:
                raise UserError(f"{key}: {shard} holds {member.name} twice")
            members[kind] = member.offset_data, member.size
    return samples
