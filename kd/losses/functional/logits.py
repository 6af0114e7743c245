"""Losses over logits.

Each loss takes ``student_logits`` and ``teacher_logits`` of one shape, some the ``target`` too; casts them to float32
(float64 stays), detaches the teacher's side, and gives a scalar: unless it says otherwise summed over classes and averaged
over all other positions. A ValueError names the argument that is wrong (unequal shapes, too few classes, a temperature
<= 0).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kd.losses.functional._checks import directions, matmul, positive, rounding, same_shape, wide


def kd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float,
    teacher_temperature: float | None = None,
) -> Tensor:
    """Hinton's knowledge distillation: ``T^2 * mean_b sum_c p_t (log p_t - log p_s)``, both at temperature ``T``.

    Source: Hinton et al., Distilling the Knowledge in a Neural Network, arXiv 1503.02531. The factor ``T^2`` keeps the
    size of the gradient when ``T`` changes. With two temperatures the factor is their product.

    Args:
        student_logits: ``(N, C)``, or ``(N, C, ...)`` with one distribution a position.
        teacher_logits: the same shape.
        temperature: ``T`` > 0.
        teacher_temperature: another one for the teacher's side; default: the same.

    Returns:
        A scalar: the mean over all positions.

    Raises:
        ValueError: the shapes differ, or a temperature is not positive.

    >>> student = torch.tensor([[2.0, 1, 0, -1], [0, 1, 2, 3], [1, -1, 0.5, 0]])
    >>> teacher = torch.tensor([[3.0, 1, -1, 0], [1, 0, 2, 4], [-1, 2, 1, 0]])
    >>> kd_loss(student, teacher, temperature=4.0)
    tensor(0.7156)
    """
    same_shape(student_logits, teacher_logits, "logits")
    positive("temperature", temperature)
    if teacher_temperature is None:
        teacher_temperature = temperature
    positive("teacher_temperature", teacher_temperature)
    divergence = kl_per_position(student_logits, teacher_logits, temperature, teacher_temperature)
    return temperature * teacher_temperature * divergence.mean()


def topk_kd_loss(
    student_logits: Tensor, values: Tensor, indices: Tensor, tail: Tensor, temperature: float
) -> Tensor:
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
    # Student: log p of the k classes, then of all others together.
    scaled_student_NC = wide(student_logits) / temperature
    log_p_NC = F.log_softmax(scaled_student_NC, dim=1)
    log_p_of_k = log_p_NC.gather(1, indices)
    without_k = log_p_NC.scatter(1, indices, -torch.inf)
    log_p_of_rest = without_k.logsumexp(1, keepdim=True)
    log_p_student = torch.cat([log_p_of_k, log_p_of_rest], 1)  # (N, k + 1)
    # Teacher: the same k + 1 numbers from its logits over T.
    scaled_values = wide(values) / temperature
    tail_N1 = tail[:, None]
    teacher_logits = torch.cat([scaled_values, tail_N1], 1).detach()
    log_p_teacher = F.log_softmax(teacher_logits, dim=1)
    terms = F.kl_div(log_p_student, log_p_teacher, reduction="none", log_target=True)
    divergence_N = terms.sum(dim=1)
    return temperature**2 * divergence_N.mean()


def kl_per_position(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float, teacher_temperature: float
) -> Tensor:
    """``KL(teacher || student)`` over the classes, in nats.

    Args:
        student_logits: ``(N, C, ...)``.
        teacher_logits: the same shape.
        temperature: of the student's side.
        teacher_temperature: of the teacher's.

    Returns:
        ``(N, ...)``.
    """
    log_p_student = F.log_softmax(wide(student_logits) / temperature, dim=1)
    log_p_teacher = F.log_softmax(wide(teacher_logits.detach()) / teacher_temperature, dim=1)
    return F.kl_div(log_p_student, log_p_teacher, reduction="none", log_target=True).sum(dim=1)


def hard_kd_loss(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """DeiT's hard distillation: cross-entropy with the teacher's decision, ``-mean_b log p_s(argmax_c teacher)``.

    Source: Touvron et al., Training data-efficient image transformers, arXiv 2012.12877, equation 3.

    Args:
        student_logits: ``(N, C)`` or ``(N, C, ...)``.
        teacher_logits: the same shape.

    Returns:
        A scalar: the mean over all positions. It is not zero where student and teacher agree.

    >>> hard_kd_loss(torch.zeros(1, 4), torch.tensor([[0.0, 9, 0, 0]]))
    tensor(1.3863)
    """
    same_shape(student_logits, teacher_logits, "logits")
    return F.cross_entropy(wide(student_logits), teacher_logits.detach().argmax(dim=1))


def dkd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    alpha: float = 1.0,
    beta: float = 8.0,
    temperature: float = 4.0,
) -> Tensor:
    """Decoupled KD: ``T^2 * mean_b (alpha * TCKD + beta * NCKD)``.

    With y the target, p the probabilities and q(c) = p(c) / (1 - p(y)) those of the others, all at ``T``:

    - ``TCKD = p_t(y) log(p_t(y) / p_s(y)) + (1 - p_t(y)) log((1 - p_t(y)) / (1 - p_s(y)))``,
    - ``NCKD = sum_{c != y} q_t(c) log(q_t(c) / q_s(c))``.

    Source: Zhao et al., Decoupled Knowledge Distillation, arXiv 2203.08679, equation 7. The others' mass is a logsumexp
    over the true rest; masking by a large negative number, as in the released code, overflows on strong logits.

    Args:
        student_logits: ``(N, C)``, C >= 3: with two classes nothing is left among the others.
        teacher_logits: the same shape.
        target: class ids ``(N,)``.
        alpha: weight of TCKD.
        beta: weight of NCKD; the paper uses 0.5 to 8.
        temperature: ``T`` > 0.

    Returns:
        A scalar: the mean over the batch.

    Raises:
        ValueError: unequal shapes, two classes, probabilities as target, or a temperature that is not positive.

    >>> student = torch.tensor([[2.0, 1, 0, -1], [0, 1, 2, 3], [1, -1, 0.5, 0]])
    >>> teacher = torch.tensor([[3.0, 1, -1, 0], [1, 0, 2, 4], [-1, 2, 1, 0]])
    >>> dkd_loss(student, teacher, torch.tensor([0, 3, 1]), alpha=1.0, beta=8.0, temperature=4.0)
    tensor(3.5043)
    """
    same_shape(student_logits, teacher_logits, "logits")
    positive("temperature", temperature)
    is_target = _is_target(target, student_logits, "DKD")
    scaled_student = wide(student_logits) / temperature
    scaled_teacher = wide(teacher_logits.detach()) / temperature
    student = _decouple(scaled_student, is_target)
    teacher = _decouple(scaled_teacher, is_target)

    # TCKD: KL of the two-way distribution target / not target.
    log_ratio_of_target = teacher.target - student.target
    log_ratio_of_rest = teacher.rest - student.rest
    of_target = teacher.target.exp() * log_ratio_of_target
    of_rest = teacher.rest.exp() * log_ratio_of_rest
    tckd = of_target + of_rest

    # NCKD: KL among the other classes.
    log_ratio_of_others = teacher.others - student.others
    of_each_class = teacher.others.exp() * log_ratio_of_others
    of_others = of_each_class.masked_fill(is_target, 0)
    nckd = of_others.sum(dim=1)
    total = alpha * tckd + beta * nckd
    return temperature**2 * total.mean()


def _is_target(target: Tensor, logits: Tensor, loss: str) -> Tensor:
    """Where a class is the target, bool ``(N, C)``; refuses what a loss over the other classes is not defined for."""
    if logits.shape[1] < 3:
        raise ValueError(f"student_logits must have >= 3 classes for {loss}, got {logits.shape[1]}")
    if target.is_floating_point():
        shape = tuple(target.shape)
        raise ValueError(
            f"target must hold class ids (N,) for {loss}, got probabilities of shape {shape}"
        )
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, target[:, None], True)


class _Decoupled(NamedTuple):
    """Logarithms of a model's probabilities, the target apart."""

    target: Tensor
    """``log p(y)``, ``(N,)``."""
    rest: Tensor
    """``log(1 - p(y))``, ``(N,)``."""
    others: Tensor
    """``log p(c | not y)``, ``(N, C)``; 0 at the target."""


def _decouple(logits: Tensor, is_target: Tensor) -> _Decoupled:
    """A model's logits over the temperature, ``(N, C)``, and where a class is the target, bool ``(N, C)`` with one True a
    row -> its log-probabilities, the target apart.
    """
    log_p = F.log_softmax(logits, dim=1)
    target_alone = log_p.masked_fill(~is_target, 0)
    target = target_alone.sum(dim=1)
    others_alone = log_p.masked_fill(is_target, -torch.inf)
    rest = others_alone.logsumexp(dim=1)
    # log q(c) = log p(c) - log (1 - p(y))
    log_q = log_p - rest[:, None]
    others = log_q.masked_fill(is_target, 0)
    return _Decoupled(target, rest, others)


def dist_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    beta: float = 1.0,
    gamma: float = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """DIST: ``T^2 * (beta * (1 - mean row correlation) + gamma * (1 - mean column correlation))``.

    Pearson correlations of the two softmax matrices: rows compare classes within a picture, columns pictures within a
    class. Source: Huang et al., Knowledge Distillation from A Stronger Teacher, arXiv 2205.10536, equations 9 to 11. A
    constant row or column has no correlation and counts as 0.

    Args:
        student_logits: ``(N, C)``.
        teacher_logits: the same shape.
        beta: weight of the relation between classes.
        gamma: weight of the relation within a class, over the batch.
        temperature: ``T`` > 0.

    Returns:
        A scalar. The column term depends on the batch as a whole.

    >>> student = torch.tensor([[2.0, 1, 0, -1], [0, 1, 2, 3], [1, -1, 0.5, 0]])
    >>> teacher = torch.tensor([[3.0, 1, -1, 0], [1, 0, 2, 4], [-1, 2, 1, 0]])
    >>> dist_loss(student, teacher, beta=1.0, gamma=1.0, temperature=1.0)
    tensor(1.0667)
    """
    same_shape(student_logits, teacher_logits, "logits")
    positive("temperature", temperature)
    scaled_student = wide(student_logits) / temperature
    scaled_teacher = wide(teacher_logits.detach()) / temperature
    p_student = F.softmax(scaled_student, dim=1)
    p_teacher = F.softmax(scaled_teacher, dim=1)
    row_correlations = _correlation(p_student, p_teacher, dim=1)
    column_correlations = _correlation(p_student, p_teacher, dim=0)
    between_classes = 1 - row_correlations.mean()
    within_classes = 1 - column_correlations.mean()
    return temperature**2 * (beta * between_classes + gamma * within_classes)


def _correlation(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Pearson's correlation of two ``(N, C)`` over ``dim``, which goes; 0, without a gradient, where either is constant."""
    return (_standard_score(a, dim) * _standard_score(b, dim)).sum(dim=dim)


def _standard_score(x: Tensor, dim: int) -> Tensor:
    """``x`` less its mean over ``dim``, brought to the length 1 there; 0 where it is constant but for rounding."""
    centred = x - x.mean(dim=dim, keepdim=True)
    return directions(centred, dim, eps=1e-8, noise=rounding(x, dim))


def standardize_logits(logits: Tensor) -> Tensor:
    """Logit standardisation: ``(x - mean) / (std + 1e-7)`` over the classes, with the unbiased deviation.

    Source: Sun et al., Logit Standardization in Knowledge Distillation, arXiv 2403.01427. Applied to both models'
    logits before any logit loss; cross-entropy keeps the raw ones. Equal logits become 0, without a gradient.

    Args:
        logits: ``(N, C)`` or ``(N, C, ...)``, C >= 2.

    Returns:
        The same shape, float32 at least.

    Raises:
        ValueError: one class.

    >>> standardize_logits(torch.tensor([[1.0, 2.0, 3.0]])).round(decimals=4)
    tensor([[-1.,  0.,  1.]])
    """
    num_classes = logits.shape[1]
    if num_classes < 2:
        raise ValueError(f"logits must have >= 2 classes to standardize, got {num_classes}")
    x = wide(logits)
    centred = x - x.mean(dim=1, keepdim=True)
    squares = centred.square()
    variance = squares.sum(dim=1, keepdim=True) / (num_classes - 1)
    length = centred.detach().norm(2, 1, keepdim=True)
    varies = length > rounding(x, 1)
    # the root's slope at 0 is infinite: equal logits would have a gradient of NaN
    deviation = torch.where(varies, variance, 1.0).sqrt()
    divisor = torch.where(varies, deviation + 1e-7, torch.inf)
    return centred / divisor


def nkd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    gamma: float = 1.5,
    temperature: float = 1.0,
) -> Tensor:
    """Normalised KD: ``-mean_b [p_t(y) log p_s(y) + gamma T^2 sum_{c != y} q_t(c) log q_s(c)]``.

    ``p`` at temperature 1; ``q`` are the probabilities of the other classes at ``T``, renormalised. Source: Yang et
    al., From Knowledge Distillation to Self-Knowledge Distillation, arXiv 2303.13005. Both terms are cross-entropies:
    the loss is not zero at its optimum.

    Args:
        student_logits: ``(N, C)``, C >= 3.
        teacher_logits: the same shape.
        target: class ids ``(N,)``.
        gamma: weight of the other classes.
        temperature: ``T`` > 0, of the other classes alone.

    Returns:
        A scalar: the mean over the batch.

    >>> student = torch.tensor([[2.0, 1, 0, -1], [0, 1, 2, 3], [1, -1, 0.5, 0]])
    >>> teacher = torch.tensor([[3.0, 1, -1, 0], [1, 0, 2, 4], [-1, 2, 1, 0]])
    >>> nkd_loss(student, teacher, torch.tensor([0, 3, 1]), gamma=1.5, temperature=1.0)
    tensor(2.4493)
    """
    same_shape(student_logits, teacher_logits, "logits")
    positive("temperature", temperature)
    is_target = _is_target(target, student_logits, "NKD")
    student = wide(student_logits)
    teacher = wide(teacher_logits.detach())

    # p(y) log p(y), at temperature 1
    log_p_student = _decouple(student, is_target).target
    log_p_teacher = _decouple(teacher, is_target).target
    of_target = log_p_teacher.exp() * log_p_student

    # sum of q(c) log q(c) over the other classes, at T
    log_q_student = _decouple(student / temperature, is_target).others
    log_q_teacher = _decouple(teacher / temperature, is_target).others
    of_each_other = log_q_teacher.exp() * log_q_student
    of_others = of_each_other.masked_fill(is_target, 0).sum(dim=1)
    return -(of_target + gamma * temperature**2 * of_others).mean()


def wsld_loss(
    student_logits: Tensor, teacher_logits: Tensor, target: Tensor, temperature: float = 2.0
) -> Tensor:
    """Weighted soft labels: ``T^2 * mean_b w_b KL_b`` with ``w_b = 1 - exp(-CE_s / CE_t)``.

    The weight, without gradient and at temperature 1, trusts the teacher less on pictures that the student already
    knows better. Source: Zhou et al., Rethinking Soft Labels for Knowledge Distillation, arXiv 2102.00650. The paper
    writes the cross-entropy in place of the divergence; the gradient is the same, and this form is 0 at its optimum.

    Args:
        student_logits: ``(N, C)``.
        teacher_logits: the same shape.
        target: class ids ``(N,)``, or probabilities ``(N, C)``; each picture needs a label.
        temperature: ``T`` > 0.

    Returns:
        A scalar: the mean over the batch.

    >>> wsld_loss(torch.zeros(1, 3), torch.tensor([[2.0, 0, 0]]), torch.tensor([0])).round(decimals=4)
    tensor(0.4881)
    """
    same_shape(student_logits, teacher_logits, "logits")
    positive("temperature", temperature)
    student = wide(student_logits)
    teacher = wide(teacher_logits.detach())
    student_error = F.cross_entropy(student.detach(), target, reduction="none")
    teacher_error = F.cross_entropy(teacher, target, reduction="none")
    # w_b = 1 - exp(-CE_s / CE_t)
    error_ratio = student_error / teacher_error.clamp_min(1e-7)
    trust = -torch.expm1(-error_ratio)
    divergence = kl_per_position(student, teacher, temperature, temperature)
    return temperature**2 * (trust * divergence).mean()


def mlkd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperatures: Sequence[float] = (2.0, 3.0, 4.0, 5.0, 6.0),
) -> Tensor:
    """Multi-level logit distillation: the mean over temperatures of an instance, a batch and a class term.

    With ``P`` the ``(N, C)`` softmax matrix at a temperature: instance ``T^2 * KL`` (mean over the batch), batch ``|P_s
    P_s' - P_t P_t'|^2 / N``, class ``|P_s' P_s - P_t' P_t|^2 / C``. Source: Jin et al., Multi-level Logit Distillation,
    CVPR 2023, equations 3 to 8. Paper and code sum over the temperatures, here is their mean; the code also masks the
    batch and class terms by the teacher's confidence and compares two augmentations.

    Args:
        student_logits: ``(N, C)``.
        teacher_logits: the same shape.
        temperatures: each > 0, at least one.

    Returns:
        A scalar. The batch and class terms depend on the batch as a whole.

    >>> mlkd_loss(torch.zeros(2, 3), torch.zeros(2, 3))
    tensor(0.)
    """
    same_shape(student_logits, teacher_logits, "logits")
    if not temperatures:
        raise ValueError("temperatures must hold at least one, got none")
    for temperature in temperatures:
        positive("temperatures", temperature)
    student = wide(student_logits)
    teacher = wide(teacher_logits.detach())
    count, classes = student.shape
    levels = []
    for temperature in temperatures:
        p_student = F.softmax(student / temperature, dim=1)
        p_teacher = F.softmax(teacher / temperature, dim=1)
        between_pictures = matmul(p_student, p_student.T) - matmul(p_teacher, p_teacher.T)
        batch_term = between_pictures.square().sum() / count
        class_term = _class_distance(p_student, p_teacher) / classes
        levels.append(kd_loss(student, teacher, temperature) + batch_term + class_term)
    return torch.stack(levels).mean()


def _class_distance(p: Tensor, q: Tensor) -> Tensor:
    """``|p' p - q' q|^2`` of ``(N, C)`` matrices without a ``(C, C)`` one.

    With ``d = p - q`` it is ``|d' p + q' d|^2 = |d' p|^2 + |q' d|^2 + 2 <d' p, q' d>``, and of N x N products:
    ``|d' p|^2 = sum(d d' * p p')``, ``|q' d|^2 = sum(d d' * q q')``, ``<d' p, q' d> = sum(d p' * (d q')')``.
    """
    difference = p - q
    with_p = matmul(difference, p.T)
    with_q = matmul(difference, q.T)
    gram_p = matmul(p, p.T)
    gram_q = matmul(q, q.T)
    gram_sum = gram_p + gram_q
    squares = matmul(difference, difference.T) * gram_sum
    products = 2 * with_p * with_q.T
    return (squares + products).sum()


def binary_kd_loss(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0
) -> Tensor:
    """KD of independent yes/no answers: ``T^2 * mean_b sum_c KL(Bernoulli(t/T) || Bernoulli(s/T))``.

    For labels that do not exclude each other. Source: Yang et al., Multi-Label Knowledge Distillation, arXiv
    2308.06453, equation 2 (there the mean over labels; here their sum, as for classes everywhere).

    Args:
        student_logits: ``(N, C)``, one logit a label.
        teacher_logits: the same shape.
        temperature: ``T`` > 0.

    Returns:
        A scalar: the mean over the batch of the sum over labels.

    >>> binary_kd_loss(torch.zeros(1, 2), torch.full((1, 2), 2.0)).round(decimals=4)
    tensor(0.6556)
    """
    same_shape(student_logits, teacher_logits, "logits")
    positive("temperature", temperature)
    student = wide(student_logits) / temperature
    teacher = wide(teacher_logits.detach()) / temperature
    # sigmoid(x) is the probability of yes, sigmoid(-x) of no
    log_ratio_of_yes = F.logsigmoid(teacher) - F.logsigmoid(student)
    log_ratio_of_no = F.logsigmoid(-teacher) - F.logsigmoid(-student)
    yes = teacher.sigmoid() * log_ratio_of_yes
    no = (-teacher).sigmoid() * log_ratio_of_no
    terms = (yes + no).flatten(1)
    divergence_N = terms.sum(dim=1)
    return temperature**2 * divergence_N.mean()
