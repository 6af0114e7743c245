"""A run's first weights: computed by the first process, and sent to all others to the bit."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import Strategy
from torch import Tensor

from kd.distill.settle import settle_losses
from kd.distill.student import Student
from kd.processes import by_first, tensors_from_first
from kd.teachers import RunTeacher

T = TypeVar("T")


def settle_once(
    trainer: Trainer, student: Student, teacher: RunTeacher, sample: Callable[[int], Tensor]
) -> None:
    """Settles the student's losses (:func:`kd.distill.settle.settle_losses`) in the first process, for all.

    To settle is to set, from the sample, the statistics by which feature losses standardise the teacher's features and, for
    a student with trained weights, to fit the losses' projections. Every process must call it.

    A teacher in shards (``is_shared_out``) answers only where all processes run it together: then each process settles
    the losses, and takes over the first one's tensors afterwards.

    Args:
        trainer: of the run.
        student: of the run.
        teacher: of the run, on its device.
        sample: takes a number N, and returns as many training pictures, uint8 ``(N, 3, H, W)``; the same ones in every
            process.

    Raises:
        UserError, RunError: as of :func:`by_the_first`.
    """
    settle = partial(settle_losses, student, teacher, sample)
    if not teacher.is_shared_out:
        by_the_first(trainer, student, settle)
        return
    settle()
    _send(trainer.strategy, student)


def by_the_first(trainer: Trainer, student: Student, compute: Callable[[], T]) -> T:
    """Has the first process compute tensors of the student, which the others receive to the bit.

    Every process must call it; they wait here for the first. The fits of a start take minutes of all cores: done in each
    process they would share the cores of a machine. The state of torch's generator travels too, so that all processes
    draw on as if each had computed.

    Args:
        trainer: of the run.
        student: before a strategy shards it.
        compute: called in the first process alone, so it must hold no collective. Changes tensors of the student in
            place, not their number or shapes; returns messages.

    Returns:
        What ``compute`` returns, in every process.

    Raises:
        UserError: as :func:`kd.processes.by_first`; likewise a RunError.
    """
    messages = by_first(trainer.strategy, compute)
    _send(trainer.strategy, student)
    return messages


def _send(strategy: Strategy, student: Student) -> None:
    """Gives all processes the first one's tensors of the student, and its state of torch's generator."""
    generator = torch.get_rng_state()
    tensors_from_first(strategy, [*student.parameters(), *student.buffers(), generator])
    torch.set_rng_state(generator)
