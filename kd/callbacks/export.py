"""``student.safetensors``: written as soon as training has ended, before anything is reported about it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from kd.callbacks.best import Best
from kd.callbacks.context import RunContext
from kd.callbacks.preemption import RunStopped
from kd.distill.sharding import Sharding
from kd.storage.checkpoints import damage, newest_whole


@dataclass
class Export(Callback):
    """Writes the student of its best epoch. Must precede the callbacks that report."""

    best: Best
    """Which validation is the best."""
    save: Callable[[Any, Path, Path | None], None]
    """Writes a student to a file, and a folder beside it: with the weights of a checkpoint, or as they are (None)."""
    _written: bool = False
    """Whether the end of the training was seen, on whichever process."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file on rank 0."""
        self._write(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file where no training came before it: a resumed run that has nothing left to train may have been
        killed before it wrote its student.
        """
        if not self._written:
            self._write(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Writes the file where a rule or a limit of the monitor has stopped the run; after any other error nothing."""
        if isinstance(exception, RunStopped):
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        """Writes ``student.safetensors`` on the first process; nothing where no step was made.

        It is written from the checkpoint that :meth:`_best` finds, else as the student is in memory.
        """
        self._written = True
        if not trainer.is_global_zero or not trainer.global_step:  # nothing was trained
            return
        trainer.strategy.checkpoint_io.teardown()  # waits for a file that is being written
        run = RunContext.of(trainer)
        best = self._best(trainer, run.best_checkpoint)
        self.save(run.student, run.folder / "student.safetensors", best)

    def _best(self, trainer: Trainer, path: Path) -> Path | None:
        """The checkpoint that the student's file is written from: the best epoch's, or the last whole one where that
        is damaged.

        None: the student in memory is the one, as no validation has chosen an epoch, or no whole checkpoint is left. Of a
        sharded student only a checkpoint holds the whole weights: without a best epoch its last one is taken. Damage is
        reported on stderr.

        Args:
            trainer: of the run.
            path: of the best epoch's checkpoint.
        """
        if not self.best.best:
            sharded = isinstance(trainer.strategy, Sharding) and trainer.strategy.shards_weights
            if sharded:
                return newest_whole(path.parent)[0]
            return None
        problem = damage(path)
        if not problem:
            return path
        print(
            f"kd-train: warning: {path}: {problem}; exports the last epoch",
            file=sys.stderr,
            flush=True,
        )
        return newest_whole(path.parent)[0]
