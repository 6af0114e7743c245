"""Distillation losses as pure functions.

All take ``(student, teacher, ...)``, cast to float32 (float64 stays), detach the teacher's side, sum over classes
and average over all other positions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    """float32 at least: under CPU autocast a bfloat16 log-softmax stays bfloat16 and loses the small terms."""
    return x if x.dtype == torch.float64 else x.float()


def kd_loss(student_logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Hinton's knowledge distillation: ``T^2 * mean_b sum_c p_t (log p_t - log p_s)``, both at temperature ``T``.

    Source: Hinton et al., Distilling the Knowledge in a Neural Network, arXiv 1503.02531. The factor ``T^2`` keeps
    the size of the gradient when ``T`` changes.

    Args:
        student_logits: ``(N, C)``, or ``(N, C, ...)`` with one distribution a position.
        teacher_logits: the same shape.
        temperature: ``T`` > 0.

    Returns:
        A scalar: the mean over all positions.

    Raises:
        ValueError: the shapes differ, or the temperature is not positive.

    >>> student = torch.tensor([[2.0, 1, 0, -1], [0, 1, 2, 3], [1, -1, 0.5, 0]])
    >>> teacher = torch.tensor([[3.0, 1, -1, 0], [1, 0, 2, 4], [-1, 2, 1, 0]])
    >>> kd_loss(student, teacher, temperature=4.0)
    tensor(0.7156)
    """
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student_logits and teacher_logits must have one shape, got {tuple(student_logits.shape)} "
            f"and {tuple(teacher_logits.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    log_p_student = F.log_softmax(_wide(student_logits) / temperature, dim=1)
    log_p_teacher = F.log_softmax(_wide(teacher_logits.detach()) / temperature, dim=1)
    divergence = F.kl_div(log_p_student, log_p_teacher, reduction="none", log_target=True).sum(dim=1)
    return temperature**2 * divergence.mean()


def topk_kd_loss(student_logits: Tensor, values: Tensor, indices: Tensor, tail: Tensor, temperature: float) -> Tensor:
    """Hinton's loss where only the teacher's k largest logits are known: all other classes count as one.

    With ``r`` the teacher's probability of all other classes together (at ``T``), against :func:`kd_loss`:

    - the gradient on the k classes is the same; on the others it differs by at most ``T * r`` in a class and
      ``2 * T * r`` in sum, a sample;
    - the value is smaller by ``T^2 * r * KL(teacher || student, both within the other classes)``, so never larger.

    Source: the log-sum inequality; keeping k answers is TinyViT's (arXiv 2207.10666), which spreads the rest evenly
    instead.

    Args:
        student_logits: ``(N, C)``.
        values: ``(N, k)`` with k < C: the teacher's largest logits, up to a constant a sample.
        indices: ``(N, k)``: their classes.
        tail: ``(N,)``: ``log sum exp(z_c / T)`` over the teacher's other logits, up to the same constant (over T).
        temperature: ``T`` > 0.

    Returns:
        A scalar: the mean over the batch.

    >>> teacher = torch.tensor([[3.0, 1, -1, 0]])
    >>> values, indices = teacher.topk(3)
    >>> topk_kd_loss(torch.zeros(1, 4), values, indices, teacher[:, 2], 1.0)  # one class left over: exact
    tensor(0.7912)
    >>> kd_loss(torch.zeros(1, 4), teacher, 1.0)
    tensor(0.7912)
    """
    log_student = F.log_softmax(_wide(student_logits) / temperature, dim=1)
    rest = log_student.scatter(1, indices, -torch.inf).logsumexp(1, keepdim=True)
    log_p_student = torch.cat([log_student.gather(1, indices), rest], 1)
    log_p_teacher = F.log_softmax(torch.cat([_wide(values) / temperature, tail[:, None]], 1).detach(), dim=1)
    divergence = F.kl_div(log_p_student, log_p_teacher, reduction="none", log_target=True).sum(dim=1)
    return temperature**2 * divergence.mean()


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

    >>> hint_loss(torch.zeros(2, 3), torch.full((2, 3), 2.0))
    tensor(4.)
    """
    if student_features.shape != teacher_features.shape:
        raise ValueError(
            f"student_features and teacher_features must have one shape, got {tuple(student_features.shape)} "
            f"and {tuple(teacher_features.shape)}"
        )
    return F.mse_loss(_wide(student_features), _wide(teacher_features.detach()))
