"""Multi-label classification: several labels a picture, or none."""

import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MultilabelAccuracy, MultilabelAveragePrecision, MultilabelF1Score

from kd.tasks.base import Task


class MultiLabel(Task):
    """Binary cross-entropy a label; mean average precision, F1 at 0.5, agreement with the teacher's decisions.

    The loss is the sum over labels, as for every loss of ours, so its size is that of
    :func:`kd.losses.functional.binary_kd_loss`.
    """

    multi_label = True
    primary = "map"

    def build(self, num_classes: int, ignore_index: int | None = None) -> None:
        """Makes the metrics; the average precision is binned at 200 thresholds, which bounds its memory."""
        self.map = MultilabelAveragePrecision(num_classes, average="macro", thresholds=200)
        self.f1 = MultilabelF1Score(num_classes, average="macro")
        self.agreement = MultilabelAccuracy(num_classes, average="macro")

    def metric_names(self, teacher: bool) -> list[str]:
        """See :meth:`Task.metric_names`."""
        return ["map", "f1", *(["agreement"] if teacher else [])]

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Binary cross-entropy: logits ``(N, C)``, labels ``(N, C)`` in 0..1 (NaN: unlabelled) -> the batch's mean."""
        known = ~target.isnan().any(dim=1)
        losses = F.binary_cross_entropy_with_logits(logits.float(), target.nan_to_num(), reduction="none").sum(dim=1)
        return (losses * known).sum() / known.sum().clamp_min(1)

    def decide(self, logits: Tensor) -> Tensor:
        """Each label's yes or no, ``(N, C)``."""
        return (logits > 0).long()

    def update(self, logits: Tensor, target: Tensor, teacher_answer: Tensor | None) -> None:
        """Adds a batch: ``(N, C)``, labels ``(N, C)``, and the teacher's decisions ``(N, C)``."""
        probabilities = logits.float().sigmoid()
        self.map.update(probabilities, target.long())
        self.f1.update(probabilities, target.long())
        if teacher_answer is not None:
            self.agreement.update(probabilities, teacher_answer)

    def chance(self, counts: Tensor, total: int) -> float:
        """A random order has the labels' share as its precision; a fifth more is no better."""
        return 1.2 * counts.mean().item() / total
