"""Distillation of a model that answers in numbers."""

import torch.nn.functional as F
from torch import Tensor

from kd.losses.base import LogitLoss, NotNegative, with_arguments

FORMS = {"smooth_l1": F.smooth_l1_loss, "l1": F.l1_loss, "l2": F.mse_loss}


@with_arguments
class RegressionKDLoss(LogitLoss):
    """The student's numbers approach the teacher's, both in standard deviations of the training targets.

    With ``bounded`` they approach the target instead, and only where the student's squared error plus ``margin`` is
    above the teacher's: the teacher-bounded regression of Chen et al., Learning Efficient Object Detection Models with
    Knowledge Distillation (NeurIPS 2017), equation 5. Missing targets then do not count.

    Args:
        form: ``smooth_l1``, ``l1`` or ``l2``; of the unbounded loss.
        bounded: see above.
        margin: in squared standard deviations, >= 0; of the bounded loss alone.

    >>> import torch
    >>> student, teacher, target = torch.tensor([[3.0]]), torch.tensor([[1.0]]), torch.tensor([[0.0]])
    >>> RegressionKDLoss("l2")(student, teacher, target), RegressionKDLoss(bounded=True)(teacher, student, target)
    (tensor(4.), tensor(0.))
    """

    for_numbers = True

    form: str = "smooth_l1"
    bounded: bool = False
    margin: NotNegative = 0.0
    weight: NotNegative = 1.0

    def __post_init__(self) -> None:
        """Checks the arguments; ValueError where one is wrong, or a margin is not ``bounded``."""
        super().__post_init__()
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {self.form}")
        if self.margin and not self.bounded:
            raise ValueError(f"margin must come with bounded=true, got {self.margin} alone")

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, ``(N, C)`` with NaN where missing -> scalar: summed over the C numbers of a picture,
        averaged over the N pictures. The task has brought all three to standard deviations.
        """
        student = student_logits.float()
        teacher = teacher_logits.detach().float()
        if not self.bounded:
            distances_NC = FORMS[self.form](student, teacher, reduction="none")
            return distances_NC.sum(1).mean()
        is_known = ~target.isnan()
        known_target = target.nan_to_num()
        student_error = (student - known_target) ** 2
        teacher_error = (teacher - known_target) ** 2
        is_worse = student_error + self.margin > teacher_error
        counted_error = student_error * (is_known & is_worse)
        return counted_error.sum(1).mean()
