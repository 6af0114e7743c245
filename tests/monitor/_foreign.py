"""Trainings that are not kd's: a module, loaders, a Trainer, a loop."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import kd
from kd.report.records import RunRecords, read_run

STEPS = 24  # a verdict needs 20 after the first
SIDE = 4
BATCH = 2


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 4))


class Classifier(LightningModule):
    """A plain module, as its author would write it.

    Args:
        net: what it trains.
        forward_s: seconds that its forward pass takes beside computing.
        rank: of the process where it takes them; None: everywhere.
    """

    def __init__(
        self, net: nn.Module | None = None, forward_s: float = 0.0, rank: int | None = None
    ) -> None:
        super().__init__()
        self.net = net or linear()
        self.forward_s, self.rank = forward_s, rank

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, labels = batch
        if self.rank in (None, self.global_rank):
            time.sleep(self.forward_s)
        return nn.functional.cross_entropy(self.net(pictures), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        pictures, labels = batch
        self.log("val/acc1", (self.net(pictures).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class OwnLoader:
    """A loader of the user's own, which says neither how large its batches are nor how it makes them.

    Args:
        wait_s: seconds that a batch takes, as from a slow store.
        side: of the pictures.
    """

    def __init__(self, wait_s: float, side: int = SIDE) -> None:
        self.wait_s, self.side = wait_s, side

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(STEPS):
            time.sleep(self.wait_s)
            yield torch.rand(BATCH, 3, self.side, self.side), torch.randint(0, 4, (BATCH,))


def loader(batches: int = 30) -> DataLoader:
    """One of torch's, whose length and batch size are known."""
    count = batches * BATCH
    pictures = torch.rand(count, 3, SIDE, SIDE)
    return DataLoader(TensorDataset(pictures, torch.arange(count) % 4), batch_size=BATCH)


def trainer_with(*callbacks: Callback, **settings: Any) -> Trainer:
    """A Trainer that says and keeps nothing, of one epoch on the CPU where the settings say no other."""
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    given: dict[str, Any] = {**quiet, "max_epochs": 1, "accelerator": "cpu", **settings}
    return Trainer(callbacks=list(callbacks), **given)


def trained(folder: Path, module: LightningModule, batches: Any, **settings: Any) -> RunRecords:
    """The records of an epoch, watched with these settings."""
    watch = kd.Monitor(folder, interval_s=0.1, rules_every_s=0, **settings)
    trainer_with(watch).fit(module, batches)
    return read_run(folder)


def plain_loop(watch: Any, batches: Any, net: nn.Module, forward_s: float = 0.0) -> None:
    """An epoch of a loop without a Trainer; its forward pass takes so many seconds more."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for pictures, labels in batches:
        with watch.phase("forward"):
            time.sleep(forward_s)
            loss = nn.functional.cross_entropy(net(pictures), labels)
        with watch.phase("backward"):
            loss.backward()
        with watch.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        watch.log(loss)
