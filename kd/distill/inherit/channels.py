"""Which channels of a teacher's convolutions a smaller student keeps.

After a ReLU, or before a depthwise convolution, channels can't be mixed: a student keeps some of them as they are. The
next layers are fitted to make good what is cut (:mod:`kd.distill.inherit.maps`), so those channels are best that
explain the rest: a channel is worth little if others say the same (ThiNet, Luo, Wu, Lin, ICCV 2017; He, Zhang, Sun,
ICCV 2017, choose by a lasso, here it is done greedily in closed form).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Readout(NamedTuple):
    """One place where channels are read."""

    covariance: Tensor
    """Of the channels on the sample, G, ``(C, C)``."""
    weight: Tensor
    """What a reader computes of them, A, ``(outputs, C)``; several readers are stacked."""


def chosen_channels(readings: Sequence[Readout], count: int) -> Tensor:
    """The channels from which the readers' outputs ``A x`` can best be regressed, one after the other.

    Given the channels that are chosen, let G be the covariance of what they leave unexplained. A further channel c
    explains ``|A G_c|^2 / G_cc`` of the outputs' variance, with G_c its column. The best one is taken, and what it
    explains is taken off: ``G <- G - G_c G_c' / G_cc`` (a Cholesky factorisation with pivots). A channel of which next to
    nothing is left unexplained gains nothing.

    Args:
        readings: all places where the same channels are read; each counts alike, relative to its outputs' variance.
        count: how many are chosen.

    Returns:
        ``(count,)``, in rising order.
    """
    width = readings[0].covariance.shape[0]
    if count == width:
        return torch.arange(width)
    # G, and R G with R'R = A'A, at most as many rows as channels
    covariances = []
    reads = []
    for reading in readings:
        covariance = reading.covariance.double()
        weight = reading.weight.double()
        if len(weight) > width:
            values, vectors = torch.linalg.eigh(weight.T @ weight)
            weight = values.clamp(min=0).sqrt()[:, None] * vectors.T
        outputs = weight @ covariance
        variance = (outputs * weight).sum().clamp(min=1e-30)
        covariances.append(covariance)
        reads.append(outputs / variance.sqrt())

    chosen: list[int] = []
    for _ in range(count):
        gain = torch.zeros(width, dtype=torch.float64)
        for covariance, outputs in zip(covariances, reads, strict=True):
            left = covariance.diagonal()
            floor = 1e-9 * left.max().clamp(min=1e-30)
            explained = outputs.square().sum(0) / left.clamp(min=1e-30)
            gain += torch.where(left > floor, explained, 0)
        gain[chosen] = -1
        best = int(gain.argmax())
        chosen.append(best)

        # What it explains is taken off.
        for number, covariance in enumerate(covariances):
            outputs = reads[number]
            pivot = covariance[best, best]
            if pivot > 1e-30:
                share = covariance[best] / pivot
                reads[number] = outputs - outputs[:, best, None] * share
                covariances[number] = covariance - covariance[:, best, None] * share
    return torch.tensor(sorted(chosen))
