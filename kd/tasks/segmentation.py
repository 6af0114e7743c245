"""Semantic segmentation: a class for every pixel."""

from collections.abc import Mapping
from colorsys import hsv_to_rgb

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kd.errors import REFUSED_LOSSES
from kd.losses import LogitLoss
from kd.tasks.base import ExactMetric, Task, occurrences
from kd.tasks.fidelity import Fidelity
from kd.tasks.weights import ClassWeights, check_class_weights


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

    kind = "masks"
    answers = "segmentation"
    link = "softmax"
    dense = True
    primary = "miou"
    secondary = ("pixel_acc",)
    certified = "mean IoU"
    weights: Tensor | None

    def __init__(
        self,
        num_classes: int | None = None,
        ignore_index: int | None = None,
        class_weights: ClassWeights = None,
    ) -> None:
        """Checks the arguments, which are the class's; the weights' tensor is made by :meth:`weigh`.

        Raises:
            ValueError: fewer classes than one, or weights that no classes can have.
        """
        super().__init__(num_classes, ignore_index)
        check_class_weights(class_weights)
        self.class_weights = class_weights
        self.register_buffer("weights", None, persistent=False)

    def build(self, num_classes: int, ignore_index: int | None = None) -> None:
        """Makes the pixel counts.

        Called by :meth:`Task.settle`, which has compared both with what the constructor was given.

        Args:
            num_classes: as many classes C as the models' logits ``(N, C, H, W)`` have.
            ignore_index: pixels with this value count nowhere; None: every pixel counts.
        """
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.pixels = PixelCounts(num_classes, ignore_index)

    def fit(self, logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C, h, w)`` -> ``(N, C, H, W)`` of the target, bilinear."""
        if logits.shape[2:] == target.shape[1:]:
            return logits
        return F.interpolate(logits, target.shape[1:], mode="bilinear")

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy, each pixel times its class's weight: the mean over pixels of a known class; 0 without any.

        Like :meth:`kd.tasks.Classification.loss`, it is not divided by the weights.

        Args:
            logits: ``(N, C, H, W)``.
            target: class ids ``(N, H, W)``; ``ignore_index`` and ids that are no class take no part.
        """
        target = target.long()
        valid = self._valid(target)
        losses = F.cross_entropy(
            logits.float(), torch.where(valid, target, 0), self.weights, reduction="none"
        )
        return (losses * valid).sum() / valid.sum().clamp_min(1)

    def _valid(self, target: Tensor) -> Tensor:
        """Where a pixel's class is known, bool ``(N, H, W)``."""
        return (target >= 0) & (target < self.num_classes) & (target != self.ignore_index)

    def wanted_targets(self, training: bool) -> str:
        """A class id for each pixel."""
        return (
            f"masks (N, H, W) of class ids, whole numbers from 0 to {self.num_classes - 1} (255, "
            "ignore_index, or below 0: no class)"
        )

    def takes(self, target: Tensor, pictures: int, training: bool) -> bool:
        """Whether targets are whole numbers ``(N, H, W)``; on the CPU their largest must also be a class id, 255 or
        ``ignore_index``.
        """
        if target.is_floating_point() or target.ndim != 3 or len(target) != pictures:
            return False
        if target.device.type != "cpu":
            return True
        most = int(target.max())
        return most < self.num_classes or most in (255, self.ignore_index)

    def counted(self, target: Tensor) -> Tensor:
        """How many pixels of the masks ``(N, H, W)`` have a known class: int64, a scalar."""
        return self._valid(target.long()).sum()

    def decide(self, logits: Tensor) -> Tensor:
        """The class of each pixel, uint8 ``(N, H, W)`` (int16 beyond 255 classes)."""
        return logits.argmax(1).to(torch.uint8 if self.num_classes <= 255 else torch.int16)

    def refuses(self, loss: LogitLoss) -> str:
        """Refuses losses that are not defined for logit maps."""
        return "" if loss.for_maps else REFUSED_LOSSES["Segmentation"]

    def fidelity(self, classes: int) -> Fidelity:
        """Compares the maps of student and teacher; pixels of ``ignore_index`` take no part."""
        return Fidelity("segmentation", classes, self.ignore_index)

    def outcome(self, answer: Tensor, target: Tensor) -> Tensor:
        """Of each class the pixels that are right, and those in the union of target and answer: ``(N, 2, C)``."""
        class_ids_NHW = answer.argmax(1)
        known_NHW = self._valid(target)
        counts = []
        for class_id in range(self.num_classes):
            is_target = (target == class_id) & known_NHW
            is_answer = (class_ids_NHW == class_id) & known_NHW
            right = (is_target & is_answer).sum((1, 2))
            union = (is_target | is_answer).sum((1, 2))
            counts.append(torch.stack([right, union], 1))
        counts_N2C = torch.stack(counts, 2).float()
        if self.ignore_index is not None and 0 <= self.ignore_index < self.num_classes:
            counts_N2C[..., self.ignore_index] = 0
        return counts_N2C

    def update(self, logits: Tensor, target: Tensor, teacher_answer: Tensor | None) -> None:
        """Adds a batch: logits ``(N, C, H, W)``, ids ``(N, H, W)``, and the teacher's classes ``(N, H, W)``."""
        self.pixels.update(logits.argmax(1), target.long(), teacher_answer)

    def compute(self) -> dict[str, Tensor]:
        """``miou``, ``pixel_acc``, ``agreement`` (with a teacher), and the IoU of each class in targets or predictions.

        All are scalars in [0, 1]. A class's name is ``iou_`` and its id in two digits or more. ``miou_of_targets`` is there
        where a class is predicted that is no target. Without a pixel of a known class ``miou`` is NaN, and only then. {}
        where no process has a batch.
        """
        pixels = super().compute().get("pixels")
        if pixels is None:
            return {}
        confusion, alike = pixels
        # Of each class c: IoU = pixels right / (pixels of c + pixels predicted as c - pixels right);
        # NaN where it is neither target nor predicted.
        right = confusion.diag()
        in_target = confusion.sum(1)
        predicted = confusion.sum(0)
        iou = right / (in_target + predicted - right)
        if self.ignore_index is not None and 0 <= self.ignore_index < self.num_classes:
            iou[self.ignore_index] = torch.nan  # it may be predicted, and can't be right

        metrics = {"miou": iou.nanmean(), "pixel_acc": right.sum() / confusion.sum().clamp_min(1)}
        agreed, compared = alike
        if compared:
            metrics["agreement"] = agreed / compared
        occurs = in_target > 0
        only_predicted = ~iou.isnan() & ~occurs
        if only_predicted.any() and occurs.any():
            metrics["miou_of_targets"] = iou[occurs].nanmean()
        for class_id, value in enumerate(iou):
            if not value.isnan():
                metrics[f"iou_{class_id:02d}"] = value
        return metrics

    def chance(self, counts: Tensor, total: int) -> float:
        """The mean IoU of always naming the most frequent class: its share is its IoU, all others that occur have 0.

        At most ``1 - 1 / total``, so that a teacher that is right on all is above it.

        Args:
            counts: pixels of each class, ``(C,)``.
            total: pixels of a known class, > 0.
        """
        share = counts.max().item() / total
        occurring = max(1, int((counts > 0).sum()))
        return min(share / occurring, 1 - 1 / total)


class PixelCounts(ExactMetric):
    """Pixels by target and prediction ``(C, C)``, and how many are as the teacher has decided, of how many."""

    confusion: Tensor
    """Pixels by target (rows) and prediction, int64 ``(C, C)``."""
    alike: Tensor
    """int64 ``(2,)``: pixels on which student and teacher agree, and all compared."""

    def __init__(self, num_classes: int, ignore_index: int | None) -> None:
        """Begins without pixels; ``confusion`` ``(C, C)`` and ``alike`` ``(2,)`` are added up over processes."""
        super().__init__()
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.add_state(
            "confusion",
            torch.zeros(num_classes, num_classes, dtype=torch.int64),
            dist_reduce_fx="sum",
        )
        self.add_state("alike", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, prediction: Tensor, target: Tensor, teacher_answer: Tensor | None) -> None:
        """Adds a batch, class ids ``(N, H, W)`` each, on their device and without a wait for it.

        Pixels of an unknown class other than ``ignore_index`` are left out of the matrix alone: both models answer there
        too, so they count in ``alike``.

        Args:
            prediction: of the student.
            target: int64.
            teacher_answer: None without a teacher: then ``alike`` stays as it is.
        """
        taking_part = torch.ones_like(target, dtype=torch.bool)
        if self.ignore_index is not None:
            taking_part = target != self.ignore_index
        is_class = (target >= 0) & (target < self.num_classes)
        known = taking_part & is_class
        pairs = target * self.num_classes + prediction  # a number for each pair of classes
        counts = occurrences(pairs.flatten(), known.flatten(), self.confusion.numel())
        self.confusion += counts.view_as(self.confusion)
        if teacher_answer is not None:
            is_alike = prediction == teacher_answer
            agreed = taking_part & is_alike
            self.alike += torch.stack([agreed.sum(), taking_part.sum()])

    def compute(self) -> tuple[Tensor, Tensor]:
        """The confusion matrix ``(C, C)`` in pixels, and ``(2,)``: pixels on which student and teacher agree, and
        all compared.
        """
        return self.confusion, self.alike


def colours(classes: int) -> np.ndarray:
    """A palette by class id, uint8 ``(max(256, classes + 1), 3)``, red, green and blue.

    Classes get evenly turned hues of alternating brightness; all other ids are black.
    """
    golden_ratio = 0.61803398875  # turned by it, any number of hues are far from each other
    brightness = (255, 190, 140)
    palette = np.zeros((max(256, classes + 1), 3), np.uint8)
    for class_id in range(classes):
        hue = class_id * golden_ratio % 1
        value = brightness[class_id % 3] / 255
        shares = hsv_to_rgb(hue, 200 / 255, value)
        colour = [round(255 * share) for share in shares]
        palette[class_id] = colour
    return palette


def side_by_side(
    picture: np.ndarray, maps: Mapping[str, Tensor], known: Tensor, classes: int
) -> np.ndarray:
    """A picture and class maps in a row, uint8 ``(H, W * (1 + maps), 3)``.

    Args:
        picture: ``(H, W, 3)``, 0 to 255.
        maps: class ids ``(H, W)`` by name, on the CPU.
        known: which pixels count, bool ``(H, W)``; the others are black in all maps.
        classes: how many there are.
    """
    palette = colours(classes)
    panels = [picture]
    for ids in maps.values():
        shown = ids.long().where(known, classes)  # no class: black
        panels.append(palette[shown.numpy()])
    return np.concatenate(panels, axis=1)
