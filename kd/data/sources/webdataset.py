"""The source ``WebDataset``: tar shards as others have made them, read where they lie.

A sample is the members of one shard with the same name up to the first dot after the last slash. The headers of a shard
are read once; where each picture lies, and its label, is kept in the user's cache folder.
"""

import glob
import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from filelock import FileLock

from kd.data.label_text import plain_label
from kd.data.sources.arrays import Names
from kd.data.sources.base import Source
from kd.data.sources.files import said
from kd.data.sources.labels import numbered
from kd.data.sources.places import IMAGE_SUFFIXES, expanded
from kd.data.sources.shards import PICTURE, ShardSplit
from kd.data.sources.split_names import split_of
from kd.errors import UserError
from kd.machine import cache_dir
from kd.progress import bar
from kd.storage.archives import opened
from kd.storage.decoding import MAX_BYTES
from kd.storage.elsewhere import (
    LARGEST_DATA,
    LARGEST_LIST,
    json_of,
    matching,
    open_regular,
    text_of,
)
from kd.storage.writing import write_text

LABELS = ("cls", "json", "txt")
"""Endings of a sample's files that may hold its label."""
MAX_LABEL = 2**20  # bytes of a member that holds a label
CAPTIONS = 0.5
"""Texts of which more than this share are different, and more than 1,000, are captions: they name no classes."""
MOST_SHARDS = 1_000_000
FORMAT = 3  # of an index in the user's cache folder


class Shard(NamedTuple):
    """What a tar file holds: of each sample with a picture, in order, the picture's name, place and label."""

    names: list[str]
    places: list[list[int]]
    """First byte and size of each picture."""
    labels: list[str | None]
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
            list of these. Of a folder with shards of several splits
            (``train-0000.tar``, ``val/0000.tar``) each split's are taken.
        val: likewise; without them a part of the training pictures is held out (``data.val_fraction``).
        label: the member with the label: ``cls``, ``txt``, ``json.FIELD``; ``none`` reads pictures alone; default:
            ``cls``, else ``json.label``, else ``txt``.
        classes: names by class id, where the labels are numbers.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | None = None,
        label: str = "auto",
        classes: list[str] | None = None,
    ) -> None:
        """Checks ``label``; the arguments are the class's. No shard is read yet."""
        if label not in ("auto", "none", "cls", "txt") and not re.fullmatch(r"json\..+", label):
            raise ValueError(f"label must be cls, txt, json.FIELD, none or auto, got '{label}'")
        self.places: dict[str, list[str]] = {}
        for split, given in (("train", train), ("val", val)):
            places = given or []
            if isinstance(places, str):
                places = [places]
            if places:
                self.places[split] = list(map(expanded, places))
        self.label = label
        self.names = None
        if classes:
            self.names = list(map(plain_label, classes))
        self._shards: dict[str, dict[str, Shard]] = {}  # by split

    def check_there(self) -> None:
        """Refuses places without shards; none is read."""
        for split in self.places:
            self._files(split)

    def load(self, split: str) -> "TarSplit":
        """See :meth:`Source.load`; a split that was not given is one that the folder of the training shards has.

        Raises:
            UserError: no such split, or labels that are missing, unknown or not clear.
        """
        train = self._labels("train")
        if not any(train) and self.label not in ("auto", "none"):
            raise UserError(f"data.source.label: no sample has '{self.label}'")
        different = len(set(train))
        most = max(1000, CAPTIONS * len(train))
        if self.label in ("auto", "txt") and different > most:
            raise UserError(
                f"data.source.label: {different:,} different labels of {len(train):,} pictures look like captions; "
                "data.source.label=none reads pictures alone"
            )
        shards = self._read(split)
        names = []
        for file, shard in shards.items():
            names += [f"{name} in {file}" for name in shard.names]
        labels = self._labels(split)
        pictures = zip(names, labels, strict=True)
        key = f"data.source.{split}"
        remedy = "data.source.label=none"
        found = numbered(pictures, train, key, remedy, self.names)
        self.classes = found.classes
        self.note(*found.notes)
        return TarSplit(shards, found.ids)

    def _labels(self, split: str) -> list[str]:
        """The label of each sample as all sources write it, "" without one; the name of a class where its id is given."""
        labels = [
            plain_label(label) for shard in self._read(split).values() for label in shard.labels
        ]
        names = dict(enumerate(self.names or []))
        return [names.get(int(label), label) if label.isdecimal() else label for label in labels]

    def has(self, split: str) -> bool:
        """Whether shards were given for the split, or the folder of the training shards has some of it."""
        return split in self.places or bool(self._of_folder(split))

    def describe(self) -> str:
        """Where the training shards are."""
        return f"WebDataset {', '.join(self.places['train'])}"

    # -- which shards ------------------------------------------------------------------------------------------------
    def _files(self, split: str) -> list[str]:
        """Paths of the shards of a split.

        Raises:
            UserError: no such split, or a place without shards.
        """
        key = f"data.source.{split}"
        files = self._of_folder(split)
        if files:
            self.note(f"{split}: {len(files)} shard(s) of the folder, from {Path(files[0]).name}")
            return files
        if split not in self.places:
            raise UserError(f"split: WebDataset has the splits train and val, got '{split}'")
        if files is not None:
            raise UserError(
                f"{key}: {self.places['train'][0]} has shards of other splits and none of {split}; give a pattern of "
                f"those of {split}"
            )
        return [file for place in self.places[split] for file in shards_at(place, key)]

    def _of_folder(self, split: str) -> list[str] | None:
        """The shards of a split in a folder whose names, or folders, tell splits apart; a test split validates where there
        is no validation split. None where they do not, or several places or a pattern were given.

        Raises:
            UserError: some names of shards mean a split and others none.
        """
        first, *others = self.places.get(split, self.places["train"])
        folder = Path(first)
        if others or not folder.is_dir():
            return None
        shards = sorted(folder.glob("*.tar")) or sorted(folder.glob("[!.]*/*.tar"))
        groups: dict[str | None, list[str]] = {}
        for file in shards:
            name = file.stem if file.parent == folder else file.parent.name
            groups.setdefault(split_of(name), []).append(str(file))
        if groups.keys() <= {None} or (len(groups) == 1 and split in self.places):
            return None
        if None in groups:
            raise UserError(
                f"data.source.{split}: {folder} has shards whose names mean a split beside "
                f"{Path(groups[None][0]).name}; data.source.train=PATTERN and data.source.val=PATTERN say which are which"
            )
        wanted = "test" if split == "val" and "val" not in groups else split
        return groups.get(wanted, [])

    def _read(self, split: str) -> dict[str, Shard]:
        """What the shards of a split hold, by path; read once.

        Raises:
            UserError: no shards, or no pictures in them.
        """
        if split not in self._shards:
            key = f"data.source.{split}"
            files = bar(self._files(split), label=f"{split}: index of the shards", unit=" shards")
            shards = {file: index(file, self.label, key) for file in files}
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
        names: list[str] = []
        places: list[list[int]] = []
        numbers: list[int] = []  # of each sample's shard
        for number, shard in enumerate(shards.values()):
            names += shard.names
            places += shard.places
            numbers += [number] * len(shard.names)
        self.names = Names(names)
        starts_and_sizes = np.array(places, np.int64)
        table = np.zeros(len(names), PICTURE)
        table["shard"] = numbers
        table["offset"] = starts_and_sizes[:, 0]
        table["size"] = starts_and_sizes[:, 1]
        files = list(shards)
        super().__init__("", files, table, targets, digest="")
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
        UserError: none, a missing file, or a URL.
    """
    if "://" in place or place.startswith("pipe:"):
        raise UserError(
            f"{key}: {place} is not on a disk; copy the shards there, or pack them (kd-pack)"
        )
    files: list[str] = []
    if Path(place).is_dir():
        place = f"{glob.escape(place)}/*.tar"
    for name in braces(place, key):
        files += matching(name) if glob.has_magic(name) else [name]
    if not files:
        raise UserError(f"{key}: no tar files: {place}")
    for file in files:
        if not Path(file).is_file():
            raise UserError(f"{key}: {file} not found")
    return files


def braces(pattern: str, key: str = "") -> list[str]:
    """A pattern's names, as a shell writes numbers in braces; a UserError with ``key`` refuses more than
    :data:`MOST_SHARDS`.

    >>> braces("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    >>> braces("{0..1}/{5..6}")
    ['0/5', '0/6', '1/5', '1/6']
    """
    # text, first number, last number, text, ...
    parts = re.split(r"\{(\d{1,9})\.\.(\d{1,9})\}", pattern)
    names = [parts[0]]
    for i in range(1, len(parts), 3):
        first, last, text = parts[i : i + 3]
        width = 1
        if first.startswith("0"):
            width = len(first)
        numbers = range(int(first), int(last) + 1)
        if len(names) * len(numbers) > MOST_SHARDS:
            raise UserError(f"{key}: {pattern[:200]} must name at most {MOST_SHARDS:,} shards")
        ends = [f"{number:0{width}d}{text}" for number in numbers]
        longer = []
        for name in names:
            longer += [name + end for end in ends]
        names = longer
    return names


# -- what a shard holds ------------------------------------------------------------------------------------------------
def index(shard: str, label: str, key: str) -> Shard:
    """What a shard holds; from the user's cache folder where the shard (path, size, time) and ``label`` have not changed.

    Every process calls it; one of them reads the headers, under a lock.

    Args:
        shard: path of the tar file.
        label: the setting of :class:`WebDataset`, which decides what is read as the label.
        key: the setting that names the shard, for messages.

    Raises:
        UserError: not a tar file, a compressed or a truncated one, one that holds a member twice or two pictures in a
            sample, or a label that can't be read.
    """
    path = Path(shard)
    stat = path.stat()
    facts = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{label}\0{FORMAT}"
    digest = hashlib.sha256(facts.encode(errors="surrogateescape")).hexdigest()[:32]
    file = cache_dir() / "webdataset" / f"{digest}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):  # one of all processes reads the headers
        try:
            return Shard(**json_of(text_of(file, LARGEST_LIST)))
        except (OSError, ValueError, TypeError):
            content = _read(shard, label, key)
        write_text(file, json.dumps(content._asdict()))
    return content


def _read(shard: str, label: str, key: str) -> Shard:
    """What a shard holds, from its headers and its labels; arguments and errors as of :func:`index`."""
    content = Shard([], [], [], {})
    left_out: Counter[str] = Counter()
    with open_regular(shard, LARGEST_DATA) as stream:
        for name, members in _members(shard, key).items():
            pictures = [ending for ending in members if f".{ending}".endswith(IMAGE_SUFFIXES)]
            if len(pictures) > 1:
                raise UserError(
                    f"{key}: {name} in {shard} has several pictures: {', '.join(pictures)}"
                )
            if not pictures:
                others = [f".{ending}" for ending in members if ending not in LABELS]
                left_out.update(others or ["no picture"])
                continue
            content.names.append(f"{name}.{pictures[0]}")
            content.places.append([*members[pictures[0]]])
            content.labels.append(_label(stream, members, label, f"{name} in {shard}"))
    content.left_out.update(left_out)
    return content


def _members(shard: str, key: str) -> dict[str, dict[str, tuple[int, int]]]:
    """(first byte, bytes) of each member, by the sample's name, then by what follows its first dot, in lower case.

    Members without a dot, or with nothing before or after it, are passed over.

    Raises:
        UserError: the shard is no uncompressed tar file, is truncated, or holds a member twice.
    """
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    shard_size = Path(shard).stat().st_size
    with opened(Path(shard), key, compressed=False) as files:
        for member, _ in files:
            folder, slash, file_name = member.name.rpartition("/")
            stem, _, ending = file_name.partition(".")
            if not stem or not ending:
                continue
            end = member.offset_data + member.size
            if end > shard_size or member.size > MAX_BYTES:
                raise UserError(f"{key}: {shard} is truncated: it ends within {member.name}")
            sample = f"{folder}{slash}{stem}"
            members = samples.setdefault(sample, {})
            kind = ending.lower()
            if kind in members:
                raise UserError(f"{key}: {shard} holds {member.name} twice")
            members[kind] = member.offset_data, member.size
    return samples


def _label(
    shard: IO[bytes], members: dict[str, tuple[int, int]], label: str, where: str
) -> str | None:
    """A sample's label as text; None where it has none.

    Args:
        shard: open.
        members: offset and size in it, by ending.
        label: the setting: ``cls``, ``txt``, ``json.FIELD``, ``auto`` or ``none``.
        where: the sample, for messages.

    Raises:
        UserError: the label's file is no text, no JSON, has no such field, or one of several labels.
    """
    if label == "none":
        return None
    without_field = ""  # what a json holds in place of the field
    for kind in ("cls", "json.label", "txt") if label == "auto" else (label,):
        ending, _, field = kind.partition(".")
        if ending not in members:
            continue
        start, size = members[ending]
        shard.seek(start)
        try:
            text = shard.read(min(size, MAX_LABEL)).decode().strip()
            content: Any = json_of(text) if field else text
        except ValueError as error:
            raise UserError(f"data.source.label: the {ending} of {where} can't be read") from error
        if field and isinstance(content, dict):
            without_field = ", ".join(content)[:120]
            content = content.get(field)
        if isinstance(content, list | dict):
            raise UserError(
                f"data.source.label: the json of {where} holds no single label, but {type(content).__name__}"
            )
        if content is not None:
            return str(content) or None
    if without_field:
        field = label.partition(".")[2] or "label"
        raise UserError(
            f"data.source.label: the json of {where} has no '{field}'; it has {without_field} "
            "(data.source.label=json.FIELD)"
        )
    return None
