"""One batch ahead: the next batch is on the device, and answered by the teacher, before the step of this one begins.

On a GPU both run on a second CUDA stream, beside the step (``data.copy_ahead``, ``model.teacher.overlap``). Any other
device does the same in the same order, one after the other. Answers do not depend on the student: the run learns the
same to the last bit.
"""

from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from kd.clock import unclocked
from kd.data.batch import Batch
from kd.data.datamodule import DistillationDataModule
from kd.teachers.answer import Answer
from kd.teachers.base import RunTeacher

Asking = Callable[[Batch], Answer]
"""Gives the teacher's answer to a batch on the device."""


def run_ahead(
    module: LightningModule, data: DistillationDataModule, teacher: RunTeacher | None, ask: Asking
) -> None:
    """Wraps the training loader where the next batch's copy or answer is to run beside a step.

    That is where ``data.copy_ahead`` is set, or ``overlap`` of one teacher or more; else nothing changes. Each process
    calls it once, when a fit is set up.

    Args:
        module: whose hooks move a batch to the device.
        data: its ``wrap_loader`` is set; one that is set already wraps the loader first.
        teacher: of the run; None: only copies run ahead.
        ask: gives the teacher's answer to a batch on the device.
    """
    overlap = teacher is not None and any(
        member.spec.overlap for member in teacher.members.values()
    )
    wrap = data.wrap_loader
    if overlap or data.given.copy_ahead:
        data.wrap_loader = lambda loader: Ahead(
            wrap(loader) if wrap else loader, module, ask if overlap else None
        )


def taken(batch: object) -> Batch | None:
    """The batch that was made ready ahead, None for any other."""
    if isinstance(batch, dict) and "ahead" in batch:
        return cast(Batch, batch["ahead"]())
    return None


class Ahead:
    """A loader that gives batches which are on the device, each after the work on the next one has begun."""

    def __init__(self, loader: DataLoader, module: LightningModule, answer: Asking | None) -> None:
        """Wraps a loader; Lightning reads ``batch_sampler``, to set its epoch.

        Args:
            loader: gives batches on the host.
            module: whose hooks, precision and strategy move a batch to the device.
            answer: computes the teacher's answer to a batch; None: only the copy runs ahead.
        """
        self.loader = loader
        self.module = module
        self.answer = answer
        self.batch_sampler = loader.batch_sampler  # Lightning sets its epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Callable[[], Batch]]]:
        """``{"ahead": FUNCTION}``; the function gives the batch (:func:`taken` calls it). Lightning would move and
        convert the batch itself a second time.
        """
        device = self.module.trainer.strategy.root_device
        side = None
        if device.type == "cuda":
            side = torch.cuda.Stream(device)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(device))
        begun: Iterator[Any] = (self._begin(batch, side) for batch in self.loader)
        for before, _ in pairwise(chain(begun, [None])):  # which begins the next one first
            yield {"ahead": before}

    def _begin(self, batch: object, side: torch.cuda.Stream | None) -> Callable[[], Batch]:
        """Begins the work on a batch, and returns the function that gives the batch when the step needs it.

        Args:
            batch: on the host.
            side: the stream that the work runs on; the function then makes the caller's stream wait for it, not the
                host. None (no GPU): the work is done before this returns.
        """
        if side is None:
            made = self._make(batch)
            return lambda: made
        with torch.cuda.stream(side), unclocked():
            made = self._make(batch)
            done = side.record_event()

        def take() -> Batch:
            """Makes the step's stream wait for the batch, and keeps its memory until that stream has read it."""
            here = torch.cuda.current_stream(side.device)
            here.wait_event(done)
            if "answer" in made:
                answer = made["answer"]()
            else:
                answer = Answer()
            parts = [made, answer.logits, answer.features]
            apply_to_collection(
                parts, Tensor, lambda x: x.record_stream(here) if x.is_cuda else None
            )
            return made

        return take

    def _make(self, batch: object) -> Batch:
        """A batch on the device, in the run's precision; where answers are computed ahead, under "answer" a function
        that returns the teacher's.
        """
        trainer = self.module.trainer
        batch = self.module.on_before_batch_transfer(
            trainer.precision_plugin.convert_input(batch), 0
        )
        batch = cast(Batch, trainer.strategy.batch_to_device(batch))
        if self.answer is None:
            return batch
        with trainer.precision_plugin.train_step_context():
            answer = self.answer(batch)
        return {**batch, "answer": lambda: answer}
