"""What a checkpoint holds beside weights, and how another run resumes from it."""

import math
from collections.abc import Mapping
from typing import Any

from pytorch_lightning import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from kd.data.datamodule import DistillationDataModule, check_same_samples
from kd.distill.students import Students
from kd.errors import UserError
from kd.optim import settings_of, settle_resumed, steps_done


class Resume:
    """A run's way into a checkpoint and back.

    Args:
        students: that are trained.
        teacher: who teaches them (:meth:`kd.Teacher.identity`).
    """

    def __init__(self, students: Students, teacher: Mapping[str, Any]) -> None:
        self.students, self.teacher = students, teacher
        self._classes = list(students.data_info.classes)
        self.optim_before: dict[str, Any] | None = None  # the settings of the run that is resumed, by student
        self._made_with: list[list[dict[str, Any]]] = []

    def content(self, data: DistillationDataModule | None, cached: bool) -> dict[str, Any]:
        """What is stored: who the teacher was (its weights stay out), the classes, the settings that count."""
        found = {
            "kd_teacher": self.teacher,
            "kd_classes": self._classes,
            "kd_cached": cached,
            "kd_optim": {name: student.optim.settings() for name, student in self.students.named().items()},
        }
        if data is None:
            return found
        return {**found, "kd_batch_size": data.batch_size, "kd_data": data.samples_identity}

    def check(self, checkpoint: Mapping[str, Any], data: DistillationDataModule | None) -> None:
        """Compares a checkpoint with this run, and takes over what its run had measured (batch size).

        Args:
            checkpoint: as loaded.
            data: of this run; None where it is not kd's.

        Raises:
            UserError: another teacher, other data or classes, or an optimizer that the saved state does not fit.
        """
        before = self.optim_before = checkpoint.get("kd_optim", {})
        for name, student in self.students.named().items():
            student.optim.check_resumed(before.get(name, {}))
        if data is not None:
            check_same_samples(checkpoint.get("kd_data", {}), data.samples_identity)
        for key, now in (("kd_teacher", self.teacher), ("kd_classes", self._classes)):
            then = checkpoint.get(key, now)
            if then != now:
                what = key.removeprefix("kd_")
                raise UserError(f"resume: the checkpoint was made with another {what} ({then}, now {now})")
        if data is not None and "batch_size" in data.auto:
            data.batch_size = checkpoint.get("kd_batch_size", data.batch_size)

    def note(self, optimizers: list[Optimizer]) -> None:
        """Keeps what this run made its optimizers with: a checkpoint is loaded over it."""
        self._made_with = [settings_of(optimizer) for optimizer in optimizers]

    def settle(self, trainer: Trainer, data: DistillationDataModule | None) -> None:
        """Applies this run's own rates and decays to the restored optimizer, at the position that the samples seen
        give.
        """
        if self.optim_before is None or data is None:
            return
        students = self.students.named()
        keys = {"weight_decay"}
        for name, student in students.items():
            keys |= {*self.optim_before.get(name, {}).get("kwargs", {}), *student.optim.kwargs}
        (optimizer,), (schedule,) = trainer.optimizers, (config.scheduler for config in trainer.lr_scheduler_configs)
        assert isinstance(schedule, LambdaLR)
        position = schedule.last_epoch
        if data.position.at is not None:
            position = _position(trainer, *data.position.at, data)
        settle_resumed(optimizer, schedule, self._made_with[0], keys, position)


def _position(trainer: Trainer, epoch: int, samples: int, data: DistillationDataModule) -> int:
    per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    by_epochs = epoch * per_epoch + data.batches_before(samples) // trainer.accumulate_grad_batches
    epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else math.inf
    return steps_done(trainer.global_step, by_epochs, epochs * per_epoch, trainer.max_steps)
