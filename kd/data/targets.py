"""What a source labels its pictures with: how a target follows its picture into a view and a batch.

A method that needs torch imports it: sources are listed before torch is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kd.data.info import Target
from kd.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from torchvision.transforms import v2


class Targets:
    """One class id a picture, -1 without a label; base of the other kinds. A source's ``kind`` is one of these."""

    name = "one label a picture"  # in messages; a task names the kind that it learns from in the same words
    counted = "classes"  # what a source has some of
    undefined: tuple[str, ...] = ()
    """The augmentations that are not defined for such targets."""
    one_class = True  # a picture has one class, or no label
    least_classes = 2  # fewer leave nothing to tell apart
    # It has a value for each pixel, which a view's crop, resize and flip move too: the loader makes such views whole.
    cut_with_picture = False

    def view(
        self, transform: v2.Transform, picture: Tensor, target: Target, ignore_index: int | None
    ) -> tuple[Any, Any]:
        """A view of a picture and the target that belongs to it; runs in the loader, under the sample's seed.

        Args:
            transform: makes the view; a mask goes through it too.
            picture: uint8 ``(3, H, W)``.
            target: as the split has it.
            ignore_index: of a mask's pixels that take no part; other kinds do not read it.
        """
        return transform(picture), target

    def check_unlabelled(self, classes: int, ignore_index: int | None) -> None:
        """Refuses ``data.unlabeled`` where no target is left that means "no label": only masks can run out of values.

        Args:
            classes: how many there are.
            ignore_index: the value of a mask's pixels that take no part.

        Raises:
            UserError: no value is left.
        """

    def stack(self, targets: Sequence[Any], classes: int) -> Tensor:
        """The targets of N samples as one tensor, as losses read them: class ids ``(N,)``."""
        import torch

        return torch.tensor(targets)

    def counts(self, targets: Sequence[Any], classes: int) -> list[int] | None:
        """Pictures of each class, by id; None for the kinds of which a picture has not one class.

        Args:
            targets: of the training pictures; ids below 0 are no label.
            classes: how many there are.
        """
        if not self.one_class:
            return None
        ids = np.asarray(targets)
        return np.bincount(ids[ids >= 0], minlength=classes).tolist()

    def scales(self, targets: Sequence[Any], classes: int) -> list[tuple[float, float]] | None:
        """Mean and standard deviation of each number; None where targets are classes."""
        return None


class LabelSets(Targets):
    """Any number of class ids a picture."""

    name = "several labels a picture"
    counted = "labels"
    undefined = ("mixup", "cutmix")
    one_class = False
    least_classes = 1

    def stack(self, targets: Sequence[Any], classes: int) -> Tensor:
        """Rows ``(N, C)`` of 0 and 1, float32; NaN for a picture without labels.

        Args:
            targets: a list of class ids of each of N pictures (empty: it has none of the labels); -1 where its labels are
                not known.
            classes: C.
        """
        import torch

        rows = torch.zeros(len(targets), classes)
        for row, ids in zip(rows, targets, strict=True):
            if isinstance(ids, list):
                row[ids] = 1.0
            else:
                row.fill_(float("nan"))
        return rows


class Numbers(Targets):
    """Some numbers a picture, NaN where one is missing."""

    name = "numbers"
    counted = "number(s)"
    undefined = ("mixup", "cutmix")
    one_class = False
    least_classes = 1

    def stack(self, targets: Sequence[Any], classes: int) -> Tensor:
        """Rows ``(N, C)``, float32; NaN for a missing number, and for all of a picture without a label (-1)."""
        import torch

        missing = [math.nan] * classes
        rows = [target if isinstance(target, list) else missing for target in targets]
        return torch.tensor(rows, dtype=torch.float32)

    def scales(self, targets: Sequence[Any], classes: int) -> list[tuple[float, float]]:
        """Mean and standard deviation of each number over the known targets, by which losses bring them to one scale.

        NaN and missing ones are left out; the deviation of a constant number is 1, and of one without a value the mean is 0.

        Args:
            targets: lists of ``classes`` numbers; -1 without targets.
            classes: how many numbers a picture has.
        """
        rows = [target for target in targets if isinstance(target, list)]
        known = np.asarray(rows, dtype=np.float64)
        means = np.nan_to_num(np.nanmean(known, 0))
        # of equal numbers rounding leaves a deviation above 0
        lowest = np.nanmin(known, 0)
        highest = np.nanmax(known, 0)
        varies = lowest < highest
        deviations = np.where(varies, np.nanstd(known, 0), 1.0)
        pairs = zip(means.tolist(), deviations.tolist(), strict=True)
        return list(pairs)


class Masks(Targets):
    """A class id for every pixel, uint8 ``(1, H, W)``."""

    name = "masks"
    undefined = (
        "mixup",
        "cutmix",
        "rand_augment",
        "random_erasing",
        "pad",
        "rotation",
        "before_resize",
    )
    one_class = False
    least_classes = 1
    cut_with_picture = True

    def view(
        self, transform: v2.Transform, picture: Tensor, target: Target, ignore_index: int | None
    ) -> tuple[Any, Any]:
        """The view of the picture, and of its mask by the same crop and flip."""
        mask = self._whole(target, picture.shape[-2:], ignore_index)
        view, view_mask = transform(picture, mask)
        return view, view_mask

    def check_unlabelled(self, classes: int, ignore_index: int | None) -> None:
        """Refuses ``data.unlabeled`` where classes and ``ignore_index`` leave no value of a byte for pictures without a
        mask; arguments and errors as of :meth:`Targets.check_unlabelled`.
        """
        if self._unlabelled(ignore_index) < classes:
            raise UserError(
                f"data.unlabeled: {classes} classes and ignore_index={ignore_index} take all 256 values of a mask; "
                "pictures without a mask need one (fewer class_names, or no ignore_index)"
            )

    @staticmethod
    def _unlabelled(ignore_index: int | None) -> int:
        """The value of all pixels of a picture without a mask, 0 to 255: neither a class nor ``ignore_index``."""
        return 254 if ignore_index == 255 else 255

    def stack(self, targets: Sequence[Any], classes: int) -> Tensor:
        """N masks ``(1, H, W)`` of one size as one tensor of class ids, uint8 ``(N, H, W)``."""
        import torch

        return torch.cat([mask.as_subclass(torch.Tensor) for mask in targets])

    @classmethod
    def _whole(cls, target: Target, size: Sequence[int], ignore_index: int | None) -> Tensor:
        """A picture's mask, uint8 ``(1, H, W)``; without labels (``target`` -1) 255 everywhere, or 254 where 255 is ignored.

        That is no class, so a task skips these pixels. It is not ``ignore_index``, whose pixels distillation skips too.

        Args:
            target: the mask, or -1.
            size: height and width of the picture.
            ignore_index: of the source.
        """
        import torch
        from torchvision import tv_tensors

        if isinstance(target, torch.Tensor):
            return target
        value = cls._unlabelled(ignore_index)
        return tv_tensors.Mask(torch.full((1, *size), value, dtype=torch.uint8))


WITH_TARGETS = {
    LabelSets.name: "a list has several: data.source=LIST.csv, with a column of paths and one of labels "
    "(recipes/TOPICS.md, Several labels)",
    Numbers.name: "a list has numbers: data.source=LIST.csv data.source.targets=COLUMN (recipes/TOPICS.md, Numbers)",
    Masks.name: "masks are beside pictures: data.source=SegmentationFolder data.source.root=DIR",
}
"""By kind of target: what a message says of a task that needs it and gets another."""
TASKS = {
    "Classification": Targets.name,
    "MultiLabel": LabelSets.name,
    "Regression": Numbers.name,
    "Segmentation": Masks.name,
}
"""kd's tasks by the short names of their classes, and the kind of target that each learns from."""


def other_targets(task: str, needs: str, gives: str) -> UserError:
    """The error, for the caller to raise, of a task whose kind of target the pictures do not have.

    Args:
        task: the short name of its class.
        needs: its kind of target.
        gives: the pictures' kind.
    """
    remedy = WITH_TARGETS.get(needs, "")
    fitting = [name for name, kind in TASKS.items() if kind == gives]
    if needs == Targets.name:
        remedy = f"model.task={fitting[0]}" if fitting else ""
    return UserError(
        f"model.task: {task} needs {needs}, data.source gives {gives}"
        + (f"; {remedy}" if remedy else "")
    )
