"""Batches with the targets of their accumulation window."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kd.data.windows import WindowedLoader


class Batches:
    """A loader of six batches of one target each; notes how many were read."""

    batch_sampler = SimpleNamespace()

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        for number in range(6):
            self.read += 1
            yield {"target": torch.tensor([number])}


def windows(size: int, left: float) -> list[list[int]]:
    loader: Any = Batches()
    return [
        [int(target) for target in batch["window"]]
        for batch in WindowedLoader(loader, size, lambda: left)
    ]


@pytest.mark.parametrize(
    ("size", "left", "expected"),
    [
        (2, 6, [[0, 1]] * 2 + [[2, 3]] * 2 + [[4, 5]] * 2),
        (4, 6, [[0, 1, 2, 3]] * 4 + [[4, 5]] * 2),
        (4, float("inf"), [[0, 1, 2, 3]] * 4 + [[4, 5]] * 2),
        # the trainer takes five alone: the sixth counts in no window that is trained on
        (2, 5, [[0, 1]] * 2 + [[2, 3]] * 2 + [[4], [5]]),
    ],
)
def test_a_batch_knows_its_window(size: int, left: float, expected: list[list[int]]) -> None:
    assert windows(size, left) == expected


def test_no_more_than_a_window_is_read_ahead() -> None:
    loader: Any = Batches()
    next(iter(WindowedLoader(loader, 2, lambda: 6)))
    assert loader.read == 2


def test_nothing_is_collected_beyond_the_trainers_last_batch() -> None:
    """Lightning asks for one batch more than it takes."""
    loader: Any = Batches()
    batches = iter(WindowedLoader(loader, 2, lambda: 2))
    for _ in range(3):
        next(batches)
    assert loader.read == 3
