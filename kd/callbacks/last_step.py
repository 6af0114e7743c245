"""The last step of an epoch, and of the run."""

from pytorch_lightning import Callback, LightningModule, Trainer

from kd.lightning_internals import log_last_step


class LastStep(Callback):
    """Ends a run that ``max_steps`` cuts short with a validation; logs the last step of each epoch.

    Lightning validates after whole epochs alone, and logs every ``log_every_n_steps`` steps alone.
    """

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """A trainer that should stop validates and logs, wherever in the epoch it is."""
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True
        elif trainer.is_last_batch:
            log_last_step(trainer)
