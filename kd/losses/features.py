"""Losses over features."""

from torch import Tensor, nn

from kd.losses.base import FeatureLoss
from kd.losses.functional import hint_loss


class HintLoss(FeatureLoss):
    """FitNet's hint after a learned linear projection to the teacher's width (arXiv 1412.6550).

    Takes tokens ``(N, L, D)`` or vectors ``(N, D)``; the last axis is projected. With ``class_token`` only the first
    token of each model is compared, which also fits models with another number of patches.

    Args:
        weight: factor in the total loss.
        class_token: compare the first token alone.

    >>> import torch
    >>> loss = HintLoss(class_token=True)
    >>> loss.build((2, 50, 192), (2, 65, 384))
    >>> loss(torch.randn(2, 50, 192), torch.randn(2, 65, 384), torch.zeros(2)).shape
    torch.Size([])
    """

    def __init__(self, weight: float = 1.0, class_token: bool = False) -> None:
        super().__init__(weight)
        self.class_token = class_token
        self.projection: nn.Module = nn.Identity()

    def build(self, student_shape: tuple[int, ...], teacher_shape: tuple[int, ...]) -> None:
        """Makes the projection.

        Raises:
            ValueError: the features differ in more than their width.
        """
        same = student_shape[1:-1] == teacher_shape[1:-1]
        tokens = len(student_shape) == len(teacher_shape) == 3
        if not (same or (tokens and self.class_token)):
            raise ValueError(
                f"HintLoss compares features that differ in width alone, got {student_shape[1:]} and "
                f"{teacher_shape[1:]} a sample; class_token=true compares the first token only"
            )
        self.projection = nn.Linear(student_shape[-1], teacher_shape[-1])

    def forward(self, student_features: Tensor, teacher_features: Tensor, target: Tensor) -> Tensor:
        """``(N, L, D_student)``, ``(N, L, D_teacher)``, unused -> scalar."""
        if self.class_token:
            student_features, teacher_features = student_features[:, 0], teacher_features[:, 0]
        return hint_loss(self.projection(student_features), teacher_features)
