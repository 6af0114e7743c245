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
from kd.distill.students import StepOutput, Students
from kd.module.distillation import DistillationModule
from kd.module.evaluation import ValidationLogits
from kd.teachers import RunTeacher


def output_of(outputs: STEP_OUTPUT) -> StepOutput:
    """Our training step's output, typed: Lightning passes it to callbacks as any output."""
    assert isinstance(outputs, Mapping)
    return cast(StepOutput, outputs)


def validation_logits(outputs: STEP_OUTPUT) -> ValidationLogits:
    """Our validation step's output, typed; empty where it gave none."""
    return cast(ValidationLogits, outputs or {})


def is_trial_validation(trainer: Trainer) -> bool:
    """Whether Lightning tries a few validation batches before training, which say nothing of a student.

    A validation of all of them there measures the students' start (:class:`kd.callbacks.best.Best`).
    """
    return trainer.sanity_checking and not math.isinf(trainer.num_sanity_val_steps)


@dataclass(frozen=True)
class RunContext:
    """Typed access to a run's trainer, module, students, teacher, data and folder."""

    trainer: Trainer
    """The run's trainer."""
    module: DistillationModule
    """The run's module, which holds students, teacher and data."""

    @classmethod
    def of(cls, trainer: Trainer) -> "RunContext":
        """The run of a trainer that is set up with kd's module."""
        module = trainer.lightning_module
        assert isinstance(module, DistillationModule)
        return cls(trainer, module)

    @property
    def students(self) -> Students:
        """The models that are trained, each with its losses and optimizer."""
        return self.module.students

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

    def student_folder(self, name: str) -> Path:
        """The folder of one of several students; the run's own folder for a single student (no name)."""
        if name:
            return self.folder / "students" / name
        return self.folder

    @property
    def device(self) -> torch.device:
        """The device that this process trains on; after the training the students lie in the host's memory."""
        return self.trainer.strategy.root_device
