"""What ``metrics.csv`` has of each step: the learning rate, and the last step of an epoch."""

from pytorch_lightning import Callback, LightningModule, Trainer

from kd.callbacks.context import RunContext
from kd.data.batch import Batch
from kd.lightning_internals import log_last_step
from kd.module.pace import logs_now


class LearningRate(Callback):
    """Logs ``train/lr``, the rate that a step is made with, where the step's losses are logged."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Logs the learning rate where :func:`kd.module.pace.logs_now` is true: a call costs 0.7 ms.

        With ``optim.layer_decay`` it is the last layer's, the highest; else all parameters have it.
        """
        run = RunContext.of(trainer)
        if not logs_now(trainer):
            return
        (optimizer,) = trainer.optimizers
        highest_lr = max(group["lr"] for group in optimizer.param_groups)
        run.module.log("train/lr", highest_lr)


class LastStep(Callback):
    """Validates at the end of a run that ``max_steps`` cuts short; logs the last step of each epoch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Has the loggers take an epoch's last step; at ``max_steps`` sets ``trainer.should_stop``.

        Lightning ends training at ``max_steps`` in any case. With ``should_stop`` it first validates once more, in an epoch
        that has a validation, and logs the step.
        """
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True
        elif trainer.is_last_batch:
            log_last_step(trainer)
