"""What callbacks read of their run."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor

from kd.data.datamodule import DistillationDataModule
from kd.distill.students import StepOutput, Students
from kd.module.distillation import DistillationModule
from kd.module.evaluation import ValidationLogits
from kd.teachers import RunTeacher

T = TypeVar("T")
Tag = TypeVar("Tag")  # what the caller wants back with its tensors


def output_of(outputs: STEP_OUTPUT) -> StepOutput:
    """Our training step's output, typed: Lightning passes it to callbacks as any output."""
    assert isinstance(outputs, Mapping)
    return cast(StepOutput, outputs)


def validation_logits(outputs: STEP_OUTPUT) -> ValidationLogits:
    """Our validation step's output, typed; empty where it gave none."""
    return cast(ValidationLogits, outputs or {})


class HostCopies(Generic[Tag]):
    """Copies tensors to the host and gives them back in order once they have arrived: nothing waits for a GPU."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Tag, list[Tensor], torch.cuda.Event | None]] = deque()

    def add(self, tag: Tag, *tensors: Tensor) -> None:
        """Begins to copy tensors to the host without a wait; ``tag`` comes back with them."""
        done = None
        if any(x.device.type == "cuda" for x in tensors):
            tensors, done = (
                tuple(x.to("cpu", non_blocking=True) for x in tensors),
                torch.cuda.Event(),
            )
            done.record()
        self._pending.append((tag, list(tensors), done))

    def take(self, wait: bool = False) -> Iterator[tuple[Tag, list[Tensor]]]:
        """Copies that have arrived; with ``wait`` all of them."""
        while self._pending:
            tag, tensors, done = self._pending[0]
            if done is not None:
                if not wait and not done.query():
                    return
                done.synchronize()
            self._pending.popleft()
            yield tag, tensors

    def clear(self) -> None:
        """Forgets copies that were not taken."""
        self._pending.clear()


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
        """The run's folder; Lightning's default folder without the callback ``RunFolder``."""
        return self.module.folder or Path(self.trainer.default_root_dir)

    @property
    def best_checkpoint(self) -> Path:
        """Path of ``best.ckpt``, whether or not it exists yet."""
        return self.folder / "checkpoints" / "best.ckpt"

    def student_folder(self, name: str) -> Path:
        """The folder of one of several students; the run's own folder for a single student (no name)."""
        return self.folder / "students" / name if name else self.folder

    @property
    def device(self) -> torch.device:
        """The device that the students are on."""
        return self.module.device
