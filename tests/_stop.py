"""Callbacks that disturb a run, for tests."""

import json
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, Trainer

from kd.callbacks.context import RunContext


class StopAfterEpoch(Callback):
    """Sends SIGTERM to its own process in the last step of an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == self.epoch and batch_idx == trainer.num_training_batches - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class StopAfterEachEpoch(Callback):
    """Sends SIGTERM to its own process in the last step of each epoch but the last one."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if (
            trainer.current_epoch < trainer.max_epochs - 1
            and batch_idx == trainer.num_training_batches - 1
        ):
            os.kill(os.getpid(), signal.SIGTERM)


class FailAtStep(Callback):
    """Raises at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("planted")


class RecordOptimizer(Callback):
    """Appends step, learning rate, weight decays and betas of every optimizer step to a file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        groups = optimizer.param_groups
        line = {
            "step": trainer.global_step,
            "lr": groups[0]["lr"],
            "decay": [g["weight_decay"] for g in groups],
        }
        with Path(self.file).open("a") as file:
            file.write(json.dumps(line | {"betas": groups[0].get("betas")}) + "\n")


class Slow(Callback):
    """Sleeps in every step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        time.sleep(self.seconds)


class Deaf(Callback):
    """Hangs in the first step, and takes no signal but SIGKILL."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        (RunContext.of(trainer).folder / "deaf").touch()
        time.sleep(600)


class KillAtStep(Callback):
    """SIGKILL to its own process before a step, on every rank or on one."""

    def __init__(self, step: int, rank: int | None = None) -> None:
        self.step, self.rank = step, rank

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step and self.rank in (None, trainer.global_rank):
            os.kill(os.getpid(), signal.SIGKILL)


class BreakWeights(Callback):
    """Makes a weight NaN before a step, on one rank: what a broken picture or a bug does."""

    def __init__(self, step: int, rank: int = 0, gradient: bool = False) -> None:
        self.step, self.rank, self.gradient = step, rank, gradient

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if (
            trainer.global_step == self.step
            and trainer.global_rank == self.rank
            and not self.gradient
        ):
            next(pl_module.student.model.parameters()).data.fill_(float("nan"))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.step and self.gradient:
            next(pl_module.student.model.parameters()).grad.fill_(float("nan"))


class BreakGradient(Callback):
    """Makes a gradient NaN while it is computed: some strategies keep none to be seen afterwards."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            next(pl_module.student.model.parameters()).register_hook(
                lambda gradient: gradient * float("nan")
            )


class KillWorker(Callback):
    """SIGKILL to a loader worker, as the kernel does where memory runs out."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: object) -> None:
        if trainer.global_step == 2:
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


class Interrupt(Callback):
    """SIGINT twice within one step."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)


class TerminateAndInterrupt(Callback):
    """SIGTERM and SIGINT within one step, as some launchers send them."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)


class KillOnce(KillAtStep):
    """As KillAtStep, in the job's first life alone."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)


class Terminate(Callback):
    """SIGTERM to its own process before a step, on every rank or on one."""

    def __init__(self, step: int, rank: int | None = None) -> None:
        self.step, self.rank = step, rank

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step and self.rank in (None, trainer.global_rank):
            os.kill(os.getpid(), signal.SIGTERM)


class SignalGroup(Callback):
    """The group's first process sends a signal to all of it before a step, as launchers and terminals do."""

    def __init__(self, step: int, number: int = 15) -> None:
        self.step, self.number = step, number

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step and os.getpgid(0) == os.getpid():
            subprocess.run(
                ["kill", f"-{self.number}", "--", f"-{os.getpgid(0)}"]
            )  # from outside, for all who get it
            time.sleep(0.3)


class SignalLauncher(Callback):
    """SIGTERM to the process that has started this one."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step and trainer.global_rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(0.3)


class TerminateAndKillWorker(Callback):
    """SIGTERM to its own process and SIGKILL to one of its loader workers, within an optimizer step."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2 * trainer.accumulate_grad_batches + 1:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
            time.sleep(0.3)
