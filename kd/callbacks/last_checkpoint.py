"""``last.ckpt``: the state from which a run resumes."""

import time
from functools import partial
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.utilities.types import STEP_OUTPUT

from kd.callbacks.context import RunContext
from kd.callbacks.hooks import after_step, ranks_meet
from kd.data.batch import Batch
from kd.processes import from_first, in_each
from kd.storage.checkpoints import LAST
from kd.storage.tensors import check_readable

OF_LIBRARIES = ("kd.", "pytorch_lightning.")
"""How the modules of callbacks begin whose state is known to be plain."""


class LastCheckpoint(Checkpoint):
    """Saves the whole state of training at each epoch's end, and every few steps or minutes where set.

    Args:
        dirpath: folder of ``last.ckpt``; None: :class:`kd.callbacks.run_folder.RunFolder` sets the run's ``checkpoints``.
        every_n_steps: save after so many optimizer steps since the last save, too; None: not by steps.
        every_n_minutes: likewise after so many minutes, by the first process's clock.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        every_n_steps: int | None = None,
        every_n_minutes: float | None = None,
    ) -> None:
        """Stores the arguments, which are the class's; time counts from the training's start."""
        self.dirpath = dirpath
        self.every_n_steps = every_n_steps
        self.every_n_minutes = every_n_minutes
        self._is_checked = False
        self._saved_at_step = 0
        self._saved_at = time.monotonic()

    @property
    def path(self) -> Path:
        """Path of ``last.ckpt``."""
        assert self.dirpath is not None
        return Path(self.dirpath) / LAST

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Corrects the epoch's batch counter, as the checkpoint's run may have had another batch size or number of ranks.

        Lightning calls it before it restores its loops from the same dict, which is changed in place. The counter over
        all epochs stays as it was.

        Args:
            checkpoint: its content; below the data module's class name, ``samples``: pictures of the epoch that all
                processes together have done. Without any (saved at an epoch's end) nothing is changed.
        """
        data = RunContext.of(trainer).data
        state = checkpoint.get(type(data).__qualname__, {})
        if not state.get("samples"):
            return
        # batches of this process, as large as they are now
        done = data.batches_before(state["samples"])
        fit_loop = checkpoint["loops"]["fit_loop"]
        progress = fit_loop["epoch_loop.batch_progress"]["current"]
        # saved at the end of a batch: Lightning counts that one as completed after it has saved
        completed = max(done - 1, 0)
        progress.update(ready=done, started=done, processed=done, completed=completed)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the state that was resumed from as saved."""
        self._saved_at_step = trainer.global_step
        self._saved_at = time.monotonic()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks once, before the first step, that the state of users' callbacks can be read back from a checkpoint.

        Raises:
            UserError: it can't be; names the callback.
        """
        own = [c for c in trainer.callbacks if not type(c).__module__.startswith(OF_LIBRARIES)]  # type: ignore[attr-defined]
        if own and not self._is_checked:
            checkpoint: dict[str, Any] = {"state_dict": {}, "callbacks": {}}
            for callback in own:
                checkpoint["callbacks"][callback.state_key] = callback.state_dict()
                callback.on_save_checkpoint(trainer, pl_module, checkpoint)
            in_each(partial(check_readable, checkpoint))
        self._is_checked = True

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Saves after an optimizer step where so many steps or minutes are up; the epoch's last batch is left to the
        epoch's end.
        """
        if trainer.is_last_batch or not after_step(trainer, batch_idx):
            return
        steps_are_up = (
            self.every_n_steps and trainer.global_step - self._saved_at_step >= self.every_n_steps
        )
        if steps_are_up or self._time_is_up(trainer, batch_idx):
            self.save(trainer)

    def _time_is_up(self, trainer: Trainer, batch_idx: int) -> bool:
        """Whether ``every_n_minutes`` have passed, as the first process's clock says: all processes save together."""
        if self.every_n_minutes is None or not ranks_meet(trainer, batch_idx):
            return False
        seconds = time.monotonic() - self._saved_at
        is_up = seconds >= 60 * self.every_n_minutes
        return from_first(trainer.strategy, is_up)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves after each epoch."""
        self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Saves now; all ranks must call it. The file before becomes ``previous.ckpt``, unless the run found it damaged.

        With ``checkpoint.asynchronous`` the file may be on the disk only later.
        """
        trainer.save_checkpoint(self.path)
        self._saved_at_step = trainer.global_step
        self._saved_at = time.monotonic()
