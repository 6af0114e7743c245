"""Fits of layers that read maps ``(N, C, H, W)``: convolutions, and linear layers at every position.

A convolution is a linear layer of the pixels under its kernel. Maps have far more positions than a regression needs, so
some thousands of them are drawn, the same in the teacher's map and in the student's (He, Zhang, Sun, ICCV 2017).
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kd.distill.inherit.anatomy import Part
from kd.distill.inherit.ridge import change_from, fit_linear, layer_for

ROWS = 16384
"""Positions that a fit reads, of all pictures together, at least (or all, where there are fewer)."""
ROWS_PER_INPUT = 6
"""Positions for each input of a layer, at least."""
RIDGE = 1e-3
"""As of :func:`kd.distill.inherit.ridge.fit_linear`, at least: neighbouring pixels are alike."""
RIDGE_OF_FEW = 0.05
"""Of a layer with as many inputs as there are rows: the fewer rows, the more the start weighs."""


class Positions(NamedTuple):
    """Places in maps of one part of the sample, R of them."""

    picture: Tensor
    """Number of the picture in its part, ``(R,)``."""
    row: Tensor
    """``(R,)``."""
    column: Tensor
    """``(R,)``."""


def drawn_positions(pictures: int, height: int, width: int, count: int, seed: int) -> Positions:
    """Draws places in ``pictures`` maps of ``height`` x ``width``; the same for the same seed.

    Args:
        pictures: maps of the part, one a picture.
        height: of a map, in its own pixels.
        width: likewise.
        count: how many are drawn, some perhaps twice; where there are no more places, each is taken once, in order.
        seed: of the draw; the global random state is left alone.
    """
    places_of_one = height * width
    total = pictures * places_of_one
    numbers = torch.arange(total)
    if count < total:
        # the CPU's: the same places on every device
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(total, (count,), generator=generator, device="cpu")
        numbers = drawn.to(numbers.device)
    picture = numbers // places_of_one
    place = numbers % places_of_one
    return Positions(picture, place // width, place % width)


def channels_at(maps_NCHW: Tensor, positions: Positions) -> Tensor:
    """The channels at some places, ``(R, C)``."""
    return maps_NCHW.permute(0, 2, 3, 1)[positions]


def under_kernel(layer: nn.Module, maps_NCHW: Tensor, positions: Positions) -> Tensor:
    """The numbers that a layer reads for its output at each of R places: all channels of the pixels under its kernel.

    Args:
        layer: a convolution without groups or dilation, a depthwise one, or a linear layer.
        maps_NCHW: what it reads.
        positions: in its output's map.

    Returns:
        ``(R, C * kh * kw)``; of a depthwise convolution ``(R, C, kh * kw)``, of a linear layer ``(R, C)``.
    """
    if isinstance(layer, nn.Linear):
        return channels_at(maps_NCHW, positions)
    assert isinstance(layer, nn.Conv2d)
    windows_NCHWkk = windows(layer, maps_NCHW)
    windows_RCkk = windows_NCHWkk.permute(0, 2, 3, 1, 4, 5)[positions]
    return windows_RCkk.flatten(2 if is_depthwise(layer) else 1)


def is_depthwise(layer: nn.Module) -> bool:
    """Whether a layer is a convolution of each channel by itself."""
    return isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels > 1


def windows(layer: nn.Conv2d, maps_NCHW: Tensor) -> Tensor:
    """The pixels of maps under a convolution's kernel at each place of its output, ``(N, C, h, w, kh, kw)``.

    A view of the padded maps: it must not be changed in place.
    """
    padding: Any = layer.padding
    rows, columns = padding
    padded = nn.functional.pad(maps_NCHW, (columns, columns, rows, rows))
    kh, kw = layer.kernel_size
    sh, sw = layer.stride
    windows_NChWk = padded.unfold(2, kh, sh)
    return windows_NChWk.unfold(3, kw, sw)


def maps_of(layer: nn.Module, tensor: Tensor) -> Tensor:
    """A copy of a layer's input or output, brought into the form of :func:`as_maps`: an activation may change the tensor
    itself in place afterwards.
    """
    return as_maps(layer, tensor).clone()


def as_maps(layer: nn.Module, tensor: Tensor) -> Tensor:
    """A layer's input or output as maps ``(N, C, H, W)``.

    That of a linear layer or LayerNorm, ``(N, H, W, C)``, is permuted; any other tensor is returned as it is.
    """
    is_last = isinstance(layer, nn.Linear | nn.LayerNorm) and tensor.ndim == 4
    if is_last and not _is_2d(layer):
        return tensor.permute(0, 3, 1, 2)
    return tensor


def _is_2d(layer: nn.Module) -> bool:
    return type(layer).__name__.endswith("2d")  # timm's LayerNorm2d is a LayerNorm of maps


def rows_needed(layer: nn.Module) -> int:
    """How many positions a layer's fit reads, of all parts of the sample together; at least 6 for each input of the layer
    (of a convolution each channel and pixel under its kernel).
    """
    weight: Any = layer.weight
    return max(ROWS, ROWS_PER_INPUT * weight[0].numel())


def fit_layer(
    layer: Part, norm: Any | None, rows: Sequence[tuple[Tensor, Tensor]], start: Tensor
) -> None:
    """Fits a convolution or linear layer by :func:`fit_linear`, a depthwise convolution by :func:`fit_depthwise`.

    Args:
        layer: its weight is overwritten, and without a norm its bias if it has one. A depthwise one has no norm after it.
        norm: the BatchNorm after it, whose statistics are measured and which adds the bias; None: none.
        rows: of each part of the sample, what the layer reads at drawn places (:func:`under_kernel`), and what layer and
            norm together should give there, ``(R, C_out)``.
        start: to which the fit is drawn, in the weight's shape.
    """
    if is_depthwise(layer):
        fit_depthwise(layer, rows, start)
        return
    has_bias = layer.bias is not None or norm is not None
    flat_start = start.flatten(1)
    linear = layer_for(flat_start, has_bias)

    # Where there are few rows for each input, the start weighs more.
    inputs_RC = [inputs for inputs, _ in rows]
    count = sum(map(len, inputs_RC))
    ridge_of_few = RIDGE_OF_FEW * linear.in_features / count
    ridge = min(1.0, max(RIDGE, ridge_of_few))
    fit_linear(linear, rows, flat_start, ridge=ridge)

    layer.weight.copy_(linear.weight.view_as(layer.weight))
    if norm is not None:
        before_norm = torch.cat(inputs_RC) @ linear.weight.T
        _measure(norm, before_norm, linear.bias)
    elif has_bias:
        layer.bias.copy_(linear.bias)


def _measure(norm: Part, rows: Tensor, bias: Tensor) -> None:
    """Sets a BatchNorm's statistics to those of its input, and its scale and shift so that it only adds a bias.

    With scale ``sqrt(v + eps)`` and shift ``m + b``, ``(x - m) / sqrt(v + eps) * scale + shift = x + b``.

    Args:
        norm: timm's or torch's BatchNorm.
        rows: its input on the sample, ``(R, C)``.
        bias: what it adds, ``(C,)``.
    """
    mean = rows.mean(0)
    variance = rows.var(0, correction=0)
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
    norm.weight.copy_((variance + norm.eps).sqrt())
    norm.bias.copy_(mean + bias)


def groups_by_change(changes: Sequence[float], count: int) -> list[list[int]]:
    """Shares the teacher's blocks of a stage among ``count`` of the student's, in groups of neighbours.

    A group begins with the first block, and with each of the ``count - 1`` others that change the stream most. The student's
    block follows the first of its group, and also does the work of the rest, which are left out.

    Args:
        changes: of the teacher's blocks, in any unit.
        count: of the student's blocks, at most as many.

    Returns:
        Of each of the student's blocks: the numbers of the teacher's, from 0.

    >>> groups_by_change([0, 1, 5, 2], 2), groups_by_change([0, 1, 5, 2], 3), groups_by_change([9, 1, 5, 2], 4)
    ([[0, 1], [2, 3]], [[0, 1], [2], [3]], [[0], [1], [2], [3]])
    """
    following = range(1, len(changes))
    by_change = sorted(following, key=lambda number: -changes[number])
    most = by_change[: count - 1]
    begins = sorted([0, *most])
    ends = [*begins[1:], len(changes)]
    groups = []
    for begin, end in zip(begins, ends, strict=True):
        numbers = range(begin, end)
        groups.append(list(numbers))
    return groups


def covariance(vectors: Tensor) -> Tensor:
    """The covariance of C channels over all rows, ``(..., C)`` -> ``(C, C)``, float64; divided by the number of rows."""
    rows = vectors.reshape(-1, vectors.shape[-1]).double()
    rows = rows - rows.mean(0)
    return rows.T @ rows / len(rows)


def fit_depthwise(layer: nn.Conv2d, pairs: Iterable[tuple[Tensor, Tensor]], start: Tensor) -> None:
    """Fits a depthwise convolution: of each channel a regression of its own on the pixels under its kernel.

    Args:
        layer: its weight, and its bias if it has one, are overwritten.
        pairs: of each part of the sample, inputs ``(R, C, kh * kw)`` and outputs ``(R, C)``.
        start: its weight's start, ``(C, 1, kh, kw)``.
    """
    count = 0
    of_parts = []
    for inputs_RCk, outputs_RC in pairs:
        x_CRk = inputs_RCk.transpose(0, 1).double()
        y_CR1 = outputs_RC.T.double()[..., None]
        gram = x_CRk.mT @ x_CRk
        cross = x_CRk.mT @ y_CR1
        of_parts.append((gram, cross, x_CRk.sum(1), y_CR1.sum(1)))
        count += len(inputs_RCk)
    gram_Ckk, cross_Ck1, mean_x_Ck, mean_y_C1 = (
        torch.stack(sums).sum(0) / count for sums in zip(*of_parts, strict=True)
    )
    if layer.bias is not None:
        gram_Ckk -= mean_x_Ck[:, :, None] * mean_x_Ck[:, None]
        cross_Ck1 -= mean_x_Ck[..., None] * mean_y_C1[..., None]
    start_C1k = start.flatten(2).double()
    weight_C1k = start_C1k + change_from(start_C1k, gram_Ckk, cross_Ck1, RIDGE)
    layer.weight.copy_(weight_C1k.view_as(layer.weight).float())
    if layer.bias is not None:
        of_mean_C = (weight_C1k[:, 0] * mean_x_Ck).sum(1)
        layer.bias.copy_((mean_y_C1[:, 0] - of_mean_C).float())


def folded_with_norm(layer: nn.Conv2d, norm: Part) -> Tensor:
    """A convolution's weight with the scale of the BatchNorm after it, ``(C_out, C_in, kh, kw)``."""
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return layer.weight * scale[:, None, None, None]


def as_reader(weight: Tensor) -> Tensor:
    """A convolution's weight, ``(C_out, C_in, kh, kw)``, as what it computes of its channels, ``(outputs, C_in)``.

    Each channel of its output at each place under the kernel counts as an output of its own: ``C_out * kh * kw``.
    """
    return weight.transpose(0, 1).flatten(1).T
