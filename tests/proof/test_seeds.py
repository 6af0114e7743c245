"""Differences from a few repetitions, with their intervals."""

import math

import numpy as np
import pytest

from kd.proof.seeds import gain_in_accuracy, gain_over_seeds


def test_students_t_over_paired_seeds() -> None:
    """By hand: differences 2, 4, 9 have mean 5 and standard deviation sqrt(13); t(2) = 4.303 (Fisher's table)."""
    gain = gain_over_seeds([12, 24, 39], [10, 20, 30])
    assert gain.mean == pytest.approx(5)
    assert gain.half == pytest.approx(4.303 * math.sqrt(13 / 3), rel=1e-3)
    assert (gain.low, gain.high) == (gain.mean - gain.half, gain.mean + gain.half)
    assert gain_over_seeds([3], [1]).half == math.inf


def test_equal_seeds_leave_the_chance_of_the_pictures() -> None:
    """Three times right on the same 6 of 10 pictures against 4: the seeds agree, ten pictures prove nothing."""
    better = np.tile([True] * 6 + [False] * 4, (3, 1))
    base = np.tile([True] * 4 + [False] * 6, (3, 1))
    gain = gain_in_accuracy(better, base)
    assert gain.mean == pytest.approx(0.2)
    of_pictures = np.array([0, 0, 0, 0, 1, 1, 0, 0, 0, 0])
    assert gain.half == pytest.approx(1.96 * of_pictures.std(ddof=1) / math.sqrt(10))
    assert gain.low < 0 < gain.high


def test_the_interval_covers_as_often_as_it_says() -> None:
    """2,000 experiments of three seeds whose judging pictures are drawn anew: 95 of 100 hold the real gain, or more."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        ease = rng.normal(0, 1.5, size=120)  # of each judging picture, for both
        skill = rng.normal(0, 0.15, size=(2, 3, 1))  # of each fit
        score = skill + ease + rng.normal(0, 1, size=(2, 3, 120))
        better = score[0] + 0.5 > 0
        base = score[1] > 0
        gain = gain_in_accuracy(better, base)
        held += gain.low <= REAL_GAIN <= gain.high
    assert held / 2000 >= 0.95


DEVIATION = math.sqrt(1 + 1.5**2 + 0.15**2)
REAL_GAIN = 0.5 * math.erf(0.5 / DEVIATION / math.sqrt(2))
"""P(x + 0.5 > 0) - P(x > 0) for a normal x of this deviation."""
