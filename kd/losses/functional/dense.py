"""Losses over maps, for dense prediction: pixels whose target is ``ignore_index`` take no part.

All cast to float32 (float64 stays), detach the teacher's side and give a scalar. Where every pixel is ignored the loss
is 0, with a gradient of 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kd.losses.functional._checks import positive, same_shape, wide
from kd.losses.functional.features import cosines
from kd.losses.functional.logits import kl_per_position


def _valid(logits: Tensor, target: Tensor | None, ignore_index: int | None) -> Tensor:
    """True where a pixel counts, ``(N, H, W)``."""
    if target is None or ignore_index is None:
        return torch.ones_like(logits[:, 0], dtype=torch.bool)
    return target != ignore_index


def pixel_kd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int | None = None,
) -> Tensor:
    """Per-pixel KD: ``T^2 * mean over valid pixels of KL(teacher || student)``, the softmax over classes.

    Source: Liu et al., Structured Knowledge Distillation for Dense Prediction, arXiv 1903.04197, equation 1, with the
    temperature of arXiv 1503.02531.

    Args:
        student_logits: ``(N, C, H, W)``.
        teacher_logits: the same shape.
        target: class ids ``(N, H, W)``, read for ``ignore_index`` alone.
        temperature: ``T`` > 0.
        ignore_index: the id of pixels that take no part.

    Returns:
        A scalar: the mean over valid pixels.

    >>> pixel_kd_loss(torch.zeros(1, 2, 1, 2), torch.zeros(1, 2, 1, 2), torch.tensor([[[0, 9]]]), ignore_index=9)
    tensor(0.)
    """
    same_shape(student_logits, teacher_logits, "logits")
    positive("temperature", temperature)
    valid = _valid(student_logits, target, ignore_index)
    divergence = kl_per_position(student_logits, teacher_logits, temperature, temperature)
    total = (divergence * valid).sum()
    count = valid.sum().clamp_min(1)
    return temperature**2 * total / count


def cwd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None = None,
    temperature: float = 4.0,
    ignore_index: int | None = None,
) -> Tensor:
    """Channel-wise distillation: ``T^2 / (N C) * sum KL`` of the softmax **over positions**, one a channel.

    Source: Shu et al., Channel-wise Knowledge Distillation for Dense Prediction, arXiv 2011.13256, equations 2 and 3.

    Args:
        student_logits: ``(N, C, H, W)``: logits, or features of one width.
        teacher_logits: the same shape.
        target: class ids ``(N, H, W)``, read for ``ignore_index`` alone.
        temperature: ``T`` > 0.
        ignore_index: the id of pixels that take no part in the softmax.

    Returns:
        A scalar: the mean over pictures (with a valid pixel) and channels.

    >>> cwd_loss(torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, 2))
    tensor(0.)
    """
    same_shape(student_logits, teacher_logits, "logits")
    positive("temperature", temperature)
    valid_NHW = _valid(student_logits, target, ignore_index)
    valid_N1P = valid_NHW.flatten(1)[:, None]
    log_p_student = _log_softmax_over_positions(student_logits, valid_N1P, temperature)
    log_p_teacher = _log_softmax_over_positions(teacher_logits.detach(), valid_N1P, temperature)
    log_ratio = log_p_teacher - log_p_student
    terms_NCP = log_p_teacher.exp() * log_ratio
    divergence_NC = (terms_NCP * valid_N1P).sum(dim=2)
    has_valid_pixel = valid_N1P.any(dim=2)
    pictures = has_valid_pixel.sum().clamp_min(1)
    channels = student_logits.shape[1]
    return temperature**2 * divergence_NC.sum() / (pictures * channels)


def _log_softmax_over_positions(logits: Tensor, valid: Tensor, temperature: float) -> Tensor:
    """``(N, C, H, W)`` -> ``(N, C, H W)``; ``valid``, ``(N, 1, H W)``: the positions that take part."""
    scaled = wide(logits).flatten(2) / temperature
    nothing = torch.finfo(torch.float32).min
    return F.log_softmax(scaled.masked_fill(~valid, nothing), dim=2)


def pairwise_loss(student_features: Tensor, teacher_features: Tensor, grid: int = 8) -> Tensor:
    """Pair-wise structure: squared difference of the cosine similarities between all positions of a map.

    Maps are first average-pooled to at most ``grid`` positions a side. Source: Liu et al., Structured Knowledge
    Distillation for Dense Prediction, arXiv 1903.04197, equation 2.

    Args:
        student_features: ``(N, C, H, W)``.
        teacher_features: ``(N, any C, any H, any W)``.
        grid: positions a side, > 0; the matrices have ``grid^4`` entries a picture.

    Returns:
        A scalar: the mean over pictures and pairs of positions.

    >>> x = torch.randn(1, 3, 4, 4)
    >>> bool(pairwise_loss(2 * x, x) < 1e-6)
    True
    """
    positive("grid", grid)
    student_height, student_width = student_features.shape[2:]
    teacher_height, teacher_width = teacher_features.shape[2:]
    height = min(grid, student_height, teacher_height)
    width = min(grid, student_width, teacher_width)
    size = (height, width)
    student_wide = wide(student_features)
    teacher_wide = wide(teacher_features.detach())
    student_pooled = F.adaptive_avg_pool2d(student_wide, size)
    teacher_pooled = F.adaptive_avg_pool2d(teacher_wide, size)
    difference = cosines(student_pooled) - cosines(teacher_pooled)
    return difference.square().mean()
