"""What is measured: students, their teacher, and the trainer that will run them."""

from collections.abc import Mapping
from typing import Protocol

from pytorch_lightning import Trainer

from kd.distill.student import Student
from kd.losses import DistillLoss
from kd.teachers import Teacher
from kd.teachers.answer import Wanted


class Run(Protocol):
    """A :class:`kd.DistillationModule` attached to its trainer, as far as it is measured."""

    teacher: Teacher | None

    @property
    def trainer(self) -> Trainer:
        """That will run it."""

    @property
    def wanted(self) -> Wanted:
        """What the losses look at of the teacher."""

    @property
    def active_losses(self) -> Mapping[str, DistillLoss]:
        """The distillation losses with a weight."""

    def named_students(self) -> Mapping[str, Student]:
        """The students by name."""
