"""SIGTERM, SIGHUP, SIGUSR1, a job's SIGUSR2 and Ctrl-C: finish the step, save, stop."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.types import STEP_OUTPUT

from kd.callbacks.hooks import Closing, ranks_meet
from kd.callbacks.last_checkpoint import LastCheckpoint
from kd.data.batch import Batch
from kd.errors import end_of_a_worker
from kd.lightning_internals import log_this_step
from kd.machine import in_job, say_in_handler, stopping
from kd.processes import any_process, by_first, from_first


class Preempted(Exception):
    """Training stopped on a signal, with a checkpoint to resume from.

    Args:
        signal_number: the signal.
        checkpoint: the file.
    """

    def __init__(self, signal_number: int, checkpoint: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number
        self.checkpoint = checkpoint


class RunStopped(Preempted):
    """Training stopped by a rule or a limit of the run, with a checkpoint to resume from.

    Args:
        reason: the name of the rule or limit (``BudgetSpent``).
        checkpoint: the file.
    """

    def __init__(self, reason: str, checkpoint: Path) -> None:
        super().__init__(signal.SIGTERM, checkpoint)
        self.reason = reason

    def __str__(self) -> str:
        return f"stopped: {self.reason}"


class Preemption(Closing):
    """Turns the first SIGTERM, SIGHUP, SIGUSR1 or SIGINT, and a job's SIGUSR2, into a checkpoint and :class:`Preempted`.

    A second SIGINT ends the run at once, by a KeyboardInterrupt.

    Schedulers warn a job before they end it: SLURM by what ``--signal`` names, as Lightning's guide does SIGUSR1 and
    submitit SIGUSR2. Outside of a job SIGUSR2 is ignored.

    The ranks agree every few batches, so that all save at the same step. After an epoch's last batch the run first
    validates and writes the epoch's usual checkpoint. A loader worker that dies after the signal is no failure.
    """

    def __init__(self, last: LastCheckpoint, speaks: bool = False) -> None:
        """No signal has come yet.

        Args:
            last: writes the checkpoint.
            speaks: whether a line reports at once that a signal has come: in one process alone, and not in the training of
                a teacher that another run has started.
        """
        self._last = last
        self._speaks = speaks
        self._received: int | None = None
        self._interrupted = False
        self._validates = False
        self._reason = ""
        self._stop_after_epoch = False
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handles SIGTERM, SIGINT, SIGUSR1, SIGHUP and, in a job, SIGUSR2 from here on; under nohup SIGHUP stays ignored.

        In any other thread than the main one no signal is handled; :meth:`stop_for` works all the same.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # Python handles signals in the main thread alone
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
        under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        if not under_nohup:
            numbers.append(signal.SIGHUP)
        if in_job():
            numbers.append(signal.SIGUSR2)
        for number in numbers:
            self._before[number] = signal.signal(number, self._on_signal)

    def stop_for(self, reason: str) -> None:
        """Stops the run as a signal would, with :class:`RunStopped`. Any thread of rank 0 may call it.

        The first reason counts.
        """
        self._reason = self._reason or reason

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler: notes the first signal, which the end of the step reads; a second Ctrl-C interrupts at once."""
        if number == signal.SIGINT:
            if self._interrupted:
                signal.default_int_handler(number, frame)
            self._interrupted = True
        if not self._received:
            self._received = number
            if self._speaks:
                when = "the validation" if self._validates else "this step"
                say_in_handler(stopping(number, when))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes that no step is being made, for the line about a signal: the run stops after the next step."""
        self._validates = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes that steps are made again."""
        self._validates = False

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Saves and stops where a signal or a rule asks for it on any rank; all ranks stop at the same step.

        After an epoch's last batch nothing is saved here: the epoch's validation and checkpoint follow, then
        :meth:`on_train_epoch_start` stops; after the last epoch the training has ended anyway.

        Raises:
            Preempted: on a signal.
            RunStopped: by a rule.
        """
        if not ranks_meet(trainer, batch_idx):
            return
        if not any_process(trainer.strategy, self._received is not None or bool(self._reason)):
            return
        if trainer.is_last_batch:
            self._stop_after_epoch = True
            return
        self._last.save(trainer)
        # Lightning logs a step after this hook, and the resumed run starts at the next one
        log_this_step(trainer)
        self._stop(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops between two epochs, where the ranks agreed to at an epoch's last batch."""
        if self._stop_after_epoch:
            self._stop(trainer)

    def _stop(self, trainer: Trainer) -> NoReturn:
        """Raises once the checkpoint is on disk: a launcher kills all processes when the first one ends.

        A rank that has received a signal raises Preempted with it; the others RunStopped for rank 0's reason, or Preempted
        with SIGTERM.
        """
        by_first(trainer.strategy, trainer.strategy.checkpoint_io.teardown)
        reason = from_first(trainer.strategy, self._reason)
        trainer.strategy.barrier()
        if reason and self._received is None:
            raise RunStopped(reason, self._last.path)
        raise Preempted(self._received or signal.SIGTERM, self._last.path)

    def interruption(self, error: BaseException) -> Preempted | None:
        """The :class:`Preempted` that an error is, or stands for where a loader worker has died after a signal; else None.

        The run's status in ``summary.json`` and the exit status depend on it. For a worker's death nothing is saved: the
        checkpoint is the last one, which may not be there yet.
        """
        if isinstance(error, Preempted):
            return error
        if self._received is None or not end_of_a_worker(error):
            return None
        return Preempted(self._received, self._last.path)

    def close(self, trainer: Trainer) -> None:
        """Restores the handlers from before."""
        for number, handler in self._before.items():
            if handler is not None:  # one that C code has set can't be put back
                signal.signal(number, handler)
        self._before = {}
