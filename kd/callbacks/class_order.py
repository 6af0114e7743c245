"""Finds the order of a teacher's classes where it is another than the data's, for all of them or for some."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kd.proof.luck import is_clearly_more
from kd.tasks.base import ExactMetric

CYCLE_SIGMAS = 2.0
"""Standard errors that each group of classes which change places must gain, and by which an order that no rule explains must
be more accurate than a rule's.
"""

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
        half_N = index.to(target.device, non_blocking=True) % 2
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
    """The class of each column."""
    reached: float
    """The teacher's accuracy in this order, in [0, 1]: on all pictures for a rule's; else on the half of them that the
    order was not matched on (``classes`` is then matched on all).
    """
    rule: str = ""
    """The way of sorting names that gives this order; "" where none does."""


def number_or_text(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts ``a2`` before ``a10``: digits in a row count as one number, and before text.

    >>> sorted(["a10", "a2", "b"], key=number_or_text)
    ['a2', 'a10', 'b']
    """
    key = []
    for part in re.split(r"(\d+)", name):
        if part.isdecimal():
            key.append((0, int(part), ""))
        elif part:
            key.append((1, 0, part))
    return key


def number_or_folded_text(name: str) -> list[tuple[int, int, str]]:
    """As :func:`number_or_text`, without regard to case."""
    return number_or_text(name.casefold())


RULES: dict[str, Callable[[str], Any]] = {
    "names sorted, capitals first": str,
    "names sorted without regard to case": str.casefold,
    "numbers sorted as numbers": number_or_text,
    "numbers sorted as numbers, without regard to case": number_or_folded_text,
}
"""The keys by which tools sort the names of classes."""


def better_order(counts: Tensor, names: Sequence[str] = ()) -> ClassOrder | None:
    """The order of the teacher's columns in which it is right clearly more often; None where no such order was found.

    Two ways are tried: the orders that tools give names by sorting them; and columns matched with classes on one half of
    the pictures and judged on the other, where each group of classes that change places must gain. Where both find an
    order the sorted one is taken, unless the other's accuracy is more than :data:`CYCLE_SIGMAS` standard errors higher.

    An order is clearly better by a sign test (:mod:`kd.proof.luck`): of the pictures that only one of two orders gets
    right, the new one has clearly more than half. The accuracy must be clearly above that of guessing the largest class
    as well.

    Args:
        counts: of :class:`Confusions`, ``(2, C, C)``.
        names: of the data's classes, by class id; () tries no sorting.

    >>> swapped = torch.tensor([[0, 20], [20, 0]])
    >>> better_order(torch.stack([swapped, swapped]))
    ClassOrder(classes=[1, 0], reached=1.0, rule='')
    >>> better_order(torch.full((2, 3, 3), 5)) is None
    True
    """
    fitted, judged = counts.cpu()
    both = fitted + judged

    # the best of the orders that sorting gives
    sorted_order: ClassOrder | None = None
    for rule, order in sorted_orders(names).items():
        accuracy = _accuracy(both, order)
        is_best = sorted_order is None or accuracy > sorted_order.reached
        if is_best and _is_clear(both, order):
            sorted_order = ClassOrder(order.tolist(), accuracy, rule)

    # an order matched on one half of the pictures, judged on the other
    matched = _matched(fitted)
    if not _is_clear(judged, matched):
        return sorted_order
    reached = _accuracy(judged, matched)

    # a rule that explains as much is the likelier reason
    error = (reached * (1 - reached) / max(1, int(judged.sum()))) ** 0.5
    if sorted_order is not None and sorted_order.reached >= reached - CYCLE_SIGMAS * error:
        return sorted_order
    return ClassOrder(_matched(both).tolist(), reached)


def sorted_orders(names: Sequence[str]) -> dict[str, Tensor]:
    """The class of each column ``(C,)`` by rule, for the rules of :data:`RULES` that change the order.

    Args:
        names: of the data's classes, by class id; where two are equal no rule is tried.

    >>> sorted_orders(["a10", "a2"])["numbers sorted as numbers"]
    tensor([1, 0])
    """
    if len(set(names)) < len(names):
        return {}
    as_it_is = list(range(len(names)))
    orders: dict[str, Tensor] = {}
    for rule, key in RULES.items():
        keys = [key(name) for name in names]
        order = sorted(as_it_is, key=keys.__getitem__)
        if order != as_it_is:
            orders[rule] = torch.tensor(order)
    return orders


def _accuracy(counts: Tensor, order: Tensor) -> float:
    """In [0, 1], of a teacher whose columns mean the classes ``order`` ``(C,)``, from its counts ``(C, C)``: pictures by
    column and class.
    """
    right = counts.gather(1, order[:, None]).sum()
    return float(right) / max(1, int(counts.sum()))


def _is_clear(counts: Tensor, order: Tensor) -> bool:
    """Whether an order of classes is clearly better than the data's (a sign test), and than guessing (a binomial one).

    Args:
        counts: pictures by the teacher's column and their class, ``(C, C)``.
        order: the data's class of each of the teacher's columns, ``(C,)``.
    """
    all_columns = torch.arange(len(order))
    gain, changed = _gain(counts, order, all_columns)
    new_alone = (changed + gain) // 2
    if not is_clearly_more(new_alone, changed, 0.5):
        return False

    # Guessing: always the most frequent class.
    pictures = int(counts.sum())
    of_class = counts.sum(0)
    largest_class = float(of_class.max()) / pictures
    right = round(_accuracy(counts, order) * pictures)
    return is_clearly_more(right, pictures, largest_class)


def _gain(counts: Tensor, order: Tensor, columns: Tensor) -> tuple[int, int]:
    """The two numbers of a paired test, ``b - c`` and ``b + c``, for some of the columns.

    ``b`` pictures are right in the new order alone, ``c`` in the data's alone.

    Args:
        counts: ``(C, C)``: pictures by the teacher's column and their class.
        order: the class of each column in the new order, ``(C,)``.
        columns: numbers of some columns.
    """
    moves = order[columns] != columns
    moved = columns[moves]
    classes = order[moved]
    new_counts = counts[moved, classes]
    old_counts = counts[moved, moved]
    new_alone = int(new_counts.sum())
    old_alone = int(old_counts.sum())
    return new_alone - old_alone, new_alone + old_alone


def _matched(counts: Tensor) -> Tensor:
    """The class of each column ``(C,)``, where groups of columns that do not gain clearly stay in their places.

    ``counts``: pictures by the teacher's column and their class, ``(C, C)``.
    """
    # pairs of column and class, the most frequent first; of equally frequent ones those that change nothing first
    columns, classes = counts.nonzero(as_tuple=True)
    frequency = 2 * counts[columns, classes] + (columns == classes)
    ranking = frequency.argsort(descending=True, stable=True)

    # each column gets the first class that is free
    class_of: dict[int, int] = {}
    every_column = range(len(counts))
    free = set(every_column)
    ranked_columns = columns[ranking].tolist()
    ranked_classes = classes[ranking].tolist()
    for column, label in zip(ranked_columns, ranked_classes, strict=True):
        if column not in class_of and label in free:
            class_of[column] = label
            free.remove(label)

    # columns that answered no free class keep their own where they can
    for column in every_column:
        if column not in class_of:
            label = column if column in free else min(free)
            class_of[column] = label
            free.remove(label)

    # groups that change places must gain, each by itself
    order = torch.tensor([class_of[column] for column in every_column])
    for cycle in _cycles(class_of):
        numbers = torch.tensor(cycle)
        gain, changed = _gain(counts, order, numbers)
        deviation = changed**0.5
        if gain <= CYCLE_SIGMAS * deviation:
            order[numbers] = numbers
    return order


def _cycles(class_of: dict[int, int]) -> list[list[int]]:
    """Columns that change places among themselves: ``{0: 1, 1: 0, 2: 2}`` -> ``[[0, 1], [2]]``.

    Args:
        class_of: the data's class by the teacher's column.
    """
    cycles: list[list[int]] = []
    seen: set[int] = set()
    for first in class_of:
        if first in seen:
            continue
        cycle = []
        column = first
        while column not in seen:
            seen.add(column)
            cycle.append(column)
            column = class_of[column]
        cycles.append(cycle)
    return cycles
