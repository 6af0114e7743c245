"""A student without a classifier: its features, and how they are measured without labels."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kd.losses import LogitLoss
from kd.report.metric import PROBE
from kd.tasks.base import ExactMetric, Task
from kd.tasks.features import rank_of_gram


def label_free_metrics(losses: Iterable[str], probed: bool) -> list[str]:
    """The validation metrics of a student without a classifier, the one that chooses the best epoch first.

    Args:
        losses: names of its distillation losses, as in ``model.distill_losses``.
        probed: whether labelled pictures measure its features too (``data.probe.root``): ``knn1`` and ``probe1``.

    >>> label_free_metrics(["dino"], True)
    ['feature_loss', 'dino_loss', 'rankme', 'knn1', 'probe1']
    """
    metrics = ["feature_loss"]
    metrics += [f"{name}_loss" for name in losses]
    metrics.append("rankme")
    if probed:
        metrics += PROBE
    return metrics


class HeldOut(ExactMetric):
    """The losses of held-out pictures, and the rank of their features, over all batches and processes.

    Args:
        names: of the losses.
        width: of the features.
    """

    sums: Tensor
    """Of each loss, times its pictures, ``(len(names),)``."""
    gram: Tensor
    """``X'X`` of all features X, ``(D, D)``."""
    pictures: Tensor
    """How many, a scalar."""

    def __init__(self, names: Sequence[str], width: int) -> None:
        """Begins without pictures; sums are float64 and added up over processes.

        Args:
            names: of the losses whose means are computed, the keys that :meth:`update` reads.
            width: D of the student's features.
        """
        super().__init__()
        self.names = list(names)
        self.add_state(
            "sums", torch.zeros(len(self.names), dtype=torch.float64), dist_reduce_fx="sum"
        )
        self.add_state("gram", torch.zeros(width, width, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("pictures", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, features: Tensor, losses: Mapping[str, Tensor]) -> None:
        """Adds the student's features ``(N, D)``, and the mean losses of these N pictures by name.

        N is 0 for a batch of padding alone, of which ``losses`` is not read.
        """
        if not len(features):
            return
        x_ND = features.double()
        pictures = len(x_ND)
        means = torch.stack([losses[name].double() for name in self.names])
        self.gram += x_ND.T @ x_ND
        self.sums += means * pictures
        self.pictures += pictures

    def compute(self) -> dict[str, Tensor]:
        """Each loss's mean over the held-out pictures, and ``rankme``, the effective rank of the features, 0 to D.

        Without a picture all are 0; with NaN among the features ``rankme`` is NaN. All processes call it.
        """
        pictures = self.pictures.clamp_min(1)
        means = self.sums / pictures
        metrics = dict(zip(self.names, means.float(), strict=True))
        metrics["rankme"] = torch.tensor(rank_of_gram(self.gram))
        return metrics


class Features(Task):
    """A student without a classifier that learns teachers' features alone (``model.student.head=false``).

    Measured by the distillation losses on held-out pictures (``feature_loss``, their weighted sum) and by RankMe; with
    labelled pictures (``data.probe.root``) also by ``knn1`` and ``probe1``.
    """

    answers = "features"
    labels = False
    primary = "feature_loss"

    @property
    def monitored(self) -> str:
        """See :attr:`Task.monitored`; labels of the probe choose no epoch."""
        return "feature_loss"

    def measure(self, losses: Sequence[str], width: int, probed: bool) -> None:
        """Makes the metrics, once the student that is measured is built; before it there are none.

        Args:
            losses: names of those that are measured: ``feature_loss``, and ``<name>_loss`` of each.
            width: of the student's features, D.
            probed: whether a probe (:class:`kd.callbacks.probe.FeatureProbe`) measures too; then its ``knn1`` describes
                the model best, and ``feature_loss`` still chooses the epoch.
        """
        self.held_out = HeldOut(losses, width)
        self.probed = probed
        if probed:
            self.primary = PROBE[0]

    def metric_names(self, teacher: bool) -> list[str]:
        """The validation metrics in order: ``feature_loss`` first, see :func:`label_free_metrics`.

        ``teacher`` is not read: such a student always has one.
        """
        losses = [
            name.removesuffix("_loss") for name in self.held_out.names if name != "feature_loss"
        ]
        return label_free_metrics(losses, self.probed)

    def learns_from(self, kind: str) -> bool:
        """Always: labels are not used."""
        return True

    def label_weight(self, weight: float) -> float:
        """0: there is no loss on labels."""
        return 0.0

    def note_on_labels(self, there: bool) -> str:
        """A line that labels are not used, where there are any; "" without."""
        if there:
            return (
                "the labels are not used: the student has no classifier (model.student.head=false)"
            )
        return ""

    def refuses(self, loss: LogitLoss) -> str:
        """Refuses every loss over logits: the student has no classifier."""
        return "compares logits, and the student has no classifier (model.student.head=false)"

    def same(self, logits: Tensor, others: Tensor) -> Tensor:
        """Whether two models' features of a picture have a cosine similarity above 0.999, ``(N,)``."""
        return torch.cosine_similarity(logits, others) > 0.999

    def compute(self) -> dict[str, Tensor]:
        """The losses and ``rankme``, over all batches (and processes) since the last reset; all processes call it."""
        return self.held_out.compute()
