"""What follows the crop, for a whole batch on a GPU: some fifty large steps, however many pictures there are.

Picture by picture, colours alone took 114 of a step's 163 ms on a busy GPU machine (scripts/bench/log/gpu.md). All that
chance has drawn goes to the device in one transfer; then each change is made of all pictures, whose levels are float until
the end. A picture that a transform has not chosen gets the numbers that change nothing.

Suffixes: N pictures, P pairs of them, H rows, W columns, L = H * W.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchvision.transforms import v2

from kd.data.transforms import Mix, soft_labels

Drawn = Sequence[tuple[int, dict[str, Any]]]
"""Of one transform: a picture's place in the batch, and the parameters that were drawn for it."""
STRENGTHS = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
"""ColorJitter's parameters; their places are the numbers in its ``fn_idx``."""
CONTRAST, SATURATION, HUE = 1, 2, 3
TURNS = 3
"""Changes of a picture's colours that are no turn of its hue, at most: before that turn, and after it."""
Row = tuple[float, float, float, float]
UNCHANGED: list[Row] = [(1.0, 0.0, 0.0, 0.0)] * TURNS
"""Changes that leave a picture as it is."""
GREYS = torch.tensor([0.2989, 0.587, 0.114]).repeat(3)
"""A matrix, row by row, that makes grey of red, green and blue."""
NEXT = torch.tensor([0.0, 1, -1, -1, 0, 1, 1, -1, 0])
"""A matrix, row by row: of red, green and blue each one's next colour less the one after that."""
SIXTHS = torch.tensor([5.0, 3, 1])
"""Red, green and blue lie so many sixths of the circle of hues further than its start."""
WAYS = torch.block_diag(torch.stack([torch.eye(3).flatten(), GREYS]), GREYS, torch.ones(3))
"""How much of a pixel, of its grey, of the picture's mean grey, and what is added -> the numbers of :func:`_changed`."""


def finish(
    images: Tensor,
    changes: Sequence[tuple[v2.Transform, Drawn]],
    mixes: Sequence[Mix],
    labels: np.ndarray | None,
    classes: int,
) -> tuple[Tensor, Tensor | None]:
    """Everything that follows the crop.

    Args:
        images: resized crops, uint8 ``(N, 3, H, W)``; not changed.
        changes: transforms in their order, with what was drawn for each.
        mixes: pairs of the batch that are mixed.
        labels: float32, of :meth:`~kd.data.transforms.MixPairs.labels`; None: nothing is mixed.
        classes: of the data.

    Returns:
        The views, uint8 as ``images``, and the mixed labels ``(N, classes)``, None without ``labels``. Where colours change
        or pairs are blended, a level may differ from torchvision's by another order of rounding (:class:`Jitter`).
    """
    steps = [
        KINDS.get(type(kind), BatchChange)(kind, drawn, images.shape) for kind, drawn in changes
    ]
    tables = [step.numbers() for step in steps]
    if labels is not None:
        tables += [_shares(mixes, images.shape), torch.from_numpy(labels)]
    # one transfer for all tables; the empty one, as there may be none
    sent = torch.cat([table.flatten() for table in [*tables, torch.empty(0)]])
    sent = sent.to(images.device, non_blocking=True)
    parts = sent.split([*map(torch.numel, tables), 0])
    numbers = [part.view(table.shape) for part, table in zip(parts, tables, strict=False)]

    levels = images.float()
    for step, table in zip(steps, numbers, strict=False):
        levels = step.apply(levels, table)
    if labels is None:
        return levels.to(images.dtype), None
    shares_PK, labels_N22 = numbers[-2:]
    if mixes:
        levels = _mixed(levels, shares_PK)
    return levels.to(images.dtype), soft_labels(labels_N22, classes)


def tensors(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters as torchvision's transforms take them: tensors in place of arrays."""
    return apply_to_collection(parameters, np.ndarray, torch.from_numpy)


@dataclass
class BatchChange:
    """A transform of a batch; of this class itself picture by picture, as torchvision does it."""

    transform: v2.Transform
    drawn: Drawn
    shape: torch.Size
    """Of the batch, ``(N, 3, H, W)``."""

    def numbers(self) -> Tensor:
        """What :meth:`apply` reads on the device, a float tensor on the host."""
        return torch.empty(0)

    def apply(self, levels: Tensor, numbers: Tensor) -> Tensor:
        """The changed batch, float ``(N, 3, H, W)``, whole levels 0..255 as it is given; ``numbers`` are on its device.

        ``levels`` may be changed in place.
        """
        for place, parameters in self.drawn:
            levels[place] = self.transform.transform(levels[place], tensors(parameters))
        return levels


class Flip(BatchChange):
    """Left and right mirrored, or top and bottom."""

    def numbers(self) -> Tensor:
        """1 for a picture that is mirrored, else 0."""
        flags = torch.zeros(self.shape[0], 1, 1, 1)
        flags[[place for place, _ in self.drawn]] = 1.0
        return flags

    def apply(self, levels: Tensor, numbers: Tensor) -> Tensor:
        """Each flagged picture's mirror image in its place."""
        axis = -1 if isinstance(self.transform, v2.RandomHorizontalFlip) else -2
        return torch.lerp(levels, levels.flip(axis), numbers)


class Erase(BatchChange):
    """A box filled with a colour. RandomErasing's parameters are the box's top ``i``, left ``j``, height ``h`` and width
    ``w``, and the colour ``v``, None where no box has fitted.
    """

    def numbers(self) -> Tensor:
        """The box of each picture (:func:`_edges`) and its colour, ``(N, H + W + 3)``."""
        count, colours, height, width = self.shape
        table = torch.zeros(count, height + width + colours)
        for place, box in self.drawn:
            if box["v"] is None:
                continue
            left = box["j"]
            top = box["i"]
            corners = (left, top, left + box["w"], top + box["h"])
            colour = torch.from_numpy(box["v"]).flatten()
            table[place] = torch.cat([_edges(corners, self.shape), colour])
        return table

    def apply(self, levels: Tensor, numbers: Tensor) -> Tensor:
        """The colour wherever both the row and the column are in the box."""
        rows, columns, colour = numbers.split([*self.shape[2:], 3], dim=1)
        rows_N1H1 = rows[:, None, :, None]
        columns_N11W = columns[:, None, None, :]
        inside_N1HW = rows_N1H1 * columns_N11W
        colour_N311 = colour[:, :, None, None]
        return torch.lerp(levels, colour_N311.expand_as(levels), inside_N1HW)


class Jitter(BatchChange):
    """Colours as ``v2.ColorJitter`` changes them, in the order that was drawn for each picture.

    First all that comes before the turn of its hue, then that turn, then the others. torchvision cuts every result off to
    whole levels; here they are rounded once. In the test 98 % of the levels differ by one at most, a few by five. A GPU's
    products of ten bits (TF32) add up to a quarter of a level a change.
    """

    def numbers(self) -> Tensor:
        """``(N, 2 * TURNS * 21 + 12)``: each change of :func:`_changed`, :data:`NEXT`, and where red, green and blue begin
        once the hue is turned, in sixths of the circle."""
        count = self.shape[0]
        # Of each change: how much of the pixel, of its grey, of the picture's mean grey; and what is added. Of each picture
        # the changes before the turn of its hue, and those after it.
        sides: list[tuple[list[Row], list[Row]]] = [([], []) for _ in range(count)]
        hues = torch.zeros(count, 1)
        for place, parameters in self.drawn:
            rows, after = sides[place]
            for kind in parameters["fn_idx"].tolist():
                strength = parameters[STRENGTHS[kind]]
                if kind == HUE:
                    hues[place] = strength or 0.0
                    rows = after
                elif strength is not None:
                    grey = (1 - strength) * (kind == SATURATION)
                    mean = (1 - strength) * (kind == CONTRAST)
                    # torchvision cuts off the levels, and the greys: half a level on average.
                    rows.append((strength, grey, mean, -0.5 * (1 + grey + mean)))
        padded = [[(rows + UNCHANGED)[:TURNS] for rows in pair] for pair in sides]
        changes = torch.tensor(padded) @ WAYS
        starts = SIXTHS + 6 * hues
        return torch.cat([changes.flatten(1), NEXT.expand(count, -1), starts], dim=1)

    def apply(self, levels: Tensor, numbers: Tensor) -> Tensor:
        """The changes before the turn of the hue, that turn, and the changes after it; whole levels 0..255."""
        changes, of_next, starts = numbers.split([2 * TURNS * 21, 9, 3], dim=1)
        before, after = changes.view(-1, 2, TURNS, 21).unbind(1)
        of_next_N33 = of_next.view(-1, 3, 3)
        starts_N31 = starts[:, :, None]
        has_hue = any(parameters[STRENGTHS[HUE]] for _, parameters in self.drawn)
        levels_N3L = levels.flatten(2)
        for i in range(TURNS):
            levels_N3L = _changed(levels_N3L, before[:, i])
        if has_hue:
            levels_N3L = turn_hue(levels_N3L, of_next_N33, starts_N31)
        for i in range(TURNS):
            levels_N3L = _changed(levels_N3L, after[:, i])
        return levels_N3L.round().view_as(levels)


def _changed(levels_N3L: Tensor, numbers: Tensor) -> Tensor:
    """A change of each picture's brightness, contrast or saturation: ``A x + B mean(x) + c``, cut off at 0 and 255.

    Args:
        levels_N3L: the pixels x.
        numbers: of each picture the matrices A and B ``(3, 3)``, row by row, and c for each colour.
    """
    of_pixel, of_mean, added = numbers.split([9, 9, 3], dim=1)
    of_pixel_N33 = of_pixel.view(-1, 3, 3)
    of_mean_N33 = of_mean.view(-1, 3, 3)
    mean_N31 = levels_N3L.mean(2, keepdim=True)
    added_N31 = torch.baddbmm(added[:, :, None], of_mean_N33, mean_N31)
    changed_N3L = torch.baddbmm(added_N31, of_pixel_N33, levels_N3L)
    return changed_N3L.clamp_(0, 255)


def turn_hue(levels_N3L: Tensor, of_next_N33: Tensor, starts_N31: Tensor) -> Tensor:
    """The hue of each pixel turned.

    Args:
        levels_N3L: 0..255.
        of_next_N33: :data:`NEXT` for each picture.
        starts_N31: :data:`SIXTHS` of each picture, and the sixths of the circle by which its hue turns.

    Source: HSV as a cone of six parts; A. R. Smith, Color gamut transform pairs, SIGGRAPH 1978. The hue h is, in sixths,
    twice the place of the largest colour (red 0, green 1, blue 2) and ``(next - the one after) / chroma``. A colour
    that lies n sixths further is ``value - chroma * clamp(2 - |k - 2|, 0, 1)`` with ``k = (h + n) mod 6``; as
    ``|k - 2|`` counts between 1 and 2 alone, it may be the distance on the circle, ``|(h + n + 1) mod 6 - 3|``.
    """
    value, largest = levels_N3L.max(1, keepdim=True)
    chroma = value - levels_N3L.amin(1, keepdim=True)
    differences_N3L = torch.bmm(of_next_N33, levels_N3L)
    next_less_following = differences_N3L.gather(1, largest)
    start_N3L = torch.add(starts_N31 + 1, largest, alpha=2)
    divisor = chroma.clamp_min(1e-6)  # of a grey pixel
    hue_N3L = torch.addcdiv(start_N3L, next_less_following, divisor)
    from_middle = hue_N3L.remainder_(6).sub_(3)
    distance = from_middle.abs_().clamp_(1, 2)
    value_less_two_chromas = value.sub(chroma, alpha=2)
    return torch.addcmul(value_less_two_chromas, chroma, distance)


def _edges(box: Sequence[int], shape: torch.Size) -> Tensor:
    """1 in the rows, then in the columns that a box (left, top, right, bottom) covers, else 0; ``(H + W,)``."""
    left, top, right, bottom = box
    height, width = shape[2:]
    edges = torch.zeros(height + width)
    edges[top:bottom] = 1.0
    edges[height + left : height + right] = 1.0
    return edges


def _shares(mixes: Sequence[Mix], shape: torch.Size) -> Tensor:
    """Of each pair the pictures' shares in their own pixels, and the box in which they have none (:func:`_edges`);
    ``(P, 1 + H + W)``."""
    table = torch.zeros(shape[0] // 2, 1 + sum(shape[2:]))
    table[:, 0] = 1.0
    for mix in mixes:
        if mix.is_cut:
            table[mix.pair, 1:] = _edges((mix.left, mix.top, mix.right, mix.bottom), shape)
        else:
            table[mix.pair, 0] = mix.share
    return table


def _mixed(levels: Tensor, shares_PK: Tensor) -> Tensor:
    """Mixup and cutmix of the neighbours 2k and 2k + 1; a last picture without a partner stays. Whole levels."""
    count, *shape = levels.shape
    share, rows, columns = shares_PK.split([1, *shape[1:]], dim=1)
    share_P11 = share[:, :, None]
    rows_PH1 = rows[:, :, None]
    columns_P1W = columns[:, None, :]
    shares_PHW = torch.addcmul(share_P11, rows_PH1, columns_P1W, value=-1)
    even = count // 2 * 2
    pairs_P23HW = levels[:even].view(-1, 2, *shape)
    partners_P23HW = pairs_P23HW.flip(1)
    mixed = torch.lerp(partners_P23HW, pairs_P23HW, shares_PHW[:, None, None])
    whole = mixed.round_().view(even, *shape)
    if even == count:
        return whole
    return torch.cat([whole, levels[even:]])


KINDS: dict[type, type[BatchChange]] = {
    v2.RandomHorizontalFlip: Flip,
    v2.RandomVerticalFlip: Flip,
    v2.ColorJitter: Jitter,
    v2.RandomErasing: Erase,
}
"""The change that makes a transform of a whole batch."""
