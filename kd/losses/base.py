"""What a distillation loss is: a weight, and a forward over the student's and the teacher's tensors."""

import math

from torch import nn


class DistillLoss(nn.Module):
    """Base of all distillation losses. A loss takes tensors, never a model or a layer's name.

    Args:
        weight: factor of this loss in the total, >= 0. With 0 the loss is not computed.
    """

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"weight must be >= 0, got {weight}")
        self.weight = weight


class LogitLoss(DistillLoss):
    """A loss over the logits of both models: ``forward(student_logits, teacher_logits, target)``."""


class FeatureLoss(DistillLoss):
    """A loss over one feature tensor of each model: ``forward(student_features, teacher_features, target)``.

    Which layers the features come from is the module's affair (``model.taps.<name>``). ``build`` is called once,
    with the shapes that those layers give, before the optimizer is made: a loss with a projection makes it there.
    """

    def build(self, student_shape: tuple[int, ...], teacher_shape: tuple[int, ...]) -> None:
        """Makes the parameters that depend on the two feature shapes (batch axis included)."""
