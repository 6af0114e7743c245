"""Losses that regress a teacher's features: what is learned from a teacher without a classifier, without labels."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from kd.config.kinds import Range
from kd.losses.base import NotNegative, Positive, Shape, with_arguments
from kd.losses.numerics import both, wide
from kd.losses.projections import ProjectedLoss, Projection, resize
from kd.losses.targets import Standardizer
from kd.settings import Standardization

STATISTICS = tuple(f"targets.{name}" for name in ("mean", "scatter", "turn", "rows", "batches"))
"""Buffers of the standardized targets, which are equal on all ranks."""


class FeatureRegression(ProjectedLoss):
    """The teacher's features from the student's, after a projection to the teacher's width.

    Maps are compared on the student's grid, to which the teacher's are resized (bilinear, with averaging where they get
    smaller). Subclasses say what is compared (:meth:`compare`).

    Args:
        projection: from the student's width to the teacher's; default: linear.
        standardize: the teacher's features as they are (``none``), each channel with mean 0 and variance 1
            (``variance``), or all of them turned and scaled together, by PHI-S (``phi_s``):
            :class:`kd.losses.targets.Standardizer`.
    """

    def __init__(
        self,
        projection: Projection | None = None,
        standardize: Standardization = "none",
        weight: NotNegative = 1.0,
    ) -> None:
        self.standardize = standardize
        super().__init__(projection, weight)

    def build(self, student_shape: Shape, teacher_shape: Shape) -> None:
        """Makes the projection to the teacher's width on the student's grid, and what standardises the targets.

        Raises:
            ValueError: shapes that no projection joins, or PHI-S without a rotation of this width.
        """
        if len(student_shape) == len(teacher_shape) == 4:
            teacher_shape = (*teacher_shape[:2], *student_shape[2:])
        super().build(student_shape, teacher_shape)
        if self.standardize != "none":
            if len(teacher_shape) == 4:
                width = teacher_shape[1]
            else:
                width = teacher_shape[-1]
            self.targets = Standardizer(width, self.standardize)
            self.equal_on_all_ranks = STATISTICS

    def pair(
        self, student_features: Tensor, teacher_features: Tensor, target: Tensor, **extra: Tensor
    ) -> Tensor:
        """The mean of :meth:`compare` of the projected student and the standardised teacher, a scalar.

        After :meth:`build`. With ``standardize`` a call in training first takes the batch into the statistics of all
        processes, until they are complete: a collective, all ranks call alike.

        Args:
            student_features: ``(N, C, H, W)``, tokens ``(N, L, C)`` or ``(N, D)``.
            teacher_features: of the same pictures; a map is brought to the student's grid. The student's map is
                averaged where the teacher has a vector.
            target: unused.
        """
        regressed = self._on_students_grid(student_features, teacher_features)
        if self.standardize != "none":
            regressed = self.targets(regressed)
        return self.compare(self.projection(student_features, regressed), regressed).mean()

    def _on_students_grid(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """The teacher's features; maps resized to the student's height and width."""
        if student_features.ndim == teacher_features.ndim == 4:
            return resize(wide(teacher_features), student_features.shape[2:])
        return teacher_features

    @torch.no_grad()
    def settle(self, student_features: Tensor, teacher_features: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the targets' statistics from a sample, for good (with ``standardize``), before the first step.

        Args:
            student_features: shapes as for the loss; fewer pictures where no projection is fitted to them.
            teacher_features: of all pictures.

        Returns:
            What a projection is fitted to map from, ``(..., C_s)``, and to, ``(..., C_t)``, the targets standardised.
        """
        teacher_features = self._on_students_grid(student_features, teacher_features)
        if student_features.ndim == 4 and teacher_features.ndim != 4:
            student_features = student_features.mean(dim=(2, 3))
        if self.standardize != "none":
            self.targets.settle(teacher_features)
            teacher_features = self.targets(teacher_features)
        inputs = wide(student_features)
        outputs = wide(teacher_features)
        if inputs.ndim == 4:
            inputs = inputs.movedim(1, -1)
        if outputs.ndim == 4:
            outputs = outputs.movedim(1, -1)
        return inputs, outputs


def cosine_loss(student_features: Tensor, teacher_features: Tensor) -> Tensor:
    """One minus the cosine of the two feature vectors at each position: their size does not count.

    Source: the summary term of AM-RADIO, Ranzinger et al., arXiv 2312.06709. A vector of zeros has the cosine 0 with
    any other, without a gradient.

    Args:
        student_features: maps, tokens or vectors, already projected to the teacher's width.
        teacher_features: the same shape.

    Returns:
        ``(N,)``: of each picture the mean over its positions, in [0, 2].

    Raises:
        ValueError: the shapes differ.

    >>> cosine_loss(torch.tensor([[3.0, 0], [0, 1]]), torch.tensor([[1.0, 0], [1, 0]]))
    tensor([0., 1.])
    """
    student, teacher = both(student_features, teacher_features)
    channels = 1 if student.ndim == 4 else -1
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

    Raises:
        ValueError: the shapes differ.

    >>> smooth_l1_loss(torch.zeros(2, 1), torch.tensor([[0.5], [3.0]]))
    tensor([0.1250, 2.5000])
    """
    student, teacher = both(student_features, teacher_features)
    losses = F.smooth_l1_loss(student, teacher, beta=beta, reduction="none")
    return losses.flatten(1).mean(dim=1)


class CosineLoss(FeatureRegression):
    """The direction of the teacher's features, by :func:`cosine_loss`."""

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """1 - cosine of each vector, averaged over a picture's positions: ``(N,)``."""
        return cosine_loss(student_features, teacher_features)


@with_arguments
class SmoothL1Loss(FeatureRegression):
    """Smooth L1, by :func:`smooth_l1_loss`; see :class:`FeatureRegression`.

    Args:
        beta: where it passes from square to absolute, > 0.
    """

    beta: Positive = 1.0
    projection: Projection | None = None
    standardize: Standardization = "none"
    weight: NotNegative = 1.0

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """Smooth L1 distance, averaged over a picture: ``(N,)``."""
        return smooth_l1_loss(student_features, teacher_features, self.beta)


class MSELoss(FeatureRegression):
    """The mean squared error, see :class:`FeatureRegression`: a :class:`HintLoss` on the student's grid."""

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """Squared distance, averaged over a picture: ``(N,)``."""
        return (wide(student_features) - wide(teacher_features)).square().flatten(1).mean(dim=1)


@with_arguments
class RADIOLoss(FeatureRegression):
    """Cosine and smooth L1 together: the loss of AM-RADIO's patch features (arXiv 2312.06709).

    UNIC (arXiv 2408.05088) takes both at 0.5.

    Args:
        cosine_share: of the cosine, in [0, 1]; smooth L1 has the rest.
    """

    cosine_share: Annotated[float, Range(">= 0 and <= 1")] = 0.9
    projection: Projection | None = None
    standardize: Standardization = "none"
    weight: NotNegative = 1.0

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """Cosine and smooth L1 loss, mixed by ``cosine_share``: ``(N,)``."""
        direction = cosine_loss(student_features, teacher_features)
        distance = smooth_l1_loss(student_features, teacher_features)
        return self.cosine_share * direction + (1 - self.cosine_share) * distance
