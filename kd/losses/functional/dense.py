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
    temperature of arXiv 1503.02531. Shapes: ``(N, C, H, W)``; the target, class ids ``(N, H, W)``, is read for
    ``ignore_index`` alone.

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
    divergence = kl_per_position(student_logits, teacher_logits, temperature, temperature) * valid
    return temperature**2 * divergence.sum() / valid.sum().clamp_min(1)


def cwd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None = None,
    temperature: float = 4.0,
    ignore_index: int | None = None,
) -> Tensor:
    """Channel-wise distillation: ``T^2 / (N C) * sum KL`` of the softmax **over positions**, one a channel.

    Source: Shu et al., Channel-wise Knowledge Distillation for Dense Prediction, arXiv 2011.13256, equations 2 and 3.
    Shapes: ``(N, C, H, W)``, logits or features of one width; the target ``(N, H, W)`` as for :func:`pixel_kd_loss`.
    The mean is over pictures with a valid pixel.

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
    valid = _valid(student_logits, target, ignore_index).flatten(1)[:, None]
    log_p, log_q = (
        F.log_softmax(
            (wide(x).flatten(2) / temperature).masked_fill(~valid, torch.finfo(torch.float32).min),
            dim=2,
        )
        for x in (student_logits, teacher_logits.detach())
    )
    divergence = ((log_q.exp() * (log_q - log_p)) * valid).sum(dim=2)
    pictures = valid.any(dim=2).sum().clamp_min(1)
    return temperature**2 * divergence.sum() / (pictures * student_logits.shape[1])


def pairwise_loss(student_features: Tensor, teacher_features: Tensor, grid: int = 8) -> Tensor:
    """Pair-wise structure: squared difference of the cosine similarities between all positions of a map.

    Maps are first average-pooled to at most ``grid`` positions a side. Source: Liu et al., Structured Knowledge
    Distillation for Dense Prediction, arXiv 1903.04197, equation 2. Shapes: ``(N, C, H, W)``, ``(N, any C, any H, any
    W)``. The matrices have ``grid^4`` entries a picture.

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
    height, width = (
        min(grid, *sides)
        for sides in zip(student_features.shape[2:], teacher_features.shape[2:], strict=True)
    )
    student, teacher = (
        cosines(F.adaptive_avg_pool2d(wide(x), (height, width)))
        for x in (student_features, teacher_features.detach())
    )
    return (student - teacher).square().mean()
