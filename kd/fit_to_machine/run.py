"""What is measured: students, their teacher, and the trainer that will run them."""

from typing import Protocol

from pytorch_lightning import Trainer

from kd.distill.students import Students
from kd.teachers import RunTeacher


class Run(Protocol):
    """A :class:`kd.DistillationModule` attached to its trainer, as far as it is measured."""

    teacher: RunTeacher | None

    @property
    def trainer(self) -> Trainer:
        """That will run it."""

    @property
    def students(self) -> Students:
        """That learn."""
