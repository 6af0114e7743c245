"""Losses over one feature tensor of each model: maps ``(N, C, H, W)``, tokens ``(N, L, D)`` or vectors ``(N, D)``.

All cast to float32 (float64 stays), detach the teacher's side and give a scalar mean unless they say otherwise. Shapes
that do not fit raise a ValueError.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kd.losses.functional._checks import (
    directions,
    matmul,
    positive,
    rounding,
    same_grid,
    same_shape,
    wide,
)


def hint_loss(student_features: Tensor, teacher_features: Tensor) -> Tensor:
    """FitNet's hint: the mean squared error between two feature tensors of one shape.

    Source: Romero et al., FitNets, arXiv 1412.6550, equation 3 (here the mean, not half the sum). Any shape, already
    projected to the teacher's width.

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
    authors' code (squared difference, mean); the paper's equation 2 has the norm of the difference. Shapes: ``(N, C, H,
    W)``, ``(N, any C, H, W)``. With ``p < 1`` the slope at 0 is infinite; what is 0, as after a ReLU, has no gradient.

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
    same_grid(student_features, teacher_features)
    student, teacher = (
        directions(_powers(wide(x), p).mean(dim=1).flatten(1), dim=1)
        for x in (student_features, teacher_features.detach())
    )
    return (student - teacher).square().mean()


def _powers(x: Tensor, p: float) -> Tensor:
    """``|x|^p``, without a gradient where x is 0 and ``p < 1``."""
    if p >= 1:
        return x.abs().pow(p)
    return torch.where(x == 0, 1.0, x).abs().pow(p) * (x != 0)


def hcl_loss(student_features: Tensor, teacher_features: Tensor) -> Tensor:
    """ReviewKD's hierarchical context loss: the squared error at full size and pooled to 4, 2 and 1 positions a side.

    Weights 1, 1/2, 1/4, 1/8 over their sum; sizes that the map's height does not exceed are left out. Source: Chen et al.,
    Distilling Knowledge via Knowledge Review, arXiv 2104.09044, and its code. Shapes: ``(N, C, H, W)``.

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
    student = wide(student_features)
    teacher = wide(teacher_features.detach())
    loss = F.mse_loss(student, teacher)
    total = 1.0
    weight = 1.0
    for size in (4, 2, 1):
        if size >= student.shape[2]:
            continue
        weight /= 2
        pooled = F.mse_loss(
            F.adaptive_avg_pool2d(student, size), F.adaptive_avg_pool2d(teacher, size)
        )
        loss = loss + weight * pooled
        total = total + weight
    return loss / total


def pkd_loss(student_features: Tensor, teacher_features: Tensor) -> Tensor:
    """PKD: half the squared error of features standardised per channel over the batch and all positions.

    Equals one minus their Pearson correlation, up to the small constant in the deviation. Source: Cao et al., PKD:
    General Distillation Framework for Object Detectors via Pearson Correlation Coefficient, arXiv 2207.02039. Shapes:
    ``(N, C, H, W)``. The loss depends on the batch as a whole.

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
    student = _per_channel(wide(student_features))
    teacher = _per_channel(wide(teacher_features.detach()))
    return F.mse_loss(student, teacher) / 2


def _per_channel(x: Tensor) -> Tensor:
    """Mean 0 and variance 1 in each channel, ``(C, N H W)``; a constant channel is 0 and has no gradient."""
    channels_CP = x.transpose(0, 1).flatten(1)  # P: positions of all pictures
    mean_C1 = channels_CP.mean(dim=1, keepdim=True)
    centred_CP = channels_CP - mean_C1
    length_C1 = centred_CP.detach().norm(2, 1, keepdim=True)
    varies_C1 = length_C1 > rounding(channels_CP, 1)
    variance_C1 = centred_CP.square().mean(dim=1, keepdim=True)
    deviation_C1 = (variance_C1 + 1e-12).sqrt()
    divisor_C1 = torch.where(varies_C1, deviation_C1, torch.inf)
    return centred_CP / divisor_C1


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


def cosine_loss(student_features: Tensor, teacher_features: Tensor) -> Tensor:
    """One minus the cosine of the two feature vectors at each position: their size does not count.

    Source: the summary term of AM-RADIO, Ranzinger et al., arXiv 2312.06709. A vector of zeros has the cosine 0 with
    any other, without a gradient.

    Args:
        student_features: maps, tokens or vectors, already projected to the teacher's width.
        teacher_features: the same shape.

    Returns:
        ``(N,)``: of each picture the mean over its positions, in [0, 2].

    >>> import torch
    >>> cosine_loss(torch.tensor([[3.0, 0], [0, 1]]), torch.tensor([[1.0, 0], [1, 0]]))
    tensor([0., 1.])
    """
    same_shape(student_features, teacher_features, "features")
    channels = -1
    if student_features.ndim == 4:
        channels = 1
    student = wide(student_features)
    teacher = wide(teacher_features.detach())
    has_direction = (student != 0).any(dim=channels)
    cosine = F.cosine_similarity(student, teacher, dim=channels)
    similarity = cosine * has_direction
    if similarity.ndim > 1:  # of each position
        similarity = similarity.flatten(1).mean(dim=1)
    return 1 - similarity


def smooth_l1_loss(student_features: Tensor, teacher_features: Tensor, beta: float = 1.0) -> Tensor:
    """Smooth L1: ``d^2 / (2 beta)`` where the difference ``d`` is below ``beta``, ``|d| - beta / 2`` elsewhere.

    Source: Girshick, Fast R-CNN, arXiv 1504.08083, equation 3; of features: AM-RADIO, arXiv 2312.06709.

    Args:
        student_features: ``(N, ...)``, already projected to the teacher's width.
        teacher_features: the same shape.
        beta: > 0, in the features' own unit.

    Returns:
        ``(N,)``: of each picture the mean over all its elements.

    >>> import torch
    >>> smooth_l1_loss(torch.zeros(2, 1), torch.tensor([[0.5], [3.0]]))
    tensor([0.1250, 2.5000])
    """
    same_shape(student_features, teacher_features, "features")
    positive("beta", beta)
    student = wide(student_features)
    teacher = wide(teacher_features.detach())
    losses = F.smooth_l1_loss(student, teacher, beta=beta, reduction="none")
    return losses.flatten(1).mean(dim=1)


def gram_kl_loss(
    student_features: Tensor, teacher_features: Tensor, temperature: float = 0.07
) -> Tensor:
    """Divergence of how each position of a map attends to all others, by cosine.

    With ``S`` the ``(L, L)`` cosines between the positions of one picture: the mean over rows of ``KL(softmax(S_t / T)
    || softmax(S_s / T))``, without a factor ``T^2``. The widths may differ. Source: LightlyTrain's documentation of its
    third distillation method; the Gram matrix of patches as a target is DINOv3's (arXiv 2508.10104, section 4.2), there
    compared by squared difference.

    Args:
        student_features: ``(N, C_s, H, W)``.
        teacher_features: ``(N, C_t, H, W)``.
        temperature: ``T`` > 0.

    Returns:
        ``(N,)``: of each picture the mean over its positions. Takes ``L^2`` numbers a picture.

    >>> import torch
    >>> x = torch.randn(2, 3, 4, 4)
    >>> gram_kl_loss(5 * x, x).abs().max() < 1e-5
    tensor(True)
    """
    same_grid(student_features, teacher_features)
    positive("temperature", temperature)
    student_NLL = cosines(wide(student_features)) / temperature
    teacher_NLL = cosines(wide(teacher_features.detach())) / temperature
    log_p_student = student_NLL.log_softmax(dim=2)
    log_p_teacher = teacher_NLL.log_softmax(dim=2)
    divergence = F.kl_div(log_p_student, log_p_teacher, reduction="none", log_target=True)
    return divergence.sum(dim=2).mean(dim=1)


def cosines(x: Tensor) -> Tensor:
    """Between all L positions of each map: ``(N, C, ...)`` -> ``(N, L, L)``."""
    units = directions(x.flatten(2), dim=1)
    return matmul(units.transpose(1, 2), units)


def pseudo_class_loss(
    student_features: Tensor, teacher_features: Tensor, classes: Tensor, temperature: float = 0.07
) -> Tensor:
    """KL divergence over pseudo-classes: the cosines of a picture's features with other pictures' of the teacher.

    ``KL(softmax(t K' / T) || softmax(s K' / T))`` with all rows normalised, without a factor ``T^2``. Needs no labels.
    Source: LightlyTrain's documentation of distillation with a queue of representations as a pseudo-classifier; such a
    queue with two distributions over it is SEED's (Fang et al., arXiv 2101.04731).

    Args:
        student_features: ``(N, D)``, already projected to the teacher's width.
        teacher_features: ``(N, D)``.
        classes: ``K``, ``(K, D)``: the teacher's features of other (and these) pictures.
        temperature: ``T`` > 0.

    Returns:
        ``(N,)``: of each picture.

    >>> import torch
    >>> x, queue = torch.randn(2, 8), torch.randn(5, 8)
    >>> pseudo_class_loss(3 * x, x, queue).abs().max() < 1e-5
    tensor(True)
    """
    same_shape(student_features, teacher_features, "features")
    positive("temperature", temperature)
    keys_KD = F.normalize(wide(classes.detach()), dim=1)
    student_ND = directions(wide(student_features), dim=1)
    teacher_ND = directions(wide(teacher_features.detach()), dim=1)
    student_cosines_NK = matmul(student_ND, keys_KD.T)
    teacher_cosines_NK = matmul(teacher_ND, keys_KD.T)
    log_p_student = (student_cosines_NK / temperature).log_softmax(dim=1)
    log_p_teacher = (teacher_cosines_NK / temperature).log_softmax(dim=1)
    divergence = F.kl_div(log_p_student, log_p_teacher, reduction="none", log_target=True)
    return divergence.sum(dim=1)
