"""The pictures that a run's fits in closed form read: its student's start, and its losses' statistics."""

from collections.abc import Callable
from functools import cache
from typing import Any

from pytorch_lightning import Trainer
from torch import Tensor

from kd.clock import part_of_the_start
from kd.data.datamodule import DistillationDataModule, SampledPictures

MOST_IN_A_TRIAL = 256
"""Pictures at most in a trial run: it is to show that all parts work, in seconds."""
STEPS_OF_A_TRIAL = 100
"""A run of so many steps at most is a trial."""


def sample_for_fits(trainer: Trainer, data: DistillationDataModule) -> Callable[[int], Tensor]:
    """A function that gives the fits of a run's start training pictures.

    It takes how many (more than there are: all), and returns them as uint8 ``(N, 3, H, W)`` on the CPU, as validation
    shows pictures; the same ones for the same number, in every process: they are decoded once and stay in memory as long
    as the function. Each process that calls it decodes them itself.

    Args:
        trainer: of the run; a trial gets fewer (:func:`limited`).
        data: its pictures.
    """

    @cache
    @part_of_the_start("pictures for the fits")
    def sample(number: int) -> Tensor:
        """``number`` training pictures, uint8 ``(N, 3, H, W)``, or as many as there are, or as a trial gets."""
        number = min(number, len(data.split("train").targets))
        return data.sample_pictures(limited(trainer, number), "pictures for the fits")

    return sample


def pairs_for_fits(
    trainer: Trainer, data: DistillationDataModule
) -> Callable[[int, bool], SampledPictures]:
    """A function as of :func:`sample_for_fits`, but its pictures come with their targets, and are decoded one after another,
    anew in each pass over them.

    Where its second argument is true it gives only pictures that have a class id, labels or numbers.
    """

    def sample(number: int, labelled: bool) -> SampledPictures:
        """``number`` training pictures, or as many as there are, or as a trial gets."""
        return data.sample(limited(trainer, number), labelled)

    return sample


def limited(trainer: Trainer, number: int) -> int:
    """How many of ``number`` pictures a fit reads: in a trial run :data:`MOST_IN_A_TRIAL` at most, which the first process
    prints.
    """
    reason = why_trial(trainer)
    if not reason or number <= MOST_IN_A_TRIAL:
        return number
    if trainer.is_global_zero:
        print(
            f"fits read {MOST_IN_A_TRIAL} pictures, not {number}: this is a trial run ({reason})",
            flush=True,
        )
    return MOST_IN_A_TRIAL


def why_trial(trainer: Trainer) -> str:
    """The setting that makes a run a trial, as ``trainer.KEY=VALUE`` for a message; "" for a run that trains.

    A trial has ``fast_dev_run``, a limit on the batches of its epochs (1 is one batch, 1.0 all of them), or
    :data:`STEPS_OF_A_TRIAL` steps at most.
    """
    fast: Any = getattr(trainer, "fast_dev_run", False)
    if fast:
        return f"trainer.fast_dev_run={fast}"
    if trainer.limit_train_batches != 1.0 or isinstance(trainer.limit_train_batches, int):
        return f"trainer.limit_train_batches={trainer.limit_train_batches}"
    if 0 <= trainer.max_steps <= STEPS_OF_A_TRIAL:
        return f"trainer.max_steps={trainer.max_steps}"
    return ""
