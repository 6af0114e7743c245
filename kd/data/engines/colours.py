"""torchvision's ColorJitter for a batch in which every picture has its own strengths and its own order.

torchvision changes one picture, or many alike. Picture by picture, colours took 114 of a step's 163 ms on a busy GPU
machine (scripts/bench/log/gpu.md); here each turn changes all pictures at once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

STRENGTHS = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
"""ColorJitter's parameters; their places are the numbers in its ``fn_idx``."""
CONTRAST, SATURATION, HUE = 1, 2, 3
UNCHANGED = (1.0, 0.0, 0.0)
"""Factors of :func:`_mix_with_grey` that leave a picture as it is."""
TURNS = 3
"""Changes of a picture that are no turn of its hue, at most: before that turn, and after it."""


def jitter(images: Tensor, drawn: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Changes the colours of some pictures, in place, as ``v2.ColorJitter`` would change each of them.

    A picture's order is kept: first all that comes before the turn of its hue, then that turn, then the others. Values
    differ by one level of 255 now and then, from another order of rounding, which the changes that follow enlarge: by
    four levels at most in the test.

    Args:
        images: uint8 ``(N, 3, H, W)``.
        drawn: a picture's place in the batch with ColorJitter's parameters: ``fn_idx``, the order of the four changes as
            an array, and their strengths by the names of :data:`STRENGTHS`, None where a change is left out.
    """
    before: list[list[tuple[float, float, float]]] = [[] for _ in images]
    after: list[list[tuple[float, float, float]]] = [[] for _ in images]
    hues = [0.0] * len(images)
    for place, parameters in drawn:
        rows = before[place]
        for change in parameters["fn_idx"].tolist():
            strength = parameters[STRENGTHS[change]]
            if change == HUE:
                hues[place] = strength or 0.0
                rows = after[place]
            elif strength is not None:
                rest = 1 - strength
                rows.append((strength, rest * (change == SATURATION), rest * (change == CONTRAST)))
    numbers = []
    for hue, *sides in zip(hues, before, after, strict=True):
        numbers.append([hue])
        for rows in sides:
            padded = rows + [UNCHANGED] * TURNS
            numbers[-1] += [number for row in padded[:TURNS] for number in row]
    # One transfer of all numbers: (N, 1 + 2 * 3 * 3).
    table = torch.tensor(numbers).to(images.device, non_blocking=True)
    hue_n111 = table[:, 0].view(-1, 1, 1, 1)
    mixes = table[:, 1:].view(-1, 2, TURNS, 3)

    levels = images.float()
    for turn in range(max(map(len, before))):
        levels = _mix_with_grey(levels, mixes[:, 0, turn])
    if any(hues):
        levels = torch.where(hue_n111 == 0, levels, turn_hue(levels, hue_n111))
    for turn in range(max(map(len, after))):
        levels = _mix_with_grey(levels, mixes[:, 1, turn])
    images.copy_(levels)


def _mix_with_grey(levels: Tensor, factors: Tensor) -> Tensor:
    """Brightness, contrast or saturation of each picture: factors of itself, of each pixel's grey, of its mean grey.

    The first factor is the strength, ``1 - strength`` is that of the grey for saturation and that of the mean for contrast.

    Args:
        levels: whole numbers 0..255 as float, ``(N, 3, H, W)``.
        factors: ``(N, 3)``.

    Returns:
        As ``levels``, cut off to whole numbers as torchvision does.
    """
    own, of_grey, of_mean = factors.view(-1, 3, 1, 1, 1).unbind(1)  # (N, 1, 1, 1) each
    red, green, blue = levels.split(1, dim=1)  # (N, 1, H, W) each
    grey = 0.2989 * red
    grey.add_(green, alpha=0.587)
    grey.add_(blue, alpha=0.114)
    grey.trunc_()
    mean = grey.mean((1, 2, 3), keepdim=True)  # (N, 1, 1, 1)
    mixed = own * levels
    mixed.addcmul_(of_grey, grey)
    mixed.addcmul_(of_mean, mean)
    return mixed.clamp_(0, 255).trunc_()


def turn_hue(levels: Tensor, turn: Tensor) -> Tensor:
    """The hue of each pixel turned by ``turn`` of the circle, -0.5..0.5.

    Args:
        levels: whole numbers 0..255 as float, ``(N, 3, H, W)``.
        turn: float ``(N, 1, 1, 1)``.

    Source: HSV as a cone of six parts; A. R. Smith, Color gamut transform pairs, SIGGRAPH 1978.
    """
    colours = levels / 255
    red, green, blue = colours.split(1, dim=1)  # (N, 1, H, W) each
    value = colours.amax(1, keepdim=True)
    chroma = value - colours.amin(1, keepdim=True)
    divisor = torch.where(chroma == 0, 1.0, chroma)
    # The hue in sixths of the circle, -1..5; 0 is red, 2 green, 4 blue.
    sixth = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    turned = sixth + 6 * turn
    # Red, green and blue lie 5, 3 and 1 sixths further: value - chroma * clamp(min(k, 4 - k), 0, 1).
    further = torch.tensor([5.0, 3.0, 1.0]).to(levels.device, non_blocking=True)
    k = (turned + further.view(1, 3, 1, 1)).remainder(6)
    new = value - chroma * k.minimum(4 - k).clamp(0, 1)
    return (new * (256 - 1e-3)).trunc_()  # torchvision's rounding of floats to levels
