"""Finds the order of a teacher's classes where it is another than the data's, for all of them or for some."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kd.tasks.base import ExactMetric

SIGMAS = (
    3.5  # standard errors that another order must gain: one wrong alarm in some thousand teachers
)
CYCLE_SIGMAS = 2.0  # that each group of classes which change places must gain to be believed
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
        """Counts a batch.

        Args:
            columns: the teacher's answers ``(N,)``, as places among its logits.
            target: class ids ``(N,)``.
            index: the pictures' numbers ``(N,)``; even ones are one half, odd ones the other.
        """
        ones = torch.ones_like(target, dtype=torch.long)
        self.counts.index_put_(
            (index.to(target.device, non_blocking=True) % 2, columns, target.long()),
            ones,
            accumulate=True,
        )

    def compute(self) -> Tensor:
        """The counts ``(2, C, C)`` of all processes."""
        return self.counts


@dataclass
class ClassOrder:
    """An order of a teacher's columns in which it is right more often."""

    classes: list[int]  # the class of each column
    reached: float  # its accuracy in this order
    rule: str = ""  # the way of sorting names that gives this order; empty where none does


def _number_or_text(name: str) -> list[tuple[int, int, str]]:
    """Sorts ``a2`` before ``a10``: runs of digits count as numbers."""
    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


RULES: dict[str, Callable[[str], object]] = {
    "names sorted, capitals first": lambda name: name,
    "names sorted without regard to case": str.casefold,
    "numbers sorted as numbers": _number_or_text,
    "numbers sorted as numbers, without regard to case": lambda name: _number_or_text(
        name.casefold()
    ),
}


def better_order(counts: Tensor, names: Sequence[str] = ()) -> ClassOrder | None:
    """The order of the teacher's columns in which it is right clearly more often; None where there is none.

    First the orders that tools give names by sorting them are tried. Else columns are matched with classes on one half
    of the pictures and judged on the other; of the groups of classes that change places each must gain.

    The gain is that of a paired test: of the pictures that only one of two orders gets right, ``b`` and ``c``, the new
    one has ``(b - c) / sqrt(b + c) > SIGMAS``. The accuracy must be above that of guessing the largest class as well.

    Args:
        counts: of :class:`Confusions`, ``(2, C, C)``.
        names: of the data's classes, by class id.

    >>> swapped = torch.tensor([[0, 20], [20, 0]])
    >>> better_order(torch.stack([swapped, swapped]))
    ClassOrder(classes=[1, 0], reached=1.0, rule='')
    >>> better_order(torch.full((2, 3, 3), 5)) is None
    True
    """
    counts = counts.cpu()
    fitted, judged = counts
    both = fitted + judged
    by_rule = [
        ClassOrder(order.tolist(), _accuracy(both, order), rule)
        for rule, order in _sorted_orders(names).items()
        if _is_clear(both, order)
    ]
    best = max(by_rule, key=lambda order: order.reached, default=None)
    order = _matched(fitted)
    if not _is_clear(judged, order):
        return best
    reached = _accuracy(judged, order)
    error = (reached * (1 - reached) / max(1, int(judged.sum()))) ** 0.5
    if best is not None and best.reached >= reached - CYCLE_SIGMAS * error:
        return best
    return ClassOrder(_matched(both).tolist(), reached)


def _sorted_orders(names: Sequence[str]) -> dict[str, Tensor]:
    """The class of each column ``(C,)`` where a tool sorts names by its own rule, if that changes it."""
    orders: dict[str, Tensor] = {}
    for rule, key in RULES.items():
        order = sorted(range(len(names)), key=lambda i: key(names[i]))  # type: ignore[arg-type, return-value]
        if order != list(range(len(names))) and len(set(names)) == len(names):
            orders[rule] = torch.tensor(order)
    return orders


def _accuracy(counts: Tensor, order: Tensor) -> float:
    """Of a teacher whose columns mean these classes."""
    right = counts.gather(1, order[:, None]).sum()
    return float(right) / max(1, int(counts.sum()))


def _is_clear(counts: Tensor, order: Tensor) -> bool:
    """Whether pictures of these counts ``(C, C)`` show that an order is better than the data's, and than guessing."""
    total = max(1, int(counts.sum()))
    gain, moved = _gain(counts, order, torch.arange(len(order)))
    share = float(counts.sum(0).max()) / total  # of the largest class
    guessing = share + SIGMAS * (share * (1 - share) / total) ** 0.5
    return gain > SIGMAS * max(1, moved) ** 0.5 and _accuracy(counts, order) > guessing


def _gain(counts: Tensor, order: Tensor, columns: Tensor) -> tuple[int, int]:
    """By how many pictures these columns are right more often in an order, and how many speak for one or the other."""
    columns = columns[order[columns] != columns]
    after, before = counts[columns, order[columns]], counts[columns, columns]
    return int((after - before).sum()), int((after + before).sum())


def _matched(counts: Tensor) -> Tensor:
    """The class of each column ``(C,)``, where groups of columns that do not gain clearly stay in their places.

    The most frequent pairs of column and class first, each column and class once; of equally frequent pairs the one
    that leaves the order as it is.
    """
    columns, classes = counts.nonzero(as_tuple=True)
    frequency = 2 * counts[columns, classes] + (columns == classes)
    ranking = frequency.argsort(descending=True, stable=True)
    class_of: dict[int, int] = {}
    taken: set[int] = set()
    for column, label in zip(columns[ranking].tolist(), classes[ranking].tolist(), strict=True):
        if column not in class_of and label not in taken:
            class_of[column] = label
            taken.add(label)
    left = [label for label in range(len(counts)) if label not in taken]
    for column in [column for column in range(len(counts)) if column not in class_of]:
        label = column if column in left else left[0]
        class_of[column] = label
        left.remove(label)
    order = torch.tensor([class_of[column] for column in range(len(counts))])
    for cycle in _cycles(class_of):
        gain, moved = _gain(counts, order, torch.tensor(cycle))
        if gain <= CYCLE_SIGMAS * moved**0.5:
            order[cycle] = torch.tensor(cycle)
    return order


def _cycles(class_of: dict[int, int]) -> list[list[int]]:
    """Columns that change places among themselves: ``{0: 1, 1: 0, 2: 2}`` -> ``[[0, 1], [2]]``."""
    cycles, seen = [], set[int]()
    for first in class_of:
        cycle, column = [], first
        while column not in seen:
            seen.add(column)
            cycle.append(column)
            column = class_of[column]
        if cycle:
            cycles.append(cycle)
    return cycles
