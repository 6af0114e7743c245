"""Fills the cache of a recipe's teacher ahead of training: what ``kd-cache`` does."""

import time
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch.utils.data import DataLoader

from kd._bar import bar
from kd.data.batch import Batch
from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError
from kd.launch.loopback import meet_on_loopback
from kd.module import DistillationModule
from kd.teachers import CachedTeacher, Teacher, dtype_for, open_cache
from kd.teachers.answer import Wanted


class Fill(LightningModule):
    """Asks the teacher for its answers to one view after another; a validation loop over training pictures.

    Args:
        teacher: the model.
        losses: the recipe's distillation losses: they say what of an answer is kept.
        data: the training pictures.
        wanted: what the losses look at of the teacher.
    """

    def __init__(self, teacher: Teacher, losses: dict[str, Any], data: DistillationDataModule, wanted: Wanted) -> None:
        super().__init__()
        self.teacher, self.losses, self.data, self.wanted = teacher, losses, data, wanted
        self.cached: CachedTeacher | None = None
        self.view = 0

    def setup(self, stage: str) -> None:
        """Puts the teacher on its device and opens the cache."""
        if self.cached is not None:
            return
        self.teacher.to(self.trainer.strategy.root_device, dtype_for(str(self.trainer.precision)))
        zero = self.trainer.is_global_zero
        self.cached = open_cache(self.teacher, self.losses, self.data, self.wanted, announce=zero)
        self.cached.only = False

    def val_dataloader(self) -> DataLoader:
        """Batches with missing answers, of this process and view."""
        assert self.cached is not None
        loader = self.data.fill_dataloader(
            self.view, self.cached.store.present, self.trainer.global_rank, self.trainer.world_size
        )
        label = f"view {self.view + 1}/{self.cached.store.views}"
        total = len(loader) * self.data.batch_size * self.trainer.world_size
        self._bar = bar(label=label, total=total, disable=not self.trainer.is_global_zero)
        return loader

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Computes and stores one batch of answers."""
        assert self.cached is not None
        batch = self.data.on_after_batch_transfer(batch, 0)
        self.cached.answer(batch, self.wanted)
        self._bar.update(len(batch["index"]) * self.trainer.world_size)

    def on_validation_end(self) -> None:
        """Takes the bar away."""
        self._bar.close()


def fill(model: DistillationModule, data: DistillationDataModule, trainer: Trainer) -> int:
    """Fills all views, on as many processes as the trainer has; returns the exit status.

    Raises:
        UserError: the recipe has no teacher, or nothing that learns from its answers.
    """
    data.prepare_data()
    teacher, losses = model.teacher, model.students.active_losses
    if teacher is None or not losses:
        raise UserError("model.teacher: there is nothing to cache, the recipe has no teacher or no distillation loss")
    module = Fill(teacher, losses, data, model.students.wanted)
    trainer.limit_val_batches = 1.0  # an overlay for short runs must not leave holes
    trainer.callbacks = []  # type: ignore[attr-defined]  # the recipe's are for training
    meet_on_loopback(trainer)
    start = time.monotonic()
    for module.view in range(max(member.spec.cache_views for member in teacher.members.values())):
        trainer.validate(module, verbose=False)
    assert module.cached is not None
    computed = int(trainer.strategy.reduce(torch.tensor(module.cached.computed), reduce_op="sum"))
    seconds, store = time.monotonic() - start, module.cached.store
    if trainer.is_global_zero:
        print(
            f"cache: {computed} answers computed in {seconds:.0f} s ({computed / seconds:,.0f} images/s); "
            f"{store.views} view(s) of {store.samples} pictures, {store.disk_bytes / 1e6:,.1f} MB in {store.folder}"
        )
        print("       use them with model.teacher.cache=on (or only)", flush=True)
    return 0
