"""Semantic segmentation: a class for every pixel."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from kd.tasks.base import TargetCounts, Task
from kd.tasks.weights import ClassWeights, check, weights_of


class Segmentation(Task):
    """Per-pixel cross-entropy; mean intersection over union, pixel accuracy, agreement with the teacher.

    Metrics are over all pixels of the validation set that are not ignored, at the size of the targets
    (``data.img_size``). ``miou`` is the mean over the classes that occur in targets or predictions, so a class that is
    only predicted counts as 0; where there is one, ``miou_of_targets`` is the mean over the classes of the targets
    alone. Each class's IoU goes to ``summary.json``.

    Args:
        num_classes: classes of the data; default: as the data says.
        ignore_index: value of pixels that take no part; default: as the data says.
        class_weights: how much a pixel counts in the loss on the labels, by its class: a list by class id, or numbers
            by class name (the others 1).
    """

    dense = True
    primary = "miou"
    weights: Tensor | None

    def __init__(
        self, num_classes: int | None = None, ignore_index: int | None = None, class_weights: ClassWeights = None
    ) -> None:
        super().__init__(num_classes, ignore_index)
        check(class_weights)
        self.class_weights = class_weights
        self.register_buffer("weights", None, persistent=False)

    def weigh(self, classes: Sequence[str], counts: Sequence[int] | None) -> None:
        self.weights = weights_of(self.class_weights, classes, counts)

    def build(self, num_classes: int, ignore_index: int | None = None) -> None:
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.iou = MulticlassJaccardIndex(
            num_classes, average="none", ignore_index=ignore_index, zero_division=math.nan, validate_args=False
        )
        self.pixel_acc = MulticlassAccuracy(
            num_classes, average="micro", ignore_index=ignore_index, validate_args=False
        )
        self.targets = TargetCounts(num_classes, ignore_index)
        self.agreement = MulticlassAccuracy(num_classes, average="micro", validate_args=False)

    def metric_names(self, teacher: bool) -> list[str]:
        return ["miou", "pixel_acc", *(["agreement"] if teacher else [])]

    def fit(self, logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C, h, w)`` -> ``(N, C, H, W)`` of the target, bilinear."""
        if logits.shape[2:] == target.shape[1:]:
            return logits
        return F.interpolate(logits, target.shape[1:], mode="bilinear")

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy: ``(N, C, H, W)``, ids ``(N, H, W)`` -> the mean over valid pixels; 0 where all are ignored."""
        target = target.long()
        valid = (target >= 0) & (target < self.num_classes) & (target != self.ignore_index)
        losses = F.cross_entropy(logits.float(), torch.where(valid, target, 0), self.weights, reduction="none")
        return (losses * valid).sum() / valid.sum().clamp_min(1)

    def decide(self, logits: Tensor) -> Tensor:
        """The class of each pixel, uint8 ``(N, H, W)`` (int16 beyond 255 classes)."""
        return logits.argmax(1).to(torch.uint8 if self.num_classes <= 255 else torch.int16)

    def update(self, logits: Tensor, target: Tensor, teacher_answer: Tensor | None) -> None:
        """Adds a batch: ``(N, C, H, W)``, ids ``(N, H, W)``, and the teacher's classes ``(N, H, W)``."""
        prediction, target = logits.argmax(1), target.long()
        self.iou.update(prediction, target)
        self.targets.update(target)
        self.pixel_acc.update(prediction, target)
        if teacher_answer is not None:
            valid = target != self.ignore_index
            self.agreement.update(prediction[valid], teacher_answer.long()[valid])

    def compute(self) -> dict[str, Tensor]:
        """``miou``, ``pixel_acc``, ``agreement``, and ``iou_<class id>`` for the classes that occur.

        ``miou_of_targets`` too, where it differs.
        """
        found = super().compute()
        per_class, in_targets = (
            found.pop("iou"),
            found.pop("targets")[0] > 0,
        )  # NaN where a class occurs neither in targets nor in predictions
        if self.ignore_index in range(self.num_classes):  # predicted it may be, but nothing can be right about it
            per_class[self.ignore_index] = torch.nan
        each = {f"iou_{i:02d}": value for i, value in enumerate(per_class) if not value.isnan()}
        if (~per_class.isnan() & ~in_targets).any() and in_targets.any():
            found["miou_of_targets"] = per_class[in_targets].nanmean()
        return {"miou": per_class.nanmean(), **found, **each}

    def chance(self, counts: Tensor, total: int) -> float:
        """Always naming the most frequent class: its share is its IoU, all others have 0. Below 1 in any case."""
        found = counts.max().item() / total / max(1, int((counts > 0).sum()))
        return min(found, 1 - 1 / total)
