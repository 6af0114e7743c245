"""Losses over logits: formula, source and settings of each. When each one helps is in kd/losses/README.md.

All take ``(student_logits, teacher_logits, target)``, cast logits to float32 (float64 stays), detach the teacher's, and
give a scalar: unless they say otherwise summed over classes and averaged over all other positions. Logits of two shapes
are a ValueError.
"""

from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kd.config.kinds import Range
from kd.losses.base import Epochs, LogitLoss, NotNegative, Positive, TopKLogits, with_arguments
from kd.losses.numerics import both, directions, kl, matmul, rounding, wide
from kd.losses.ranks import of_all_ranks


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
    if teacher_temperature is None:
        teacher_temperature = temperature
    given = {"temperature": temperature, "teacher_temperature": teacher_temperature}
    for name, value in given.items():
        if not value > 0:
            raise ValueError(f"{name} must be > 0, got {value}")
    divergence = kl_per_position(student_logits, teacher_logits, temperature, teacher_temperature)
    return temperature * teacher_temperature * divergence.mean()


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
    student, teacher = both(student_logits, teacher_logits, "logits")
    scaled_student = student / temperature
    scaled_teacher = teacher / teacher_temperature
    log_p_student = F.log_softmax(scaled_student, dim=1)
    log_p_teacher = F.log_softmax(scaled_teacher, dim=1)
    return kl(log_p_teacher, log_p_student, dim=1)


@with_arguments
class KDLoss(LogitLoss):
    """Hinton's knowledge distillation, :func:`kd_loss`.

    On a student with a distillation token (timm's ``deit_*_distilled_*``) this is DeiT's soft distillation.

    Args:
        temperature: softens both distributions, > 0. The paper uses 1 to 20.
        teacher_temperature: another one for the teacher's side; default: the same.
        final_temperature: the temperature moves from ``temperature`` to this one, in equal steps over the epochs.

    >>> KDLoss(temperature=2.0)(torch.zeros(4, 10), torch.zeros(4, 10), torch.zeros(4, dtype=torch.long))
    tensor(0.)
    """

    exclusive = True

    temperature: Positive = 4.0
    weight: NotNegative = 1.0
    teacher_temperature: Positive | None = None
    final_temperature: Positive | None = None

    def temperature_now(self) -> float:
        """The temperature of the present epoch: ``temperature`` in the first, ``final_temperature`` in the last."""
        if self.final_temperature is None or self.max_epochs < 2:
            return self.temperature
        last_epoch = self.max_epochs - 1
        progress = min(int(self.epoch) / last_epoch, 1)
        change = self.final_temperature - self.temperature
        return self.temperature + progress * change

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, unused -> scalar."""
        return kd_loss(
            student_logits, teacher_logits, self.temperature_now(), self.teacher_temperature
        )

    def softened(self, teacher_logits: Tensor) -> Tensor:
        """The teacher's logits ``(N, C, ...)`` over its own temperature, or that of the present epoch."""
        return teacher_logits / (self.teacher_temperature or self.temperature_now())

    @property
    def topk_temperature(self) -> float | None:
        """The temperature of both sides in all epochs: with one a cache of the teacher's largest logits is enough.

        None: the sides or the epochs differ, so all logits are needed.
        """
        if self.final_temperature is not None:
            return None
        if self.teacher_temperature not in (None, self.temperature):
            return None
        return float(self.temperature)

    def forward_topk(self, student_logits: Tensor, teacher: TopKLogits, target: Tensor) -> Tensor:
        """As :meth:`forward`, where only the teacher's k largest logits are known: all other classes count as one.

        With ``r`` the teacher's probability of all other classes together (at ``T``), against :meth:`forward`:

        - the gradient on the k classes is the same; on the others it differs by at most ``T * r`` in a class and
          ``2 * T * r`` in sum, a sample;
        - the value is smaller by ``T^2 * r * KL(teacher || student, both within the other classes)``, so never larger.

        Source: the log-sum inequality; keeping k answers is TinyViT's (arXiv 2207.10666), which spreads the rest evenly
        instead.

        Args:
            student_logits: ``(N, C)``.
            teacher: values and classes ``(N, k)``, and the log of the others' summed ``exp(z / T)`` at this loss's T.
            target: not read.
        """
        # Student: log p of the k classes, then of all others together.
        scaled_student_NC = wide(student_logits) / self.temperature
        log_p_NC = F.log_softmax(scaled_student_NC, dim=1)
        log_p_of_k = log_p_NC.gather(1, teacher.indices)
        without_k = log_p_NC.scatter(1, teacher.indices, -torch.inf)
        log_p_of_rest = without_k.logsumexp(1, keepdim=True)
        log_p_student = torch.cat([log_p_of_k, log_p_of_rest], 1)  # (N, k + 1)
        # Teacher: the same k + 1 numbers from its logits over T.
        scaled_values = wide(teacher.values) / self.temperature
        tail_N = teacher.tails[float(self.temperature)]
        tail_N1 = tail_N[:, None]
        teacher_logits = torch.cat([scaled_values, tail_N1], 1).detach()
        log_p_teacher = F.log_softmax(teacher_logits, dim=1)
        divergence_N = kl(log_p_teacher, log_p_student, dim=1)
        mean_divergence = divergence_N.mean()
        return self.temperature**2 * mean_divergence


@with_arguments
class HardKDLoss(LogitLoss):
    """DeiT's hard distillation: cross-entropy with the teacher's decision, ``-mean_b log p_s(argmax_c teacher)``.

    It is not zero where student and teacher agree. On a student with a distillation token (timm's
    ``deit_*_distilled_*``) the token learns it. Source: Touvron et al., Training data-efficient image transformers, arXiv
    2012.12877, equation 3.

    Args:
        weight: factor in the total loss.

    >>> HardKDLoss()(torch.zeros(1, 4), torch.tensor([[0.0, 9, 0, 0]]), torch.zeros(1))
    tensor(1.3863)
    """

    exclusive = True

    weight: NotNegative = 1.0

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C, ...)``, the same shape, unused -> scalar."""
        student, teacher = both(student_logits, teacher_logits, "logits")
        return F.cross_entropy(student, teacher.argmax(dim=1))


@with_arguments
class DKDLoss(LogitLoss):
    """Decoupled KD: ``T^2 * mean_b (alpha * TCKD + beta * NCKD)``.

    With y the target, p the probabilities and q(c) = p(c) / (1 - p(y)) those of the others, all at ``T``:

    - ``TCKD = p_t(y) log(p_t(y) / p_s(y)) + (1 - p_t(y)) log((1 - p_t(y)) / (1 - p_s(y)))``,
    - ``NCKD = sum_{c != y} q_t(c) log(q_t(c) / q_s(c))``.

    Source: Zhao et al., Decoupled Knowledge Distillation, arXiv 2203.08679, equation 7. The others' mass is a logsumexp
    over the true rest; masking by a large negative number, as in the released code, overflows on strong logits.

    Args:
        alpha: weight of the target against all others.
        beta: weight of the others among themselves; the paper uses 0.5 to 8.
        temperature: > 0.
        warmup_epochs: the loss grows linearly over that many epochs (the paper: 20 of 240), 0 for none.

    >>> student = torch.tensor([[2.0, 1, 0, -1], [0, 1, 2, 3], [1, -1, 0.5, 0]])
    >>> teacher = torch.tensor([[3.0, 1, -1, 0], [1, 0, 2, 4], [-1, 2, 1, 0]])
    >>> DKDLoss()(student, teacher, torch.tensor([0, 3, 1]))
    tensor(3.5043)
    """

    needs_class_ids = True
    least_classes = 3

    alpha: NotNegative = 1.0
    beta: NotNegative = 8.0
    temperature: Positive = 4.0
    warmup_epochs: Epochs = 0
    weight: NotNegative = 1.0

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """Student's and teacher's logits ``(N, C)``, class ids ``(N,)`` -> a scalar, weighted up during
        ``warmup_epochs``. A ValueError for targets of probabilities.
        """
        is_target = _is_target(target, student_logits)
        student_logits, teacher_logits = self.scaled(student_logits, teacher_logits)
        student = _decouple(student_logits, is_target)
        teacher = _decouple(teacher_logits, is_target)

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

        total = self.alpha * tckd + self.beta * nckd
        loss = self.temperature**2 * total.mean()
        return loss * self.warmed_up(self.warmup_epochs)


def _is_target(target: Tensor, logits: Tensor) -> Tensor:
    """Where a class is the target, bool ``(N, C)``; a ValueError for probabilities in place of class ids."""
    if target.is_floating_point():
        shape = tuple(target.shape)
        raise ValueError(f"target must hold class ids (N,), got probabilities of shape {shape}")
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


@with_arguments
class DISTLoss(LogitLoss):
    """DIST: ``T^2 * (beta * (1 - mean row correlation) + gamma * (1 - mean column correlation))``.

    Pearson correlations of the two softmax matrices: rows compare classes within a picture, columns pictures within a
    class, so the loss depends on the batch as a whole. A constant row or column has no correlation and counts as 0.
    Source: Huang et al., Knowledge Distillation from A Stronger Teacher, arXiv 2205.10536, equations 9 to 11.

    Args:
        beta: weight of the relation between classes.
        gamma: weight of the relation within a class, over the batch.
        temperature: > 0.
        gather: compare over the batches of all processes instead of each process's own.

    >>> student = torch.tensor([[2.0, 1, 0, -1], [0, 1, 2, 3], [1, -1, 0.5, 0]])
    >>> teacher = torch.tensor([[3.0, 1, -1, 0], [1, 0, 2, 4], [-1, 2, 1, 0]])
    >>> DISTLoss()(student, teacher, torch.zeros(3))
    tensor(1.0667)
    """

    exclusive = True

    beta: float = 1.0
    gamma: float = 1.0
    temperature: Positive = 1.0
    weight: NotNegative = 1.0
    gather: bool = False

    def __post_init__(self) -> None:
        """With ``beta`` two classes are too few: any two pairs of numbers correlate by 1 or -1, without a gradient."""
        super().__post_init__()
        self.least_classes = 3 if self.beta else 1

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, unused -> scalar; over the batches of all processes where it gathers."""
        if self.gather:
            student_logits, teacher_logits = of_all_ranks(student_logits, teacher_logits)
        student, teacher = self.scaled(student_logits, teacher_logits)
        p_student = F.softmax(student, dim=1)
        p_teacher = F.softmax(teacher, dim=1)
        row_correlations = _correlation(p_student, p_teacher, dim=1)
        column_correlations = _correlation(p_student, p_teacher, dim=0)
        between_classes = 1 - row_correlations.mean()
        within_classes = 1 - column_correlations.mean()
        total = self.beta * between_classes + self.gamma * within_classes
        return self.temperature**2 * total


def _correlation(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Pearson's correlation of two ``(N, C)`` over ``dim``, which goes; 0, without a gradient, where either is constant."""
    return (_centred_direction(a, dim) * _centred_direction(b, dim)).sum(dim=dim)


def _centred_direction(x: Tensor, dim: int) -> Tensor:
    """``x`` less its mean over ``dim``, brought to the length 1 there; 0 where it is constant but for rounding."""
    centred = x - x.mean(dim=dim, keepdim=True)
    return directions(centred, dim, eps=1e-8, noise=rounding(x, dim))


@with_arguments
class NKDLoss(LogitLoss):
    """Normalised KD: ``-mean_b [p_t(y) log p_s(y) + gamma T^2 sum_{c != y} q_t(c) log q_s(c)]``.

    ``p`` at temperature 1; ``q`` are the probabilities of the other classes at ``T``, renormalised. Both terms are
    cross-entropies: the loss is not zero at its optimum. Source: Yang et al., From Knowledge Distillation to
    Self-Knowledge Distillation, arXiv 2303.13005.

    Args:
        gamma: weight of the other classes.
        temperature: > 0, of the other classes alone.

    >>> student = torch.tensor([[2.0, 1, 0, -1], [0, 1, 2, 3], [1, -1, 0.5, 0]])
    >>> teacher = torch.tensor([[3.0, 1, -1, 0], [1, 0, 2, 4], [-1, 2, 1, 0]])
    >>> NKDLoss()(student, teacher, torch.tensor([0, 3, 1]))
    tensor(2.4493)
    """

    needs_class_ids = True
    least_classes = 3

    gamma: float = 1.5
    temperature: Positive = 1.0
    weight: NotNegative = 1.0

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, class ids ``(N,)`` -> scalar. A ValueError for targets of probabilities."""
        is_target = _is_target(target, student_logits)
        student, teacher = both(student_logits, teacher_logits, "logits")

        # p(y) log p(y), at temperature 1
        log_p_student = _decouple(student, is_target).target
        log_p_teacher = _decouple(teacher, is_target).target
        of_target = log_p_teacher.exp() * log_p_student

        # sum of q(c) log q(c) over the other classes, at T
        scaled_student = student / self.temperature
        scaled_teacher = teacher / self.temperature
        log_q_student = _decouple(scaled_student, is_target).others
        log_q_teacher = _decouple(scaled_teacher, is_target).others
        of_each_other = log_q_teacher.exp() * log_q_student
        others_alone = of_each_other.masked_fill(is_target, 0)
        of_others = others_alone.sum(dim=1)
        return -(of_target + self.gamma * self.temperature**2 * of_others).mean()


@with_arguments
class WSLDLoss(LogitLoss):
    """Weighted soft labels: ``T^2 * mean_b w_b KL_b`` with ``w_b = 1 - exp(-CE_s / CE_t)``.

    The weight, without gradient and at temperature 1, trusts the teacher less on pictures that the student already
    knows better. Source: Zhou et al., Rethinking Soft Labels for Knowledge Distillation, arXiv 2102.00650. The paper
    writes the cross-entropy in place of the divergence; the gradient is the same, and this form is 0 at its optimum.

    Args:
        temperature: > 0.
        weight: factor in the total loss; the paper uses 2.25 to 2.5.

    >>> WSLDLoss()(torch.zeros(1, 3), torch.tensor([[2.0, 0, 0]]), torch.tensor([0])).round(decimals=4)
    tensor(0.4881)
    """

    needs_labels = True

    temperature: Positive = 2.0
    weight: NotNegative = 1.0

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, ids ``(N,)`` or probabilities ``(N, C)`` -> scalar."""
        student, teacher = both(student_logits, teacher_logits, "logits")
        student_error = F.cross_entropy(student.detach(), target, reduction="none")
        teacher_error = F.cross_entropy(teacher, target, reduction="none")
        # w_b = 1 - exp(-CE_s / CE_t)
        error_ratio = student_error / teacher_error.clamp_min(1e-7)
        trust = -torch.expm1(-error_ratio)
        temperature = self.temperature
        divergence = kl_per_position(student, teacher, temperature, temperature)
        trusted = trust * divergence
        return temperature**2 * trusted.mean()


@with_arguments
class MLKDLoss(LogitLoss):
    """Multi-level logit distillation: the mean over temperatures of an instance, a batch and a class term.

    With ``P`` the ``(N, C)`` softmax matrix at a temperature: instance ``T^2 * KL`` (mean over the batch), batch ``|P_s
    P_s' - P_t P_t'|^2 / N``, class ``|P_s' P_s - P_t' P_t|^2 / C``: they depend on the batch as a whole. Source: Jin et
    al., Multi-level Logit Distillation, CVPR 2023, equations 3 to 8. Paper and code sum over the temperatures, here is
    their mean; the code also masks the batch and class terms by the teacher's confidence and compares two augmentations.

    Args:
        temperatures: each > 0.

    >>> MLKDLoss()(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2))
    tensor(0.)
    """

    exclusive = True

    temperatures: Annotated[tuple[float, ...], Range("> 0")] = (2.0, 3.0, 4.0, 5.0, 6.0)
    weight: NotNegative = 1.0

    def __post_init__(self) -> None:
        """Checks the temperatures; a ValueError without any, or where one is not above 0."""
        super().__post_init__()
        if not self.temperatures:
            raise ValueError("temperatures must hold at least one, got none")
        self.temperatures = tuple(self.temperatures)

    def softened(self, teacher_logits: Tensor) -> Tensor:
        """The teacher's logits over the lowest of the temperatures."""
        return teacher_logits / min(self.temperatures)

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, unused -> scalar."""
        student, teacher = both(student_logits, teacher_logits, "logits")
        count, classes = student.shape
        levels = []
        for temperature in self.temperatures:
            p_student = F.softmax(student / temperature, dim=1)
            p_teacher = F.softmax(teacher / temperature, dim=1)
            student_gram = matmul(p_student, p_student.T)
            teacher_gram = matmul(p_teacher, p_teacher.T)
            between_pictures = student_gram - teacher_gram
            batch_term = between_pictures.square().sum() / count
            class_term = _class_distance(p_student, p_teacher) / classes
            instance_term = kd_loss(student, teacher, temperature)
            levels.append(instance_term + batch_term + class_term)
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


@with_arguments
class BinaryKDLoss(LogitLoss):
    """KD of independent yes/no answers: ``T^2 * mean_b sum_c KL(Bernoulli(t/T) || Bernoulli(s/T))``.

    For labels that do not exclude each other. Source: Yang et al., Multi-Label Knowledge Distillation, arXiv
    2308.06453, equation 2 (there the mean over labels; here their sum, as for classes everywhere).

    Args:
        temperature: > 0.

    >>> BinaryKDLoss()(torch.zeros(1, 2), torch.full((1, 2), 2.0), torch.zeros(1, 2)).round(decimals=4)
    tensor(0.6556)
    """

    temperature: Positive = 1.0
    weight: NotNegative = 1.0

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, unused -> scalar: the mean over the batch of the sum over labels."""
        student, teacher = self.scaled(student_logits, teacher_logits)
        # sigmoid(x) is the probability of yes, sigmoid(-x) of no
        log_ratio_of_yes = F.logsigmoid(teacher) - F.logsigmoid(student)
        log_ratio_of_no = F.logsigmoid(-teacher) - F.logsigmoid(-student)
        p_yes = teacher.sigmoid()
        p_no = (-teacher).sigmoid()
        yes = p_yes * log_ratio_of_yes
        no = p_no * log_ratio_of_no
        both_answers = yes + no
        terms = both_answers.flatten(1)
        divergence_N = terms.sum(dim=1)
        return self.temperature**2 * divergence_N.mean()


@with_arguments
class StandardizedLoss(LogitLoss):
    """Any logit loss over standardised logits: ``(x - mean) / (std + 1e-7)`` over the classes.

    Applied to both models' logits; cross-entropy keeps the raw ones. Source: Sun et al., Logit Standardization in
    Knowledge Distillation, arXiv 2403.01427.

    Args:
        loss: the loss; its own weight must be 1.
        weight: factor in the total loss; the paper uses 9 with KD at temperature 2.

    >>> bool(StandardizedLoss(KDLoss(2.0))(torch.eye(3), 5 * torch.eye(3), torch.arange(3)) < 1e-6)
    True
    """

    exclusive = True
    least_classes = 3  # standardised, any two logits are the same two numbers, without a gradient

    loss: LogitLoss
    weight: NotNegative = 1.0

    def __post_init__(self) -> None:
        """Takes over what the loss inside needs of labels and indices, so that a batch is prepared for it; whether it
        compares maps or numbers; and its ``final_temperature``, which the LightningModule's notes read.

        Raises:
            ValueError: the loss inside has a weight other than 1.
        """
        super().__post_init__()
        loss = self.loss
        if loss.weight != 1:
            raise ValueError(
                f"weight must be given to StandardizedLoss, the loss inside it got {loss.weight}"
            )
        for name in ("needs_class_ids", "needs_labels", "needs_index", "for_maps", "for_numbers"):
            setattr(self, name, getattr(loss, name))
        self.final_temperature = getattr(loss, "final_temperature", None)

    def bind(self, num_classes: int, num_samples: int, ignore_index: int | None = None) -> None:
        """Prepares both itself and the loss inside; a ValueError for two classes."""
        super().bind(num_classes, num_samples, ignore_index)
        self.loss.bind(num_classes, num_samples, ignore_index)

    def counted(self, target: Tensor) -> Tensor:
        """As the loss inside counts."""
        return self.loss.counted(target)

    def softened(self, teacher_logits: Tensor) -> Tensor:
        """The standardised teacher's logits, softened by the loss inside."""
        return self.loss.softened(standardized(teacher_logits))

    def forward(
        self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor, **extra: Tensor
    ) -> Tensor:
        """``(N, C)``, ``(N, C)``, the target of the loss inside -> scalar."""
        return self.loss(
            standardized(student_logits), standardized(teacher_logits), target, **extra
        )


def standardized(logits: Tensor) -> Tensor:
    """Logits ``(N, C, ...)`` of mean 0 and (unbiased) deviation 1 over the classes, float32 at least.

    Equal logits become 0, without a gradient.

    >>> standardized(torch.tensor([[1.0, 2.0, 3.0]])).round(decimals=4)
    tensor([[-1.,  0.,  1.]])
    """
    x = wide(logits)
    num_classes = x.shape[1]
    centred = x - x.mean(dim=1, keepdim=True)
    squares = centred.square()
    variance = squares.sum(dim=1, keepdim=True) / (num_classes - 1)
    length = centred.detach().norm(2, 1, keepdim=True)
    varies = length > rounding(x, 1)
    # the root's slope at 0 is infinite: equal logits would have a gradient of NaN
    deviation = torch.where(varies, variance, 1.0).sqrt()
    divisor = torch.where(varies, deviation + 1e-7, torch.inf)
    return centred / divisor
