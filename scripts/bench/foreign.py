"""A training that is not kd's, watched by ``kd.Monitor``, with a bottleneck planted: for ``truth.py --foreign``.

    python scripts/bench/foreign.py RUNS slow=forward:0.06 sleep_s=0.02 num_workers=1

A plain LightningModule with a small ResNet of torchvision's, on noise, in batches of 8; the run's folder is
``RUNS/foreign/000``. It may be copied elsewhere and started there.

Words: those of :data:`DEFAULTS`; ``slow=PART:SECONDS``, or ``slow=PART:SECONDS:RANK``, with the part ``forward``,
``optimizer``, ``callback`` or ``checkpoint``, once or several times.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torchvision
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import kd
from scripts.bench.plants import Slow, come_late

BATCH = 8
SIDE = 32
DEFAULTS: dict[str, Any] = {
    "sleep_s": 0.0,
    "burn_s": 0.0,
    "num_workers": 0,
    "devices": 1,
    "epochs": 1,
    "steps": 24,
}
"""Seconds that each picture waits, or computes; loader processes; ranks; epochs; steps of one (16 loader processes hold
32 batches ready).
"""


class Pictures(Dataset):
    """Noise that comes late."""

    def __init__(self, count: int, sleep_s: float, burn_s: float) -> None:
        self.count, self.late = count, (sleep_s, burn_s)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        come_late(*self.late)
        return torch.rand(3, SIDE, SIDE), index % 4


class Classifier(LightningModule):
    """A plain module."""

    def __init__(self) -> None:
        super().__init__()
        block = torchvision.models.resnet.BasicBlock
        self.net = torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=4)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        pictures, labels = batch
        return nn.functional.cross_entropy(self.net(pictures), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(runs: Path, words: list[str]) -> Path:
    """Trains, and returns the run's folder.

    Args:
        runs: a folder.
        words: see the module.
    """
    folder = runs / "foreign" / "000"
    given = dict(DEFAULTS)
    callbacks: list[Callback] = [kd.Monitor(folder, rules_every_s=0, interval_s=0.1)]
    for word in words:
        name, _, text = word.partition("=")
        if name == "slow":
            part, seconds, *rank = text.split(":")
            callbacks.append(Slow(part, float(seconds), *map(int, rank)))
        else:
            given[name] = type(DEFAULTS[name])(text)
    is_saved = any(word.startswith("slow=checkpoint") for word in words)
    if is_saved:
        callbacks.append(ModelCheckpoint(folder / "checkpoints", every_n_train_steps=1))
    trainer = Trainer(
        max_epochs=given["epochs"],
        accelerator="cpu",
        devices=given["devices"],
        strategy="ddp" if given["devices"] > 1 else "auto",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=is_saved,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    pictures = Pictures(BATCH * given["steps"], given["sleep_s"], given["burn_s"])
    loader = DataLoader(pictures, batch_size=BATCH, num_workers=given["num_workers"])
    trainer.fit(Classifier(), loader)
    return folder


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2:])
