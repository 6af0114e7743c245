"""Finds the order of a teacher's classes where it is another than the data's, for all of them or for some."""

from dataclasses import dataclass

import scipy
import torch
from torch import Tensor

from kd.proof.luck import is_clearly_more
from kd.tasks.base import ExactMetric

MOST_CLASSES = 2000
"""With more classes no order is searched: two tables of classes x classes are kept."""


class Confusions(ExactMetric):
    """How often the teacher's column ``j`` answered a picture of class ``i``, in two halves of the pictures.

    Args:
        num_classes: C.
    """

    counts: Tensor
    """``(2, C, C)``: half of the pictures, column of the teacher, class."""

    def __init__(self, num_classes: int) -> None:
        """Begins with no picture; ``counts`` ``(2, C, C)`` is added up over processes."""
        super().__init__()
        self.add_state(
            "counts",
            torch.zeros(2, num_classes, num_classes, dtype=torch.long),
            dist_reduce_fx="sum",
        )

    def update(self, columns: Tensor, target: Tensor, index: Tensor) -> None:
        """Counts a batch.

        Args:
            columns: the teacher's answers ``(N,)``, as places among its logits.
            target: class ids ``(N,)``; a picture without a label (-1) does not count.
            index: the pictures' numbers ``(N,)``; even ones are one half, odd ones the other.
        """
        index_N = index.to(target.device, non_blocking=True)
        half_N = index_N % 2
        # a count of 0 at class 0 for those without a label: a mask would wait for the device
        count_N = (target >= 0).long()
        class_N = target.clamp_min(0).long()
        self.counts.index_put_((half_N, columns, class_N), count_N, accumulate=True)

    def compute(self) -> Tensor:
        """The counts ``(2, C, C)`` of all processes."""
        return self.counts


@dataclass
class ClassOrder:
    """An order of a teacher's columns in which it is right more often."""

    classes: list[int]
    """The class of each column, matched on all pictures."""
    reached: float
    """The teacher's accuracy, in [0, 1], on one half of the pictures in the order that was matched on the other half."""


def better_order(counts: Tensor) -> ClassOrder | None:
    """The order of the teacher's columns in which it is right clearly more often; None where no such order was found.

    Columns are matched with classes on one half of the pictures and judged on the other by a sign test
    (:mod:`kd.proof.luck`): of the pictures that only one of the two orders, old and new, gets right, the new one must have
    clearly more than half. Its accuracy must be clearly above that of guessing the largest class as well.

    Args:
        counts: of :class:`Confusions`, ``(2, C, C)``.

    >>> swapped = torch.tensor([[0, 20], [20, 0]])
    >>> better_order(torch.stack([swapped, swapped]))
    ClassOrder(classes=[1, 0], reached=1.0)
    >>> better_order(torch.full((2, 3, 3), 5)) is None
    True
    """
    fitted, judged = counts.cpu()
    order = _matched(fitted)
    columns = torch.arange(len(order))
    moves = order != columns
    right_now = judged.diagonal()
    right_then = judged[columns, order]
    new_alone = int(right_then[moves].sum())
    old_alone = int(right_now[moves].sum())
    if not is_clearly_more(new_alone, new_alone + old_alone, 0.5):
        return None
    right = int(right_then.sum())
    pictures = int(judged.sum())
    largest_class = float(judged.sum(0).max()) / pictures
    if not is_clearly_more(right, pictures, largest_class):
        return None
    return ClassOrder(_matched(fitted + judged).tolist(), right / pictures)


def _matched(counts: Tensor) -> Tensor:
    """The class of each column ``(C,)``: the assignment of columns to classes that most pictures follow.

    Of equally good ones the one that changes least: a column without a picture keeps its place where that is free.

    Args:
        counts: pictures by the teacher's column and their class, ``(C, C)``.
    """
    columns = len(counts)
    stays = torch.eye(columns, dtype=counts.dtype)
    of_picture = columns + 1  # more than all that stay together
    gains = of_picture * counts + stays
    _, order = scipy.optimize.linear_sum_assignment(gains, maximize=True)
    return torch.from_numpy(order)
