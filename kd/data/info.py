"""What is known of the data, once their settings are seen to fit each other."""

from collections.abc import Mapping, Sequence
from typing import Any

from kd.data.batch import DataInfo
from kd.data.sources import Source
from kd.errors import UserError
from kd.run.settings import Augment


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
    """Classes and sizes. See :class:`kd.data.datamodule.DistillationDataModule` for the settings."""
    for name in source.kind.undefined:
        if getattr(augment, name):
            raise UserError(f"data.augment.{name}: is not defined for {source.kind.name}, set it to 0")
    unlabelled_alone = bool(sizes["unlabeled"]) and unlabeled_ratio is None
    counts = source.kind.counts(targets, len(source.classes)) if source.classes else None
    if balance_classes and (counts is None or unlabelled_alone):
        raise UserError("data.balance_classes: needs one label a picture to train on")
    if balance_classes and sizes["unlabeled"] and augment.mixes:
        raise UserError("data.balance_classes: is not defined for labelled and unlabelled pictures mixed in pairs")
    if source.classes == [] and sizes["unlabeled"]:
        raise UserError("data.unlabeled: stands beside labelled pictures, and data.source has none; leave it out")
    if 0 < len(source.classes) < source.kind.least_classes:
        raise UserError(f"data.source: one class ('{source.classes[0]}') leaves nothing to tell apart; two are needed")
    return DataInfo(
        list(source.classes), sizes["train"], sizes["val"],
        unlabeled=sizes["unlabeled"] if source.classes else sizes["train"],
        labels=bool(source.classes) and not unlabelled_alone,
        soft_targets=augment.mixes, kind=source.kind.name,
        ignore_index=source.ignore_index, crop_ratio=crop_ratio,
        probed=probed, counts=None if balance_classes else counts,
        scales=source.kind.scales(targets, len(source.classes)),
    )  # fmt: skip
