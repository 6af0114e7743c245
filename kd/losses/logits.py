"""Losses over logits."""

from torch import Tensor

from kd.losses.base import LogitLoss
from kd.losses.functional import kd_loss, topk_kd_loss
from kd.losses.topk import TopKLogits


class KDLoss(LogitLoss):
    """Hinton's knowledge distillation, see :func:`kd.losses.functional.kd_loss`.

    Args:
        temperature: softens both distributions, > 0. The paper uses 1 to 20.
        weight: factor in the total loss.

    >>> import torch
    >>> KDLoss(temperature=2.0)(torch.zeros(4, 10), torch.zeros(4, 10), torch.zeros(4, dtype=torch.long))
    tensor(0.)
    """

    def __init__(self, temperature: float = 4.0, weight: float = 1.0) -> None:
        super().__init__(weight)
        if not temperature > 0:
            raise ValueError(f"temperature must be > 0, got {temperature}")
        self.temperature = temperature

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, unused -> scalar."""
        return kd_loss(student_logits, teacher_logits, self.temperature)

    def forward_topk(self, student_logits: Tensor, teacher: TopKLogits, target: Tensor) -> Tensor:
        """As :meth:`forward`, from a cache of the largest logits: see :func:`kd.losses.functional.topk_kd_loss`."""
        tail = teacher.tails[self.temperature]
        return topk_kd_loss(student_logits, teacher.values, teacher.indices, tail, self.temperature)
