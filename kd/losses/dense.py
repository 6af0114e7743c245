"""Losses for dense prediction: the classes of all pixels, or maps of features. See kd/losses/README.md."""

import torch
from torch import Tensor

from kd.losses.base import FeatureLoss, LogitLoss, check_range
from kd.losses.functional import cwd_loss, pairwise_loss, pixel_kd_loss
from kd.losses.projections import Projection, _Projected


class _MapLoss(LogitLoss):
    """A loss over logit maps at a temperature, without the pixels that the task ignores."""

    for_maps = True
    ignore_index: int | None = None

    def bind(self, num_classes: int, num_samples: int, ignore_index: int | None = None) -> None:
        self.ignore_index = ignore_index

    def valid(self, target: Tensor) -> Tensor:
        """Where a pixel takes part, bool ``(N, H, W)``."""
        if self.ignore_index is None:
            return torch.ones_like(target, dtype=torch.bool)
        return target != self.ignore_index


class PixelKDLoss(_MapLoss):
    """Per-pixel KD, see :func:`kd.losses.functional.pixel_kd_loss`.

    Args:
        temperature: > 0.
    """

    def __init__(self, temperature: float = 1.0, weight: float = 1.0) -> None:
        super().__init__(weight, temperature)

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C, H, W)``, ``(N, C, H, W)``, class ids ``(N, H, W)`` -> scalar."""
        return pixel_kd_loss(
            student_logits, teacher_logits, target, self.temperature, self.ignore_index
        )

    def counted(self, target: Tensor) -> Tensor:
        """How many pixels of the targets ``(N, H, W)`` take part: int64, a scalar."""
        return self.valid(target).sum()


class CWDLoss(_MapLoss):
    """Channel-wise distillation of logit maps, see :func:`kd.losses.functional.cwd_loss`.

    Args:
        temperature: > 0.
        weight: factor in the total loss; the paper uses 3 on logits.
    """

    def __init__(self, temperature: float = 4.0, weight: float = 1.0) -> None:
        super().__init__(weight, temperature)

    def softened(self, teacher_logits: Tensor) -> Tensor:
        """As they are: the temperature is that of a softmax over positions, not over classes."""
        return teacher_logits

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C, H, W)``, ``(N, C, H, W)``, class ids ``(N, H, W)`` -> scalar."""
        return cwd_loss(student_logits, teacher_logits, target, self.temperature, self.ignore_index)

    def counted(self, target: Tensor) -> Tensor:
        """How many pictures of the targets ``(N, H, W)`` have a pixel that takes part: int64, a scalar."""
        return self.valid(target).flatten(1).any(dim=1).sum()


class CWDFeatureLoss(_Projected):
    """Channel-wise distillation of feature maps after a projection, see :func:`kd.losses.functional.cwd_loss`.

    Args:
        temperature: > 0.
        projection: from the student's features to the teacher's shape; default: linear.
        weight: factor in the total loss; the paper uses 50 on features.
    """

    over_maps = True

    def __init__(
        self, temperature: float = 1.0, projection: Projection | None = None, weight: float = 1.0
    ) -> None:
        """Checks the arguments, which are the class's."""
        super().__init__(projection, weight)
        check_range("temperature", temperature, "> 0")
        self.temperature = temperature

    def forward(self, student_features: Tensor, teacher_features: Tensor, target: Tensor) -> Tensor:
        """``(N, C_s, H', W')``, ``(N, C_t, H, W)``, unused -> scalar; the projection brings the student's map to the
        teacher's grid.
        """
        projected = self.projection(student_features, teacher_features)
        return cwd_loss(projected, teacher_features, temperature=self.temperature)


class PairwiseLoss(FeatureLoss):
    """Pair-wise structure of a map's positions, see :func:`kd.losses.functional.pairwise_loss`. No parameters.

    Args:
        grid: the most positions a side that the maps are pooled to, > 0.
    """

    over_maps = True

    def __init__(self, grid: int = 8, weight: float = 1.0) -> None:
        """Checks the arguments, which are the class's."""
        super().__init__(weight)
        check_range("grid", grid, "> 0")
        self.grid = grid

    def forward(self, student_features: Tensor, teacher_features: Tensor, target: Tensor) -> Tensor:
        """``(N, C_s, H, W)``, ``(N, C_t, H', W')``, unused -> scalar."""
        return pairwise_loss(student_features, teacher_features, self.grid)
