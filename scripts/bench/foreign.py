"""A training that is not kd's, watched by ``kd.Monitor``, with a bottleneck planted: for ``truth.py --foreign``.

    python scripts/bench/foreign.py RUNS slow=forward:0.06 sleep_s=0.02 num_workers=1

A plain LightningModule with a small ResNet of torchvision's, on noise, in batches of 8; the run's folder is
``RUNS/foreign/000``. Nothing of kd but the callback is used. It may be copied elsewhere and started there.

Words: ``sleep_s``, ``burn_s`` (seconds that each picture waits, or computes), ``num_workers``, ``devices``,
``epochs``, ``steps`` (of an epoch); ``slow=PART:SECONDS``, or ``slow=PART:SECONDS:RANK``, with the part ``forward``,
``optimizer``, ``callback`` or ``checkpoint``, once or several times.
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchvision
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import kd

BATCH = 8
SIDE = 32


@dataclass
class Planted:
    """What is planted, see the module."""

    sleep_s: float = 0.0
    burn_s: float = 0.0
    num_workers: int = 0
    devices: int = 1
    epochs: int = 1
    steps: int = 24
    """Of an epoch; 16 loader processes hold 32 batches ready."""
    slow: list[tuple[str, float, int]] = field(default_factory=list)
    """Part, seconds and rank (-1: all) of each."""

    @classmethod
    def of(cls, words: list[str]) -> "Planted":
        """Reads the words of a command line."""
        planted = cls()
        for word in words:
            name, _, text = word.partition("=")
            if name == "slow":
                part, seconds, *rank = text.split(":")
                planted.slow.append((part, float(seconds), int(rank[0]) if rank else -1))
                continue
            kind = type(getattr(planted, name))
            setattr(planted, name, kind(text))
        return planted


class Pictures(Dataset):
    """Noise that comes late."""

    def __init__(self, planted: Planted) -> None:
        self.sleep_s, self.burn_s = planted.sleep_s, planted.burn_s
        self.steps = planted.steps

    def __len__(self) -> int:
        return BATCH * self.steps

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.sleep_s)
        until = time.thread_time() + self.burn_s
        while time.thread_time() < until:
            pass
        return torch.rand(3, SIDE, SIDE), index % 4


class Classifier(LightningModule):
    """A plain module."""

    def __init__(self, planted: Planted) -> None:
        super().__init__()
        block = torchvision.models.resnet.BasicBlock
        self.net = torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=4)
        self.planted = planted

    def wait(self, part: str) -> None:
        """Takes the time that is planted into a part."""
        for name, seconds, rank in self.planted.slow:
            if name == part and rank in (-1, self.global_rank):
                time.sleep(seconds)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        pictures, labels = batch
        self.wait("forward")
        return nn.functional.cross_entropy(self.net(pictures), labels)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """An optimizer that takes its time."""
        self.wait("optimizer")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A slow disk."""
        self.wait("checkpoint")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Slow(Callback):
    """A callback that takes its time."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Waits as planted."""
        assert isinstance(pl_module, Classifier)
        pl_module.wait("callback")


def train(runs: Path, words: list[str]) -> Path:
    """Trains, and returns the run's folder.

    Args:
        runs: a folder.
        words: see the module.
    """
    planted = Planted.of(words)
    folder = runs / "foreign" / "000"
    callbacks: list[Callback] = [kd.Monitor(folder, rules_every_s=0, interval_s=0.1), Slow()]
    if any(part == "checkpoint" for part, _, _ in planted.slow):
        callbacks.append(ModelCheckpoint(folder / "checkpoints", every_n_train_steps=1))
    trainer = Trainer(
        max_epochs=planted.epochs,
        accelerator="cpu",
        devices=planted.devices,
        strategy="ddp" if planted.devices > 1 else "auto",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Pictures(planted), batch_size=BATCH, num_workers=planted.num_workers)
    trainer.fit(Classifier(planted), loader)
    return folder


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2:])
