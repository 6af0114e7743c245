"""The splits of a source: completed by what it lacks, and without damaged pictures."""

import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from kd.data.batch import DataInfo
from kd.data.scan import scan, usual
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
from kd.data.sources.folder import labelled_folder
from kd.data.sources.places import expanded, joined, place_of
from kd.data.sources.unlabelled import splits_within, unlabelled_folder
from kd.errors import UserError
from kd.settings import Augment, DataSettings, Probe

PROBE = "data.probe.root"


class Splits:
    """Lists the splits of a source once, and checks their pictures once. See :class:`DistillationDataModule`."""

    def __init__(self, source: Source, given: DataSettings, probe: Probe | None = None) -> None:
        self.source, self.unlabeled, self.probe = source, given.unlabeled, probe
        self.val_fraction, self.seed = given.val_fraction, given.seed
        self.on_bad_image, self.check, self.max_pixels = (
            given.on_bad_image,
            given.check,
            given.max_pixels,
        )
        self.cache_bytes = source.cache_bytes
        self.holds_out = False
        self.skipped: list[str] = []
        self._listed: dict[str, list[Split]] = {}
        self._splits: dict[str, Split] = {}
        self._pictures: dict[
            str, Sequence[str]
        ] = {}  # identities: hashes of their bytes, or their paths

    def check_fraction(self) -> None:
        """Refuses ``data.val_fraction`` where the source has validation pictures.

        Raises:
            UserError: the setting would have no effect.
        """
        if self.val_fraction != DataSettings.val_fraction and self.source.has("val"):
            why = "data.source has validation pictures"
            raise UserError(f"data.val_fraction: {self.val_fraction} has no effect: {why}")

    @property
    def left_out(self) -> dict[str, int]:
        """How many files beside the pictures can't be read as pictures, by the ending of their names."""
        found: Counter[str] = Counter()
        for part in chain.from_iterable(self._listed.values()):
            found.update(getattr(part, "left_out", {}))
        return dict(found)

    def listed(self, name: str) -> list[Split]:
        """A split as its source gives it, and after it the unlabelled pictures; nothing is checked."""
        if name == "probe" and self.probe is not None and name not in self._listed:
            self._listed[name] = load_probe(self.probe, self.cache_bytes)
        if name not in self._listed:
            self.holds_out = not self.source.has("val")
            parts = [
                self._part(name)
                if self.holds_out and name in ("train", "val")
                else self.source.load(name)
            ]
            if name == "train" and self.unlabeled:
                pictures = unlabelled_folder(self.unlabeled, cache_bytes=self.cache_bytes)
                self.source.note(*splits_within(expanded(self.unlabeled), pictures.place))
                parts.append(pictures)
            self._listed[name] = parts
        return self._listed[name]

    def _part(self, name: str) -> Split:
        if "whole" not in self._listed:
            self._listed["whole"] = [self.source.load("train")]
        (whole,) = self._listed["whole"]
        if len(whole.targets) < 2:
            raise UserError(
                "data.source: needs two pictures or more to hold one out for validation, got one"
            )
        chosen = held_out(whole.targets, self.val_fraction, self.seed)
        keep = chosen if name == "val" else np.setdiff1d(np.arange(len(whole.targets)), chosen)
        return Subset(whole, keep.tolist())

    def validate_in_training(self, fraction: float) -> None:
        """From now on validation is a share of the training pictures: to choose by, where the real one is for later."""
        first, *others = self.listed("train")
        chosen = held_out(first.targets, fraction, self.seed + 1)
        rest = np.setdiff1d(np.arange(len(first.targets)), chosen)
        if not len(chosen):
            raise UserError(
                f"data.source: {len(first.targets)} training pictures are too few to hold some out"
            )
        self._listed |= {
            "train": [Subset(first, rest.tolist()), *others],
            "val": [Subset(first, chosen.tolist())],
        }
        self._splits, self.holds_out = {}, True

    def parts(self, name: str) -> Sequence[Split]:
        """The listed splits, or what is left of them where damaged pictures are left out."""
        if self.on_bad_image == "stop":
            return self.listed(name)
        split = self.split(name)
        return split.parts if isinstance(split, Joined) else [split]

    def split(self, name: str) -> Split:
        """A split without its damaged pictures; the first call for it checks them, see :meth:`prepare_data`."""
        if name not in self._splits:
            labels = ["probe train", "probe val"] if name == "probe" else [name, "unlabeled"]
            parts = [labelled(*part) for part in zip(self.listed(name), labels, strict=False)]
            whole = [self._checked(part, label) for part, label in zip(parts, labels, strict=False)]
            self._splits[name] = Joined(*whole) if len(whole) > 1 else whole[0]
        return self._splits[name]

    def _checked(self, split: Split, name: str) -> Split:
        bad, digests = scan(split, name, self.check or usual(split), self.max_pixels)
        paths = split.paths if isinstance(split, FileSplit) else ()
        self._pictures[name] = [digest for i, digest in enumerate(digests) if i not in bad] or paths
        if not bad:
            return split
        listed = [f"{named(split, i)} ({reason})" for i, reason in bad.items()]
        if self.on_bad_image == "stop":
            more = f" and {len(listed) - 10} more" if len(listed) > 10 else ""
            key = {"unlabeled": "data.unlabeled"}.get(
                name, PROBE if name.startswith("probe") else "data.source"
            )
            raise UserError(
                f"{key}: {len(listed)} damaged picture{'s' * (len(listed) > 1)}: {', '.join(listed[:10])}{more}; "
                "mend them, or leave them out with data.on_bad_image=skip"
            )
        self.skipped += listed
        keep = [i for i in range(len(split.targets)) if i not in bad]
        if not keep:
            raise UserError(
                f"data.source: all {len(listed)} pictures of {name} are damaged, the first is {listed[0]}"
            )
        return Subset(split, keep)

    @property
    def shared(self) -> list[tuple[str, str]]:
        """Validation pictures that are training pictures too, each with one of those; both splits have been checked."""
        train, val = (self._pictures.get(name, ()) for name in ("train", "val"))
        both = {*train} & {*val}
        if not both:
            return []
        first = {picture: i for i, picture in reversed([*enumerate(train)])}
        val_split, train_split = self.split("val"), self.split("train")
        pairs = ((i, first[picture]) for i, picture in enumerate(val) if picture in both)
        return [(val_split.name(i), train_split.name(j)) for i, j in pairs]

    def prepare(self) -> None:
        """Loads all splits before training.

        Raises:
            UserError: a split can't be loaded, or all validation pictures are training pictures.
        """
        for name in ("train", "val", "probe") if self.probe else ("train", "val"):
            self.split(name)
        self._doubt_labels()
        shared = [] if self.holds_out else self.shared
        if shared and len(shared) == len(self.split("val").targets):
            held_out, train = map(printable, shared[0])
            what = held_out if held_out == train else f"{held_out} is {train}"
            raise UserError(
                f"data.source: all {len(shared)} validation pictures are training pictures ({what}); give "
                "others, or none, and data.val_fraction of the training pictures is held out"
            )

    def _doubt_labels(self) -> None:
        """Notes training pictures that are the same file, byte for byte, with different labels."""
        split, pictures = self.split("train"), self._pictures.get("train", ())
        if (
            len(pictures) != len(split.targets) - self.unlabelled()
        ):  # paths of pictures that are left out too
            return
        first: dict[str, int] = {}
        different: list[tuple[int, int]] = []
        for i, picture in enumerate(pictures):
            before = first.setdefault(picture, i)
            if split.targets[before] != split.targets[i]:
                different.append((before, i))
        if different:
            before, i = different[0]
            self.source.note(
                f"warning: {len(different)} training pictures are listed before with another label, for "
                f"example {printable(split.name(i))} ({printable(split.name(before))})"
            )

    def use_folder(self, folder: str, classes: Sequence[str]) -> None:
        """Makes ``folder/<class>/*.jpg`` the split ``folder``, with ids from ``classes``."""
        self.source.classes = list(classes)
        folder = expanded(folder)
        place = place_of(folder, "folder", self.cache_bytes)
        self._listed["folder"] = [
            labelled_folder(joined(folder), classes, "folder", place, self.source.note)
        ]
        self.split("folder")

    def sizes(self) -> dict[str, int]:
        """Pictures of ``train`` and ``val``, and of train's ``unlabeled`` ones."""
        counted = {
            name: sum(len(part.targets) for part in self.parts(name)) for name in ("train", "val")
        }
        return {**counted, "unlabeled": self.unlabelled()}

    def unlabelled(self) -> int:
        """How many unlabelled pictures follow the labelled ones in the training split."""
        return len(self.parts("train")[1].targets) if self.unlabeled else 0


def held_out(targets: Sequence[Any], fraction: float, seed: int) -> np.ndarray:
    """Numbers of the held-out training pictures, ascending: ``fraction`` of each class, at least one of two or more."""
    rng = np.random.default_rng([seed, 2])
    classes: dict[Hashable, list[int]] = {}
    for i, target in enumerate(targets):
        classes.setdefault(target if isinstance(target, int) else None, []).append(
            i
        )  # others: of all alike
    counts = {
        kind: min(max(1, round(fraction * len(found))), len(found) - 1)
        for kind, found in classes.items()
    }
    return np.sort(
        np.concatenate([rng.permutation(found)[: counts[kind]] for kind, found in classes.items()])
    )


def load_probe(probe: Probe, cache_bytes: int | None = None) -> list[Split]:
    """Labelled pictures that features are measured on: those of ``train`` and of ``val``."""
    source = ImageFolder(probe.root or "")
    source.key, source.cache_bytes = PROBE, cache_bytes
    train = source.load("train")
    if len(source.classes) == 1:
        raise UserError(f"{PROBE}: needs two classes or more, got one ('{source.classes[0]}')")
    val = source.load("val")
    first, both = (
        {os.path.realpath(s.name(i)) for i in range(len(s.targets))} for s in (train, val)
    )
    both &= first
    if both:
        raise UserError(
            f"{PROBE}: {len(both)} pictures of val are in train too ({min(both)}): they would be "
            "their own nearest neighbours"
        )
    return [train, val]


def info_of(
    source: Source,
    sizes: Mapping[str, int],
    targets: Sequence[Any],
    augment: Augment,
    crop_ratio: float,
    unlabeled_ratio: float | None,
    balance_classes: bool,
    probed: bool = False,
) -> DataInfo:
    """What is known of the data, once their settings are seen to fit each other."""
    for name in source.kind.undefined:
        if getattr(augment, name):
            raise UserError(
                f"data.augment.{name}: is not defined for {source.kind.name}, set it to 0"
            )
    unlabelled_alone = bool(sizes["unlabeled"]) and unlabeled_ratio is None
    counts = source.kind.counts(targets, len(source.classes)) if source.classes else None
    if balance_classes and (counts is None or unlabelled_alone):
        raise UserError("data.balance_classes: needs one label a picture to train on")
    if balance_classes and sizes["unlabeled"] and augment.mixes:
        raise UserError(
            "data.balance_classes: needs data.augment.mixup=0 and cutmix=0 beside data.unlabeled"
        )
    if source.classes == [] and sizes["unlabeled"]:
        raise UserError(
            "data.unlabeled: needs labelled pictures in data.source, which has none; leave it out"
        )
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
        crop_ratio=crop_ratio,
        probed=probed,
        counts=None if balance_classes else counts,
        scales=source.kind.scales(targets, len(source.classes)),
    )
