"""Stops the run when the loss is NaN or infinite, before a bad checkpoint is written."""

import math
from typing import Any, NamedTuple

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor

from kd.callbacks.context import RunContext, output_of
from kd.callbacks.hooks import after_step
from kd.callbacks.host_copies import HostCopies
from kd.data.batch import Batch
from kd.errors import RunError
from kd.models.sharding import own

RISEN = 3.0  # a loss of more than so many times the first one: the training had diverged before
SHOWN = 16  # numbers of pictures that the message names at most


class _Batch(NamedTuple):
    """A batch whose loss is on its way to the host."""

    number: int
    """From 0, over the whole run."""
    step: int
    """Number of its optimizer step, from 0, as in ``metrics.csv``."""
    pictures: Tensor
    """Numbers of its pictures, ``(N,)``."""


class Finite(Callback):
    """Stops at a NaN or infinite loss, names step, rate and batch, and keeps such weights out of ``last.ckpt``.

    Each process checks the losses of its own batches, so one may stop alone; the others then fail in their next collective.

    Args:
        rate: the learning rate, as the message names it (``optim.lr=0.001``); a rate that is too high is the usual
            reason.
    """

    def __init__(self, rate: str = "optim.lr") -> None:
        """No loss is known yet; ``rate`` as of the class."""
        self._rate = rate
        self._first_loss: float | None = None  # of this process, since it began or resumed
        self._before = 0.0  # the loss of the batch before
        self._losses: HostCopies[_Batch] = HostCopies()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Checks the losses that have arrived on the host, without a wait, and begins to copy this one, for a later call.

        Raises:
            RunError: a loss is NaN or infinite.
        """
        self._look(trainer, wait=False)
        step = trainer.global_step
        if after_step(trainer, batch_idx):
            step -= 1  # it counts the batch's own step already
        of_batch = _Batch(trainer.fit_loop.epoch_loop.total_batch_idx, step, batch["index"])
        self._losses.add(of_batch, output_of(outputs)["terms"]["loss"])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the epoch's last losses and checks them.

        Raises:
            RunError: a loss is NaN or infinite.
        """
        self._look(trainer, wait=True)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps NaN and infinite weights out of the file, which is not written then: the one before stays the last good one.

        Lightning calls it in every process before it writes a whole state, such as ``last.ckpt``; a checkpoint of weights
        alone, as that of the best epoch is, gets no such check. Of a model in shards each process reads its own, so one
        may raise alone. Frozen weights, moving averages and statistics of norms are not read.

        Raises:
            RunError: a loss so far, or a trained weight, is NaN or infinite.
        """
        run = RunContext.of(trainer)
        self._look(trainer, wait=True)
        trained = [own(p).detach() for p in run.module.parameters() if p.requires_grad]
        largest = [p.abs().max() for p in trained if p.numel()]
        # none where this process's shards are empty: few rows, many processes
        if largest and not math.isfinite(float(torch.stack(largest).float().max())):
            step = f"the student's weights are NaN or infinite after step {trainer.global_step}"
            raise RunError(
                f"{step} (a gradient was NaN or infinite); the last checkpoint is from before"
            )

    def _look(self, trainer: Trainer, wait: bool) -> None:
        """Reads the losses that have come from the device, in order, and keeps the first and the newest for a message.

        Args:
            trainer: for the epoch and rank in the message.
            wait: whether all losses are waited for.

        Raises:
            RunError: a loss is NaN or infinite; losses after it are forgotten. It names the batch's pictures, or, where the
                loss had risen before (:meth:`_diverged`), that rise.
        """
        for batch, [loss] in self._losses.take(wait):
            if math.isfinite(loss):
                self._before = float(loss)
                if self._first_loss is None:
                    self._first_loss = self._before
                continue
            self._losses.clear()
            numbers = [int(i) for i in batch.pictures]
            named = ", ".join(map(str, numbers[:SHOWN]))
            more = ""
            if len(numbers) > SHOWN:
                more = f" and {len(numbers) - SHOWN} more"
            epoch = trainer.current_epoch + 1
            where = f"(step {batch.step}, epoch {epoch}, rank {trainer.global_rank})"
            text = f"the loss is {float(loss)} in batch {batch.number} of the run {where}; the usual reason is {self._rate}"
            if self._diverged():
                rise = f"the loss was {self._before:.3g} in the batch before, {self._first_loss:.3g} at the start"
                raise RunError(f"{text}: {rise}")
            raise RunError(f"{text}; training pictures: {named}{more}")

    def _diverged(self) -> bool:
        """Whether the loss had risen to more than :data:`RISEN` times the first one already in the batch before: then the
        pictures of this batch are not the reason.
        """
        return self._first_loss is not None and abs(self._before) > RISEN * max(
            abs(self._first_loss), 1e-6
        )
