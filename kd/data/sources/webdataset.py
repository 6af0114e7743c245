"""The source ``WebDataset``: tar shards as others have made them, read where they lie.

A sample is the members of one shard with the same name up to the first dot after the last slash. The headers of a shard
are read once; where each picture lies, and its label, is kept in the user's cache folder.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from kd.data.label_text import plain
from kd.data.sources.base import Source
from kd.data.sources.files import UNLABELLED, said
from kd.data.sources.labels import by_label, cells, check_known, doubts, in_order, unused
from kd.data.sources.places import IMAGE_SUFFIXES, expanded
from kd.data.sources.shard_names import expanded_places, lines_of, shards_of, shards_of_split
from kd.data.sources.shards import ShardSplit
from kd.data.sources.split_names import (
    Column,
    Unfit,
    may_name_split,
    numbers_in,
    split_of,
    splits_by_row,
)
from kd.errors import UserError
from kd.machine import cache_dir
from kd.progress import bar
from kd.storage.archives import opened
from kd.storage.decoding import MAX_BYTES
from kd.storage.elsewhere import LARGEST_DATA, json_of, open_regular, text_of
from kd.storage.writing import write_text

FIELDS = ("label", "cls", "class", "class_id", "class_name", "label_name", "category", "target")
"""Fields of a sample's JSON that may hold its label, in the order in which they are looked for."""
LABELS = ("cls", "json", "txt")
"""Endings of a sample's files that may hold its label."""
MAX_LABEL = 2**20  # bytes of a member that holds a label
CAPTIONS = 0.5
"""Texts of which more than this share are different, and more than 1,000, are captions: they name no classes."""

Sample = tuple[str, int, int, str | None, dict[str, Any]]
"""Name in the shard, the picture's first byte and its size, the label, and the JSON fields that may name its split."""
FORMAT = 2  # of an index in the user's cache folder


@dataclass
class Shard:
    """What a tar file holds."""

    samples: list[Sample]
    """Samples with a picture, in order."""
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
        """Checks ``label``; the arguments are the class's. No shard is read yet."""
        if label not in ("auto", "none", "cls", "txt") and not re.fullmatch(r"json\..+", label):
            raise ValueError(f"label must be cls, txt, json.FIELD, none or auto, got '{label}'")
        self.places = {
            "train": expanded_places(train),
            "val": expanded_places(val),
        }
        self.label = label
        self.names = expanded(classes) if isinstance(classes, str) else classes
        self._shards: dict[str, dict[str, Shard]] = {}  # by split

    def load(self, split: str) -> "TarSplit":
        """See :meth:`Source.load`; a split that was not given is one that the training shards have.

        Raises:
            UserError: no such split, or labels that are missing, unknown or not clear.
        """
        train = self._split("train")
        self._check_labels(train)
        self.classes = self._class_names(train)
        shards = train
        if split != "train":
            shards = self._split(split)
        labels = _labels(shards)
        if not self.classes:
            return TarSplit(shards, [UNLABELLED] * len(labels))

        pictures = []
        for name, shard in shards.items():
            pictures += [f"{sample[0]} in {name}" for sample in shard.samples]
        key = f"data.source.{split}"
        texts = []  # as _check_labels has seen, all or none of the training pictures have a label
        for picture, label in zip(pictures, labels, strict=True):
            if label is None:
                raise UserError(
                    f"{key}: {picture} has no label, others do; label=none ignores labels"
                )
            texts.append(label)

        # A label is a class's name; with names of the user it may also be a class id.
        ids = {name: i for i, name in enumerate(self.classes)}
        if self.names:
            ids |= {str(i): i for i in range(len(self.classes))}
            known = f"the {len(self.classes)} of data.source.classes"
        else:
            known = "the training pictures"
        check_known(by_label(pictures, [[text] for text in texts]), ids, key, known)
        self.note(*doubts(self.classes))
        if self.names:
            self.note(*unused(self.classes, (ids[str(label)] for label in _labels(train))))
        return TarSplit(shards, [ids[text] for text in texts])

    def has(self, split: str) -> bool:
        """Whether shards were given for the split, or the training shards have some of it."""
        if self.places.get(split):
            return True
        return any(shard.samples for shard in self._of_train(split).values())

    def describe(self) -> str:
        """Where the training shards are."""
        return f"WebDataset {self.places['train']}"

    def _split(self, split: str) -> dict[str, Shard]:
        """The shards of a split by path, with the split's samples alone; read once. A UserError where it has none."""
        if split in self._shards:
            return self._shards[split]
        places = self.places.get(split)
        if places is None:
            shards = self._of_train(split)
            known = "the splits train and val"
        else:
            shards = self._of_split(self._indexed(split, places), split)
            known = "no sample of that split"
        if not any(shard.samples for shard in shards.values()):
            raise UserError(f"split: WebDataset has {known}, got '{split}'")
        self._shards[split] = shards
        return shards

    def _of_train(self, split: str) -> dict[str, Shard]:
        """What the training shards have of another split: in shards of its name, or in samples that name it.

        {} where the shards' names tell splits apart and none is of this one, or where neither they nor the samples' JSON
        name splits. Shards may be left without samples.
        """
        train = self.places["train"]
        named = shards_of_split(train, split, "data.source.train")
        if named is not None and split != "train":
            if named:
                return self._of_split(self._indexed(split, named), split)
            return {}
        shards = self._indexed("train", train or [])
        if self._row_splits(shards) is not None:
            return self._of_split(shards, split)
        return {}

    def _row_splits(self, shards: dict[str, Shard]) -> list[str | None] | None:
        """The split that each sample's JSON names, None for a sample in no split; None where no JSON names splits.

        In the order of the samples. How the splits were found is noted.

        Raises:
            UserError: fields of the JSON contradict each other.
        """
        samples = [sample for shard in shards.values() for sample in shard.samples]
        fields = [sample[4] for sample in samples]
        names = sorted({name for sample_fields in fields for name in sample_fields})
        columns: dict[Column, list[Any]] = {}
        for name in names:
            columns[name] = [sample_fields.get(name) for sample_fields in fields]
        try:
            splits, notes, _ = splits_by_row(columns)
        except Unfit as error:
            raise UserError(
                f"data.source: the JSON of {next(iter(shards))} and others {error}"
            ) from error
        self.note(*notes)
        return splits

    def _of_split(self, shards: dict[str, Shard], split: str) -> dict[str, Shard]:
        """The shards with the samples whose JSON names the split; with all where no JSON names splits.

        Samples of ``test`` are those of ``val`` where no JSON names ``val``. A UserError where none is of ``train``.
        """
        splits = self._row_splits(shards)
        if splits is None:
            return shards
        chosen = set(numbers_in(splits, split))
        if not chosen and split == "train":
            raise UserError("data.source.train: no sample's JSON names the split train")
        parts: dict[str, Shard] = {}
        first = 0  # number of the shard's first sample
        for name, shard in shards.items():
            samples = [sample for i, sample in enumerate(shard.samples, first) if i in chosen]
            parts[name] = Shard(samples, shard.left_out)
            first += len(shard.samples)
        return parts

    def _indexed(self, split: str, places: str | Sequence[str]) -> dict[str, Shard]:
        """What the shards of some places hold, by path, whatever split their samples name; ``split``: whose places they are.

        Raises:
            UserError: no shards, or no pictures in them.
        """
        key = f"data.source.{split}"
        names = self._files_of(split, places)
        shards = {}
        for name in bar(names, label=f"{split}: index of the shards", unit=" shards"):
            shards[name] = index(name, self.label, key)
        if not any(shard.samples for shard in shards.values()):
            raise UserError(
                f"{key}: no pictures in {len(shards)} shard(s) ({', '.join(IMAGE_SUFFIXES)})"
                f"{said(_left_out(shards))}"
            )
        return shards

    def _files_of(self, split: str, places: str | Sequence[str]) -> list[str]:
        """Paths of the shards that places name, of a folder those of the split; ``split``: whose places they are."""
        key = f"data.source.{split}"
        names = shards_of_split(places, split, key)
        if names:
            self.note(
                f"{split}: {len(names)} shard(s) of the folder have its name, from {Path(names[0]).name}"
            )
            return names
        return shards_of(places, key)

    def check_shards(self) -> None:
        """Refuses places without shards; none is read.

        Raises:
            UserError: names the setting and the place.
        """
        for split, places in self.places.items():
            if places is not None:
                self._files_of(split, places)

    def _check_labels(self, shards: dict[str, Shard]) -> None:
        """Refuses training shards of which some samples have a label and some none, or none has the one that the setting
        names, or that have several labels in one, or captions.
        """
        labels = _labels(shards)
        have_label = [label is not None for label in labels]
        if any(have_label) and not all(have_label):
            for shard_name, shard in shards.items():
                for name, _, _, label, _ in shard.samples:
                    if label is None:
                        raise UserError(
                            f"data.source.label: {name} in {shard_name} has no label, others do; label=none ignores labels"
                        )
        if not all(have_label) and self.label not in ("auto", "none"):
            raise UserError(f"data.source.label: no sample has '{self.label}'")
        self._check_one_label(labels)
        different = len(set(labels))
        if self.label in ("auto", "txt") and different > max(1000, CAPTIONS * len(labels)):
            raise UserError(
                f"data.source.label: {different:,} different labels of {len(labels):,} pictures look like captions; "
                "label=none ignores labels"
            )

    def _check_one_label(self, labels: Sequence[str | None]) -> None:
        """Refuses cells of several labels, which this source doesn't take."""
        separator = "none" if self.names else None
        try:
            read = cells(labels, several=False, separator=separator)
        except Unfit as error:
            reason = f"data.source.label: the training set {error}".partition(
                ": data.source.multi"
            )[0]
            raise UserError(
                f"{reason}; a list (data.source=Manifest) takes several labels a picture"
            ) from error
        for cell in read.labels:
            if len(cell) > 1:
                raise UserError(
                    f"data.source.label: a picture has {len(cell)} labels ({', '.join(cell[:3])}); a "
                    "list (data.source=Manifest) takes several labels a picture"
                )

    def _class_names(self, shards: dict[str, Shard]) -> list[str]:
        """The classes' names by id: the user's, else the labels in order; none where no training sample has a label."""
        labels = {label for label in _labels(shards) if label is not None}
        if not self.names or not labels:
            return in_order(labels)
        names = self.names
        if isinstance(names, str):
            names = lines_of(Path(names), "data.source.classes", "names")
        return [plain(name) for name in names]


class TarSplit(ShardSplit):
    """A split of shards that have no index of their own.

    Args:
        shards: by path.
        targets: class ids of all samples in the order of the shards; -1 without labels.
    """

    def __init__(self, shards: dict[str, Shard], targets: list[int]) -> None:
        """Takes the samples of all shards in order; the arguments are the class's."""
        places = []
        self.names = []
        for shard_number, shard in enumerate(shards.values()):
            for name, start, size, _, _ in shard.samples:
                places.append([shard_number, start, size])
                self.names.append(name)
        index = {"shards": list(shards), "samples": places, "targets": targets}
        super().__init__("", index, digest="")
        self.left_out = _left_out(shards)
        self.check = None  # nobody has looked at the pictures yet

    def name(self, i: int) -> str:
        """Shard and member of picture ``i``."""
        return f"{self.shards[self.samples[i][0]]}/{self.names[i]}"

    def key(self, i: int) -> str:
        """Its name and its shard's stamp: nothing else says what an unpacked shard holds."""
        return f"{self.name(i)}\0{self.stamp(i)}"


def _labels(shards: dict[str, Shard]) -> list[str | None]:
    """The label of each sample as all sources write it; None without one."""
    labels = []
    for shard in shards.values():
        for _, _, _, label, _ in shard.samples:
            labels.append(plain(label) or None)
    return labels


def _left_out(shards: dict[str, Shard]) -> dict[str, int]:
    """As :attr:`Shard.left_out`, of all shards together."""
    counts: Counter[str] = Counter()
    for shard in shards.values():
        counts.update(shard.left_out)
    return dict(counts)


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
            return Shard(**json_of(text_of(file)))
        except (OSError, ValueError, TypeError):
            content = _read(shard, label, key)
        write_text(file, json.dumps(asdict(content)))
    return content


def _read(shard: str, label: str, key: str) -> Shard:
    """What a shard holds, from its headers and its labels; arguments and errors as of :func:`index`."""
    samples: list[Sample] = []
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
            (ending,) = pictures
            start, size = members[ending]
            target = _label(stream, members, label, f"{name} in {shard}")
            fields = _split_fields(stream, members)
            samples.append((f"{name}.{ending}", start, size, target, fields))
    return Shard(samples, dict(left_out))


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
            folder, _, file_name = member.name.rpartition("/")
            stem, _, ending = file_name.partition(".")
            if not stem or not ending:
                continue
            if member.offset_data + member.size > shard_size or member.size > MAX_BYTES:
                raise UserError(f"{key}: {shard} is truncated: it ends within {member.name}")
            sample_name = stem
            if folder:
                sample_name = f"{folder}/{stem}"
            members = samples.setdefault(sample_name, {})
            ending = ending.lower()
            if ending in members:
                raise UserError(f"{key}: {shard} holds {member.name} twice")
            members[ending] = member.offset_data, member.size
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
        UserError: the label's file is no text, or as of :func:`_field`.
    """

    def text(ending: str) -> str:
        """The text of the sample's member with this ending, at most :data:`MAX_LABEL` bytes; a user's error if it is
        none.
        """
        start, size = members[ending]
        shard.seek(start)
        try:
            return shard.read(min(size, MAX_LABEL)).decode().strip()
        except UnicodeDecodeError as error:
            raise UserError(f"data.source.label: the {ending} of {where} is no text") from error

    if label in ("auto", "cls") and "cls" in members:
        return text("cls") or None
    if (label == "auto" or label.startswith("json.")) and "json" in members:
        value = _field(text("json"), label, where)
        if value is not None or label != "auto":
            return value
    if label in ("auto", "txt") and "txt" in members:
        return text("txt") or None
    return None


def _split_fields(shard: IO[bytes], members: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """The fields (text, whole number, yes or no) of a sample's JSON whose names or values may say which split it belongs to;
    {} without JSON, or where it can't be read or has more than :data:`MAX_LABEL` bytes.

    Args:
        shard: open.
        members: offset and size in it, by ending.
    """
    start, size = members.get("json", (0, 0))
    if not 0 < size <= MAX_LABEL:
        return {}
    shard.seek(start)
    try:
        content = json_of(shard.read(size))
    except ValueError:  # refused where the label is read from it
        return {}
    if not isinstance(content, dict):
        return {}
    fields = {}
    for name, value in content.items():
        is_short = isinstance(value, str | int | bool)
        if is_short and (may_name_split(name) or split_of(value)):
            fields[name] = value
    return fields


def _field(text: str, label: str, where: str) -> str | None:
    """The label in a sample's JSON: of the first of :data:`FIELDS`, or of the field that ``label`` (``json.FIELD``) names.

    Args:
        text: the JSON.
        label: the setting; with ``auto`` a sample without such a field has no label (None).
        where: the sample, for messages.

    Raises:
        UserError: no JSON, no such field, or a field of several labels.
    """
    try:
        content: Any = json_of(text)
    except ValueError as error:
        raise UserError(f"data.source.label: the json of {where} can't be read") from error
    fields = {}
    if isinstance(content, dict):
        fields = content
    names = FIELDS if label == "auto" else (label.removeprefix("json."),)
    values = [fields[name] for name in names if fields.get(name) is not None]
    if not values:
        if label == "auto":
            return None
        raise UserError(
            f"data.source.label: the json of {where} has no '{names[0]}'; it has {', '.join(fields)[:120]}"
        )
    value = values[0]
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], list | dict):
        value = value[0]
    if isinstance(value, list | dict):
        raise UserError(
            f"data.source.label: the json of {where} holds no single label, but {type(value).__name__}"
        )
    return str(value)
