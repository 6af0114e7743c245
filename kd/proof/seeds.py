"""How large a difference between two ways is, from a few paired repetitions."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

NORMAL95 = 1.96
"""Half of a 95 % interval in standard errors, where the standard error is known."""


@dataclass(frozen=True)
class Gain:
    """A difference with its 95 % interval."""

    mean: float
    """The difference: more is better."""
    half: float
    """Half of the interval; infinite where a single repetition says nothing of the spread."""

    @property
    def low(self) -> float:
        """The interval's lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The interval's upper end."""
        return self.mean + self.half


def gain_over_seeds(better: Sequence[float], base: Sequence[float]) -> Gain:
    """The mean over seeds of ``better - base``, and half of its 95 % interval by Student's t, both in the values' unit.

    Of ``n`` differences with standard deviation ``s`` half of the interval is ``t(n - 1) * s / sqrt(n)``; infinite for one
    seed.

    Args:
        better: a value for each seed, one at least; more is better.
        base: likewise, of the same seeds in the same order.

    >>> gain_over_seeds([3.0, 5.0], [1.0, 3.0])
    Gain(mean=2.0, half=0.0)
    """
    differences = [x - y for x, y in zip(better, base, strict=True)]
    n = len(differences)
    if n < 2:
        return Gain(differences[0], math.inf)
    degrees = n - 1
    t = float(scipy.stats.t.ppf(0.975, degrees))
    deviation = statistics.stdev(differences)
    half = t * deviation / n**0.5
    mean = statistics.mean(differences)
    return Gain(mean, half)


def gain_in_accuracy(better: np.ndarray, base: np.ndarray) -> Gain:
    """The mean gain in accuracy over S seeds, all measured on the same N pictures, with a 95 % interval for both sources of
    chance: the seeds, and the choice of the pictures.

    Half of the interval is ``sqrt(a^2 + b^2)``: ``a`` by Student's t over the seeds' gains (:func:`gain_over_seeds`),
    ``b = 1.96 s / sqrt(N)`` with the standard deviation ``s``, over the pictures, of a picture's mean gain.

    Args:
        better: whether each seed's model is right on each picture, bool ``(S, N)``.
        base: likewise for the models to compare with, of the same seeds and pictures.

    Returns:
        The gain as a share, in -1..1; half of the interval is infinite for one seed or one picture.
    """
    accuracies = better.mean(axis=1)
    accuracies_of_base = base.mean(axis=1)
    of_seeds = gain_over_seeds(accuracies.tolist(), accuracies_of_base.tolist())
    gains_SN = better.astype(np.float64) - base.astype(np.float64)
    of_pictures_N = gains_SN.mean(axis=0)
    count = len(of_pictures_N)
    half_of_pictures = math.inf
    if count > 1:
        deviation = float(of_pictures_N.std(ddof=1))
        half_of_pictures = NORMAL95 * deviation / math.sqrt(count)
    half = math.hypot(of_seeds.half, half_of_pictures)
    return Gain(of_seeds.mean, half)
