"""A loss that is no number stops the run while its checkpoints are still good."""

import math
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor

from kd.callbacks.context import RunContext, output_of
from kd.data.batch import Batch
from kd.errors import RunError
from kd.models.sharding import own

SHOWN = 16  # indices that the message names


class Finite(Callback):
    """Stops at a NaN or infinite loss and names the step and the batch; never lets such weights into a checkpoint.

    The loss of a step is read while the next one runs, so the device is never waited for. Before a checkpoint the
    newest loss and all weights are looked at.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, Tensor, Tensor] | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        """Looks at the step before this one."""
        self._look(trainer)
        loss = output_of(outputs)["loss"].detach()
        self._pending = (trainer.fit_loop.epoch_loop.total_batch_idx, loss, batch["index"])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks at the last step."""
        self._look(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps weights that are no numbers out of the file: the one before stays the last good one."""
        run = RunContext.of(trainer)
        self._look(trainer)
        trained = [own(p).detach() for p in run.module.parameters() if p.requires_grad]
        if not math.isfinite(float(torch.stack([p.abs().max() for p in trained if p.numel()]).float().max())):
            raise RunError(
                f"the student's weights are no numbers after step {trainer.global_step} (a gradient was NaN or "
                "infinite); the last checkpoint is from before"
            )

    def _look(self, trainer: Trainer) -> None:
        if self._pending is None:
            return
        batch, loss, index = self._pending
        self._pending = None
        value = float(loss)
        if math.isfinite(value):
            return
        named = ", ".join(str(int(i)) for i in index[:SHOWN])
        more = f" and {len(index) - SHOWN} more" if len(index) > SHOWN else ""
        raise RunError(
            f"the loss is {value} in batch {batch} of the run (step {batch // trainer.accumulate_grad_batches}, epoch "
            f"{trainer.current_epoch + 1}, rank {trainer.global_rank}); training pictures: {named}{more}"
        )
