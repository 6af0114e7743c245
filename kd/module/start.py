"""A run's first weights: computed by the first process, and sent to all others to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd.distill.settle import settle_losses
from kd.errors import RunError, UserError, first_line
from kd.processes import from_first, tensors_from_first

if TYPE_CHECKING:
    from kd.module.distillation import DistillationModule

Sample = Callable[[int], Tensor]
"""Gives so many training pictures, uint8 ``(N, 3, H, W)``."""


def begin_once(module: DistillationModule, sample: Sample | None) -> list[str]:
    """Gives the students their first weights.

    Args:
        module: in a trainer, before it is placed.
        sample: training pictures; None: there are none.

    Returns:
        Messages for the user, the same in every process.

    Raises:
        UserError, RunError: see :func:`_by_the_first`.
    """

    messages = _by_the_first(module, lambda: module.begin(sample, module.data))
    module.begun = True
    return messages


def settle_once(module: DistillationModule, sample: Sample) -> None:
    """Settles the students' losses (:func:`kd.distill.settle.settle_losses`), the teacher in its place.

    A teacher whose weights the processes share answers only where all ask: then each computes.

    Args:
        module: in a trainer.
        sample: training pictures.
    """
    students, teacher = module.students, module.teacher
    assert teacher is not None
    if teacher.is_shared_out:
        for student in students.named().values():
            student.sample_taps = None  # the first process's alone: it would not ask
        settle_losses(students, teacher, sample, partial(from_first, module.trainer.strategy))
        return

    def settle() -> list[str]:
        settle_losses(students, teacher, sample, lambda value: value)
        return []

    _by_the_first(module, settle)


def _by_the_first(module: DistillationModule, compute: Callable[[], list[str]]) -> list[str]:
    """Has the first process compute tensors of the students, which the others receive to the bit.

    The fits of a start take minutes of all cores: done in each process they would share the cores of a machine. The
    state of torch's generator travels too, so that all processes draw on as if each had computed.

    Args:
        module: in a trainer.
        compute: changes tensors of the students; returns messages.

    Returns:
        What ``compute`` returns, in every process.

    Raises:
        UserError: ``compute`` has raised it; in every process.
        RunError: ``compute`` has failed otherwise in the first process; in the others.
    """
    strategy = module.trainer.strategy
    messages: list[str] = []
    if module.trainer.is_global_zero:
        try:
            messages = compute()
        except Exception as error:
            from_first(strategy, (isinstance(error, UserError), first_line(error)))
            raise
    none: tuple[bool, str] | None = None
    failure = from_first(strategy, none)
    if failure is not None:
        is_users_mistake, reason = failure
        raise UserError(reason) if is_users_mistake else RunError(f"rank 0: {reason}")
    generator = torch.get_rng_state()
    students = module.students
    tensors_from_first(strategy, [*students.parameters(), *students.buffers(), generator])
    torch.set_rng_state(generator)
    return from_first(strategy, messages)
