"""Stops the run when the loss is NaN or infinite, before a bad checkpoint is written."""

import math
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor

from kd.callbacks.context import RunContext, output_of
from kd.callbacks.host_copies import HostCopies
from kd.data.batch import Batch
from kd.errors import RunError
from kd.models.sharding import own

RISEN = 3.0  # times the first loss, or more: the training had diverged before
SHOWN = 16  # indices that the message names


class Finite(Callback):
    """Stops at a NaN or infinite loss, names step, rate and batch, and keeps such weights out of checkpoints.

    Args:
        rate: the learning rate, as the message names it; a rate that is too high is the usual reason.
    """

    def __init__(self, rate: str = "optim.lr") -> None:
        """No loss is known yet; ``rate`` is the setting that messages name as the usual reason."""
        self._rate = rate
        self._first_loss: float | None = None  # of this process
        self._before = 0.0  # the loss of the batch before
        self._losses: HostCopies[tuple[int, Tensor]] = HostCopies()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Checks the losses that have arrived on the host, without a wait, and begins to copy this one.

        Raises:
            RunError: a loss is NaN or infinite.
        """
        self._look(trainer, wait=False)
        tag = trainer.fit_loop.epoch_loop.total_batch_idx, batch["index"]
        self._losses.add(tag, output_of(outputs)["loss"].detach())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the epoch's last losses and checks them.

        Raises:
            RunError: a loss is NaN or infinite.
        """
        self._look(trainer, wait=True)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps NaN weights out of the file, which is not written then: the one before stays the last good one.

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
        """Reads the losses that have come from the device; raises RunError at the first that is NaN or infinite.

        Args:
            trainer: for the step and epoch in the message.
            wait: whether all losses are waited for.
        """
        for (batch, index), [loss] in self._losses.take(wait):
            if math.isfinite(loss):
                self._before = float(loss)
                if self._first_loss is None:
                    self._first_loss = self._before
                continue
            self._losses.clear()
            numbers = [int(i) for i in index]
            named = ", ".join(map(str, numbers[:SHOWN]))
            more = ""
            if len(numbers) > SHOWN:
                more = f" and {len(numbers) - SHOWN} more"
            step = batch // trainer.accumulate_grad_batches
            epoch = trainer.current_epoch + 1
            where = f"(step {step}, epoch {epoch}, rank {trainer.global_rank})"
            text = f"the loss is {float(loss)} in batch {batch} of the run {where}; the usual reason is {self._rate}"
            if self._diverged():
                rise = f"the loss was {self._before:.3g} in the batch before, {self._first_loss:.3g} at the start"
                raise RunError(f"{text}: {rise}")
            raise RunError(f"{text}; training pictures: {named}{more}")

    def _diverged(self) -> bool:
        """Whether the batch before was abnormal too: the pictures of this one are not the reason."""
        return self._first_loss is not None and abs(self._before) > RISEN * max(
            abs(self._first_loss), 1e-6
        )
