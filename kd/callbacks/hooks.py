"""What callbacks share: closing what they hold when training ends, and when the ranks may stop or save together."""

import math

from pytorch_lightning import Callback, LightningModule, Trainer

from kd.report.records import Writer

SYNC_EVERY = 10  # batches between two agreements of the ranks, at least: each costs a collective


class Closing(Callback):
    """Closes what it holds when training ends, well or not."""

    def close(self, trainer: Trainer) -> None:
        """Does nothing where nothing is open."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Calls :meth:`close`."""
        self.close(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Calls :meth:`close`."""
        self.close(trainer)


class Recording(Closing):
    """A callback that writes records; its file is closed when training ends, in whatever way."""

    _writer: Writer | None = None

    def close(self, trainer: Trainer) -> None:
        """Closes the file, once."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def after_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether an optimizer step has just ended (gradients of an unfinished accumulation are in no checkpoint)."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def ranks_meet(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the ranks may agree on something now: after a step; with several ranks only every few batches, and after an
    epoch's last one.

    All ranks get the same answer for the same ``batch_idx`` (of the epoch), so that none waits alone.
    """
    if not after_step(trainer, batch_idx):
        return False
    if trainer.world_size == 1 or trainer.is_last_batch:
        return True
    batches_a_step = trainer.accumulate_grad_batches
    steps = math.ceil(SYNC_EVERY / batches_a_step)
    batches_done = batch_idx + 1
    return batches_done % (steps * batches_a_step) == 0
