"""Losses for dense prediction: the classes of all pixels, or maps of features. See kd/losses/README.md.

All cast to float32 (float64 stays), detach the teacher's side and give a scalar. Where every pixel is ignored the loss
is 0, with a gradient of 0. Logits of two shapes are a ValueError.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kd.losses.base import Count, FeatureLoss, LogitLoss, NotNegative, Positive, with_arguments
from kd.losses.logits import kl_per_position
from kd.losses.numerics import both, cosines, wide
from kd.losses.projections import ProjectedLoss, Projection


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


@with_arguments
class PixelKDLoss(_MapLoss):
    """Per-pixel KD: ``T^2 * mean over valid pixels of KL(teacher || student)``, the softmax over classes.

    Source: Liu et al., Structured Knowledge Distillation for Dense Prediction, arXiv 1903.04197, equation 1, with the
    temperature of arXiv 1503.02531.

    Args:
        temperature: > 0.

    >>> PixelKDLoss()(torch.zeros(1, 2, 1, 2), torch.zeros(1, 2, 1, 2), torch.tensor([[[0, 9]]]))
    tensor(0.)
    """

    temperature: Positive = 1.0
    weight: NotNegative = 1.0

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C, H, W)``, ``(N, C, H, W)``, class ids ``(N, H, W)`` -> scalar."""
        valid = self.valid(target)
        temperature = self.temperature
        divergence = kl_per_position(student_logits, teacher_logits, temperature, temperature)
        total = (divergence * valid).sum()
        count = valid.sum().clamp_min(1)
        return temperature**2 * total / count

    def counted(self, target: Tensor) -> Tensor:
        """How many pixels of the targets ``(N, H, W)`` take part: int64, a scalar."""
        return self.valid(target).sum()


@with_arguments
class CWDLoss(_MapLoss):
    """Channel-wise distillation: ``T^2 / (N C) * sum KL`` of the softmax **over positions**, one a channel.

    The mean over pictures (with a valid pixel) and channels. Source: Shu et al., Channel-wise Knowledge Distillation for
    Dense Prediction, arXiv 2011.13256, equations 2 and 3.

    Args:
        temperature: > 0.
        weight: factor in the total loss; the paper uses 3 on logits.

    >>> CWDLoss()(torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2))
    tensor(0.)
    """

    temperature: Positive = 4.0
    weight: NotNegative = 1.0

    def softened(self, teacher_logits: Tensor) -> Tensor:
        """As they are: the temperature is that of a softmax over positions, not over classes."""
        return teacher_logits

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C, H, W)``, ``(N, C, H, W)``, class ids ``(N, H, W)`` -> scalar."""
        return _channel_wise(student_logits, teacher_logits, self.valid(target), self.temperature)

    def counted(self, target: Tensor) -> Tensor:
        """How many pictures of the targets ``(N, H, W)`` have a pixel that takes part: int64, a scalar."""
        return self.valid(target).flatten(1).any(dim=1).sum()


@with_arguments
class CWDFeatureLoss(ProjectedLoss):
    """Channel-wise distillation of feature maps after a projection: the formula of :class:`CWDLoss`.

    Args:
        temperature: > 0.
        projection: from the student's features to the teacher's shape; default: linear.
        weight: factor in the total loss; the paper uses 50 on features.
    """

    over_maps = True

    temperature: Positive = 1.0
    projection: Projection | None = None
    weight: NotNegative = 1.0

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """Two ``(N, C, H, W)`` -> scalar."""
        valid = torch.ones_like(teacher_features[:, 0], dtype=torch.bool)
        return _channel_wise(student_features, teacher_features, valid, self.temperature)


def _channel_wise(student: Tensor, teacher: Tensor, valid: Tensor, temperature: float) -> Tensor:
    """The formula of :class:`CWDLoss`, a scalar.

    Args:
        student: ``(N, C, H, W)``: logits, or features of one width.
        teacher: the same shape.
        valid: bool ``(N, H, W)``: the pixels that take part in the softmax.
        temperature: ``T`` > 0.
    """
    student, teacher = both(student, teacher, "logits")
    valid_N1P = valid.flatten(1)[:, None]
    log_p_student = _log_softmax_over_positions(student, valid_N1P, temperature)
    log_p_teacher = _log_softmax_over_positions(teacher, valid_N1P, temperature)
    log_ratio = log_p_teacher - log_p_student
    terms_NCP = log_p_teacher.exp() * log_ratio
    divergence_NC = (terms_NCP * valid_N1P).sum(dim=2)
    has_valid_pixel = valid_N1P.any(dim=2)
    pictures = has_valid_pixel.sum().clamp_min(1)
    channels = student.shape[1]
    return temperature**2 * divergence_NC.sum() / (pictures * channels)


def _log_softmax_over_positions(logits: Tensor, valid: Tensor, temperature: float) -> Tensor:
    """``(N, C, H, W)`` -> ``(N, C, H W)``; ``valid``, ``(N, 1, H W)``: the positions that take part.

    The others get the probability 0. In a picture where no position takes part all get the same one.
    """
    scaled = logits.flatten(2) / temperature
    nothing = torch.finfo(torch.float32).min
    return F.log_softmax(scaled.masked_fill(~valid, nothing), dim=2)


@with_arguments
class PairwiseLoss(FeatureLoss):
    """Pair-wise structure: squared difference of the cosine similarities between all positions of a map.

    Maps are first average-pooled to at most ``grid`` positions a side; the widths may differ. No parameters. Source: Liu
    et al., Structured Knowledge Distillation for Dense Prediction, arXiv 1903.04197, equation 2.

    Args:
        grid: the most positions a side that the maps are pooled to, > 0; the matrices have ``grid^4`` entries a picture.

    >>> x = torch.randn(1, 3, 4, 4)
    >>> bool(PairwiseLoss()(2 * x, x, torch.zeros(1)) < 1e-6)
    True
    """

    over_maps = True

    grid: Count = 8
    weight: NotNegative = 1.0

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """``(N, C_s, H, W)``, ``(N, C_t, H', W')`` -> scalar: the mean over pictures and pairs of positions."""
        student_height, student_width = student_features.shape[2:]
        teacher_height, teacher_width = teacher_features.shape[2:]
        height = min(self.grid, student_height, teacher_height)
        width = min(self.grid, student_width, teacher_width)
        size = (height, width)
        student_wide = wide(student_features)
        teacher_wide = wide(teacher_features.detach())
        student = F.adaptive_avg_pool2d(student_wide, size)
        teacher = F.adaptive_avg_pool2d(teacher_wide, size)
        difference = cosines(student) - cosines(teacher)
        return difference.square().mean()
