"""Classification: one label a picture."""

import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy


class Classification(nn.Module):
    """Cross-entropy and the metrics of a classifier: top-1, top-5, agreement with the teacher.

    Args:
        label_smoothing: in [0, 1).
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing must be >= 0 and < 1, got {label_smoothing}")
        self.label_smoothing = label_smoothing

    def build(self, num_classes: int) -> None:
        """Makes the metrics for ``num_classes`` classes."""
        self.acc1 = MulticlassAccuracy(num_classes, average="micro")
        self.acc5 = MulticlassAccuracy(num_classes, top_k=min(5, num_classes), average="micro")
        self.agreement = MulticlassAccuracy(num_classes, average="micro")

    @staticmethod
    def metric_names(teacher: bool) -> list[str]:
        """What :meth:`compute` gives, with or without a teacher."""
        return ["acc1", "acc5", *(["agreement"] if teacher else [])]

    @property
    def _metrics(self) -> dict[str, MulticlassAccuracy]:
        return {"acc1": self.acc1, "acc5": self.acc5, "agreement": self.agreement}

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy.

        Args:
            logits: ``(N, C)``.
            target: class ids ``(N,)``, or probabilities ``(N, C)`` (mixup, cutmix).

        Returns:
            A scalar: the mean over the batch.
        """
        return F.cross_entropy(logits.float(), target, label_smoothing=self.label_smoothing)

    def update(self, logits: Tensor, target: Tensor, teacher_prediction: Tensor | None) -> None:
        """Adds a batch to the metrics: ``(N, C)``, ``(N,)``, and the teacher's class ids ``(N,)``."""
        logits = logits.float()
        self.acc1.update(logits, target)
        self.acc5.update(logits, target)
        if teacher_prediction is not None:
            self.agreement.update(logits, teacher_prediction)

    def compute(self) -> dict[str, Tensor]:
        """The metrics over all batches (and processes) since the last reset, in 0..1."""
        return {name: metric.compute() for name, metric in self._metrics.items() if metric.update_called}

    def reset(self) -> None:
        """Forgets all batches."""
        for metric in self._metrics.values():
            metric.reset()
