"""A kind of target that kd does not have: numbers. One task, one source and one loss; nothing of ``kd/`` knows them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchmetrics import MeanAbsoluteError, R2Score

from kd.data.sources import FileSplit, Source, pictures_below
from kd.data.targets import Targets
from kd.losses import LogitLoss
from kd.tasks import Task


class Numbers(Targets):
    """Some numbers a picture; NaN where a picture has none."""

    name = "numbers"
    undefined = ("mixup", "cutmix")
    least_classes = 1

    def stack(self, targets: Sequence[Any], classes: int) -> Tensor:
        return torch.tensor(
            [target if isinstance(target, list) else [math.nan] * classes for target in targets]
        )

    def counts(self, targets: Sequence[Any], classes: int) -> None:
        return None


class Colours(Source):
    """Pictures below ``root/<split>``, whose targets are their mean red and green in 0..1."""

    kind = Numbers()

    def __init__(self, root: str) -> None:
        self.root, self.classes = root, ["red", "green"]

    def load(self, split: str) -> FileSplit:
        paths, _ = pictures_below(f"{self.root}/{split}")
        means = [np.asarray(Image.open(path)).reshape(-1, 3).mean(0)[:2] / 255 for path in paths]
        return FileSplit(paths, [mean.tolist() for mean in means])


class Regression(Task):
    """Smooth L1; R2 and the mean absolute error."""

    kind = "numbers"
    primary = "r2"
    no_class_id = "has numbers in place of classes"

    def build(self, num_classes: int, ignore_index: int | None = None) -> None:
        self.r2, self.mae = R2Score(), MeanAbsoluteError()

    def metric_names(self, teacher: bool) -> list[str]:
        return ["r2", "mae"]

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        known = ~target.isnan()
        return (
            F.smooth_l1_loss(logits.float(), target.nan_to_num(), reduction="none") * known
        ).sum() / known.sum()

    def decide(self, logits: Tensor) -> Tensor:
        return logits

    def same(self, logits: Tensor, others: Tensor) -> Tensor:
        return (logits - others).abs() <= 1e-3 * (1 + logits.abs())

    def refuses(self, loss: LogitLoss) -> str:
        return "" if isinstance(loss, NumbersLoss) else "compares classes, the data has numbers"

    def update(self, logits: Tensor, target: Tensor, teacher_answer: Tensor | None) -> None:
        self.r2.update(logits.float(), target)
        self.mae.update(logits.float(), target)

    def chance(self, counts: Tensor, total: int) -> float:
        return 0.0  # of whoever always names the mean


class NumbersLoss(LogitLoss):
    """Smooth L1 between the student's numbers and the teacher's."""

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        return F.smooth_l1_loss(student_logits, teacher_logits)
