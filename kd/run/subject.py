"""What ``kd-eval`` measures: a model and its pictures."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from kd.data.datamodule import DistillationDataModule
from kd.models import Prepare
from kd.tasks import Task
from kd.teachers import RunTeacher


@dataclass
class Subject:
    """A model and the pictures that it is measured on."""

    name: str
    """The run's folder, or a weights file as it was given."""
    run: Path | None
    """The run's folder; None for a bare weights file."""
    model: nn.Module
    """The model, in eval mode."""
    prepare: Prepare
    """Its input."""
    classes: list[str]
    """Names by class id."""
    data: DistillationDataModule
    """Holds the split."""
    task: Task
    """What the labels mean."""
    teacher: RunTeacher | None
    """The teacher whose answers are compared with the model's; None where it has none that answers here."""
