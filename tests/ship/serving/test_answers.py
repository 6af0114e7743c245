"""Numbers as a client reads them."""

import numpy as np
import pytest

from kd.ship.serving.answers import largest


@pytest.mark.parametrize("count", [1, 2, 5, 50, 51, 1000])
@pytest.mark.parametrize("kinds", [1, 3, 10_000])
def test_the_largest_are_those_of_a_whole_sort_whose_equal_ones_keep_their_order(
    count: int, kinds: int
) -> None:
    for seed in range(20):
        values = np.random.default_rng(seed).integers(kinds, size=50).astype(np.float32)
        assert (
            largest(values, count).tolist() == np.argsort(-values, kind="stable")[:count].tolist()
        )
