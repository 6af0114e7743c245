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


def windows(size: int, total: float, taken: int) -> list[list[int]]:
    loader: Any = Batches()
    return [
        [int(target) for target in batch["window"]]
        for batch in WindowedLoader(loader, size, lambda: (taken, total))
    ]


@pytest.mark.parametrize(
    ("size", "total", "taken", "expected"),
    [
        (4, 6, 0, [[0, 1, 2, 3]] * 4 + [[4, 5]] * 2),
        (4, float("inf"), 0, [[0, 1, 2, 3]] * 4 + [[4, 5]] * 2),
        # the trainer takes five alone: the sixth counts in no window that is trained on
        (2, 5, 0, [[0, 1]] * 2 + [[2, 3]] * 2 + [[4], [5]]),
        # resumed with larger steps: the trainer steps after the eighth and the twelfth batch of the epoch
        (4, 12, 6, [[0, 1]] * 2 + [[2, 3, 4, 5]] * 4),
    ],
)
def test_a_batch_knows_its_window(
    size: int, total: float, taken: int, expected: list[list[int]]
) -> None:
    assert windows(size, total, taken) == expected


def test_no_more_than_a_window_is_read_ahead() -> None:
    loader: Any = Batches()
    next(iter(WindowedLoader(loader, 2, lambda: (0, 6))))
    assert loader.read == 2


def test_nothing_is_collected_beyond_the_trainers_last_batch() -> None:
    """Lightning asks for one batch more than it takes."""
    loader: Any = Batches()
    batches = iter(WindowedLoader(loader, 2, lambda: (0, 2)))
    for _ in range(3):
        next(batches)
    assert loader.read == 3
