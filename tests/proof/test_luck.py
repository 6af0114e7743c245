"""What few pictures can show."""

import math

import pytest
from scipy.stats import binom

from kd.proof.luck import (
    CHANCE_SIGMAS,
    ERROR,
    FEWEST_PICTURES,
    SIGMAS,
    at_least,
    is_clearly_more,
    p_value,
    shows_a_bad_teacher,
)


def tail(k: int, n: int, p: float) -> float:
    """``P(X >= k)`` by its definition."""
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))


@pytest.mark.parametrize("pictures", [1, 2, 4, 8, 20, 60])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.25, 0.5, 0.9])
def test_a_verdict_has_a_small_chance_of_being_wrong(pictures: int, share: float) -> None:
    halfway = (1 + share) / 2
    for right in range(pictures + 1):
        at_most = 1 - tail(right + 1, pictures, halfway)
        assert shows_a_bad_teacher(right, pictures, share) == (at_most < ERROR)
        assert is_clearly_more(right, pictures, share) == (
            tail(right, pictures, share) < p_value(SIGMAS)
        )


def test_the_tail_of_many_pictures_is_that_of_arrays() -> None:
    for hits, trials, share in (
        (40, 50, 0.5),
        (5_100, 10_000, 0.5),
        (130, 50_000, 0.002),
        (3, 3, 1),
    ):
        expected = float(binom.sf(hits - 1, trials, share))
        assert at_least(hits, trials, share) == pytest.approx(expected, rel=1e-7)
    assert at_least(1, 3, 0) == 0


def test_a_fewest_of_coins_is_as_rare_as_a_chance() -> None:
    assert 0.5**FEWEST_PICTURES < p_value(CHANCE_SIGMAS) < 0.5 ** (FEWEST_PICTURES - 1)
