"""The file ``monitor`` in a run's folder: what is watched is changed while the job runs."""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from tqdm import tqdm

from kd.callbacks.hooks import ranks_meet
from kd.monitor.health import Health
from kd.monitor.kernels import Kernels
from kd.monitor.phases import Phases
from kd.monitor.watched import Watched
from kd.processes import from_first
from kd.storage.elsewhere import RefusedFile, text_of

CONTROL = "monitor"  # the file's name
WORDS = "on, off, interval=SECONDS, health=BATCHES, kernels=BATCHES, nvtx=on|off"
LOOK_EVERY_S = 1.0
LARGEST = 2**16  # bytes of the file


def parse(text: str) -> dict[str, Any]:
    """The words of the file, with spaces or lines between them (kd/report/README.md)."""
    found: dict[str, Any] = {}
    for word in text.lower().split():
        key, _, value = word.partition("=")
        try:
            if word in ("on", "off"):
                found["on"] = word == "on"
            elif key == "nvtx":
                found["nvtx"] = {"on": True, "off": False}[value]
            elif key == "interval":
                found["interval"] = _at_least(0.05, float(value))
            else:
                found[key] = int(_at_least({"health": 0, "kernels": 1}[key], int(value)))
        except (ValueError, KeyError):
            raise ValueError(f"'{word}' is not known; known: {WORDS}") from None
    return found


def _at_least(least: float, value: float) -> float:
    if not least <= value < float("inf"):
        raise ValueError
    return value


def read(folder: Path) -> tuple[str, int]:
    """The file's text, and when it was written, as words may be repeated. Empty without a file.

    Raises:
        RefusedFile: it is no regular file, or larger than :data:`LARGEST`.
    """
    file = folder / CONTROL
    try:
        return text_of(file, LARGEST), file.stat().st_mtime_ns
    except RefusedFile:
        raise
    except (OSError, ValueError):
        return "", 0


class Control(Callback):
    """Rank 0 reads the file once a second at most; all ranks follow at the same batch, within ten batches."""

    def __init__(self, watched: Watched, health: Health, kernels: Kernels, phases: Phases) -> None:
        self.watched = watched
        self.health, self.kernels, self.phases = health, kernels, phases
        self._said = self._old = ("", 0)
        self._looked = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before a resume the file may have requested a window: it is not profiled again."""
        with suppress(RefusedFile):  # the first look reports it
            self._old = read(self.watched.folder(trainer))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Follows the file where it has changed; rank 0 reads, all ranks act at the same step."""
        if not ranks_meet(trainer, batch_idx):
            return
        folder = self.watched.folder(trainer)
        found = from_first(trainer.strategy, self._look(folder) if trainer.is_global_zero else {})
        self.health.every = found.get("health", self.health.every)
        if "kernels" in found:
            self.kernels.begin(trainer.fit_loop.epoch_loop.total_batch_idx + 2, found["kernels"])
        if "nvtx" in found:
            self.phases.name_ranges(found["nvtx"])

    def _look(self, folder: Path) -> dict[str, Any]:
        now = time.monotonic()
        if now < self._looked + LOOK_EVERY_S:
            return {}
        self._looked = now
        try:
            said = read(folder)
        except RefusedFile as error:
            said = str(error), 0
        if said == self._said:
            return {}
        self._said = said
        try:
            found = parse(said[0])
        except ValueError as error:
            tqdm.write(f"kd-train: the file {CONTROL}: {error}", file=sys.stderr)
            return {}
        if said == self._old:
            found.pop("kernels", None)
        return found
