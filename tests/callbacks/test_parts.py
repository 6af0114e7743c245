"""Small parts of the callbacks, without a run."""

from types import SimpleNamespace

import pytest
import torch

from kd.callbacks.class_order import SIGMAS, ClassOrder, Confusions, better_order
from kd.callbacks.hooks import SYNC_EVERY, after_step, ranks_meet


def trainer(accumulate: int = 1, world: int = 1, last: bool = False) -> SimpleNamespace:
    return SimpleNamespace(accumulate_grad_batches=accumulate, world_size=world, is_last_batch=last)


@pytest.mark.parametrize(("accumulate", "last", "expected"), [
    (1, False, [True] * 4), (2, False, [False, True, False, True]), (4, True, [True] * 4),
])  # fmt: skip
def test_a_step_ends_with_its_last_batch(accumulate: int, last: bool, expected: list[bool]) -> None:
    assert [after_step(trainer(accumulate, last=last), i) for i in range(4)] == expected  # type: ignore[arg-type]


def test_several_ranks_meet_only_every_few_batches() -> None:
    assert [i for i in range(30) if ranks_meet(trainer(world=2), i)] == [
        SYNC_EVERY - 1,
        2 * SYNC_EVERY - 1,
        29,
    ]  # type: ignore[arg-type]
    assert all(ranks_meet(trainer(), i) for i in range(30))  # type: ignore[arg-type]
    assert [i for i in range(24) if ranks_meet(trainer(4, world=2), i)] == [11, 23]  # type: ignore[arg-type]
    assert ranks_meet(trainer(world=2, last=True), 3)  # type: ignore[arg-type]


def test_a_permuted_teacher_is_found_and_a_poor_one_is_not_taken_for_one() -> None:
    order = torch.tensor([2, 0, 3, 1])
    counts = Confusions(4)
    target = torch.arange(4).repeat_interleave(10)
    counts.update(torch.argsort(order)[target], target, torch.arange(40))
    assert better_order(counts.compute()) == ClassOrder(order.tolist(), 1.0)
    chance = torch.full((2, 4, 4), 3)
    assert better_order(chance) is None
    assert SIGMAS > 3, "a wrong alarm is rare"
