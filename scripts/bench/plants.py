"""Bottlenecks and faults to plant into a run, by class path, for ``truth.py`` and the tests."""

import time
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer

from kd.data.sources import ImageFolder, Split


def come_late(sleep_s: float, burn_s: float) -> None:
    """Waits (a remote call, a lock), then computes (a costly transform)."""
    time.sleep(sleep_s)
    until = time.thread_time() + burn_s
    while time.thread_time() < until:
        pass


class SlowSplit:
    """A split whose pictures come late.

    Args:
        split: the pictures.
        sleep_s: waited for each.
        bytes_per_s: of the disk.
        burn_s: CPU time spent on each.
    """

    def __init__(self, split: Split, sleep_s: float, bytes_per_s: float, burn_s: float) -> None:
        self.targets, self.name, self.target = split.targets, split.name, split.target
        self.split, self.sleep_s, self.burn_s = split, sleep_s, burn_s
        self.bytes_per_s = bytes_per_s

    def read(self, index: int) -> bytes:
        """The picture, late."""
        found: Any = self.split.read(index)
        sleep_s = self.sleep_s
        if self.bytes_per_s:
            sleep_s += Path(self.split.name(index)).stat().st_size / self.bytes_per_s
        come_late(sleep_s, self.burn_s)
        return found


class SlowFolder(ImageFolder):
    """An ImageFolder whose training pictures come late, see :class:`SlowSplit`."""

    def __init__(
        self, root: str, sleep_s: float = 0.0, bytes_per_s: float = 0.0, burn_s: float = 0.0
    ) -> None:
        super().__init__(root)
        self.slow = sleep_s, bytes_per_s, burn_s

    def load(self, split: str) -> Split:
        """Slow for training only."""
        found = super().load(split)
        return SlowSplit(found, *self.slow) if split == "train" else found


class Slow(Callback):
    """Makes one part of the training slower on one rank (or on all).

    Args:
        part: ``teacher``, ``student``, ``optimizer``, ``checkpoint`` or ``callback``; in place of the models ``forward`` in
            ``foreign.py``.
        seconds: how much.
        rank: where; -1 everywhere.
    """

    def __init__(self, part: str, seconds: float, rank: int = -1) -> None:
        self.part, self.seconds, self.rank = part, seconds, rank

    def _sleep(self, trainer: Trainer, part: str) -> None:
        if part == self.part and self.rank in (-1, trainer.global_rank):
            time.sleep(self.seconds)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Models: before their forward pass."""
        if hasattr(pl_module, "net"):
            models = {"forward": pl_module.net}
        else:
            models = {"student": pl_module.student.model}
            if pl_module.teacher:
                models["teacher"] = pl_module.teacher.model
        for name, model in models.items():
            model.register_forward_pre_hook(lambda *_, name=name: self._sleep(trainer, name))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        """Optimizer."""
        self._sleep(trainer, "optimizer")

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Callback."""
        self._sleep(trainer, "callback")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Checkpoint: one is saved in every step, to a slow disk."""
        if self.part == "checkpoint" and not hasattr(pl_module, "net"):
            trainer.save_checkpoint(Path(trainer.checkpoint_callback.dirpath) / "slow.ckpt")  # type: ignore

    def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        """The slow disk."""
        self._sleep(trainer, "checkpoint")


class FreeTeacher(Callback):
    """The teacher answers from memory: what a cache would do."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Puts random answers in its place."""
        answers = torch.randn(trainer.datamodule.batch_size, len(pl_module.student.data.classes))  # type: ignore
        teacher = pl_module.teacher
        teacher.prepare = lambda images: images[:1, :1, :1, :1]
        teacher.model.forward = lambda _images: answers


class Leak(Callback):
    """Keeps some memory of every step.

    Args:
        megabytes: a step.
    """

    def __init__(self, megabytes: int) -> None:
        self.megabytes, self.kept = megabytes, list[bytearray]()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Leaks."""
        self.kept.append(bytearray(b"x" * (self.megabytes * 2**20)))
