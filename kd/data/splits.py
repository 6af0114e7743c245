"""The splits of a source: completed by what it lacks, and without damaged pictures.

A split as the source *lists* it may hold damaged pictures; ``split(name)`` is the same without them. ``train`` may have two
parts, labelled and unlabelled pictures (``data.unlabeled``); where the source has no ``val``, a share of each class of
``train`` is *held out* for it.
"""

import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kd.data.info import DataInfo
from kd.data.sources import (
    FileSplit,
    ImageFolder,
    Joined,
    Source,
    Split,
    Subset,
    labelled,
    named,
    printable,
)
from kd.data.sources.arrays import Column, by_value
from kd.data.sources.base import SplitFacts
from kd.data.sources.folder import labelled_folder
from kd.data.sources.places import expanded, folder_here
from kd.data.sources.unlabelled import unlabelled_folder
from kd.data.targets import Targets
from kd.errors import UserError
from kd.settings import Augment, DataSettings, Probe

PROBE = "data.probe.root"
KEYS = {"unlabeled": "data.unlabeled", "probe train": PROBE, "probe val": PROBE}
"""The settings that name pictures, by the part of a split; ``data.source`` for all others."""


class DataSpec(DataSettings):
    """Pictures for distillation; :class:`kd.settings.DataSettings` explains the other arguments."""

    seed: int = 0
    """The run's: orders, augments and holds out."""


class Splits:
    """Lists the splits of a source once, and checks their pictures once. See :class:`DistillationDataModule`."""

    def __init__(self, source: Source, given: DataSpec) -> None:
        """Stores the settings that decide which pictures belong to which split; none is listed yet.

        Args:
            source: of labelled pictures.
            given: ``data.*``; ``data.probe`` names pictures with labels for a run without labels.
        """
        self.source = source
        self.given = given
        self.probe = given.probe if given.probe and given.probe.root else None
        self.max_pixels = given.max_pixels
        # Whether ``val`` is a part of the source's training pictures; known once a split is listed.
        self.holds_out = False
        self.skipped: list[str] = []  # damaged pictures that are left out: "NAME (REASON)"
        self._began = time.time()
        self._listed: dict[str, list[Split]] = {}  # its parts by the split's name
        self._splits: dict[str, Split] = {}  # by name, checked
        self._digests: dict[str, list[str]] = {}
        """By the split's name, hashes of the bytes of its intact pictures; [] where not all were read."""
        self._facts: dict[int, tuple[Split, SplitFacts]] = {}  # by the split's id

    def check_fraction(self) -> None:
        """Refuses a ``data.val_fraction`` other than the default where the source has validation pictures.

        Raises:
            UserError: the setting would have no effect.
        """
        if self.given.val_fraction != DataSettings.val_fraction and self.source.has("val"):
            why = "data.source has validation pictures"
            raise UserError(f"data.val_fraction: {self.given.val_fraction} has no effect: {why}")

    @property
    def left_out(self) -> dict[str, int]:
        """How many files beside the pictures of the splits listed so far are no pictures, by the ending of their names."""
        counts: Counter[str] = Counter()
        for parts in self._listed.values():
            for part in parts:
                counts.update(getattr(part, "left_out", {}))
        return dict(counts)

    def listed(self, name: str) -> list[Split]:
        """The parts of a split, listed once; no picture is read. Sets ``holds_out``.

        Returns:
            One part: the split as its source gives it, or (``val`` is held out) a part of the training pictures. A second
            one for ``train`` with ``data.unlabeled``. For ``probe`` the training and the validation pictures of its folder.

        Raises:
            UserError: pictures are missing, or too few to hold some out.
        """
        if name in self._listed:
            return self._listed[name]
        if name == "probe" and self.probe is not None:
            parts = load_probe(self.probe)
        else:
            self.holds_out = not self.source.has("val")
            is_part = self.holds_out and name in ("train", "val")
            parts = [self._part(name) if is_part else self._loaded(name)]
        if name == "train" and self.given.unlabeled:
            source = self.source
            source.kind.check_unlabelled(len(source.classes), source.ignore_index)
            pictures = unlabelled_folder(self.given.unlabeled, source.note)
            parts.append(self._not_shown(pictures, self.listed("val")))
        self._listed[name] = parts
        return parts

    def _loaded(self, name: str) -> Split:
        """A split as its source gives it; a machine's processes share its names and targets (:meth:`FileSplit.share`).

        Raises:
            UserError: as of :meth:`Source.load`; or a list of which no picture is on this disk.
        """
        split = self.source.load(name)
        self.source.check_listed(split, name, f"data.source.{name}")
        if isinstance(split, FileSplit):
            split.share()
        return split

    def _not_shown(self, pictures: Split, val: Iterable[Split]) -> FileSplit:
        """The unlabelled ``pictures`` (``data.unlabeled``) without those that the parts of ``val`` show, of which a note is
        added.

        Raises:
            UserError: none are left.
        """
        assert isinstance(pictures, FileSplit)
        real_folder = lru_cache(10_000)(os.path.realpath)

        def real_path(path: str) -> str:
            """A path with all links resolved, so that one picture has one name."""
            if os.path.islink(path):  # noqa: PTH114 - a Path each is slow
                return os.path.realpath(path)
            folder, name = os.path.split(path)
            return f"{real_folder(folder)}/{name}"

        names = (part.name(i) for part in val for i in range(len(part.targets)))
        shown = set(map(real_path, names))
        unseen = [path for path in pictures.paths if real_path(path) not in shown]
        count = len(pictures.paths) - len(unseen)
        if not unseen:
            raise UserError(
                f"data.unlabeled: all {count} pictures below {self.given.unlabeled} are validation pictures of data.source"
            )
        if count:
            self.source.note(
                f"data.unlabeled: {count} of {len(pictures.paths)} pictures are not trained on: they are validation "
                "pictures of data.source"
            )
        targets = pictures.targets[: len(unseen)]
        return FileSplit(unseen, targets, pictures.left_out)

    def _part(self, name: str) -> Split:
        """``train`` or ``val`` of a source without ``val``: the pictures not held out, or those held out.

        Each class gives a share ``val_fraction`` of its pictures, by the seed.

        Raises:
            UserError: the source has a single picture, or one of each class.
        """
        if "whole" not in self._listed:
            self._listed["whole"] = [self._loaded("train")]
        (all_pictures,) = self._listed["whole"]
        count = len(all_pictures.targets)
        if count < 2:
            raise UserError(
                "data.source: needs two pictures or more to hold one out for validation, got one"
            )
        numbers = held_out(all_pictures.targets, self.given.val_fraction, self.given.seed)
        if not len(numbers):
            hint = ""
            if all(re.fullmatch(r"-?\d+(\.\d*)?", name) for name in self.source.classes):
                hint = "; its labels are numbers, which model.task=Regression learns"
            raise UserError(
                f"data.source: has one picture of each of its {count} classes, so none can be held out for "
                f"validation{hint}"
            )
        if name == "train":
            numbers = np.setdiff1d(np.arange(count), numbers)
        return Subset(all_pictures, numbers)

    def validate_in_training(self, fraction: float) -> None:
        """From now on ``val`` is a share ``fraction``, in (0, 1), of each class of the labelled training pictures, which
        ``train`` no longer has, also without labels.

        To choose settings by: the source's own validation pictures stay unseen, for what is measured later. Splits that
        were checked are checked again.

        Raises:
            UserError: too few pictures to hold some out.
        """
        first, *others = self.listed("train")
        count = len(first.targets)
        chosen = held_out(first.targets, fraction, self.given.seed + 1)
        if not len(chosen):
            raise UserError(f"data.source: {count} training pictures are too few to hold some out")
        rest = np.setdiff1d(np.arange(count), chosen)
        val = [Subset(first, chosen)]
        unlabelled = [self._not_shown(part, val) for part in others]
        self._listed["train"] = [Subset(first, rest), *unlabelled]
        self._listed["val"] = [*val]
        self._splits = {}
        self.holds_out = True

    def parts(self, name: str) -> Sequence[Split]:
        """The parts of a split as :meth:`listed`; with ``data.on_bad_image=skip`` without the damaged pictures.

        Then the first call for a split checks its pictures.
        """
        if self.given.on_bad_image == "stop":
            return self.listed(name)
        split = self.split(name)
        return split.parts if isinstance(split, Joined) else [split]

    def split(self, name: str) -> Split:
        """A split without its damaged pictures, its parts joined; the first call for it checks them.

        Args:
            name: ``train``, ``val``, ``probe``, or one that only the source knows.

        Raises:
            UserError: damaged pictures (with ``data.on_bad_image=stop``), or all are damaged.
        """
        if name in self._splits:
            return self._splits[name]
        labels = [name, "unlabeled"]
        if name == "probe":
            labels = ["probe train", "probe val"]
        checked = []
        for part, label in zip(self.listed(name), labels, strict=False):
            checked.append(self._checked(labelled(part, label), label))
        split = checked[0]
        if len(checked) > 1:
            split = Joined(*checked)
        self._splits[name] = split
        return split

    def facts(self, name: str) -> SplitFacts:
        """What tells a split from others: caches are found by it, and a resumed run recognises its pictures by it.

        Size and time of each file are read by one process of a machine, once.

        Raises:
            UserError: as of :meth:`split`.
        """
        return self._facts_of(self.split(name))

    def _facts_of(self, split: Split) -> SplitFacts:
        """The facts of a split object; found once for each, and kept with it."""
        from kd.data.scan import facts_of_machine

        if id(split) not in self._facts:
            facts = facts_of_machine(split, self._began)
            self._facts[id(split)] = split, facts  # with the split its id stays taken
        _, facts = self._facts[id(split)]
        return facts

    def _checked(self, split: Split, name: str) -> Split:
        """A part of a split without its damaged pictures, which are added to ``skipped``; keeps the hashes of all others.

        Args:
            split: as the source lists it.
            name: ``train``, ``unlabeled``, ``val``, ``probe train`` or another one: for messages, and for ``_digests``.

        Raises:
            UserError: there are damaged pictures (``data.on_bad_image=stop``), or all are damaged.
        """
        from kd.data.scan import scan, usual

        check = usual(split) if self.given.check is None else self.given.check
        damaged, digests = scan(split, name, check, self.max_pixels, self._facts_of)
        self._digests[name] = [digest for i, digest in enumerate(digests) if i not in damaged]
        if not damaged:
            return split
        descriptions = [f"{named(split, i)} ({reason})" for i, reason in damaged.items()]
        count = len(descriptions)
        key = KEYS.get(name, "data.source")
        if self.given.on_bad_image == "stop":
            more = f" and {count - 10} more" if count > 10 else ""
            raise UserError(
                f"{key}: {count} damaged picture{'s' * (count > 1)}: {', '.join(descriptions[:10])}{more}; "
                "mend them, or leave them out with data.on_bad_image=skip"
            )
        self.skipped += descriptions
        intact = [i for i in range(len(split.targets)) if i not in damaged]
        if not intact:
            raise UserError(
                f"{key}: all {count} pictures of {name} are damaged, the first is {descriptions[0]}"
            )
        return Subset(split, intact)

    @property
    def shared(self) -> list[tuple[str, str]]:
        """Names of validation pictures that are labelled training pictures too, each with the name of the first such one.

        The same bytes count where both splits were read whole (``data.check=all``), else the same path. Empty before both
        splits have been checked, and where pictures that were not read whole are no files.
        """
        if not {"train", "val"} <= self._digests.keys():
            return []
        train, val = self.split("train"), self.split("val")
        of_train: Iterable[str] = self._digests["train"]
        of_val: Iterable[str] = self._digests["val"]
        if not (of_train and of_val):
            for name in ("train", "val"):
                first, *_ = self.listed(name)
                if not isinstance(first, FileSplit):
                    return []
            labelled_count = len(train.targets) - self.unlabelled()
            val_count = len(val.targets)
            of_train = map(train.name, range(labelled_count))
            of_val = map(val.name, range(val_count))
        numbers: dict[str, list[int]] = {}  # in validation, by the picture's identity
        for i, picture in enumerate(of_val):
            numbers.setdefault(picture, []).append(i)
        pairs = []
        for i, picture in enumerate(of_train):
            pairs += [(number, i) for number in numbers.pop(picture, ())]
        return [(val.name(number), train.name(i)) for number, i in sorted(pairs)]

    def prepare(self) -> None:
        """Lists and checks ``train``, ``val`` and ``probe`` before training; every process calls it.

        Raises:
            UserError: a split can't be listed or has damaged pictures (``data.on_bad_image=stop``), or all validation
                pictures are training pictures.
        """
        names = ["train", "val"]
        if self.probe:
            names.append("probe")
        for name in names:
            self.split(name)
        self._doubt_labels()
        if self.holds_out:
            return
        shared = self.shared
        if shared and len(shared) == len(self.split("val").targets):
            val_name, train_name = map(printable, shared[0])
            example = val_name
            if val_name != train_name:
                example = f"{val_name} is {train_name}"
            raise UserError(
                f"data.source: all {len(shared)} validation pictures are training pictures ({example}); give "
                "others, or none, and data.val_fraction of the training pictures is held out"
            )

    def _doubt_labels(self) -> None:
        """Adds a warning to the source's notes: labelled training pictures of the same bytes, with different labels. Where
        pictures were not read whole, nothing is compared.
        """
        split = self.split("train")
        first_number: dict[str, int] = {}
        different: list[tuple[int, int]] = []
        for i, picture in enumerate(self._digests["train"]):
            before = first_number.setdefault(picture, i)
            # as texts: a missing number, NaN, is equal to another
            if str(split.targets[before]) != str(split.targets[i]):
                different.append((i, before))
        if different:
            again, first = (printable(split.name(i)) for i in different[0])
            self.source.note(
                f"warning: {len(different)} training pictures are listed before with another label, for example "
                f"{again} ({first})"
            )

    def list_folder(self, folder: str, classes: Sequence[str]) -> None:
        """Makes ``folder/<class>/*.jpg`` the split ``folder``, with ids from ``classes``: a command's option ``folder=``.

        ``classes`` become the source's.

        Raises:
            UserError: no such folder, a class that is not among ``classes``, or data whose pictures have another kind of
                targets: of a folder's classes these have no measure.
        """
        kind = self.source.kind.name
        if kind != Targets.name:
            raise UserError(
                f"folder: has {Targets.name}, and the model learnt from {kind}; data.source.* names other pictures"
            )
        self.source.classes = list(classes)
        folder = folder_here(expanded(folder), "folder")
        split = labelled_folder(folder, classes, "folder", self.source.note)
        self._listed["folder"] = [split]

    def unlabelled(self) -> int:
        """How many unlabelled pictures follow the labelled ones in the training split."""
        if self.given.unlabeled:
            return len(self.parts("train")[1].targets)
        return 0

    def info(self) -> DataInfo:
        """What is known of the data, without the facts of classes; see :func:`info_of`."""
        sizes = {"unlabeled": self.unlabelled()}
        for name in ("train", "val"):
            counts = [len(part.targets) for part in self.parts(name)]
            sizes[name] = sum(counts)
        targets = self.parts("train")[0].targets
        probed = bool(self.probe and self.listed("probe"))
        return info_of(self.source, sizes, targets, self.given, probed)


def held_out(targets: Sequence[Any], fraction: float, seed: int) -> np.ndarray:
    """Numbers of the held-out training pictures, ascending: ``fraction`` of each class, at least one of two or more, never
    all.

    A class of one picture gives none; the result is empty where all classes have one picture.

    Args:
        targets: of all training pictures; all that are no class ids (labels, numbers) count as one class.
        fraction: in (0, 1).
        seed: of the choice, which a resumed run must repeat.

    >>> ids = np.repeat(np.arange(4), 5)
    >>> ids[held_out(list(ids), 0.2, seed=0)].tolist(), len(held_out([[0], [0, 1], [1], [0]], 0.5, seed=0))
    ([0, 1, 2, 3], 2)
    """
    rng = np.random.default_rng([seed, 2])
    column = Column.of(targets)
    ids = np.zeros(len(targets), np.int32)
    if isinstance(column, Column) and column.holds_ids:
        ids = column.values
    chosen = []
    for numbers in sorted(by_value(ids), key=lambda group: group[0]):
        share = round(fraction * len(numbers))
        count = min(max(1, share), len(numbers) - 1)
        shuffled = rng.permutation(numbers)
        chosen.append(shuffled[:count])
    together = np.concatenate(chosen)
    return np.sort(together)


def load_probe(probe: Probe) -> list[Split]:
    """Labelled pictures that features are measured on: those of ``train`` and of ``val``, in this order.

    Args:
        probe: ``data.probe``.

    Raises:
        UserError: the folder is no image folder, has one class, or a picture of both splits.
    """
    source = ImageFolder(probe.root or "")
    source.key = PROBE
    train = source.load("train")
    if len(source.classes) == 1:
        raise UserError(f"{PROBE}: needs two classes or more, got one ('{source.classes[0]}')")
    val = source.load("val")
    in_both = files_of(train) & files_of(val)
    if in_both:
        raise UserError(
            f"{PROBE}: {len(in_both)} pictures of val are in train too ({min(in_both)}): they would be "
            "their own nearest neighbours"
        )
    return [train, val]


def files_of(split: Split) -> set[str]:
    """The paths of a split's pictures, links resolved; of pictures that are no files, their names below the present
    folder.
    """
    return {os.path.realpath(split.name(i)) for i in range(len(split.targets))}


def check_global_batch(batch_size: int, processes: int, pictures: int, of_what: str) -> None:
    """Refuses a global batch that an epoch can't fill once.

    Args:
        batch_size: pictures of one process.
        processes: how many train.
        pictures: that an epoch has, for all processes.
        of_what: what these pictures are, for the message.

    Raises:
        UserError: it names ``data.batch_size``.
    """
    if batch_size * processes > pictures:
        fits = ""
        if pictures >= processes:
            largest = 2 ** int(math.log2(pictures / processes))
            fits = f"; data.batch_size={largest} fits"
        raise UserError(
            f"data.batch_size: {batch_size} x {processes} process(es) is more than {of_what}{fits}"
        )


def unlabelled_in_epoch(ratio: float, labelled: int) -> int:
    """How many unlabelled pictures an epoch has beside so many labelled ones (``data.unlabeled_ratio``)."""
    return round(ratio * labelled)


def check_ratio(ratio: float, labelled: int, unlabelled: int, paired: bool) -> None:
    """Refuses a ``data.unlabeled_ratio`` by which an epoch has no unlabelled picture, or a ``paired`` one twice.

    Args:
        ratio: unlabelled pictures to each labelled one in an epoch.
        labelled: pictures.
        unlabelled: likewise.
        paired: whether pictures are mixed.

    Raises:
        UserError: it says what is allowed.
    """
    count = unlabelled_in_epoch(ratio, labelled)
    if count == 0 or (paired and count > unlabelled):
        raise UserError(
            f"data.unlabeled_ratio: {ratio} takes {count} unlabelled pictures to {labelled} labelled ones; an epoch takes "
            f"one at least, and with mixup or cutmix no more than there are, {unlabelled}"
        )


def info_of(
    source: Source,
    sizes: Mapping[str, int],
    targets: Sequence[Any],
    given: DataSpec,
    probed: bool = False,
) -> DataInfo:
    """What is known of the data, once their settings are seen to fit each other; no picture is read.

    Args:
        source: classes and kind of target.
        sizes: pictures of ``train`` and ``val``, and those of ``train`` that are of ``data.unlabeled`` (``unlabeled``).
        targets: of the source's own training pictures, without those of ``data.unlabeled``.
        given: ``data.*``.
        probed: whether there are labelled pictures (``data.probe``) to score features on.

    Raises:
        UserError: settings that do not fit; it names the key.
    """
    augment = given.augment or Augment()
    undefined = [name for name in source.kind.undefined if getattr(augment, name)]
    if undefined:
        off = " ".join(f"data.augment.{name}=0" for name in undefined)
        raise UserError(
            f"data.augment.{undefined[0]}: is not defined for {source.kind.name}: {off}"
        )
    if source.kind.cut_with_picture and given.engine in ("device", "dali"):
        raise UserError(
            f"data.engine: {source.kind.name} need data.engine=torch or ray, got {given.engine}"
        )
    unlabelled_alone = bool(sizes["unlabeled"]) and given.unlabeled_ratio is None
    counts = None
    if source.classes:
        counts = source.kind.counts(targets, len(source.classes))
    has_sampler = given.sampler is not None
    if given.balance_classes and (counts is None or unlabelled_alone):
        raise UserError("data.balance_classes: needs one label a picture to train on")
    if has_sampler and (given.balance_classes or unlabelled_alone):
        other = "data.balance_classes=true" if given.balance_classes else "data.unlabeled alone"
        raise UserError(f"data.sampler: chooses labelled pictures, not with {other}")
    chooses = given.balance_classes or has_sampler
    if chooses and sizes["unlabeled"] and augment.mixes:
        key = "data.sampler" if has_sampler else "data.balance_classes"
        raise UserError(f"{key}: needs data.augment.mixup=0 and cutmix=0 beside data.unlabeled")
    if source.classes == [] and sizes["unlabeled"]:
        raise UserError(
            "data.unlabeled: needs labelled pictures in data.source, which has none; leave it out"
        )
    if given.unlabeled_ratio is not None:
        labelled_count = sizes["train"] - sizes["unlabeled"]
        check_ratio(given.unlabeled_ratio, labelled_count, sizes["unlabeled"], augment.mixes)
    if 0 < len(source.classes) < source.kind.least_classes:
        raise UserError(f"data.source: needs two classes or more, got one ('{source.classes[0]}')")
    return DataInfo(
        list(source.classes),
        sizes["train"],
        sizes["val"],
        unlabeled=sizes["unlabeled"] if source.classes else sizes["train"],
        labels=bool(source.classes) and not unlabelled_alone,
        soft_targets=augment.mixes,
        kind=source.kind.name,
        ignore_index=source.ignore_index,
        crop_ratio=given.crop_ratio,
        probed=probed,
        counts=None if chooses else counts,
        scales=source.kind.scales(targets, len(source.classes)),
    )
