"""The file ``monitor`` in a run's folder: what is watched is changed while the job runs."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from tqdm import tqdm

from kd.callbacks.phases import Phases
from kd.callbacks.run_folder import RunFolder
from kd.callbacks.steps import ranks_meet
from kd.monitor.health import Health
from kd.monitor.kernels import Kernels

CONTROL = "monitor"  # the file's name
WORDS = "on, off, interval=SECONDS, health=BATCHES, kernels=BATCHES, nvtx=on|off"
LOOK_EVERY_S = 1.0
KEEP = -1  # in place of a number that the file does not give


@dataclass(frozen=True)
class MonitorCommand:
    """What the file says; ``None``: nothing."""

    on: bool | None = None  # sample the machine
    interval_s: float | None = None  # seconds between two samples
    health: int | None = None  # batches between two readings; 0: none
    kernels: int | None = None  # profile so many batches from now
    nvtx: bool | None = None  # name the phases for Nsight


def parse(text: str) -> MonitorCommand:
    """The words of the file, with spaces or lines between them."""
    found: dict[str, Any] = {}
    for word in text.lower().split():
        key, _, value = word.partition("=")
        try:
            if word in ("on", "off"):
                found["on"] = word == "on"
            elif key == "nvtx":
                found["nvtx"] = {"on": True, "off": False}[value]
            elif key == "interval":
                found["interval_s"] = _at_least(0.05, float(value))
            else:
                found[key] = int(_at_least({"health": 0, "kernels": 1}[key], int(value)))
        except (ValueError, KeyError):
            raise ValueError(f"'{word}' is not known; known: {WORDS}") from None
    return MonitorCommand(**found)


def _at_least(least: float, value: float) -> float:
    if not least <= value < float("inf"):
        raise ValueError
    return value


def read(folder: Path) -> tuple[str, int]:
    """The file's text, and when it was written: the same words may be said again. Empty without one."""
    file = folder / CONTROL
    try:
        return file.read_text(), file.stat().st_mtime_ns
    except (OSError, ValueError):
        return "", 0


class Control(Callback):
    """Rank 0 reads the file once a second at most; all ranks follow at the same batch, within ten batches.

    The sampling of the machine reads the file itself (:class:`kd.monitor.system.System`).
    """

    def __init__(self, folder: RunFolder, health: Health, kernels: Kernels, phases: Phases) -> None:
        self.folder, self.health, self.kernels, self.phases = folder, health, kernels, phases
        self._said = self._old = ("", 0)
        self._looked = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A window that the file asked for before a resume was another start's."""
        assert self.folder.path is not None
        self._old = read(self.folder.path)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if not ranks_meet(trainer, batch_idx):
            return
        asked = self._look() if trainer.is_global_zero else [KEEP] * 3
        if trainer.world_size > 1:
            summed = torch.tensor([number - KEEP for number in asked], device=trainer.strategy.root_device)
            summed = trainer.strategy.reduce(summed, reduce_op="sum")
            asked = [number + KEEP for number in summed.tolist()]
        health, kernels, nvtx = asked
        if health != KEEP:
            self.health.every = health
        if kernels != KEEP:
            self.kernels.begin(trainer.fit_loop.epoch_loop.total_batch_idx + 2, kernels)
        if nvtx != KEEP:
            self.phases.name_ranges(bool(nvtx))

    def _look(self) -> list[int]:
        nothing, now = [KEEP] * 3, time.monotonic()
        if now < self._looked + LOOK_EVERY_S:
            return nothing
        assert self.folder.path is not None
        self._looked, said = now, read(self.folder.path)
        if said == self._said:
            return nothing
        self._said = said
        try:
            found = parse(said[0])
        except ValueError as error:
            tqdm.write(f"kd-train: the file {CONTROL}: {error}", file=sys.stderr)
            return nothing
        kernels = None if said == self._old else found.kernels
        return [KEEP if number is None else int(number) for number in (found.health, kernels, found.nvtx)]
