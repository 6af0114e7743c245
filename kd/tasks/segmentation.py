"""Semantic segmentation: a class for every pixel."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from kd.losses import LogitLoss
from kd.tasks.base import ExactMetric, Task, counted, relative_entropy
from kd.tasks.weights import ClassWeights, check, weights_of

GAP = 4
BAND = 16


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
    dense = draws = True
    primary = "miou"
    weights: Tensor | None

    def __init__(
        self,
        num_classes: int | None = None,
        ignore_index: int | None = None,
        class_weights: ClassWeights = None,
    ) -> None:
        super().__init__(num_classes, ignore_index)
        check(class_weights)
        self.class_weights = class_weights
        self.register_buffer("weights", None, persistent=False)

    def weigh(self, classes: Sequence[str], counts: Sequence[int] | None) -> None:
        """Computes the loss's weight of each class from ``class_weights``.

        Raises:
            UserError: weights that are not these classes'.
        """
        self.weights = weights_of(self.class_weights, classes, counts)

    def build(self, num_classes: int, ignore_index: int | None = None) -> None:
        """Makes the pixel counts; pixels of ``ignore_index`` count nowhere."""
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.pixels = PixelCounts(num_classes, ignore_index)

    def metric_names(self, teacher: bool) -> list[str]:
        """``miou``, ``pixel_acc`` and, with a teacher, ``agreement``."""
        return ["miou", "pixel_acc", *(["agreement"] if teacher else [])]

    def fit(self, logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C, h, w)`` -> ``(N, C, H, W)`` of the target, bilinear."""
        if logits.shape[2:] == target.shape[1:]:
            return logits
        return F.interpolate(logits, target.shape[1:], mode="bilinear")

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy: ``(N, C, H, W)``, ids ``(N, H, W)`` -> the mean over valid pixels; 0 where all are ignored."""
        target = target.long()
        valid = self._valid(target)
        losses = F.cross_entropy(
            logits.float(), torch.where(valid, target, 0), self.weights, reduction="none"
        )
        return (losses * valid).sum() / valid.sum().clamp_min(1)

    def _valid(self, target: Tensor) -> Tensor:
        """Where a pixel's class is known, bool ``(N, H, W)``."""
        return (target >= 0) & (target < self.num_classes) & (target != self.ignore_index)

    def counted(self, target: Tensor) -> Tensor:
        """The pixels whose class is known."""
        return self._valid(target.long()).sum()

    def decide(self, logits: Tensor) -> Tensor:
        """The class of each pixel, uint8 ``(N, H, W)`` (int16 beyond 255 classes)."""
        return logits.argmax(1).to(torch.uint8 if self.num_classes <= 255 else torch.int16)

    def refuses(self, loss: LogitLoss) -> str:
        """Refuses losses that are not defined for logit maps."""
        others = "PixelKDLoss, CWDLoss and the losses over features are"
        return "" if loss.for_maps else f"is not defined for masks; {others}"

    def trial(self, classes: int) -> tuple[tuple[int, ...], Tensor]:
        """Four pictures of 4x4 pixels, to try losses on: logits ``(4, C, 4, 4)`` and masks ``(4, 4, 4)``."""
        return (4, classes, 4, 4), torch.zeros(4, 4, 4, dtype=torch.uint8)

    def entropy(self, logits: Tensor) -> Tensor:
        """Mean entropy of the pixels' softmax over its maximum log C, in 0..1."""
        return relative_entropy(logits.log_softmax(1))

    def drawn(
        self, picture: np.ndarray, answers: Mapping[str, Tensor], classes: Sequence[str]
    ) -> Image.Image:
        """The picture ``(H, W, 3)`` beside its mask and each model's; ignored pixels are blank in the models' too."""
        counts = answers["truth"].numpy() < len(classes)
        maps = {
            name: np.where(counts | (name == "truth"), ids.numpy(), 255)
            for name, ids in answers.items()
        }
        return side_by_side(picture, maps, classes)

    def update(self, logits: Tensor, target: Tensor, teacher_answer: Tensor | None) -> None:
        """Adds a batch: ``(N, C, H, W)``, ids ``(N, H, W)``, and the teacher's classes ``(N, H, W)``."""
        self.pixels.update(logits.argmax(1), target.long(), teacher_answer)

    def compute(self) -> dict[str, Tensor]:
        """``miou``, ``pixel_acc``, ``agreement``, ``iou_<class id>``; ``miou_of_targets`` where it differs."""
        confusion, alike = super().compute()["pixels"]
        right, of_class = confusion.diag(), confusion.sum(1)
        per_class = right / (
            of_class + confusion.sum(0) - right
        )  # NaN where a class is neither target nor predicted
        in_targets, found = of_class > 0, {"pixel_acc": right.sum() / confusion.sum().clamp_min(1)}
        if alike[1]:
            found["agreement"] = alike[0] / alike[1]
        if self.ignore_index in range(
            self.num_classes
        ):  # predicted it may be, but nothing can be right about it
            per_class[self.ignore_index] = torch.nan
        each = {f"iou_{i:02d}": value for i, value in enumerate(per_class) if not value.isnan()}
        if (~per_class.isnan() & ~in_targets).any() and in_targets.any():
            found["miou_of_targets"] = per_class[in_targets].nanmean()
        return {"miou": per_class.nanmean(), **found, **each}

    def chance(self, counts: Tensor, total: int) -> float:
        """Always naming the most frequent class: its share is its IoU, all others have 0. Below 1 in any case."""
        return min(counts.max().item() / total / max(1, int((counts > 0).sum())), 1 - 1 / total)


class PixelCounts(ExactMetric):
    """Pixels by target and prediction ``(C, C)``, and how many are as the teacher has decided, of how many."""

    confusion: Tensor
    alike: Tensor

    def __init__(self, num_classes: int, ignore_index: int | None) -> None:
        super().__init__()
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.add_state(
            "confusion",
            torch.zeros(num_classes, num_classes, dtype=torch.int64),
            dist_reduce_fx="sum",
        )
        self.add_state("alike", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, prediction: Tensor, target: Tensor, teacher_answer: Tensor | None) -> None:
        """Adds a batch, ids ``(N, H, W)``: counted where they are, no GPU is waited for."""
        everywhere = torch.ones_like(target, dtype=torch.bool)
        taking_part = everywhere if self.ignore_index is None else target != self.ignore_index
        known = taking_part & (target >= 0) & (target < self.num_classes)
        pairs = counted(
            (target * self.num_classes + prediction).flatten(),
            known.flatten(),
            self.confusion.numel(),
        )
        self.confusion += pairs.view_as(self.confusion)
        if teacher_answer is not None:
            self.alike += torch.stack(
                [(taking_part & (prediction == teacher_answer)).sum(), taking_part.sum()]
            )

    def compute(self) -> tuple[Tensor, Tensor]:
        """The confusion matrix ``(C, C)`` in pixels, and ``(2,)``: pixels on which student and teacher agree, and
        all compared.
        """
        return self.confusion, self.alike


def colours(classes: int) -> np.ndarray:
    """A palette ``(256+, 3)``, uint8: the classes by evenly turned hues of alternating brightness, all others black."""
    palette = np.zeros((max(256, classes), 3), np.uint8)
    for i in range(classes):
        hue, value = round(255 * (i * 0.61803398875 % 1)), (255, 190, 140)[i % 3]
        palette[i] = np.array(Image.new("HSV", (1, 1), (hue, 200, value)).convert("RGB"))[0, 0]
    return palette


def side_by_side(
    picture: np.ndarray, maps: Mapping[str, np.ndarray], classes: Sequence[str]
) -> Image.Image:
    """A picture ``(H, W, 3)`` and class maps ``(H, W)`` in a row, each under its name, the colours' names below."""
    palette = colours(len(classes))
    panels = {"picture": picture} | {name: palette[ids] for name, ids in maps.items()}
    height, width = picture.shape[:2]
    total = len(panels) * (width + GAP) - GAP
    occurring = [i for i in range(len(classes)) if any((ids == i).any() for ids in maps.values())]
    rows = _legend_rows([classes[i] for i in occurring], total)
    sheet = Image.new(
        "RGB",
        (total, BAND + height + BAND * (max((row for row, _ in rows), default=0) + 1)),
        "white",
    )
    draw = ImageDraw.Draw(sheet)
    for place, (name, panel) in enumerate(panels.items()):
        left = place * (width + GAP)
        draw.text((left + 2, 2), name, fill="black")
        sheet.paste(Image.fromarray(panel.astype(np.uint8)), (left, BAND))
    for i, (row, left) in zip(occurring, rows, strict=True):
        top = BAND + height + row * BAND
        draw.rectangle(
            (left, top + 3, left + 10, top + 13),
            fill=tuple(int(v) for v in palette[i]),
            outline="black",
        )
        draw.text((left + 14, top + 2), classes[i], fill="black")
    return sheet


def _legend_rows(names: list[str], width: int) -> list[tuple[int, int]]:
    places, row, left = [], 0, 2
    for name in names:
        needed = 26 + 7 * len(name)
        if left + needed > width and left > 2:
            row, left = row + 1, 2
        places.append((row, left))
        left += needed
    return places
