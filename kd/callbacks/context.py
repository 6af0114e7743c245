"""What callbacks read of their run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.types import STEP_OUTPUT

from kd.data.datamodule import DistillationDataModule
from kd.distill.student import Student
from kd.module.distillation import DistillationModule, StepOutput
from kd.module.evaluation import ValidationLogits
from kd.teachers import RunTeacher


def output_of(outputs: STEP_OUTPUT) -> StepOutput:
    """Our training step's output, typed: Lightning passes it to callbacks as any output."""
    assert isinstance(outputs, Mapping)
    return cast(StepOutput, outputs)


def validation_logits(outputs: STEP_OUTPUT) -> ValidationLogits | None:
    """Our validation step's output, typed; None where it gave none."""
    return cast("ValidationLogits | None", outputs)


def is_trial_validation(trainer: Trainer) -> bool:
    """Whether Lightning tries a few validation batches before training, which say nothing of a student.

    A validation of all of them there measures the student's start (:class:`kd.callbacks.best.Best`).
    """
    return trainer.sanity_checking and not math.isinf(trainer.num_sanity_val_steps)


@dataclass(frozen=True)
class RunContext:
    """Typed access to a run's trainer, module, student, teacher, data and folder."""

    trainer: Trainer
    """The run's trainer."""
    module: DistillationModule
    """The run's module, which holds student, teacher and data."""

    @classmethod
    def of(cls, trainer: Trainer) -> "RunContext":
        """The run of a trainer that is set up with kd's module."""
        module = trainer.lightning_module
        assert isinstance(module, DistillationModule)
        return cls(trainer, module)

    @property
    def student(self) -> Student:
        """The model that is trained, with its losses and optimizer."""
        return self.module.student

    @property
    def data(self) -> DistillationDataModule:
        """The run's data module; one must be there."""
        assert self.module.data is not None
        return self.module.data

    @property
    def teacher(self) -> RunTeacher:
        """The run's teacher, where one is known to be there."""
        assert self.module.teacher is not None
        return self.module.teacher

    @property
    def folder(self) -> Path:
        """The run's folder; before the callback ``RunFolder`` has claimed it, or without one, Lightning's default folder."""
        return self.module.folder or Path(self.trainer.default_root_dir)

    @property
    def best_checkpoint(self) -> Path:
        """Path of ``best.ckpt``, whether or not it exists yet."""
        return self.folder / "checkpoints" / "best.ckpt"

    @property
    def device(self) -> torch.device:
        """The device that this process trains on; after the training the student lies in the host's memory."""
        return self.trainer.strategy.root_device
