"""From the student's features to the teacher's shape."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _OrthMaps, _Orthogonal
from torch.nn.utils.parametrize import register_parametrization

from kd.losses.base import FeatureLoss, Float32, NotNegative, Shape
from kd.losses.numerics import wide


class Projection(nn.Module):
    """A learned linear map to the teacher's width, and its grid: the default of a loss.

    Chosen from the two shapes: maps by a 1x1 convolution, then resized (bilinear) to the teacher's height and width;
    tokens and vectors by a linear layer; a map is averaged over its positions where the teacher has a vector.
    Subclasses change :meth:`make`.
    """

    def build(self, student_shape: Shape, teacher_shape: Shape) -> "Projection":
        """Makes the layers for features of these shapes (batch axis included); returns itself.

        Raises:
            ValueError: no projection joins the two shapes.
        """
        self.pooled = len(student_shape) == 4 and len(teacher_shape) == 2
        fits = self.pooled or len(student_shape) == len(teacher_shape)
        if len(student_shape) == len(teacher_shape) == 3:
            fits = student_shape[1] == teacher_shape[1]
        if not fits:
            raise ValueError(
                f"no projection leads from the student's {student_shape[1:]} a sample to the teacher's "
                f"{teacher_shape[1:]} (maps, tokens of one number, and vectors do)"
            )
        is_map = len(teacher_shape) == 4
        if is_map:
            self.size = teacher_shape[2:]
        else:
            self.size = ()
        self.layers = self.make(_width(student_shape), _width(teacher_shape), is_map)
        return self

    def make(self, width: int, teacher_width: int, is_map: bool) -> nn.Module:
        """The layers from the student's width to the teacher's, over maps or over the last axis."""
        if is_map:
            return nn.Conv2d(width, teacher_width, 1)
        return nn.Linear(width, teacher_width)

    def forward(self, features: Tensor, teacher: Tensor | None = None) -> Tensor:
        """The student's features -> the teacher's shape.

        Args:
            features: of the shape that it was built for, in maps with any height and width.
            teacher: the teacher's features, whose height and width a map gets; None: those that it was built for.
        """
        if self.pooled:
            features = features.mean(dim=(2, 3))
        projected = self.project(features)
        if not self.size:
            return projected
        return resize(projected, self.size if teacher is None else teacher.shape[2:])

    def project(self, features: Tensor) -> Tensor:
        """To the teacher's width, on the student's grid: ``(N, C_s, H, W)`` -> ``(N, C_t, H, W)``, vectors likewise."""
        return self.layers(features)


def _width(shape: Shape) -> int:
    """The number of channels of maps, tokens or vectors."""
    if len(shape) == 4:
        return shape[1]
    return shape[-1]


class ProjectedLoss(FeatureLoss):
    """A loss over features after a projection: of the projected student's and the teacher's by :meth:`compare`.

    Args:
        projection: from the student's features to the teacher's shape; default: linear.
    """

    projection: Any

    def __init__(self, projection: Projection | None = None, weight: NotNegative = 1.0) -> None:
        super().__init__(weight)
        if projection is not None:
            self.projection = projection

    def __post_init__(self) -> None:
        """Checks the arguments, and makes the default projection."""
        super().__post_init__()
        self.projection = getattr(self, "projection", None) or Projection()

    def build(self, student_shape: Shape, teacher_shape: Shape) -> None:
        """Makes the projection's layers for features of these shapes (batch axis included)."""
        self.projection.build(student_shape, teacher_shape)

    def pair(
        self, student_features: Tensor, teacher_features: Tensor, target: Tensor, **extra: Tensor
    ) -> Tensor:
        """:meth:`compare` after the projection, a scalar; ``target`` is unused."""
        projected = self.projection(student_features, teacher_features)
        return self.compare(projected, teacher_features).mean()


class ConvProjection(Projection):
    """3x3 convolution, batch norm, ReLU, 1x1 convolution: for maps, where one linear layer is too weak."""

    def make(self, width: int, teacher_width: int, is_map: bool) -> nn.Module:
        """A 3x3 convolution, batch norm, ReLU and a 1x1 convolution.

        Args:
            width: channels of the student's map.
            teacher_width: channels of the teacher's.
            is_map: whether the features are ``(N, C, H, W)``.

        Raises:
            ValueError: the features are not maps.
        """
        if not is_map:
            raise ValueError(
                "projection must be Projection or MLPProjection without a grid, got ConvProjection"
            )
        hidden = max(width, teacher_width)
        return nn.Sequential(
            nn.Conv2d(width, hidden, 3, padding=1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, teacher_width, 1),
        )


class MLPProjection(Projection):
    """Two layers with a GELU between, at every position."""

    def make(self, width: int, teacher_width: int, is_map: bool) -> nn.Module:
        """Two layers (1x1 convolutions over maps) with GELU in between, as wide as the wider of both sides.

        Args:
            width: channels of the student's features.
            teacher_width: channels of the teacher's.
            is_map: whether the features are ``(N, C, H, W)``, else ``(..., D)``.
        """
        hidden = max(width, teacher_width)
        first = super().make(width, hidden, is_map)
        second = super().make(hidden, teacher_width, is_map)
        return nn.Sequential(first, nn.GELU(), second)


class _Cayley(_Orthogonal):
    """torch's Cayley map without the question whether it worked, for which the host would wait in each step.

    ``Q = (I - A / 2)^-1 (I + A / 2)`` of a skew-symmetric A is orthogonal. The matrix to be solved is the identity plus
    a skew-symmetric one, which is never singular.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Any matrix ``(R, C)`` -> one of the same shape with orthonormal columns, or rows where it has fewer of
        these.
        """
        is_wide = x.shape[0] < x.shape[1]
        tall = x.mT if is_wide else x
        rows, columns = tall.shape
        missing_columns = rows - columns
        lower = F.pad(tall.tril(), (0, missing_columns))
        skew = lower - lower.mT
        identity = torch.eye(rows, dtype=x.dtype, device=x.device)
        left = torch.add(identity, skew, alpha=-0.5)
        right = torch.add(identity, skew, alpha=0.5)
        rotation, _ = torch.linalg.solve_ex(left, right)
        first_columns = rotation[:, :columns]
        orthonormal = self.base @ first_columns
        return orthonormal.mT if is_wide else orthonormal


class OrthogonalProjection(Float32, Projection):
    """A learned linear map without bias that keeps all angles and lengths: its columns are orthonormal.

    Whatever the teacher's features say about how alike two pictures are, the student's own features must say, as the
    projection can add nothing to it. Of features wider than the teacher's it takes as many directions as the teacher
    has, and leaves the others free. Source: Miles, Elezi and Deng, VkD, arXiv 2403.06213, by torch's Cayley map.
    Its weights stay in float32: rounded they are no rotation, and torch can't make one.
    """

    def make(self, width: int, teacher_width: int, is_map: bool) -> nn.Module:
        """A linear layer ``width`` -> ``teacher_width`` whose weight is parametrised to be orthonormal (Cayley map)."""
        layer = nn.Linear(width, teacher_width, bias=False, dtype=torch.float32)
        register_parametrization(
            layer, "weight", _Cayley(layer.weight, _OrthMaps.cayley), unsafe=True
        )
        return layer

    def project(self, features: Tensor) -> Tensor:
        """As :meth:`Projection.project`, of ``(..., D_in)`` or maps ``(N, D_in, H, W)``.

        The weight is made in float32, as rounded products are not orthonormal.
        """
        with torch.autocast(features.device.type, enabled=False):
            weight: Tensor = self.layers.weight  # type: ignore[assignment]  # a parametrized layer's
        weight = weight.to(features.dtype)
        if features.ndim != 4:
            return F.linear(features, weight)
        channels_last = features.movedim(1, -1)
        return F.linear(channels_last, weight).movedim(-1, 1)

    def fit(self, inputs: Tensor, outputs: Tensor) -> None:
        """Sets the weight to the rotation that brings the centred inputs nearest to the centred outputs.

        ``W = U V'`` of the singular value decomposition ``y' x = U S V'`` (Schönemann, A Generalized Solution of the
        Orthogonal Procrustes Problem, 1966).

        Args:
            inputs: ``(..., D_in)``.
            outputs: ``(..., D_out)``.
        """
        x = inputs.flatten(0, -2).double()
        y = outputs.flatten(0, -2).double()
        mean_x = x.mean(0)
        mean_y = y.mean(0)
        centred_x = x - mean_x
        centred_y = y - mean_y
        cross = centred_y.T @ centred_x
        left, _, right = torch.linalg.svd(cross, full_matrices=False)
        rotation = left @ right
        self.layers.weight = rotation.to(self.layers.weight)


def resize(features: Tensor, size: tuple[int, ...]) -> Tensor:
    """``(N, C, H, W)`` -> ``(N, C, *size)``, bilinear, with averaging where it gets smaller. Keeps the dtype."""
    if features.shape[2:] == size:
        return features
    # in float32, as the CPU does not average in bfloat16
    resized = F.interpolate(wide(features), size, mode="bilinear", antialias=True)
    return resized.to(features.dtype)


def on_one_grid(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """``(N, C_s, H, W)``, ``(N, C_t, H', W')`` -> both average-pooled to the smaller height and the smaller width, float32
    at least.
    """
    student_height, student_width = student.shape[2:]
    teacher_height, teacher_width = teacher.shape[2:]
    height = min(student_height, teacher_height)
    width = min(student_width, teacher_width)
    size = (height, width)
    pooled_student = F.adaptive_avg_pool2d(wide(student), size)
    pooled_teacher = F.adaptive_avg_pool2d(wide(teacher), size)
    return pooled_student, pooled_teacher
