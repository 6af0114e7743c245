"""torchvision's ColorJitter for a batch in which every picture has its own strengths and its own order.

torchvision changes one picture, or many alike. Picture by picture, colours took 114 of a step's 163 ms on a busy GPU
machine (scripts/bench/log/gpu.md); here a batch takes at most sixteen groups of few operations.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tvf

STRENGTHS = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
"""ColorJitter's parameters; their places are the numbers in its ``fn_idx``."""


def jitter(images: Tensor, drawn: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Changes the colours of some pictures, in place, as ``v2.ColorJitter`` would change each of them.

    Values differ by one level of 255 now and then, from another order of rounding, which the changes that follow
    enlarge: by four levels at most in the test. Pictures are grouped by what changes them at each of four turns.

    Args:
        images: uint8 ``(N, 3, H, W)``.
        drawn: a picture's place in the batch with ColorJitter's parameters: ``fn_idx``, the order of the four changes as
            an array, and their strengths by the names of :data:`STRENGTHS`, None where a change is left out.
    """
    # places[turn][change]: the pictures that are changed so at this turn; strengths likewise.
    turns = range(len(STRENGTHS))
    places: list[list[list[int]]] = [[[] for _ in STRENGTHS] for _ in turns]
    strengths: list[list[list[float]]] = [[[] for _ in STRENGTHS] for _ in turns]
    for place, parameters in drawn:
        for turn, change in enumerate(parameters["fn_idx"].tolist()):
            strength = parameters[STRENGTHS[change]]
            if strength is not None:
                places[turn][change].append(place)
                strengths[turn][change].append(strength)

    for turn in turns:
        for change, function in enumerate(CHANGES):
            if not places[turn][change]:
                continue
            # One transfer for the places and the strengths.
            table = torch.tensor([places[turn][change], strengths[turn][change]])
            on_device = table.to(images.device, non_blocking=True)
            chosen = on_device[0].long()
            strength_n111 = on_device[1].view(-1, 1, 1, 1)
            images[chosen] = function(images[chosen], strength_n111)


def brighten(images: Tensor, strength: Tensor) -> Tensor:
    """``strength * image``; uint8 ``(n, 3, H, W)``, strengths float ``(n, 1, 1, 1)``."""
    return _as_levels(images * strength)


def contrast(images: Tensor, strength: Tensor) -> Tensor:
    """``strength`` times as far from the picture's mean grey (below 1: nearer); shapes as of :func:`brighten`."""
    grey = tvf.rgb_to_grayscale(images).float()
    mean = grey.mean((1, 2, 3), keepdim=True)
    return _as_levels(images * strength + mean * (1 - strength))


def saturate(images: Tensor, strength: Tensor) -> Tensor:
    """``strength`` times as far from each pixel's grey (below 1: nearer); shapes as of :func:`brighten`."""
    grey = tvf.rgb_to_grayscale(images)
    return _as_levels(images * strength + grey * (1 - strength))


def turn_hue(images: Tensor, turn: Tensor) -> Tensor:
    """The hue of each pixel turned by ``turn`` of the circle, -0.5..0.5; shapes as of :func:`brighten`.

    Source: HSV as a cone of six parts; A. R. Smith, Color gamut transform pairs, SIGGRAPH 1978.
    """
    colours = images.float() / 255
    red, green, blue = colours.split(1, dim=1)  # (n, 1, H, W) each
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
    further = torch.tensor([5.0, 3.0, 1.0]).to(images.device, non_blocking=True)
    k = (turned + further.view(1, 3, 1, 1)).remainder(6)
    new = value - chroma * k.minimum(4 - k).clamp(0, 1)
    return (new * (256 - 1e-3)).to(torch.uint8)  # torchvision's rounding of floats to levels


CHANGES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (brighten, contrast, saturate, turn_hue)
"""By ColorJitter's numbers."""


def _as_levels(values: Tensor) -> Tensor:
    """Floats -> uint8, cut off as torchvision cuts them."""
    return values.clamp(0, 255).to(torch.uint8)
