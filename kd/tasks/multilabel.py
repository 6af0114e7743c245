"""Multi-label classification: several labels a picture, or none."""

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import (
    MultilabelAccuracy,
    MultilabelAveragePrecision,
    MultilabelF1Score,
)

from kd.errors import REFUSED_LOSSES
from kd.losses import LogitLoss
from kd.tasks.base import (
    FirstClassifier,
    TargetCounts,
    Task,
    relative_entropy,
    updated_anywhere,
    within,
)
from kd.tasks.features import starting_labels


class MultiLabel(Task):
    """Binary cross-entropy a label; mean average precision, F1 at 0.5, agreement with the teacher's decisions.

    The loss is the sum over labels, as for every loss of ours, so its size is that of
    :class:`kd.losses.BinaryKDLoss`.

    Average precision is exact: the answers and the labels of all validation pictures are kept for it, twice ``num_classes``
    numbers a picture. It and F1 are means over the labels that occur: one without a positive has neither.

    Args:
        num_classes: labels that a picture can have; default: as the data says.
    """

    def __init__(self, num_classes: int | None = None) -> None:
        super().__init__(num_classes)

    kind = "several labels a picture"
    answers = "multilabel"
    link = "sigmoid"
    certified = "mean average precision"
    in_rows = True
    no_class_id = "has several labels a picture"
    primary = "map"
    secondary = ("f1",)

    def build(self, num_classes: int, ignore_index: int | None = None) -> None:
        """Makes average precision and F1 at probability 0.5 by label, the count of each label's pictures, and the agreement
        with the teacher, a mean over the labels.

        Args:
            num_classes: C, labels.
            ignore_index: not read.
        """
        self.map = MultilabelAveragePrecision(
            num_classes, average="none", thresholds=None, validate_args=False
        )
        self.f1 = MultilabelF1Score(num_classes, average="none", validate_args=False)
        self.positives = TargetCounts(num_classes)
        self.agreement = MultilabelAccuracy(num_classes, average="macro", validate_args=False)

    def first_classifier(self, features: Tensor, targets: Tensor) -> FirstClassifier | None:
        """A ridge regression of 0 and 1: features ``(M, D)``, labels ``(M, C)``, NaN of pictures without a label.

        Pictures without a label are left out; None where fewer than two are left.
        """
        known = ~targets.isnan().any(dim=1)
        if known.sum() < 2:
            return None
        weight, bias, f1 = starting_labels(features[known], targets[known])
        return FirstClassifier(weight, bias, f"F1 {f1:.1%}")

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Binary cross-entropy, summed over the labels of a picture: the mean over the pictures with labels, 0 without.

        Args:
            logits: ``(N, C)``.
            target: labels ``(N, C)`` in 0..1; a row with NaN has none.
        """
        known = ~target.isnan().any(dim=1)
        losses = F.binary_cross_entropy_with_logits(
            logits.float(), target.nan_to_num(), reduction="none"
        ).sum(dim=1)
        return (losses * known).sum() / known.sum().clamp_min(1)

    def wanted_targets(self, training: bool) -> str:
        """A number for each label."""
        return f"floats (N, {self.num_classes}), 0 or 1 for each label (a row of NaN: unknown)"

    def takes(self, target: Tensor, pictures: int, training: bool) -> bool:
        """Whether targets are floats ``(N, C)`` in 0..1."""
        shape = (pictures, self.num_classes)
        return target.is_floating_point() and target.shape == shape and within(target, 0, 1)

    def counted(self, target: Tensor) -> Tensor:
        """How many pictures of the targets ``(N, C)`` have labels, a row without NaN: int64, a scalar."""
        return (~target.isnan().any(dim=1)).sum()

    def decide(self, logits: Tensor) -> Tensor:
        """Each label's yes (1) or no (0), ``(N, C)``: logit > 0."""
        return (logits > 0).long()

    def refuses(self, loss: LogitLoss) -> str:
        """Refuses losses that let classes compete (softmax), as several labels may hold, and what the base refuses."""
        if not loss.exclusive:
            return super().refuses(loss)
        return REFUSED_LOSSES["MultiLabel"]

    def entropy(self, logits: Tensor) -> Tensor:
        """Mean entropy of logits ``(N, C)``, each label a yes or no of its own, over its maximum log 2: in 0..1."""
        return relative_entropy(torch.stack([logits, torch.zeros_like(logits)], 1).log_softmax(1))

    def rows(self, answer: Tensor, classes: Sequence[str]) -> dict[str, list[str]]:
        """The names of each picture's labels with ``;`` between, in one column, whose key is ""; "" without a label.

        Args:
            answer: logits ``(N, C)``, whose labels are those with a probability above 1/2; or targets of 0 and 1.
            classes: names by label.
        """
        chosen = [torch.nonzero(row).flatten().tolist() for row in answer > 0]
        return {"": [";".join(classes[i] for i in ids) for ids in chosen]}

    def outcome(self, answer: Tensor, target: Tensor) -> Tensor:
        """The logits and the labels of 0 and 1 (NaN where unknown), for average precision: ``(N, 2, C)``."""
        return torch.stack([answer.float(), target.float()], 1)

    def update(self, logits: Tensor, target: Tensor, teacher_answer: Tensor | None) -> None:
        """Adds a batch: logits ``(N, C)``, labels ``(N, C)`` of 0 and 1, and the teacher's decisions ``(N, C)``.

        Each picture has labels, or is known to have none: a row of NaN is not left out here, as it is in :meth:`loss`.
        """
        logits = logits.float()
        probabilities = logits.sigmoid()
        # In 0..1 like a probability, but strong answers don't become equal.
        order = (1 + F.softsign(logits)) / 2
        self.map.update(order, target.long())
        self.f1.update(probabilities, target.long())
        self.positives.update(target.float())
        if teacher_answer is not None:
            self.agreement.update(probabilities, teacher_answer)

    def compute(self) -> dict[str, Tensor]:
        """``map`` and ``f1`` as means over the labels that occur among the targets (0 where none does), and
        ``agreement`` (with a teacher); {} where no process has a batch.
        """
        if updated_anywhere(self.map) and not self.map.update_called:
            # torchmetrics gathers what is kept of each picture only where all processes have kept some
            none = self.positives.counts[None][:0]
            self.map.update(none, none.long())
        with warnings.catch_warnings():  # of labels without a positive, which are left out below
            warnings.filterwarnings("ignore", "No positive samples")
            metrics = super().compute()
        if not metrics:
            return {}
        occurs = metrics.pop("positives")[0] > 0
        for name in ("map", "f1"):
            of_labels = metrics[name]
            if occurs.any():
                metrics[name] = of_labels[occurs].mean()
            else:
                metrics[name] = of_labels.new_zeros(())
        return metrics

    def chance(self, counts: Tensor, total: int) -> float:
        """The mean average precision up to which a model is no better than a random order of the pictures.

        A random order reaches the share of pictures that have a label, here the mean over the labels that occur. For luck a
        fifth of that share s is added, or a fifth of ``1 - s`` where that is less. The result stays below 1, also where
        every picture has all labels.

        Args:
            counts: pictures with each label, ``(C,)``.
            total: pictures.
        """
        occurs = counts > 0
        occurring = int(occurs.sum())
        labels = max(1, occurring)
        positives = counts[occurs].sum().item()
        share = positives / labels / total
        least = min(share, 1 - share)
        by_luck = share + 0.2 * least
        below_one = 1 - 1 / (labels * total)
        return min(by_luck, below_one)
