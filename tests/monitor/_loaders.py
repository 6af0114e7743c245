"""A loader of a training that is not kd's."""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

STEPS = 24  # a verdict needs 20 after the first
SIDE = 32
BATCH = 2


class OwnLoader:
    """A loader of the user's own, which says neither how large its batches are nor how it makes them.

    Args:
        wait_s: seconds that a batch takes, as from a slow store.
    """

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(STEPS):
            time.sleep(self.wait_s)
            yield torch.rand(BATCH, 3, SIDE, SIDE), torch.randint(0, 4, (BATCH,))
