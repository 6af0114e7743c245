"""Labels that a model disputes: by its own answers, and by a classifier that was fitted to all *other* pictures.

A teacher that was fine-tuned on a picture knows its label by heart, right or wrong, so its own answer says little. Its
features say more: a linear classifier over them is fitted in closed form, once, and what each picture would get by a
fit without itself follows from that fit (:func:`kd.tasks.features.ridge_classifier`). Both count alike, by the
geometric mean of their probabilities: ``p ~ sqrt(p_model p_left_out)``. What the model knows by heart it is equally
sure of, right or wrong, so there the second decides the order.

A label is disputed where the second names another class. The least likely labels come first (other scores:
scripts/bench/log/disputed.md).

N pictures, D features, C classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kd.tasks.features import best_scale, ridge_classifier

MOST_NUMBERS = 400_000_000
"""Most of N times (D + C): the fit holds several arrays of that many numbers of eight bytes."""


@dataclass
class Disputed:
    """What pictures say of their labels, one row a picture."""

    probabilities: Tensor
    """``(N, C)``, float64, rows that sum to 1: the geometric mean of the model's and of those by the classifier that has
    not seen the picture itself."""
    of_label: Tensor
    """``(N,)``: the label's probability among these."""
    suggested: Tensor
    """``(N,)``, class ids: the likeliest class other than the label."""
    flagged: Tensor
    """``(N,)`` bool: the label is disputed."""
    accuracy: float
    """Share of pictures, in 0..1, to which the classifier that has not seen them gives their label."""

    @property
    def worst_first(self) -> Tensor:
        """Rows of the disputed pictures, those whose labels are the least likely first."""
        order_N = self.of_label.argsort(stable=True)
        return order_N[self.flagged[order_N]]


def disputed_labels(features: Tensor, logits: Tensor, labels: Tensor) -> Disputed:
    """Finds labels that a model disputes.

    Args:
        features: ``(N, D)``, the input of the model's classifier.
        logits: ``(N, C)``, the model's own answers; at least two classes.
        labels: ``(N,)``, class ids from 0; every picture has one.

    Raises:
        ValueError: more numbers than :data:`MOST_NUMBERS`, or no pictures.

    >>> features = torch.cat([torch.randn(50, 2) + 9, torch.randn(50, 2) - 9])
    >>> labels = torch.tensor([0] * 50 + [1] * 50)
    >>> labels[7] = 1
    >>> disputed_labels(features, features[:, :1] * torch.tensor([1.0, -1]), labels).worst_first.tolist()
    [7]
    """
    count, width = features.shape
    classes = logits.shape[1]
    if not count:
        raise ValueError("no pictures with labels")
    if count * (width + classes) > MOST_NUMBERS:
        most = MOST_NUMBERS // (width + classes)
        raise ValueError(f"at most {most:,} pictures with {width:,} features, got {count:,}")
    labels_N = labels.long()
    rows_N = torch.arange(count, device=features.device)

    # What each picture gets from a classifier that was fitted without it.
    _, _, left_out_NC = ridge_classifier(features, labels_N, classes)
    is_disputed_N = left_out_NC.argmax(1) != labels_N
    left_out_NC = (best_scale(left_out_NC, labels_N) * left_out_NC).log_softmax(1)

    # The label's probability by both, and the likeliest other class.
    probabilities_NC = (0.5 * (left_out_NC + logits.double().log_softmax(1))).softmax(1)
    others_NC = probabilities_NC.clone()
    others_NC[rows_N, labels_N] = -1

    return Disputed(
        probabilities=probabilities_NC,
        of_label=probabilities_NC[rows_N, labels_N],
        suggested=others_NC.argmax(1),
        flagged=is_disputed_N,
        accuracy=1 - float(is_disputed_N.double().mean()),
    )
