"""Ridge regression that is drawn towards a start: how every layer of an inherited student gets its weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from kd.distill.inherit.anatomy import Part
from kd.losses import OrthogonalProjection, Projection
from kd.models.output_scale import set_in_units

RIDGE = 1e-2
"""In units of the mean squared input: directions that the sample hardly shows stay near their start."""


class CentredRows(NamedTuple):
    """Activations of R tokens of a sample, less their mean."""

    rows: Tensor
    """``(R, D)``."""
    mean: Tensor
    """``(D,)``: what was subtracted; 0 for a layer without a bias."""
    shares: Tensor
    """``(R, 1)``: how much each row counts, 1 on average; ``(1,)`` where all count alike."""


def centred_rows(tokens: Tensor, shares: Tensor | None, centre: bool = True) -> CentredRows:
    """Flattens tokens to rows and subtracts their weighted mean.

    Args:
        tokens: ``(..., L, D)``.
        shares: how much each of the L tokens of a picture counts, in any unit; None: all alike.
        centre: without it nothing is subtracted.
    """
    rows = tokens.flatten(0, -2)
    row_shares = torch.ones(1)
    if shares is not None:
        pictures = len(rows) // len(shares)
        row_shares = (shares / shares.mean()).repeat(pictures)[:, None]
    mean = (row_shares * rows).mean(0) * centre
    return CentredRows(rows - mean, mean, row_shares)


@dataclass
class Moments:
    """First and second moments of a layer's inputs x and outputs y over rows of a sample."""

    count: int
    """Number of rows."""
    gram: Tensor
    """``(D_in, D_in)``: the mean of ``x x'``, centred."""
    cross: Tensor
    """``(D_in, D_out)``: the mean of ``x y'``, centred."""
    mean_x: Tensor
    """``(D_in,)``."""
    mean_y: Tensor
    """``(D_out,)``."""


def fit_linear(
    linear: nn.Linear,
    parts: Iterable[tuple[Tensor, Tensor]],
    start: Tensor,
    shares: Tensor | None = None,
    ridge: float = RIDGE,
) -> None:
    """Sets ``linear`` to the ridge regression of outputs on inputs, drawn towards a start.

    With inputs x and outputs y less their means, p the share of each row, ``G = mean(p x x')``, ``C = mean(p x y')``
    and W0 the start, the weight W minimises::

        mean(p |y - W x|^2) + d |W - W0|^2        with d = ridge * mean(diag(G))

    which its normal equations ``(G + d I) (W - W0)' = C - G W0'`` solve, by Cholesky as G + d I is positive definite
    (Hoerl and Kennard, Ridge Regression, Technometrics 1970; there W0 = 0). The bias is ``mean(y) - W mean(x)``.

    Args:
        linear: its weight ``(D_out, D_in)`` and its bias, where it has one, are overwritten.
        parts: pairs of inputs ``(..., L, D_in)`` and outputs ``(..., L, D_out)``. Only moments of a part are kept, so
            the sample may be larger than memory.
        start: W0, ``(D_out, D_in)``.
        shares: how much each of the L tokens counts; None: all alike.
        ridge: > 0.
    """
    centre = linear.bias is not None
    moments = pooled(_moments(inputs, outputs, shares, centre) for inputs, outputs in parts)
    weight = start + change_from(start, moments.gram, moments.cross, ridge).float()
    linear.weight.copy_(weight)
    if linear.bias is not None:
        mean_x = moments.mean_x.float()
        mean_y = moments.mean_y.float()
        linear.bias.copy_(mean_y - weight @ mean_x)


def fit_first_classifier(
    classifier: nn.Linear,
    features: Sequence[Tensor],
    logits: Tensor,
    start: Tensor,
    ridge: float = RIDGE,
) -> None:
    """Sets a classifier to the regression of a teacher's logits on a student's features.

    The outputs of a classifier that :mod:`kd.models.output_scale` has scaled are then in the logits' units, too.

    Args:
        classifier: its weight and its bias, where it has one, are overwritten.
        features: ``(N, D)`` of each part of a sample.
        logits: the teacher's, ``(all N, C)``.
        start: as of :func:`fit_linear`.
        ridge: likewise.
    """
    fit_linear(classifier, [(torch.cat(list(features)), logits)], start, ridge=ridge)
    if classifier.bias is not None:
        set_in_units(classifier, classifier.weight.clone(), classifier.bias.clone())


def change_from(start: Tensor, gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """The change ``W - W0`` of a weight that solves the normal equations of :func:`fit_linear`; of one layer or several.

    Args:
        start: W0, ``(..., D_out, D_in)``.
        gram: G, ``(..., D_in, D_in)``, float64; changed in place: d is added to its diagonal. It may be 0, as all units may
            be dead.
        cross: C, ``(..., D_in, D_out)``, float64.
        ridge: d in units of the mean of G's diagonal.

    Returns:
        ``(..., D_out, D_in)``, float64.
    """
    of_start = start.mT.double()
    right_side = cross - gram @ of_start
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    damping = ridge * diagonal.mean(-1, keepdim=True).clamp(min=1e-12)
    diagonal.add_(damping)
    factor = torch.linalg.cholesky_ex(gram).L
    return torch.cholesky_solve(right_side, factor).mT


def _moments(inputs: Tensor, outputs: Tensor, shares: Tensor | None, centre: bool) -> Moments:
    """Second moments of one part of the sample, float32, each divided by the number of rows.

    Args:
        inputs: x, ``(..., L, D_in)``; all axes but the last make R rows.
        outputs: y, ``(..., L, D_out)``.
        shares: how much each of the L tokens counts; None: all alike.
        centre: whether means are subtracted first.
    """
    x, mean_x, row_shares = centred_rows(inputs, shares, centre)
    y, mean_y, _ = centred_rows(outputs, shares, centre)
    weighted_x = x
    if shares is not None:
        weighted_x = row_shares * x
    gram = symmetric_product(weighted_x, x) / len(x)
    cross = weighted_x.T @ y / len(x)
    return Moments(len(x), gram, cross, mean_x, mean_y)


def pooled(parts: Iterable[Moments]) -> Moments:
    """The moments of a sample from those of its parts, float64; one part is held at a time.

    Part by part (Chan, Golub, LeVeque, 1979), with f the next part's share in the rows up to here and d the offset of
    its mean: ``G <- (1 - f) G + f G_p + f (1 - f) d d'`` and ``m <- m + f d``. Of parts that were not centred (a layer
    without a bias) all means are 0, and so is d.

    Raises:
        ValueError: no parts.
    """
    count = 0
    number = 0
    for number, part in enumerate(parts, 1):
        if number == 1:
            gram = part.gram.double()
            cross = part.cross.double()
            mean_x = part.mean_x.double()
            mean_y = part.mean_y.double()
            count = part.count
            continue

        # Up to here: moments about the present mean. The offset of the next part's mean adds its own.
        fraction = part.count / (count + part.count)
        offset_x = part.mean_x.double() - mean_x
        offset_y = part.mean_y.double() - mean_y
        between = fraction * (1 - fraction)
        gram.lerp_(part.gram.double(), fraction).addr_(offset_x, offset_x, alpha=between)
        cross.lerp_(part.cross.double(), fraction).addr_(offset_x, offset_y, alpha=between)
        mean_x += fraction * offset_x
        mean_y += fraction * offset_y
        count += part.count
    if not number:
        raise ValueError("a fit needs a sample, got no pictures")
    return Moments(count, gram, cross, mean_x, mean_y)


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """``a.T @ b``, ``(D, D)``, for a and b ``(R, D)`` of which that product is symmetric.

    A large product is computed in quarters, of which the upper right one is copied from the lower left one: with the
    same inside the diagonal ones this saves nearly half of the work.
    """
    half = a.shape[1] // 2
    if half < 128:
        return a.T @ b
    a_left = a[:, :half]
    a_right = a[:, half:]
    b_left = b[:, :half]
    b_right = b[:, half:]
    lower_left = a_right.T @ b_left
    upper_left = symmetric_product(a_left, b_left)
    lower_right = symmetric_product(a_right, b_right)
    upper = torch.cat([upper_left, lower_left.T], 1)
    lower = torch.cat([lower_left, lower_right], 1)
    return torch.cat([upper, lower])


def layer_for(start: Tensor, has_bias: bool) -> nn.Linear:
    """A linear layer of the shape and on the device of a weight ``(D_out, D_in)``, whose numbers are still to be set.

    One that is drawn at random would move the run's random numbers.
    """
    width_out, width_in = start.shape
    return skip_init(nn.Linear, width_in, width_out, bias=has_bias, device=start.device)


def fit_scale_and_shift(norm: Part, x_RC: Tensor, y_RC: Tensor) -> None:
    """Sets a norm to the regression ``y = a x + b`` of each channel, or ``y = a x`` where it has no shift.

    Args:
        norm: of scale 1 and shift 0.
        x_RC: what it gives.
        y_RC: what it should give.
    """
    has_shift = getattr(norm, "bias", None) is not None
    mean_x = mean_y = torch.zeros_like(x_RC[0])
    if has_shift:
        mean_x = x_RC.mean(0)
        mean_y = y_RC.mean(0)
    x_RC = x_RC - mean_x
    y_RC = y_RC - mean_y
    variance = x_RC.square().mean(0).clamp(min=1e-12)
    slope = (x_RC * y_RC).mean(0) / variance
    norm.weight.copy_(slope)
    if has_shift:
        norm.bias.copy_(mean_y - slope * mean_x)


def fit_projection(projection: Projection, inputs: Tensor, outputs: Tensor) -> None:
    """Sets a linear layer or 1x1 convolution to a ridge regression, an orthogonal one to the nearest rotation.

    Other projections (several layers, larger kernels) stay as they are.

    Args:
        projection: of a loss over features, built.
        inputs: the student's features, ``(..., D_in)``.
        outputs: what the projection should make of them, ``(..., D_out)``.
    """
    if isinstance(projection, OrthogonalProjection):
        projection.fit(inputs, outputs)
        return
    layer = projection.layers
    is_pointwise = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1)
    if isinstance(layer, nn.Linear) or is_pointwise:
        fit_pointwise(layer, inputs.cpu(), outputs.cpu())


def fit_pointwise(layer: Part, inputs: Tensor, outputs: Tensor) -> None:
    """Sets a linear layer or 1x1 convolution to a ridge regression at every position, drawn to 0.

    Args:
        layer: its weight, and its bias if it has one, are overwritten.
        inputs: ``(..., D_in)``.
        outputs: ``(..., D_out)``.
    """
    width_in = inputs.shape[-1]
    width_out = outputs.shape[-1]
    has_bias = layer.bias is not None
    start = inputs.new_zeros(width_out, width_in)
    linear = layer_for(start, has_bias)
    fit_linear(linear, [(inputs, outputs)], start)
    layer.weight.copy_(linear.weight.view_as(layer.weight))
    if has_bias:
        layer.bias.copy_(linear.bias)
