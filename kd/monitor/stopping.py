"""Stops a training that is not kd's, where a rule or a limit says so."""

from pytorch_lightning import Callback, LightningModule, Trainer

from kd.callbacks.hooks import ranks_meet
from kd.processes import any_process, from_first


class Stopping(Callback):
    """Sets ``trainer.should_stop`` on all ranks at the same batch; the trainer then ends as after its last epoch."""

    def __init__(self) -> None:
        """Nothing stops the training yet."""
        self.reason = ""
        """Name of the rule that stops the training; "" while none does."""
        self.stopped = ""
        """The same, once all ranks have stopped."""

    def stop_for(self, reason: str) -> None:
        """Stops the training at the next agreement of the ranks, for the first reason. Any thread of rank 0 may call it."""
        self.reason = self.reason or reason

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Every few batches (:func:`kd.callbacks.hooks.ranks_meet`) the ranks agree whether there is a reason to stop; then
        all stop with that of rank 0.
        """
        if not ranks_meet(trainer, batch_idx):
            return
        if any_process(trainer.strategy, bool(self.reason)):
            self.reason = from_first(trainer.strategy, self.reason)
            self.stopped = self.reason
            trainer.should_stop = True
