"""What is known of the data, once their settings are seen to fit each other."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kd.data.batch import DataInfo
from kd.data.sources import Source
from kd.data.transforms import Augment
from kd.errors import UserError


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
    """Classes and sizes. See :class:`kd.data.datamodule.DistillationDataModule` for the settings.

    Args:
        source: has been listed.
        sizes: of ``train`` and ``val``, and how many of train's pictures are ``unlabeled``.
        targets: of the training pictures from the source.
        augment: the training views.
        crop_ratio: of validation.
        unlabeled_ratio: of unlabelled pictures in an epoch.
        balance_classes: whether classes are seen equally often.
        probed: whether there are labelled pictures to measure features on.

    Raises:
        UserError: settings that are not defined for these data.
    """
    _check_augment(source, augment)
    unlabelled_alone = bool(sizes["unlabeled"]) and unlabeled_ratio is None
    if balance_classes:
        _check_balance(source, augment, bool(sizes["unlabeled"]), unlabelled_alone)
    if source.classes == [] and sizes["unlabeled"]:
        raise UserError("data.unlabeled: stands beside labelled pictures, and data.source has none; leave it out")
    if len(source.classes) == 1 and not source.masks and not source.multi_label:
        raise UserError(f"data.source: one class ('{source.classes[0]}') leaves nothing to tell apart; two are needed")
    return DataInfo(
        list(source.classes), sizes["train"], sizes["val"],
        unlabeled=sizes["unlabeled"] if source.classes else sizes["train"],
        labels=bool(source.classes) and not unlabelled_alone,
        soft_targets=augment.mixes, masks=source.masks, multi_label=source.multi_label,
        ignore_index=source.ignore_index, crop_ratio=crop_ratio,
        probed=probed, counts=None if balance_classes else _counts(source, targets),
    )  # fmt: skip


def _counts(source: Source, targets: Sequence[Any]) -> list[int] | None:
    """Training pictures of each class, where a picture has one label."""
    if not source.classes or source.masks or source.multi_label:
        return None
    ids = np.asarray(targets)
    return np.bincount(ids[ids >= 0], minlength=len(source.classes)).tolist()


def _check_augment(source: Source, augment: Augment) -> None:
    undefined: tuple[str, ...] = ("mixup", "cutmix") if source.masks or source.multi_label else ()
    if source.masks:
        undefined += ("rand_augment", "random_erasing")
    for name in undefined:
        if getattr(augment, name):
            kind = "masks" if source.masks else "several labels a picture"
            raise UserError(f"data.augment.{name}: is not defined for {kind}, set it to 0")


def _check_balance(source: Source, augment: Augment, unlabelled: bool, unlabelled_alone: bool) -> None:
    if source.masks or source.multi_label or not source.classes or unlabelled_alone:
        raise UserError("data.balance_classes: needs one label a picture to train on")
    if unlabelled and augment.mixes:
        raise UserError("data.balance_classes: is not defined for labelled and unlabelled pictures mixed in pairs")
