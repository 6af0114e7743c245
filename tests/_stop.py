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


def kill(number: int, pid: int | None = None) -> None:
    """Sends a signal, to this process where no other is given."""
    os.kill(pid or os.getpid(), number)


def first_weight(module: Any) -> Any:
    return next(module.student.model.parameters())


class AtStep(Callback):
    """Acts before a step, on every rank or on one."""

    def __init__(self, step: int = 2, rank: int | None = None) -> None:
        self.step, self.rank = step, rank

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.step and self.rank in (None, trainer.global_rank):
            self.act(pl_module)

    def act(self, module: Any) -> None:
        raise NotImplementedError


class StopAfterEachEpoch(Callback):
    """Sends SIGTERM to its own process in the last step of each epoch but the last one."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        is_last = batch_idx == trainer.num_training_batches - 1
        if is_last and self.ends(trainer):
            kill(signal.SIGTERM)

    def ends(self, trainer: Trainer) -> bool:
        assert trainer.max_epochs is not None
        return trainer.current_epoch < trainer.max_epochs - 1


class StopAfterEpoch(StopAfterEachEpoch):
    """Likewise, of one epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def ends(self, trainer: Trainer) -> bool:
        return trainer.current_epoch == self.epoch


class FailAtStep(AtStep):
    """Raises at a step."""

    def act(self, module: Any) -> None:
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

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(self.seconds)


class Deaf(Callback):
    """Hangs in the first step, and takes no signal but SIGKILL."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        (RunContext.of(trainer).folder / "deaf").touch()
        time.sleep(600)


class KillAtStep(AtStep):
    """SIGKILL to its own process."""

    def act(self, module: Any) -> None:
        kill(signal.SIGKILL)


class KillOnce(KillAtStep):
    """As KillAtStep, in the job's first life alone."""

    def act(self, module: Any) -> None:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            super().act(module)


class BreakWeights(AtStep):
    """Makes a weight NaN before a step, on one rank: what a broken picture or a bug does; or its gradient after it."""

    def __init__(self, step: int, rank: int = 0, gradient: bool = False) -> None:
        super().__init__(step, rank)
        self.gradient = gradient

    def act(self, module: Any) -> None:
        if not self.gradient:
            first_weight(module).data.fill_(float("nan"))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.step and self.gradient:
            first_weight(pl_module).grad.fill_(float("nan"))


class BreakGradient(AtStep):
    """Makes a gradient NaN while it is computed: some strategies keep none to be seen afterwards."""

    def act(self, module: Any) -> None:
        first_weight(module).register_hook(lambda gradient: gradient * float("nan"))


class KillWorker(AtStep):
    """SIGKILL to a loader worker, as the kernel does where memory runs out."""

    def act(self, module: Any) -> None:
        kill(signal.SIGKILL, multiprocessing.active_children()[0].pid)


class Interrupt(AtStep):
    """SIGINT twice within one step."""

    def act(self, module: Any) -> None:
        kill(signal.SIGINT)
        kill(signal.SIGINT)


class TerminateAndInterrupt(AtStep):
    """SIGTERM and SIGINT within one step, as some launchers send them."""

    def act(self, module: Any) -> None:
        kill(signal.SIGTERM)
        kill(signal.SIGINT)


class Terminate(AtStep):
    """SIGTERM to its own process."""

    def act(self, module: Any) -> None:
        kill(signal.SIGTERM)


class TerminateFirst(Callback):
    """SIGTERM to its own process before the first step."""

    def on_train_start(self, *_: Any) -> None:
        kill(signal.SIGTERM)


class SignalGroup(AtStep):
    """The group's first process sends a signal to all of it, as launchers and terminals do."""

    def __init__(self, step: int, number: int = 15, rank: int | None = None) -> None:
        super().__init__(step, rank)
        self.number = number

    def act(self, module: Any) -> None:
        if os.getpgid(0) == os.getpid():
            # from outside, for all who get it
            subprocess.run(["kill", f"-{self.number}", "--", f"-{os.getpgid(0)}"])
            time.sleep(0.3)


class SignalLauncher(AtStep):
    """SIGTERM to the process that has started the first rank."""

    def __init__(self, step: int) -> None:
        super().__init__(step, rank=0)

    def act(self, module: Any) -> None:
        kill(signal.SIGTERM, os.getppid())
        time.sleep(0.3)


class TerminateAndKillWorker(Callback):
    """SIGTERM to its own process and SIGKILL to one of its loader workers, within an optimizer step."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2 * trainer.accumulate_grad_batches + 1:
            kill(signal.SIGTERM)
            kill(signal.SIGKILL, multiprocessing.active_children()[0].pid)
            time.sleep(0.3)
