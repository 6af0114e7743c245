"""Finds the order of a teacher's classes where that is all that is wrong with it."""

import torch
from torch import Tensor

from kd.tasks.base import ExactMetric

SIGMAS = 3.5  # above what guessing the largest class reaches: one wrong alarm in some thousand weak teachers
MOST_CLASSES = 2000  # two tables of classes x classes are kept


class Confusions(ExactMetric):
    """How often the teacher's column ``j`` answered a picture of class ``i``, in two halves of the pictures.

    Args:
        num_classes: C.
    """

    counts: Tensor
    """``(2, C, C)``: half of the pictures, column of the teacher, class."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.add_state(
            "counts",
            torch.zeros(2, num_classes, num_classes, dtype=torch.long),
            dist_reduce_fx="sum",
        )

    def update(self, columns: Tensor, target: Tensor, index: Tensor) -> None:
        """Adds a batch: answers, class ids and sample indices, each ``(N,)``."""
        ones = torch.ones_like(target, dtype=torch.long)
        self.counts.index_put_(
            (index.to(target.device, non_blocking=True) % 2, columns, target.long()),
            ones,
            accumulate=True,
        )

    def compute(self) -> Tensor:
        """The counts, ``(2, C, C)``."""
        return self.counts


def found_order(counts: Tensor) -> tuple[list[int], float] | None:
    """The class of each of the teacher's columns and its accuracy, or None where that is near guessing.

    Columns are matched with classes on one half of the pictures and judged on the other.

    >>> swapped = torch.tensor([[0, 20], [20, 0]])
    >>> found_order(torch.stack([swapped, swapped]))
    ([1, 0], 1.0)
    >>> found_order(torch.full((2, 3, 3), 5)) is None
    True
    """
    fitted, judged = counts.cpu()
    total = max(1, int(judged.sum()))
    share = float(judged.sum(0).max()) / total
    reached = float(judged[torch.arange(len(judged)), _matched(fitted)].sum()) / total
    if reached <= share + SIGMAS * (share * (1 - share) / total) ** 0.5:
        return None
    return _matched(fitted + judged).tolist(), reached


def _matched(counts: Tensor) -> Tensor:
    """The class of each column, (C,): the most frequent pairs first, each column and class once."""
    left, match = counts.clone(), torch.zeros(len(counts), dtype=torch.long)
    for _ in range(len(counts)):
        column, label = divmod(int(left.argmax()), len(counts))
        match[column] = label
        left[column], left[:, label] = -1, -1
    return match
