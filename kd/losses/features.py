"""Losses over features. See kd/losses/README.md for when each one helps."""

from dataclasses import field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kd.losses.base import (
    Count,
    Epochs,
    FeatureLoss,
    InnerShare,
    NotNegative,
    Positive,
    Shape,
    with_arguments,
)
from kd.losses.numerics import both, directions, mean_squared, rounding
from kd.losses.projections import ProjectedLoss, Projection, on_one_grid, resize
from kd.losses.ranks import of_all_ranks


class HintLoss(ProjectedLoss):
    """FitNet's hint: the mean squared error after a projection to the teacher's shape.

    Source: Romero et al., FitNets, arXiv 1412.6550, equation 3 (here the mean, not half the sum).
    Takes maps, tokens or vectors. The class token alone is compared with ``model.taps.<name>.tokens=class``.

    Args:
        projection: from the student's features to the teacher's shape; default: linear.

    >>> loss = HintLoss()
    >>> loss.build((2, 192, 7, 7), (2, 384, 8, 8))
    >>> loss(torch.randn(2, 192, 7, 7), torch.randn(2, 384, 8, 8), torch.zeros(2)).shape
    torch.Size([])
    """

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """Two features of one shape -> scalar."""
        return mean_squared(student_features, teacher_features)


@with_arguments
class ATLoss(FeatureLoss):
    """Attention transfer: mean squared difference of the L2-normalised maps ``mean_c |x_c|^p``. No parameters.

    Maps are average-pooled to the smaller of both heights and of both widths, as in the code of CRD's authors. Source:
    Zagoruyko and Komodakis, Paying More Attention to Attention, arXiv 1612.03928. This is the form of the authors' code
    (squared difference, mean); the paper's equation 2 has the norm of the difference. With ``p < 1`` the slope at 0 is
    infinite; what is 0, as after a ReLU, has no gradient.

    Args:
        p: power, > 0.
        weight: factor in the total loss; the paper uses 500 to 1,000 (beta / 2 with beta 1,000).

    >>> ATLoss()(torch.ones(1, 8, 2, 2), 3 * torch.ones(1, 4, 2, 2), torch.zeros(1))
    tensor(0.)
    """

    over_maps = True

    p: Positive = 2.0
    weight: NotNegative = 1.0

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """``(N, C_s, H, W)``, ``(N, C_t, H', W')`` -> scalar."""
        student, teacher = on_one_grid(student_features, teacher_features.detach())
        return (self._attention(student) - self._attention(teacher)).square().mean()

    def _attention(self, x: Tensor) -> Tensor:
        """Where a map ``(N, C, H, W)`` is large: ``(N, H W)``, of length 1."""
        return directions(_powers(x, self.p).mean(dim=1).flatten(1), dim=1)


def _powers(x: Tensor, p: float) -> Tensor:
    """``|x|^p``, without a gradient where x is 0 and ``p < 1``."""
    if p >= 1:
        return x.abs().pow(p)
    return torch.where(x == 0, 1.0, x).abs().pow(p) * (x != 0)


@with_arguments
class PKDLoss(FeatureLoss):
    """PKD: half the squared error of features standardised per channel over the batch and all positions.

    It equals one minus their Pearson correlation, up to the small constant in the deviation, and depends on the batch as a
    whole. The student's map is resized to the teacher's grid. Source: Cao et al., PKD: General Distillation Framework for
    Object Detectors via Pearson Correlation Coefficient, arXiv 2207.02039.

    Args:
        projection: from the student's features to the teacher's shape; default: linear where the widths differ, none
            where they are equal, as in the paper.
        gather: standardise over the batches of all processes, whose whole maps then travel, instead of each
            process's own.

    >>> x, loss = torch.randn(2, 3, 4, 4), PKDLoss()
    >>> bool(loss(5 * x + 1, x, torch.zeros(2)) < 1e-6)
    True
    """

    over_maps = True

    projection: Projection | None = None
    weight: NotNegative = 1.0
    gather: bool = False

    def build(self, student_shape: Shape, teacher_shape: Shape) -> None:
        """Makes the projection, where the widths differ or one was given."""
        if self.projection is None and student_shape[1] != teacher_shape[1]:
            self.projection = Projection()
        if self.projection is not None:
            self.projection.build(student_shape, teacher_shape)

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """``(N, C_s, H, W)``, ``(N, C_t, H', W')`` -> scalar."""
        if self.projection is not None:
            student = self.projection(student_features, teacher_features)
        else:
            student = resize(student_features, teacher_features.shape[2:])
        if self.gather:
            student, teacher_features = of_all_ranks(student, teacher_features)
        student, teacher = both(student, teacher_features)
        return F.mse_loss(_per_channel(student), _per_channel(teacher)) / 2


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


def _generator(width: int) -> nn.Sequential:
    """3x3 convolution, ReLU, 3x3 convolution: fills hidden positions from their neighbours."""
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
    )


@with_arguments
class MGDLoss(ProjectedLoss):
    """Masked generative distillation: the teacher's whole map from the student's with positions hidden.

    Mean squared error over all positions. Source: Yang et al., Masked Generative Distillation, arXiv 2205.01529,
    equation 4 (there the sum over features divided by N, with a weight of 2e-5 to 7e-5; here the mean).

    Args:
        mask_ratio: share of hidden positions, in (0, 1); the paper uses 0.5 (0.15 for classification).
        projection: from the student's features to the teacher's shape; default: linear.
    """

    over_maps = True

    mask_ratio: InnerShare = 0.5
    projection: Projection | None = None
    weight: NotNegative = 1.0

    def build(self, student_shape: Shape, teacher_shape: Shape) -> None:
        """Makes the projection and the generator that restores masked features."""
        super().build(student_shape, teacher_shape)
        self.generator = _generator(teacher_shape[1])

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """Two ``(N, C, H, W)`` -> scalar."""
        hidden = torch.rand_like(student_features[:, :1]) < self.mask_ratio
        return mean_squared(self.generator(student_features * ~hidden), teacher_features)


@with_arguments
class ViTKDLoss(FeatureLoss):
    """ViTKD: shallow layers mimicked, the last one generated from masked tokens.

    All layers but the last of ``model.taps.<name>`` are shallow ones, compared after a linear projection each; of the
    last, ``mask_ratio`` of the positions are replaced by a learned token and generated anew. Patch tokens alone.
    Source: Yang et al., ViTKD, arXiv 2209.02432, equations 2 to 5 (the paper: the first two layers and the last; sums
    over features with weights 3e-5 and 3e-6, here means).

    Args:
        mask_ratio: share of hidden positions, in (0, 1).
        generation_weight: of the last layer's term. The code sums over two shallow layers, with a tenth of their weight
            for the last one: 0.05 where the shallow layers are averaged.
    """

    joint = True
    over_maps = True

    mask_ratio: InnerShare = 0.5
    generation_weight: float = 0.05
    weight: NotNegative = 1.0

    def build(self, student_shapes: list[Shape], teacher_shapes: list[Shape]) -> None:
        """Makes the projections, the mask token and the generator; shapes as of :meth:`FeatureLoss.build_layers`.

        Raises:
            ValueError: fewer than two layers.
        """
        if len(student_shapes) < 2:
            raise ValueError(
                "ViTKDLoss needs two layers or more, shallow ones and a last one, got 1 of each model"
            )
        pairs = zip(student_shapes, teacher_shapes, strict=True)
        self.projections = nn.ModuleList([Projection().build(s, t) for s, t in pairs])
        self.mask_token = nn.Parameter(torch.zeros(1, teacher_shapes[-1][1], 1, 1))
        self.generator = _generator(teacher_shapes[-1][1])

    def forward(
        self, student: list[Tensor], teacher: list[Tensor], target: Tensor, **extra: Tensor
    ) -> Tensor:
        """``mean(mimic of the shallow layers) + generation_weight * generation of the last`` -> scalar.

        Args:
            student: maps ``(N, C_s, H', W')``, from shallow to deep; at least two. The projections bring each to its
                teacher map's width and grid.
            teacher: as many maps ``(N, C_t, H, W)``.
            target: unused.
        """
        projected = []
        for projection, student_map, teacher_map in zip(
            self.projections, student, teacher, strict=True
        ):
            projected.append(projection(student_map, teacher_map))
        *shallow, last = projected

        # Shallow layers are mimicked.
        mimic: Any = 0
        for student_map, teacher_map in zip(shallow, teacher[:-1], strict=True):
            mimic = mimic + mean_squared(student_map, teacher_map)
        mimic = mimic / len(shallow)

        # Of the last one, positions are hidden (N, 1, H, W) and generated from the others.
        chances = torch.rand_like(last[:, :1])
        hidden = chances < self.mask_ratio
        mask_token = self.mask_token.to(last.dtype)
        masked = torch.where(hidden, mask_token, last)
        generated = self.generator(masked)
        generation = squared_where_hidden(generated, teacher[-1], hidden)
        return mimic + self.generation_weight * generation


def squared_where_hidden(
    student_features: Tensor, teacher_features: Tensor, masked: Tensor
) -> Tensor:
    """The squared error at the masked positions alone, the generation term of ViTKD.

    Source: Yang et al., ViTKD, arXiv 2209.02432, equation 4 (there the sum over features; here their mean).

    Args:
        student_features: generated, ``(N, C, H, W)``.
        teacher_features: the same shape.
        masked: True where the student's features were hidden, ``(N, 1, H, W)``.

    Returns:
        A scalar: the mean over masked positions and channels; 0, with a gradient of 0, where none is masked.

    Raises:
        ValueError: the shapes of the features differ.

    >>> squared_where_hidden(torch.zeros(1, 2, 1, 2), torch.ones(1, 2, 1, 2), torch.tensor([[[[True, False]]]]))
    tensor(1.)
    """
    student, teacher = both(student_features, teacher_features)
    error = (student - teacher).square() * masked
    return error.sum() / (masked.sum() * student.shape[1]).clamp_min(1)


@with_arguments
class ReviewKDLoss(FeatureLoss):
    """ReviewKD: from the deepest layer up, each student layer, fused with the deeper ones, reviews the teacher's.

    Attention-based fusion and the hierarchical context loss (:func:`hierarchical_context`), summed over the
    layers. Layers are named from shallow to deep. Source: Chen et al., Distilling Knowledge via Knowledge Review, arXiv
    2104.09044, and its code.

    Args:
        width: channels of the fused maps (the code: 64 to 512 by student).
        warmup_epochs: the loss grows linearly over that many epochs (the code: 20), 0 for none.
        weight: factor in the total loss; the code uses 0.6 to 8.
    """

    joint = True
    over_maps = True

    width: Count = 128
    warmup_epochs: Epochs = 0
    weight: NotNegative = 1.0

    def build(self, student_shapes: list[Shape], teacher_shapes: list[Shape]) -> None:
        """Makes the fusion blocks, from the deepest layer to the shallowest; shapes as of
        :meth:`FeatureLoss.build_layers`.
        """
        self.blocks = nn.ModuleList()
        for student_shape, teacher_shape in zip(
            reversed(student_shapes), reversed(teacher_shapes), strict=True
        ):
            has_deeper = len(self.blocks) > 0
            self.blocks.append(
                _Fusion(student_shape[1], self.width, teacher_shape[1], fuse=has_deeper)
            )

    def forward(
        self, student: list[Tensor], teacher: list[Tensor], target: Tensor, **extra: Tensor
    ) -> Tensor:
        """Maps ``(N, C, H, W)`` of the student's layers and of the teacher's, shallow to deep -> scalar; ``target`` is
        not read.
        """
        loss = student[0].new_zeros((), dtype=torch.float32)
        fused = None  # of the deeper layers
        for block, student_map, teacher_map in zip(
            self.blocks, reversed(student), reversed(teacher), strict=True
        ):
            widened, fused = block(student_map, fused, teacher_map.shape[2:])
            loss = loss + hierarchical_context(widened, teacher_map)
        return loss * self.warmed_up(self.warmup_epochs)


def hierarchical_context(student_features: Tensor, teacher_features: Tensor) -> Tensor:
    """ReviewKD's hierarchical context loss: the squared error at full size and pooled to 4, 2 and 1 positions a side.

    A size that the map's height does not exceed is left out. Each level that stays has half the weight of the one before it,
    from 1 at full size; the sum is divided by that of the weights. Source: Chen et al., Distilling Knowledge via Knowledge
    Review, arXiv 2104.09044, and its code. Shapes: ``(N, C, H, W)``.

    Args:
        student_features: ``(N, C, H, W)``.
        teacher_features: the same shape.

    Returns:
        A scalar: the weighted mean over the levels.

    Raises:
        ValueError: the shapes differ.

    >>> hierarchical_context(torch.zeros(1, 2, 8, 8), torch.ones(1, 2, 8, 8))
    tensor(1.)
    """
    student, teacher = both(student_features, teacher_features)
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


class _Fusion(nn.Module):
    """ReviewKD's attention-based fusion of one layer with the deeper ones."""

    def __init__(self, width_in: int, width: int, width_out: int, fuse: bool) -> None:
        """Convolutions that narrow a layer's map, weigh it against the fused deeper ones, and widen it.

        Args:
            width_in: channels of the student's map.
            width: channels inside.
            width_out: channels of the teacher's map.
            fuse: whether there are deeper layers.
        """
        super().__init__()
        self.narrow = nn.Sequential(
            nn.Conv2d(width_in, width, 1, bias=False), nn.BatchNorm2d(width)
        )
        self.widen = nn.Sequential(
            nn.Conv2d(width, width_out, 3, padding=1, bias=False), nn.BatchNorm2d(width_out)
        )
        self.attend = nn.Sequential(nn.Conv2d(2 * width, 2, 1), nn.Sigmoid()) if fuse else None

    def forward(
        self, student_map: Tensor, deeper: Tensor | None, size: torch.Size
    ) -> tuple[Tensor, Tensor]:
        """Fuses a layer with the deeper ones: ``a * layer + b * deeper``, attention a and b of each position.

        Args:
            student_map: the layer's, ``(N, width_in, H, W)``.
            deeper: the fused map of the deeper ones, ``(N, width, ...)``; None for the deepest.
            size: height and width of the teacher's map.

        Returns:
            What is compared with the teacher's map, ``(N, width_out, *size)``, and the fused map,
            ``(N, width, *size)``.
        """
        x = self.narrow(student_map)
        if self.attend is not None and deeper is not None:
            deeper = F.interpolate(deeper, x.shape[2:], mode="nearest")
            joined = torch.cat([x, deeper], dim=1)
            attention = self.attend(joined)  # (N, 2, H, W)
            of_layer = attention[:, :1]
            of_deeper = attention[:, 1:]
            x = x * of_layer + deeper * of_deeper
        if x.shape[2:] != size:
            x = F.interpolate(x, size, mode="nearest")
        return self.widen(x), x


@with_arguments
class SimKDLoss(HintLoss):
    """SimKD: the student learns the teacher's pre-logits and takes over the teacher's classifier.

    Mean squared error after a linear projection ``P``. The student's own classifier is not trained: before each
    validation, before each checkpoint and at the end it is set to teacher classifier x ``P``, one linear layer, so the
    exported student stays a plain timm model. Use it with ``model.task_loss_weight=0``. Source: Chen et al., Knowledge
    Distillation with the Reused Teacher Classifier, arXiv 2203.14001 (there ``P`` is a stack of convolutions, which cannot
    be folded and stays part of the student).

    Args:
        weight: factor in the total loss.

    >>> loss = SimKDLoss()
    >>> loss.build((2, 8), (2, 16))
    >>> weight, bias = loss.fold(torch.randn(5, 16), torch.zeros(5))
    >>> weight.shape, bias.shape
    (torch.Size([5, 8]), torch.Size([5]))
    """

    default_tap = "prelogits"
    classifier: tuple[Tensor, Tensor] = field(init=False)
    """The teacher's weight ``(C, D_t)`` and bias ``(C,)``, which the objective sets."""

    weight: NotNegative = 1.0

    def build(self, student_shape: Shape, teacher_shape: Shape) -> None:
        """Makes the projection.

        Raises:
            ValueError: the features are no vectors.
        """
        if len(student_shape) != 2 or len(teacher_shape) != 2:
            raise ValueError(
                f"SimKDLoss compares the classifiers' inputs, got {student_shape[1:]} and {teacher_shape[1:]} a sample"
            )
        super().build(student_shape, teacher_shape)

    @torch.no_grad()
    def fold(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's classifier ``(C, D_t)``, ``(C,)`` -> the student's ``(C, D_s)``, ``(C,)``, in float32.

        The products are float64: those of float32 lose half of their digits on a GPU (TF32).
        """
        linear: Any = self.projection.layers
        wide_weight = weight.to(linear.weight.device, torch.float64)
        folded_weight = wide_weight @ linear.weight.double()
        folded_bias = wide_weight @ linear.bias.double() + bias.to(wide_weight)
        return folded_weight.float(), folded_bias.float()
