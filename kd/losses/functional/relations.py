"""Losses over the relations between the samples of a batch; they depend on the batch as a whole.

All take ``(N, D)`` embeddings (``(N, ...)`` is flattened), whose widths may differ, cast to float32 (float64 stays) and
detach the teacher's side. Each gives a scalar.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kd.losses.functional._checks import directions, matmul, positive, wide


def _embeddings(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Both as ``(N, D)``, float32 at least, the teacher's detached."""
    if len(student) != len(teacher):
        raise ValueError(
            f"student_features and teacher_features must have one batch size, got {len(student)} "
            f"and {len(teacher)}"
        )
    return wide(student).flatten(1), wide(teacher.detach()).flatten(1)


def rkd_distance_loss(student_features: Tensor, teacher_features: Tensor) -> Tensor:
    """RKD's distance term: smooth L1 between pairwise distances, each model's divided by its mean positive one.

    Source: Park et al., Relational Knowledge Distillation, arXiv 1904.05068, equations 5 to 7.

    Args:
        student_features: ``(N, D)``.
        teacher_features: ``(N, any D)``.

    Returns:
        A scalar: the mean over all N^2 pairs; 0 for a batch of one.

    >>> x = torch.tensor([[0.0, 0], [3, 4], [6, 8]])
    >>> rkd_distance_loss(2 * x, x)
    tensor(0.)
    """
    student, teacher = (_distances(x) for x in _embeddings(student_features, teacher_features))
    return F.smooth_l1_loss(student, teacher)


def _distances(x: Tensor) -> Tensor:
    """Pairwise distances over their mean, ``(N, D)`` -> ``(N, N)``; pairs of equal samples are not in the mean."""
    # Not by matrix products, which leave noise near zero.
    distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    positives = distances > 0
    count = positives.sum().clamp_min(1)
    mean = (distances * positives).sum() / count
    has_distance = mean > 0
    divisor = torch.where(has_distance, mean, torch.ones_like(mean))
    return distances / divisor


def rkd_angle_loss(
    student_features: Tensor, teacher_features: Tensor, vertices: slice | None = None
) -> Tensor:
    """RKD's angle term: smooth L1 between the cosines of the angles of all triplets.

    Source: Park et al., arXiv 1904.05068, equations 8 and 9.

    Args:
        student_features: ``(N, D)``.
        teacher_features: ``(N, any D)``.
        vertices: only angles at these samples; default: at all.

    Returns:
        A scalar: the mean over all triplets, N^2 a vertex. Takes as many numbers of memory.

    >>> x = torch.tensor([[0.0, 0], [3, 4], [6, 1]])
    >>> rkd_angle_loss(2 * x, x)
    tensor(0.)
    """
    student, teacher = (
        _angles(x, vertices) for x in _embeddings(student_features, teacher_features)
    )
    return F.smooth_l1_loss(student, teacher)


def _angles(x: Tensor, vertices: slice | None) -> Tensor:
    """Cosines of the angles at each of V vertices between all pairs of samples, ``(N, D)`` -> ``(V, N, N)``."""
    vertices_VD = x
    if vertices is not None:
        vertices_VD = x[vertices]
    units_VND = directions(x[None] - vertices_VD[:, None], dim=2)
    return matmul(units_VND, units_VND.transpose(1, 2))


def rkd_loss(
    student_features: Tensor,
    teacher_features: Tensor,
    distance_weight: float = 25.0,
    angle_weight: float = 50.0,
    vertices: slice | None = None,
) -> Tensor:
    """Relational KD: ``distance_weight * distance term + angle_weight * angle term``.

    Source: Park et al., Relational Knowledge Distillation, arXiv 1904.05068 (25 and 50 as there).

    Args:
        student_features: ``(N, D)``.
        teacher_features: ``(N, any D)``.
        distance_weight: of :func:`rkd_distance_loss`.
        angle_weight: of :func:`rkd_angle_loss`.
        vertices: the samples whose angles are compared; default: all.

    Returns:
        A scalar.

    >>> x = torch.tensor([[0.0, 0], [3, 4], [6, 1]])
    >>> rkd_loss(2 * x, x)
    tensor(0.)
    """
    distance = rkd_distance_loss(student_features, teacher_features)
    return distance_weight * distance + angle_weight * rkd_angle_loss(
        student_features, teacher_features, vertices
    )


def sp_loss(student_features: Tensor, teacher_features: Tensor) -> Tensor:
    """Similarity-preserving KD: squared difference of the row-normalised ``(N, N)`` Gram matrices, over N^2.

    Source: Tung and Mori, Similarity-Preserving Knowledge Distillation, arXiv 1907.09682, equation 4.

    Args:
        student_features: ``(N, ...)``.
        teacher_features: ``(N, ...)``.

    Returns:
        A scalar.

    >>> sp_loss(torch.eye(2), 3 * torch.eye(2))
    tensor(0.)
    """
    student_ND, teacher_ND = _embeddings(student_features, teacher_features)
    student_NN = matmul(student_ND, student_ND.T)
    teacher_NN = matmul(teacher_ND, teacher_ND.T)
    student = directions(student_NN, dim=1)
    teacher = directions(teacher_NN, dim=1)
    return (student - teacher).square().mean()


def cka_loss(student_features: Tensor, teacher_features: Tensor) -> Tensor:
    """One minus the linear centred kernel alignment of the two batches of features.

    ``1 - |X' Y|^2 / (|X' X| |Y' Y|)``, columns centred, Frobenius norms. Source: Kornblith et al., Similarity of Neural
    Network Representations Revisited, arXiv 1905.00414, equation 7. Computed from the ``(N, N)`` Gram matrices.

    Args:
        student_features: ``(N, ...)``.
        teacher_features: ``(N, ...)``.

    Returns:
        A scalar in [0, 1]; 1 where a model gives all pictures the same features, as with a batch of one.

    >>> x = torch.tensor([[0.0, 1], [2, 0], [1, 5]])
    >>> bool(cka_loss(7 * x, x) < 1e-6)
    True
    """
    grams = []
    for x in _embeddings(student_features, teacher_features):
        centred = x - x.mean(dim=0)
        gram = matmul(centred, centred.T)  # (N, N)
        grams.append(directions(gram.flatten(), dim=0))
    student_gram, teacher_gram = grams
    return 1 - (student_gram * teacher_gram).sum()


def crd_loss(scores: Tensor, num_samples: int) -> Tensor:
    """CRD's contrastive term: is the first of K + 1 candidates the true partner, the others noise?

    ``-mean_b [log h(0) + sum_{k > 0} log (1 - h(k))]`` with ``h = P / (P + K / num_samples)`` and ``P = exp(score)``.
    Source: Tian et al., Contrastive Representation Distillation, arXiv 1910.10699, equation 18, and its code. With
    ``n = log(K / num_samples)``: ``log h = logsigmoid(score - n)`` and ``log(1 - h) = logsigmoid(n - score)``.

    Args:
        scores: ``(N, K + 1)``: log of the normalised similarity, the true partner first.
        num_samples: size of the training set.

    Returns:
        A scalar: the mean over the batch.

    >>> crd_loss(torch.tensor([[9.0, -9.0]]), num_samples=10) < crd_loss(torch.tensor([[0.0, 0.0]]), num_samples=10)
    tensor(True)
    """
    positive("num_samples", num_samples)
    scores = wide(scores)
    partner_scores = scores[:, 0]
    noise_scores = scores[:, 1:]
    negatives = noise_scores.shape[1]
    log_noise = scores.new_full((), negatives / num_samples).log()  # n
    partner_term = F.logsigmoid(partner_scores - log_noise)
    noise_terms = F.logsigmoid(log_noise - noise_scores)
    return -(partner_term + noise_terms.sum(dim=1)).mean()
