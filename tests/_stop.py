"""Callbacks that disturb a run, for tests."""

import os
import signal
import time
from typing import Any

from pytorch_lightning import Callback, Trainer


class StopAfterEpoch(Callback):
    """Sends SIGTERM to its own process in the last step of an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == self.epoch and batch_idx == trainer.num_training_batches - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class FailAtStep(Callback):
    """Raises at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("planted")


class Slow(Callback):
    """Sleeps in every step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(self.seconds)
