"""Losses over relations: between samples (of ``prelogits`` by default), or between a map's positions.

Those between samples take ``(N, D)`` (``(N, ...)`` is flattened), whose widths may differ, and depend on the batch as a
whole; batches of two sizes are a ValueError. All cast to float32 (float64 stays) and detach the teacher's side.
"""

from dataclasses import field
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kd.config.kinds import Range
from kd.losses.base import (
    Count,
    FeatureLoss,
    Float32,
    KnownOnHost,
    NotNegative,
    Positive,
    Shape,
    with_arguments,
)
from kd.losses.numerics import both, cosines, directions, kl, matmul, wide
from kd.losses.projections import ProjectedLoss, Projection, on_one_grid
from kd.losses.ranks import of_all_ranks, own_rows


def _embeddings(student: Tensor, teacher: Tensor, gather: bool = False) -> tuple[Tensor, Tensor]:
    """Both as ``(N, D)``, float32 at least, the teacher's detached; with ``gather`` the rows of all processes.

    Raises:
        ValueError: the batch sizes differ.
    """
    if gather:
        student, teacher = of_all_ranks(student, teacher)
    if len(student) != len(teacher):
        raise ValueError(
            f"student_features and teacher_features must have one batch size, got {len(student)} "
            f"and {len(teacher)}"
        )
    return wide(student).flatten(1), wide(teacher.detach()).flatten(1)


@with_arguments
class RKDLoss(FeatureLoss):
    """Relational KD: ``distance_weight * distance term + angle_weight * angle term``. No parameters.

    Smooth L1, averaged over all N^2 pairs, between pairwise distances, each model's divided by the mean of those above 0;
    and between the cosines of the angles of all triplets. Source: Park et al., Relational Knowledge
    Distillation, arXiv 1904.05068, equations 5 to 9 (25 and 50 as there).

    Args:
        distance_weight: of the distances, >= 0.
        angle_weight: of the angles, >= 0; they take the cube of the batch size in memory.
        gather: compare with the batches of all P processes too; the angle term then takes P^2 times the memory.

    >>> x = torch.tensor([[0.0, 0], [3, 4], [6, 1]])
    >>> RKDLoss()(2 * x, x, torch.zeros(3))
    tensor(0.)
    """

    default_tap = "prelogits"
    least_batch = 3

    distance_weight: NotNegative = 25.0
    angle_weight: NotNegative = 50.0
    weight: NotNegative = 1.0
    gather: bool = True

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """Student's features ``(N, D_s)``, teacher's ``(N, D_t)`` -> scalar.

        Where it gathers, all P processes must have the same N. The distances are those of all ``N * P`` pictures, the
        angles those at this process's N between all of them. So the scalars differ between processes; their mean is the
        loss of one process with the whole batch.
        """
        vertices = None
        if self.gather:  # each process takes the angles at its own pictures
            vertices = own_rows(len(student_features))
            student_features, teacher_features = of_all_ranks(student_features, teacher_features)
        student, teacher = _embeddings(student_features, teacher_features)
        student_distances = _distances(student)
        teacher_distances = _distances(teacher)
        distance = F.smooth_l1_loss(student_distances, teacher_distances)
        # made anew, so that features in half precision get each term's gradient rounded by itself, as if it were alone
        student, teacher = _embeddings(student_features, teacher_features)
        student_angles = _angles(student, vertices)
        teacher_angles = _angles(teacher, vertices)
        angle = F.smooth_l1_loss(student_angles, teacher_angles)
        return self.distance_weight * distance + self.angle_weight * angle


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


def _angles(x: Tensor, vertices: slice | None) -> Tensor:
    """Cosines of the angles at each of V vertices between all pairs of samples, ``(N, D)`` -> ``(V, N, N)``."""
    vertices_VD = x
    if vertices is not None:
        vertices_VD = x[vertices]
    units_VND = directions(x[None] - vertices_VD[:, None], dim=2)
    return matmul(units_VND, units_VND.transpose(1, 2))


@with_arguments
class SPLoss(FeatureLoss):
    """Similarity-preserving KD: squared difference of the row-normalised ``(N, N)`` Gram matrices, over N^2.

    No parameters. Source: Tung and Mori, Similarity-Preserving Knowledge Distillation, arXiv 1907.09682, equation 4.

    Args:
        gather: compare over the batches of all processes instead of each process's own.

    >>> SPLoss()(torch.eye(2), 3 * torch.eye(2), torch.zeros(2))
    tensor(0.)
    """

    default_tap = "prelogits"
    least_batch = 2
    weight: NotNegative = 1.0
    gather: bool = True

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """``(N, ...)``, ``(N, ...)`` -> scalar."""
        student, teacher = _embeddings(student_features, teacher_features, self.gather)
        student_NN = matmul(student, student.T)
        teacher_NN = matmul(teacher, teacher.T)
        student_rows = directions(student_NN, dim=1)
        teacher_rows = directions(teacher_NN, dim=1)
        return (student_rows - teacher_rows).square().mean()


@with_arguments
class CKALoss(FeatureLoss):
    """One minus the linear centred kernel alignment of the two batches of features. No parameters.

    ``1 - |X' Y|^2 / (|X' X| |Y' Y|)``, columns centred, Frobenius norms, from the ``(N, N)`` Gram matrices; in [0, 1], and 1
    where a model gives all pictures the same features, as with a batch of one. Source: Kornblith et al., Similarity of
    Neural Network Representations Revisited, arXiv 1905.00414, equation 7.

    Args:
        gather: compare over the batches of all processes instead of each process's own.

    >>> x = torch.tensor([[0.0, 1], [2, 0], [1, 5]])
    >>> bool(CKALoss()(7 * x, x, torch.zeros(3)) < 1e-6)
    True
    """

    default_tap = "prelogits"
    least_batch = 3
    weight: NotNegative = 1.0
    gather: bool = True

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """``(N, ...)``, ``(N, ...)`` -> scalar."""
        grams = []
        for x in _embeddings(student_features, teacher_features, self.gather):
            centred = x - x.mean(dim=0)
            gram = matmul(centred, centred.T)  # (N, N)
            grams.append(directions(gram.flatten(), dim=0))
        student_gram, teacher_gram = grams
        return 1 - (student_gram * teacher_gram).sum()


@with_arguments
class CRDLoss(KnownOnHost, Float32, FeatureLoss):
    """Contrastive representation distillation with a memory of the whole training set, arXiv 1910.10699.

    Both models' embeddings, projected and normalised, are distinguished from ``negatives`` random samples of the other
    model's memory (:func:`against_noise`). The memory holds two vectors of ``embed_dim`` a training picture; it is part
    of checkpoints and the same on all processes, which begin with the first one's. Negatives are drawn from the whole set,
    once for all pictures of a batch (the paper draws them for each one: the same in expectation at many times the cost; its
    code can also draw from other classes alone).

    Args:
        embed_dim: width of the projections.
        negatives: K, > 0 (the paper: 16,384).
        temperature: > 0.
        momentum: of the memory, in [0, 1).
        weight: factor in the total loss; the paper uses 0.8.
    """

    default_tap = "prelogits"
    needs_index = True
    equal_on_all_ranks = ("memory_student", "memory_teacher")
    memory_student: Tensor = field(init=False)
    """``(num_samples, embed_dim)``, rows of length 1: the moving average of the student's embeddings of each training
    picture over the times that it was seen; random until then."""
    memory_teacher: Tensor = field(init=False)
    """The teacher's, likewise."""
    scale: Tensor = field(init=False)
    """``(2,)``: log of the normaliser of the scores against the student's memory, then against the teacher's, from the
    first batch; before that NaN."""

    embed_dim: Count = 128
    negatives: Count = 4096
    temperature: Positive = 0.07
    momentum: Annotated[float, Range(">= 0 and < 1")] = 0.5
    weight: NotNegative = 1.0

    def bind(self, num_classes: int, num_samples: int, ignore_index: int | None = None) -> None:
        """Makes the memory: a random unit vector ``(embed_dim,)`` for each training sample and model.

        Args:
            num_classes: not read.
            num_samples: training pictures; their index names a row of the memory.
            ignore_index: not read.

        Raises:
            ValueError: ``num_samples`` is not known (0).
        """
        if not num_samples:
            raise ValueError(
                "CRDLoss needs the number of training pictures: data=kd.DataInfo(classes, train=NUMBER)"
            )
        self.num_samples = num_samples
        for name in ("memory_student", "memory_teacher"):
            drawn = torch.randn(num_samples, self.embed_dim)
            self.register_buffer(name, F.normalize(drawn, dim=1))
        unset = torch.full((2,), float("nan"))
        self.register_buffer("scale", unset)

    def build(self, student_shape: Shape, teacher_shape: Shape) -> None:
        """Makes the linear projections of both models' features to ``embed_dim``."""
        self.project_student = nn.Linear(torch.Size(student_shape[1:]).numel(), self.embed_dim)
        self.project_teacher = nn.Linear(torch.Size(teacher_shape[1:]).numel(), self.embed_dim)

    def pair(
        self,
        student_features: Tensor,
        teacher_features: Tensor,
        target: Tensor,
        index: Tensor | None = None,
        **extra: Tensor,
    ) -> Tensor:
        """``(N, D_s)``, ``(N, D_t)``, unused, the samples' numbers ``(N,)`` -> scalar.

        Afterwards both memories move towards this batch's embeddings, in training or not. With several processes all call
        it, with the same N.

        Raises:
            ValueError: no indices: the loss remembers every sample by its number.
        """
        if index is None:
            raise ValueError("index must hold the samples' numbers (N,) for CRDLoss, got none")
        student_NE = _embedded(self.project_student, student_features)
        teacher_NE = _embedded(self.project_teacher, teacher_features.detach())
        if not self.known:  # 1 once the normalisers are set
            self.known = int(not self.scale.isnan().any())
        negatives_K = torch.randint(self.num_samples, (self.negatives,), device=index.device)
        loss = self._contrast(teacher_NE, self.memory_student, index, negatives=negatives_K, side=0)
        loss = loss + self._contrast(
            student_NE, self.memory_teacher, index, negatives=negatives_K, side=1
        )
        self._remember(student_NE.detach(), teacher_NE.detach(), index)
        return loss

    def _contrast(
        self, anchors: Tensor, memory: Tensor, index: Tensor, negatives: Tensor, side: int
    ) -> Tensor:
        """One of the loss's two terms, a scalar; the first batch's also sets its normaliser.

        Args:
            anchors: one model's embeddings of the batch, ``(N, E)``.
            memory: of the other model, ``(num_samples, E)``.
            index: the pictures' numbers: their partners in the memory, ``(N,)``.
            negatives: numbers of random pictures, ``(K,)``.
            side: of :attr:`scale`: 0 against the student's memory, 1 against the teacher's.
        """
        partners_NE = memory[index]
        strangers_KE = memory[negatives]
        products_NE = anchors * partners_NE
        partner_cosines = products_NE.sum(dim=1, keepdim=True)
        negative_cosines = matmul(anchors, strangers_KE.T)
        cosines = torch.cat([partner_cosines, negative_cosines], dim=1)
        scores = cosines / self.temperature
        if not self.known:
            self._set_scale(side, scores.detach())
        return against_noise(scores - self.scale[side], self.num_samples)

    def _set_scale(self, side: int, scores: Tensor) -> None:
        """Sets a normaliser from the first batch's scores ``(N, K + 1)``.

        ``Z = num_samples * mean exp(score)``, as the paper's code has it; :attr:`scale` holds ``log Z``.

        Args:
            side: of :attr:`scale`: 0 against the student's memory, 1 against the teacher's.
            scores: of the batch.
        """
        per_sample = scores.numel() / self.num_samples
        log_per_sample = scores.new_full((), per_sample).log()
        log_sum = scores.logsumexp((0, 1))
        self.scale[side] = log_sum - log_per_sample

    @torch.no_grad()
    def _remember(self, student: Tensor, teacher: Tensor, index: Tensor) -> None:
        """Moves both memories towards the new embeddings ``(N, E)`` of the batch's pictures, and of all other processes'."""
        student, teacher, index = of_all_ranks(student, teacher, index)
        self._move(self.memory_student, student, index)
        self._move(self.memory_teacher, teacher, index)

    def _move(self, memory: Tensor, new: Tensor, index: Tensor) -> None:
        mixed = self.momentum * memory[index] + (1 - self.momentum) * new
        memory[index] = F.normalize(mixed, dim=1)


def against_noise(scores: Tensor, num_samples: int) -> Tensor:
    """CRD's contrastive term: is the first of K + 1 candidates the true partner, the others noise?

    ``-mean_b [log h(0) + sum_{k > 0} log (1 - h(k))]`` with ``h = P / (P + K / num_samples)`` and ``P = exp(score)``.
    Source: Tian et al., Contrastive Representation Distillation, arXiv 1910.10699, equation 18, and its code. With
    ``n = log(K / num_samples)``: ``log h = logsigmoid(score - n)`` and ``log(1 - h) = logsigmoid(n - score)``.

    Args:
        scores: ``(N, K + 1)``: log of the normalised similarity, the true partner first.
        num_samples: size of the training set.

    Returns:
        A scalar: the mean over the batch.

    >>> against_noise(torch.zeros(1, 2), num_samples=1)
    tensor(1.3863)
    """
    scores = wide(scores)
    partner_scores = scores[:, 0]
    noise_scores = scores[:, 1:]
    negatives = noise_scores.shape[1]
    log_noise = scores.new_full((), negatives / num_samples).log()  # n
    partner_term = F.logsigmoid(partner_scores - log_noise)
    noise_terms = F.logsigmoid(log_noise - noise_scores)
    return -(partner_term + noise_terms.sum(dim=1)).mean()


def _embedded(projection: nn.Linear, features: Tensor) -> Tensor:
    """``(N, ...)`` -> ``(N, E)``, each of length 1."""
    return F.normalize(projection(wide(features).flatten(1)).float(), dim=1)


@with_arguments
class GramKLLoss(FeatureLoss):
    """Divergence of how each position of a map attends to all others, by cosine. No parameters.

    With ``S`` the ``(L, L)`` cosines between the positions of one picture: the mean over rows of ``KL(softmax(S_t / T)
    || softmax(S_s / T))``, without a factor ``T^2``. The widths may differ; maps are average-pooled to the smaller of both
    heights and of both widths. Takes ``L^2`` numbers a picture. Source: LightlyTrain's documentation of its third
    distillation method; the Gram matrix of patches as a target is DINOv3's (arXiv 2508.10104, section 4.2), there compared
    by squared difference.

    Args:
        temperature: > 0.

    >>> x = torch.randn(2, 3, 4, 4)
    >>> bool(GramKLLoss()(5 * x, x, torch.zeros(2)).abs() < 1e-5)
    True
    """

    over_maps = True

    temperature: Positive = 0.07
    weight: NotNegative = 1.0

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """``(N, C_s, H, W)``, ``(N, C_t, H', W')`` -> ``(N,)``."""
        student, teacher = on_one_grid(student_features, teacher_features.detach())
        student_NLL = cosines(student) / self.temperature
        teacher_NLL = cosines(teacher) / self.temperature
        log_p_student = student_NLL.log_softmax(dim=2)
        log_p_teacher = teacher_NLL.log_softmax(dim=2)
        divergence = kl(log_p_teacher, log_p_student, dim=2)
        return divergence.mean(dim=1)


@with_arguments
class PseudoClassLoss(KnownOnHost, ProjectedLoss):
    """KL divergence over pseudo-classes: the cosines of a picture's features with other pictures' of the teacher.

    ``KL(softmax(t K' / T) || softmax(s K' / T))`` with all rows normalised, without a factor ``T^2``. Needs no labels. The
    classes ``K`` are the teacher's features of the newest pictures of all processes, this batch's among them, in a queue
    that is part of checkpoints. Source: LightlyTrain's documentation of distillation with a queue of representations as a
    pseudo-classifier; such a queue with two distributions over it is SEED's (Fang et al., arXiv 2101.04731).

    Args:
        queue_size: pictures that the queue holds, > 0; beyond the training set's size pictures are in it twice.
        temperature: > 0.
        projection: from the student's width to the teacher's; default: linear.
    """

    default_tap = "prelogits"
    equal_on_all_ranks = ("queue", "seen")
    queue: Tensor = field(init=False)
    """The teacher's features of the newest pictures, each of length 1, ``(queue_size, D_t)``; a ring."""
    seen: Tensor = field(init=False)
    """int64 scalar: pictures so far. The next one's place is the rest of its division by the queue's size."""

    queue_size: Count = 1024
    temperature: Positive = 0.07
    projection: Projection | None = None
    weight: NotNegative = 1.0

    def build(self, student_shape: Shape, teacher_shape: Shape) -> None:
        """Makes the projection and an empty queue.

        Raises:
            ValueError: the teacher's features are no vectors.
        """
        if len(teacher_shape) != 2:
            raise ValueError(
                f"PseudoClassLoss compares vectors, got {teacher_shape[1:]} a sample of the teacher (prelogits, or "
                "tokens=class)"
            )
        super().build(student_shape, teacher_shape)
        self.register_buffer("queue", torch.zeros(self.queue_size, teacher_shape[1]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def pair(
        self, student_features: Tensor, teacher_features: Tensor, target: Tensor, **extra: Tensor
    ) -> Tensor:
        """Student's features ``(N, D_s)`` (maps are averaged), teacher's ``(N, D_t)``, unused -> scalar.

        In training the teacher's features of all processes join the queue first: all ranks call alike. While the queue is
        empty, as in a validation at the start, this batch's own are the classes.
        """
        if self.known is None:
            self.known = int(self.seen)
        if self.training:
            units = F.normalize(wide(teacher_features.detach()), dim=1)
            (units_of_all,) = of_all_ranks(units)
            self._remember(units_of_all)
        classes = self.queue[: self.known]  # the places that are filled
        if not len(classes):
            classes = teacher_features
        project: Any = self.projection
        projected = project(student_features, teacher_features)
        return self.over(classes, projected, teacher_features).mean()

    def over(self, classes: Tensor, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """The loss of each picture, ``(N,)``, over the pseudo-classes ``(K, D)``; both features are ``(N, D)``."""
        student, teacher = both(student_features, teacher_features)
        keys_KD = F.normalize(wide(classes.detach()), dim=1)
        student_ND = directions(student, dim=1)
        teacher_ND = directions(teacher, dim=1)
        student_cosines_NK = matmul(student_ND, keys_KD.T)
        teacher_cosines_NK = matmul(teacher_ND, keys_KD.T)
        log_p_student = (student_cosines_NK / self.temperature).log_softmax(dim=1)
        log_p_teacher = (teacher_cosines_NK / self.temperature).log_softmax(dim=1)
        return kl(log_p_teacher, log_p_student, dim=1)

    def _remember(self, new: Tensor) -> None:
        """Puts rows ``(M, D_t)`` in place of the oldest in the queue, and counts them in :attr:`seen`; of more rows than the
        queue holds it takes the last ones.
        """
        assert self.known is not None
        left_out = max(0, len(new) - self.queue_size)
        rows_before = self.known + left_out
        newest = new[-self.queue_size :]
        rows_after = rows_before + len(newest)
        numbers = torch.arange(rows_before, rows_after, device=new.device)
        places = numbers % self.queue_size
        self.queue[places] = newest.to(self.queue.dtype)
        self.known = rows_after
        self.seen.fill_(rows_after)
