"""The file ``monitor`` in a run's folder: what is watched is changed while the job runs."""

import time
from contextlib import suppress
from pathlib import Path

from pytorch_lightning import Callback, LightningModule, Trainer

from kd.callbacks.hooks import ranks_meet
from kd.monitor.health import Health
from kd.monitor.kernels import Kernels
from kd.monitor.phases import Phases
from kd.monitor.watched import Watched
from kd.processes import by_first
from kd.storage.control_file import CONTROL, parse, read_command
from kd.storage.elsewhere import Json, RefusedFile

LOOK_EVERY_S = 1.0
"""Seconds between two readings of the file at least."""


class Control(Callback):
    """Rank 0 reads the file once a second at most; all ranks follow at the same batch, where they meet
    (:func:`kd.callbacks.hooks.ranks_meet`).
    """

    def __init__(self, watched: Watched, health: Health, kernels: Kernels, phases: Phases) -> None:
        """Stores the parts that commands change; the file is read while the run trains."""
        self.watched = watched
        self.health, self.kernels, self.phases = health, kernels, phases
        self._content = self._before_start = ("", 0)  # text, and when it was written
        self._looked = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remembers the file as it is now: its order to profile was for an earlier process and is not followed again.

        The file's other orders are followed.
        """
        with suppress(RefusedFile):  # the first look reports it
            self._before_start = read_command(self.watched.folder(trainer))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Follows the file where it has changed; rank 0 reads, all ranks act at the same step.

        It sets how often health is read, begins a profile two batches later, and turns NVTX ranges on or off.
        """
        if not ranks_meet(trainer, batch_idx):
            return
        command = by_first(trainer.strategy, lambda: self._look(self.watched.folder(trainer)))
        self.health.every = command.get("health", self.health.every)
        if "kernels" in command:
            next_batch = trainer.fit_loop.epoch_loop.total_batch_idx + 2
            self.kernels.begin(next_batch, command["kernels"])
        if "nvtx" in command:
            self.phases.name_ranges(command["nvtx"])

    def _look(self, folder: Path) -> Json:
        """What the file orders where it has changed since it was last read; else {}.

        Reads it at most once in :data:`LOOK_EVERY_S` seconds. A wrong text, or a file that is refused, is reported once and
        orders nothing.

        Returns:
            Of :func:`kd.storage.control_file.parse`: ``health`` (batches between readings), ``kernels`` (batches to
            profile; not from a file older than this training), ``nvtx`` (bool). ``on`` and ``interval`` in it are for
            :class:`kd.monitor.system.System`, which reads the file itself.
        """
        now = time.monotonic()
        if now < self._looked + LOOK_EVERY_S:
            return {}
        self._looked = now
        refused = ""
        try:
            content = read_command(folder)
        except RefusedFile as error:
            refused = str(error)
            content = refused, 0
        if content == self._content:
            return {}
        self._content = content
        if refused:
            self.watched.report(refused)
            return {}
        try:
            command = parse(content[0])
        except ValueError as error:
            self.watched.report(f"the file {CONTROL}: {error}")
            return {}
        if content == self._before_start:
            command.pop("kernels", None)
        return command
