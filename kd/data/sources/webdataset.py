"""The source ``WebDataset``: tar shards as others have made them, read where they lie.

A sample is the members of one shard with the same name up to the first dot after the last slash. The headers of a shard
are read once; where each picture lies, and its label, is kept in the user's cache folder.
"""

import glob
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from kd.data.pictures import MAX_BYTES
from kd.data.sources.base import Source
from kd.data.sources.files import UNLABELLED, said
from kd.data.sources.manifest import in_order
from kd.data.sources.places import IMAGE_SUFFIXES
from kd.data.sources.shards import ShardSplit
from kd.errors import UserError
from kd.machine import cache_dir
from kd.storage.archives import opened
from kd.storage.elsewhere import LARGEST_DATA, RefusedFile, json_of, open_regular, text_of
from kd.storage.writing import write_text

FIELDS = ("label", "cls", "class", "class_id", "class_name", "label_name", "category", "target")
LABELS = ("cls", "json", "txt")
MOST_SHARDS = 1_000_000
MAX_LABEL = 2**20  # bytes of a member that holds a label
CAPTIONS = 0.5  # texts of which more than this share are different, and many, name no classes

Sample = tuple[str, int, int, str | None]  # Name in the shard, the picture's first byte and its size, the label


@dataclass
class Shard:
    """What a tar file holds.

    Attributes:
        samples: those with a picture, in order.
        left_out: how many have none that can be read, by the ending of what they have.
    """

    samples: list[Sample]  # those with a picture, in order
    left_out: dict[str, int]  # how many have none that can be read, by the ending of what they have


class WebDataset(Source):
    """Tar shards in WebDataset's layout, made by anyone: ``KEY.jpg`` beside ``KEY.cls``, ``KEY.json`` or ``KEY.txt``.

    Nothing is converted, and pictures are read in any order: order, views and resume are those of every other source.
    Class ids are the sorted labels of the training shards, by value where all are whole numbers.

    Args:
        train: the training shards: a folder of ``*.tar``, a pattern (``DIR/train-{0000..0146}.tar``, ``DIR/*.tar``), a
            ``.txt`` file with one a line, or a list of these.
        val: likewise; without them a part of the training pictures is held out (``data.val_fraction``).
        label: the member with the label: ``cls``, ``txt``, ``json.FIELD``; ``none`` reads pictures alone; default:
            ``cls``, else a JSON field such as ``label``, else ``txt``.
        classes: names by class id, or a file with one a line, where the labels are numbers.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | None = None,
        label: str = "auto",
        classes: list[str] | str | None = None,
    ) -> None:
        if label not in ("auto", "none", "cls", "txt") and not re.fullmatch(r"json\..+", label):
            raise ValueError(f"label must be cls, txt, json.FIELD, none or auto, got '{label}'")
        self.places = {"train": train, "val": val}
        self.label, self.names = label, classes

    def load(self, split: str) -> "TarSplit":
        """Indexes the split's shards; class ids follow the training shards' labels, or ``names``.

        Raises:
            UserError: no shards, none with pictures and labels, or a label that the training shards lack.
        """
        if not self.places.get(split):
            raise UserError(f"data.source: WebDataset has the splits train and val, got '{split}'")
        shards = self._indexed("train")
        self._check_labels(shards)
        self.classes = self._class_names(shards)
        ids = {name: i for i, name in enumerate(self.classes)}
        if self.names:
            ids |= {str(i): i for i in range(len(self.classes))}
        shards = shards if split == "train" else self._indexed(split)
        for name, shard in shards.items():
            wrong = next((s for s in shard.samples if self.classes and s[3] not in ids), None)
            if wrong:
                given = f"the label '{wrong[3]}'" if wrong[3] is not None else "no label"
                raise UserError(f"data.source.{split}: {wrong[0]} in {name} has {given}, not one of the "
                                f"{len(self.classes)} classes")  # fmt: skip
        labels = _labels(shards)
        return TarSplit(shards, [ids[str(label)] if self.classes else UNLABELLED for label in labels])

    def has(self, split: str) -> bool:
        """Whether shards were given for the split."""
        return bool(self.places.get(split))

    def describe(self) -> str:
        """Where the training shards are."""
        return f"WebDataset {self.places['train']}"

    def _indexed(self, split: str) -> dict[str, Shard]:
        key = f"data.source.{split}"
        found = {shard: index(shard, self.label, key) for shard in shards_of(self.places[split] or [], key)}
        if not any(shard.samples for shard in found.values()):
            raise UserError(f"{key}: no pictures in {len(found)} shard(s) ({', '.join(IMAGE_SUFFIXES)})"
                            f"{said(_left_out(found))}")  # fmt: skip
        return found

    def _check_labels(self, shards: dict[str, Shard]) -> None:
        """All or none of the samples have a label, and texts are no captions."""
        labels = _labels(shards)
        if None in labels and any(label is not None for label in labels):
            shard, name = next((s, x[0]) for s, found in shards.items() for x in found.samples if x[3] is None)
            raise UserError(f"data.source.label: {name} in {shard} has no label, others do; label=none ignores labels")
        if None in labels and self.label not in ("auto", "none"):
            raise UserError(f"data.source.label: no sample has '{self.label}'")
        different = len(set(labels))
        if self.label in ("auto", "txt") and different > max(1000, CAPTIONS * len(labels)):
            found = f"{different:,} different labels of {len(labels):,} pictures look like captions"
            raise UserError(f"data.source.label: {found}; label=none ignores labels")

    def _class_names(self, shards: dict[str, Shard]) -> list[str]:
        labels = {*_labels(shards)} - {None}
        if not self.names or not labels:
            return in_order(str(label) for label in labels)
        if isinstance(self.names, list):
            return list(self.names)
        return _lines(Path(self.names), "data.source.classes", "names")


class TarSplit(ShardSplit):
    """A split of shards that have no index of their own.

    Args:
        shards: samples by shard.
        targets: class ids in the same order.
    """

    def __init__(self, shards: dict[str, Shard], targets: list[int]) -> None:
        places = [[n, start, size] for n, shard in enumerate(shards.values()) for _, start, size, _ in shard.samples]
        super().__init__("", {"shards": list(shards), "samples": places, "targets": targets}, "")
        self.names = [sample[0] for shard in shards.values() for sample in shard.samples]
        self.left_out = _left_out(shards)
        self.check = None  # nobody has looked at the pictures yet

    def name(self, i: int) -> str:
        """Shard and member of picture ``i``."""
        return f"{self.shards[self.samples[i][0]]}/{self.names[i]}"


def _labels(shards: dict[str, Shard]) -> list[str | None]:
    return [sample[3] for shard in shards.values() for sample in shard.samples]


def _left_out(shards: dict[str, Shard]) -> dict[str, int]:
    return dict(sum((Counter(shard.left_out) for shard in shards.values()), Counter[str]()))


# -- which shards ------------------------------------------------------------------------------------------------------
def shards_of(places: str | Sequence[str], key: str) -> list[str]:
    """The tar files that folders, patterns and lists name, in order.

    Raises:
        UserError: one that names none, or a missing file.
    """
    found: list[str] = []
    for place in [places] if isinstance(places, str) else places:
        if "://" in place or place.startswith("pipe:"):
            raise UserError(f"{key}: {place} is not on a disk; copy the shards there, or pack them (kd-pack)")
        path = Path(place)
        if path.is_dir():
            mine = sorted(str(file) for file in path.glob("*.tar"))
        elif path.suffix == ".txt":
            mine = [str(path.parent / line) for line in _lines(path, key, "shards")]
        else:
            named = braces(place, key)
            found_by = [sorted(glob.glob(n)) if re.search(r"[*?\[]", n) else [n] for n in named]  # noqa: PTH207 - any root
            mine = [file for files in found_by for file in files]
        missing = next((file for file in mine if not Path(file).is_file()), None)
        if missing or not mine:
            raise UserError(f"{key}: there is no {missing}" if missing else f"{key}: no tar files: {place}")
        found += mine
    return found


def _lines(file: Path, key: str, what: str) -> list[str]:
    try:
        lines = text_of(file).splitlines()
    except RefusedFile as error:
        raise UserError(f"{key}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: {file} can't be read as a list of {what}") from error
    return [line.strip() for line in lines if line.strip()]


def braces(pattern: str, key: str = "") -> list[str]:
    """A pattern's names, as a shell writes them.

    >>> braces("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    >>> braces("{a,b}/{0..1}")
    ['a/0', 'a/1', 'b/0', 'b/1']
    """
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [_choices(part, key) if i % 2 else [part] for i, part in enumerate(parts)]
    if math.prod(map(len, choices)) > MOST_SHARDS:
        raise UserError(f"{key}: {pattern} names more than {MOST_SHARDS:,} shards")
    return ["".join(chosen) for chosen in product(*choices)]


def _choices(braced: str, key: str) -> list[str]:
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", braced)
    if not numbers:
        return braced.split(",")
    first, last = int(numbers[1]), int(numbers[2])
    if not first <= last < first + MOST_SHARDS:
        raise UserError(f"{key}: {{{braced}}} must count up, at most {MOST_SHARDS:,} shards")
    width = len(numbers[1]) if numbers[1].startswith("0") else 1
    return [f"{number:0{width}d}" for number in range(first, last + 1)]


# -- what a shard holds ------------------------------------------------------------------------------------------------
def index(shard: str, label: str, key: str) -> Shard:
    """What a shard holds; from the cache where the shard has not changed.

    Raises:
        UserError: not a tar file, a compressed or a truncated one, or a label that can't be read.
    """
    stat = Path(shard).stat()
    facts = f"{Path(shard).resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{label}"
    file = cache_dir() / "webdataset" / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):  # one of all processes reads the headers
        try:
            return Shard(**json_of(text_of(file)))
        except (OSError, ValueError, TypeError):
            found = _read(shard, label, key)
        write_text(file, json.dumps(asdict(found)))
    return found


def _read(shard: str, label: str, key: str) -> Shard:
    samples, left_out = list[Sample](), Counter[str]()
    with open_regular(shard, LARGEST_DATA) as opened:
        for name, members in _members(shard, key).items():
            pictures = [ending for ending in members if f".{ending}".endswith(IMAGE_SUFFIXES)]
            if len(pictures) > 1:
                raise UserError(f"{key}: {name} in {shard} has several pictures: {', '.join(pictures)}")
            if pictures:
                start, size = members[pictures[0]]
                target = _label(opened, members, label, f"{name} in {shard}")
                samples.append((f"{name}.{pictures[0]}", start, size, target))
            else:
                left_out.update([f".{ending}" for ending in members if ending not in LABELS] or ["no picture"])
    return Shard(samples, dict(left_out))


def _members(shard: str, key: str) -> dict[str, dict[str, tuple[int, int]]]:
    """First byte and size of each member, by the sample's name and what stands after its first dot."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    end = Path(shard).stat().st_size
    with opened(Path(shard), key, compressed=False) as files:
        for member, _ in files:
            folder, _, name = member.name.rpartition("/")
            stem, _, ending = name.partition(".")
            if not stem or not ending:
                continue
            if member.offset_data + member.size > end or member.size > MAX_BYTES:
                raise UserError(f"{key}: {shard} is truncated: it ends within {member.name}")
            members = found.setdefault(f"{folder}/{stem}" if folder else stem, {})
            if ending.lower() in members:
                raise UserError(f"{key}: {shard} holds {member.name} twice")
            members[ending.lower()] = member.offset_data, member.size
    return found


def _label(shard: IO[bytes], members: dict[str, tuple[int, int]], label: str, where: str) -> str | None:
    """A sample's label as text; None where it has none."""

    def text(ending: str) -> str:
        start, size = members[ending]
        shard.seek(start)
        try:
            return shard.read(min(size, MAX_LABEL)).decode().strip()
        except UnicodeDecodeError as error:
            raise UserError(f"data.source.label: the {ending} of {where} is no text") from error

    if label in ("auto", "cls") and "cls" in members:
        return text("cls") or None
    if (label == "auto" or label.startswith("json.")) and "json" in members:
        found = _field(text("json"), label, where)
        if found is not None or label != "auto":
            return found
    return (text("txt") or None) if label in ("auto", "txt") and "txt" in members else None


def _field(text: str, label: str, where: str) -> str | None:
    try:
        content: Any = json_of(text)
    except ValueError as error:
        raise UserError(f"data.source.label: the json of {where} can't be read") from error
    fields = content if isinstance(content, dict) else {}
    names = FIELDS if label == "auto" else (label.removeprefix("json."),)
    value = next((fields[name] for name in names if fields.get(name) is not None), None)
    if isinstance(value, (dict, list)):
        raise UserError(f"data.source.label: the json of {where} holds no single label, but {type(value).__name__}")
    if value is None and label != "auto":
        raise UserError(f"data.source.label: the json of {where} has no '{names[0]}'; it has {', '.join(fields)[:120]}")
    return None if value is None else str(value)
