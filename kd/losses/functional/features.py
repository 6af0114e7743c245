"""Losses over one feature tensor of each model: maps ``(N, C, H, W)``, tokens ``(N, L, D)`` or vectors ``(N, D)``.

All cast to float32 (float64 stays) and detach the teacher's side.
"""

import torch.nn.functional as F
from torch import Tensor

from kd.losses.functional._checks import same_shape, wide


def hint_loss(student_features: Tensor, teacher_features: Tensor) -> Tensor:
    """FitNet's hint: the mean squared error between two feature tensors of one shape.

    Source: Romero et al., FitNets, arXiv 1412.6550, equation 3 (here the mean, not half the sum).

    Args:
        student_features: any shape, already projected to the teacher's width.
        teacher_features: the same shape.

    Returns:
        A scalar: the mean over all elements.

    Raises:
        ValueError: the shapes differ.

    >>> import torch
    >>> hint_loss(torch.zeros(2, 3), torch.full((2, 3), 2.0))
    tensor(4.)
    """
    same_shape(student_features, teacher_features, "features")
    return F.mse_loss(wide(student_features), wide(teacher_features.detach()))


def at_loss(student_features: Tensor, teacher_features: Tensor, p: float = 2.0) -> Tensor:
    """Attention transfer: mean squared difference of the L2-normalised maps ``mean_c |x_c|^p``.

    Source: Zagoruyko and Komodakis, Paying More Attention to Attention, arXiv 1612.03928. This is the form of the
    authors' code (squared difference, mean); the paper's equation 2 has the norm of the difference.

    Args:
        student_features: ``(N, C, H, W)``.
        teacher_features: ``(N, any C, H, W)``.
        p: power, > 0.

    Returns:
        A scalar: the mean over pictures and positions.

    Raises:
        ValueError: another height or width.

    >>> import torch
    >>> at_loss(torch.ones(1, 8, 2, 2), 3 * torch.ones(1, 4, 2, 2))
    tensor(0.)
    """
    if student_features.shape[2:] != teacher_features.shape[2:]:
        raise ValueError(
            f"student_features must have the teacher's height and width {tuple(teacher_features.shape[2:])}, "
            f"got {tuple(student_features.shape[2:])}"
        )
    student, teacher = (
        F.normalize(wide(x).abs().pow(p).mean(dim=1).flatten(1), dim=1)
        for x in (student_features, teacher_features.detach())
    )
    return (student - teacher).square().mean()


def hcl_loss(student_features: Tensor, teacher_features: Tensor) -> Tensor:
    """ReviewKD's hierarchical context loss: the squared error at full size and pooled to 4, 2 and 1 positions a side.

    Weights 1, 1/2, 1/4, 1/8 over their sum; sizes that the map does not exceed are left out. Source: Chen et al.,
    Distilling Knowledge via Knowledge Review, arXiv 2104.09044, and its code.

    Args:
        student_features: ``(N, C, H, W)``.
        teacher_features: the same shape.

    Returns:
        A scalar: the weighted mean over the levels.

    >>> import torch
    >>> hcl_loss(torch.zeros(1, 2, 8, 8), torch.ones(1, 2, 8, 8))
    tensor(1.)
    """
    same_shape(student_features, teacher_features, "features")
    student, teacher = wide(student_features), wide(teacher_features.detach())
    loss, total, weight = F.mse_loss(student, teacher), 1.0, 1.0
    for size in (4, 2, 1):
        if size >= student.shape[2]:
            continue
        weight /= 2
        pooled = F.mse_loss(F.adaptive_avg_pool2d(student, size), F.adaptive_avg_pool2d(teacher, size))
        loss, total = loss + weight * pooled, total + weight
    return loss / total


def pkd_loss(student_features: Tensor, teacher_features: Tensor) -> Tensor:
    """PKD: half the squared error of features standardised per channel over the batch and all positions.

    Equals one minus their Pearson correlation, up to the small constant in the deviation. Source: Cao et al., PKD:
    General Distillation Framework for Object Detectors via Pearson Correlation Coefficient, arXiv 2207.02039.

    Args:
        student_features: ``(N, C, H, W)``.
        teacher_features: the same shape.

    Returns:
        A scalar. It depends on the batch as a whole.

    >>> import torch
    >>> x = torch.randn(2, 3, 4, 4)
    >>> bool(pkd_loss(5 * x + 1, x) < 1e-6)
    True
    """
    same_shape(student_features, teacher_features, "features")
    student, teacher = _per_channel(wide(student_features)), _per_channel(wide(teacher_features.detach()))
    return F.mse_loss(student, teacher) / 2


def _per_channel(x: Tensor) -> Tensor:
    flat = x.transpose(0, 1).flatten(1)
    centred = flat - flat.mean(dim=1, keepdim=True)
    return centred / (centred.square().mean(dim=1, keepdim=True) + 1e-12).sqrt()


def masked_hint_loss(student_features: Tensor, teacher_features: Tensor, masked: Tensor) -> Tensor:
    """The squared error at the masked positions alone, the generation term of ViTKD.

    Source: Yang et al., ViTKD, arXiv 2209.02432, equation 4 (there the sum over features; here their mean).

    Args:
        student_features: generated, ``(N, C, H, W)``.
        teacher_features: the same shape.
        masked: True where the student's features were hidden, ``(N, 1, H, W)``.

    Returns:
        A scalar: the mean over masked positions and channels; 0, with a gradient of 0, where none is masked.

    >>> import torch
    >>> masked_hint_loss(torch.zeros(1, 2, 1, 2), torch.ones(1, 2, 1, 2), torch.tensor([[[[True, False]]]]))
    tensor(1.)
    """
    same_shape(student_features, teacher_features, "features")
    error = (wide(student_features) - wide(teacher_features.detach())).square() * masked
    return error.sum() / (masked.sum() * student_features.shape[1]).clamp_min(1)
