"""Classification: one label a picture."""

from collections.abc import Sequence

import numpy as np
import scipy
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from kd.proof.luck import CHANCE_SIGMAS, p_value, shows_a_bad_teacher
from kd.tasks.base import Task, within
from kd.tasks.weights import ClassWeights, check_class_weights

P_VALUE = p_value(CHANCE_SIGMAS)
"""Of a guesser that reaches what a teacher must exceed: 0.00135."""


class Classification(Task):
    """Cross-entropy and the metrics of a classifier: top-1, top-5, agreement with the teacher.

    Args:
        num_classes: classes of the data; default: as the data says.
        label_smoothing: in [0, 1).
        class_weights: how much a picture counts in the loss on the labels, by its class: a list by class id, numbers by
            class name (the others 1), or ``auto``, which gives all classes the same say.
    """

    answers = "classification"
    link = "softmax"
    certified = "accuracy"
    one_class = in_rows = True
    secondary = ("acc5",)
    weights: Tensor | None

    def __init__(
        self,
        num_classes: int | None = None,
        label_smoothing: float = 0.0,
        class_weights: ClassWeights = None,
    ) -> None:
        """Checks the arguments, which are the class's; the weights' tensor is made by :meth:`weigh`.

        Raises:
            ValueError: an argument out of its range.
        """
        super().__init__(num_classes)
        check_class_weights(class_weights)
        self.class_weights = class_weights
        self.register_buffer("weights", None, persistent=False)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing must be >= 0 and < 1, got {label_smoothing}")
        self.label_smoothing = label_smoothing

    def build(self, num_classes: int, ignore_index: int | None = None) -> None:
        """Makes top-1 and top-5 accuracy (at most ``num_classes``) and the agreement with the teacher, over pictures.

        ``ignore_index`` is not read: no class id is left out.
        """
        self.acc1 = MulticlassAccuracy(num_classes, average="micro", validate_args=False)
        self.acc5 = MulticlassAccuracy(
            num_classes, top_k=min(5, num_classes), average="micro", validate_args=False
        )
        self.agreement = MulticlassAccuracy(num_classes, average="micro", validate_args=False)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy with label smoothing, each labelled picture times its class's weight.

        With p the softmax, y a picture's class, w its weight, s the smoothing:
        ``mean over labelled pictures of w * ((1 - s) * -log p(y) + s * mean_c -log p(c))``; of a target of probabilities
        each class's share counts with its own w, and the smoothing with the mean of these. It is not divided by the
        weights: two processes with half the batch each, and as many labelled pictures, average to one with the whole
        (the objective evens out other numbers), and a class of weight 0 does not train.

        Args:
            logits: ``(N, C)``.
            target: class ids ``(N,)``, -1 for a picture without a label; or probabilities ``(N, C)`` (mixup, cutmix),
                all 0 for one without.

        Returns:
            A scalar: the mean over the labelled pictures; 0, with a gradient of 0, where there are none.
        """
        known = self._known(target)
        valid_target = target
        if not target.is_floating_point():
            valid_target = target.clamp_min(0)
        logits = logits.float()
        weights = self.weights
        smoothing = self.label_smoothing
        if weights is None:
            losses = F.cross_entropy(
                logits, valid_target, label_smoothing=smoothing, reduction="none"
            )
        else:  # torch would weigh the smoothed part by each class, not by the picture's
            losses = F.cross_entropy(logits, valid_target, weights, reduction="none")
            if smoothing:
                if target.is_floating_point():
                    weight_of_picture = target @ weights
                else:
                    weight_of_picture = weights[valid_target]
                uniform = -weight_of_picture * logits.log_softmax(1).mean(1)
                losses = (1 - smoothing) * losses + smoothing * uniform
        return (losses * known).sum() / known.sum().clamp_min(1)

    @property
    def settings_of_the_loss(self) -> list[str]:
        """Which of ``label_smoothing`` and ``class_weights`` are set; a run without a loss on labels reports that they do
        nothing.
        """
        smoothing = ["label_smoothing"] if self.label_smoothing else []
        return smoothing + super().settings_of_the_loss

    def wanted_targets(self, training: bool) -> str:
        """Class ids and, in training, shares of classes."""
        ids = f"class ids (N,), whole numbers from 0 to {self.num_classes - 1}"
        if not training:
            return ids
        return f"{ids} (-1: no label), or floats (N, {self.num_classes}), each class's share"

    def takes(self, target: Tensor, pictures: int, training: bool) -> bool:
        """Whether targets are class ids of N pictures or, in training, shares ``(N, C)``."""
        if target.is_floating_point():
            return training and target.shape == (pictures, self.num_classes)
        if target.shape != (pictures,):
            return False
        lowest = -1 if training else 0
        return within(target, lowest, self.num_classes - 1)

    @staticmethod
    def _known(target: Tensor) -> Tensor:
        """Which pictures have a label, bool ``(N,)``."""
        if target.is_floating_point():
            return target.sum(1) > 0
        return target >= 0

    def counted(self, target: Tensor) -> Tensor:
        """How many of the targets, ``(N,)`` class ids or ``(N, C)`` shares, are a label: int64, a scalar."""
        return self._known(target).sum()

    def rows(self, answer: Tensor, classes: Sequence[str]) -> dict[str, list[str]]:
        """Answers as columns of text for a table, N cells each, by what follows the column's name.

        Class ids as names, under "" (empty where unknown); logits as the likeliest class under "", and its probability,
        rounded to six decimals, under ``_p``.

        Args:
            answer: class ids ``(N,)`` or logits ``(N, C)``.
            classes: names by id.
        """
        if not answer.is_floating_point():
            names = []
            for class_id in answer.tolist():
                is_known = 0 <= class_id < len(classes)
                names.append(classes[class_id] if is_known else "")
            return {"": names}
        p = answer.float().softmax(1)
        return {
            **self.rows(p.argmax(1), classes),
            "_p": [str(round(value, 6)) for value in p.amax(1).tolist()],
        }

    def outcome(self, answer: Tensor, target: Tensor) -> Tensor:
        """1 where the answer is right and 0 where it is wrong, NaN without a label: ``(N,)``."""
        right = (answer.argmax(1) == target).float()
        return right.masked_fill(target < 0, torch.nan)

    def judged(self, value: float, total: int) -> str:
        """How many of the ``total`` validation pictures a teacher of accuracy ``value`` is right on, in words."""
        return f"is right on {round(value * total)} of {total} validation pictures"

    def update(self, logits: Tensor, target: Tensor, teacher_answer: Tensor | None) -> None:
        """Adds a batch to the metrics: ``(N, C)``, ``(N,)``, and the teacher's class ids ``(N,)``.

        Each picture has a label: the metrics know no -1, as :meth:`loss` and :meth:`outcome` do.
        """
        logits = logits.float()
        self.acc1.update(logits, target)
        self.acc5.update(logits, target)
        if teacher_answer is not None:
            self.agreement.update(logits, teacher_answer)

    def chance(self, counts: Tensor, total: int) -> float:
        """The accuracy in 0..1 that a guesser of the most frequent class hardly exceeds: ``(k - 1/2) / n``.

        ``k`` is the least number of pictures that such a guesser is right on, or on more, with a chance below 0.00135. The
        chance is binomial: each of n guesses is right with the class's share q. ``k`` is at most n, so a model that is right
        on all pictures is above the result, even where there are so few that a guesser may be right on all.

        Args:
            counts: pictures of each class in the split, ``(C,)``: only their shares count.
            total: n, pictures that were guessed.
        """
        share = _largest_class(counts)  # q
        if share == 1:
            return 1 - 0.5 / total
        fewer = np.arange(-1, total)
        chances = scipy.stats.binom.sf(fewer, total, share)  # of k = 0..n right, or more
        first_unlikely = min(int((chances >= P_VALUE).sum()), total)
        return (first_unlikely - 0.5) / total

    def shows_bad_teacher(self, value: float, counts: Tensor, pictures: int) -> bool:
        """Whether a good teacher is unlikely to be right on so few of the pictures (:mod:`kd.proof.luck`).

        Args:
            value: share of the pictures that the teacher is right on.
            counts: pictures of each class in the split, ``(C,)``.
            pictures: that the teacher has seen.
        """
        right = round(value * pictures)
        return shows_a_bad_teacher(right, pictures, _largest_class(counts))


def _largest_class(counts: Tensor) -> float:
    """The share of the most frequent class, of counts ``(C,)``: what guessing gets right."""
    return float(counts.max() / counts.sum())
