"""Epochs in optimizer steps: an epoch's last step takes the batches that are left."""

import math

import pytest

from kd.optim import Pace


@pytest.mark.parametrize(
    ("total", "per_epoch", "max_epochs", "epochs"),
    [
        (10, 2, None, 5), (9, 2, -1, 5), (100, 2, 3, 3), (4, 2, 1000, 2), (math.inf, 2, None, 1),
        (7, math.inf, None, 1), (math.inf, math.inf, 4, 4),
    ],
)  # fmt: skip
def test_the_bound_that_comes_first_ends_the_run(
    total: float, per_epoch: float, max_epochs: int | None, epochs: int
) -> None:
    assert Pace(total, per_epoch).epochs(max_epochs) == epochs
