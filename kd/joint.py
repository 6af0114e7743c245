"""Several students in one run: one teacher answers once a batch, every student learns by its own settings."""

from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from kd.data.datamodule import Batch, DataInfo
from kd.errors import UserError
from kd.module import Answers, DistillationModule, logs_now
from kd.optim import Together, settings_of
from kd.tasks import Task
from kd.teacher import Ensemble, Teacher


class SeveralStudents(LightningModule):
    """Trains several students side by side on the same batches and the same teacher's answers.

    Each student has its own losses, optimizer, schedule, clipping, moving average and metrics, and comes out as if it
    had been trained alone with the same seed. Everything is logged under ``<student>/...``; ``train/loss`` is the sum.

    Args:
        students: the modules by name; those with a teacher share one (:func:`kd.teacher.shared_teachers`).

    Raises:
        UserError: students with different teachers or tasks, or sharded optimizers.
    """

    def __init__(self, students: dict[str, DistillationModule]) -> None:
        super().__init__()
        self.students = nn.ModuleDict(students)
        self._ddp_params_and_buffers_to_ignore = [
            f"students.{name}.{own}" for name, m in students.items() for own in m._ddp_params_and_buffers_to_ignore
        ]
        taught = [module.teacher for module in students.values() if module.teacher is not None]
        if any(teacher.identity() != taught[0].identity() for teacher in taught):
            raise UserError("students: all must have the same model.teacher, it answers once for all")
        if len({type(module.task) for module in students.values()}) > 1:
            raise UserError("students: all must have the same model.task")
        if any(module.optim_spec.zero for module in students.values()):
            raise UserError("optim.zero: is not available with several students")
        object.__setattr__(self, "teacher", taught[0] if taught else None)
        self.teacher: Teacher | Ensemble | None
        self._optim_before: dict[str, Any] | None = None

    def named_students(self) -> dict[str, DistillationModule]:
        """The students by name."""
        return dict(self.students.items())  # type: ignore[arg-type]

    @property
    def _first(self) -> DistillationModule:
        return next(iter(self.named_students().values()))

    @property
    def task(self) -> Task:
        """The task of all."""
        return self._first.task

    @property
    def data_info(self) -> DataInfo:
        """The data of all."""
        return self._first.data_info

    def keep_teacher_answers(self, answers: Tensor | None) -> None:
        """See :meth:`DistillationModule.keep_teacher_answers`."""
        for module in self.named_students().values():
            module.keep_teacher_answers(answers)

    # -- life cycle --------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Each student's own.

        Raises:
            UserError: a lever that knows one student alone.
        """
        if self.teacher is not None and any(t.spec.cache != "off" for t in self.teacher.members.values()):
            raise UserError(
                "model.teacher.cache: is not available with several students, who share one answer as it is"
            )
        if "batch_size" in self.trainer.datamodule.auto:  # type: ignore[attr-defined]
            raise UserError("data.batch_size: auto is not available with several students")
        for module in self.named_students().values():
            module.trainer = self.trainer
            module.start_student(stage)
        for module in self.named_students().values():
            module.place_teacher()
            if stage == "fit":
                module.prepare_fit()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """All students' optimizers and schedules, stepped together."""
        own: list[Any] = [module.configure_optimizers() for module in self.named_students().values()]
        together = Together([part["optimizer"] for part in own])
        factors = [f for part in own for f in part["lr_scheduler"]["scheduler"].lr_lambdas]
        schedule = LambdaLR(together, factors)
        return {"optimizer": together, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_fit_start(self) -> None:
        """Keeps what this run made its optimizers with."""
        self._first.optimizer_settings = [settings_of(optimizer) for optimizer in self.trainer.optimizers]
        for module in self.named_students().values():
            module.follow_precision()

    def on_train_start(self) -> None:
        """As :meth:`DistillationModule.on_train_start`."""
        if self._optim_before is not None:
            named = self.named_students().items()
            self._first.settle_resumed([(self._optim_before.get(name, {}), m.optim_spec) for name, m in named])

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Tells the losses where training is."""
        for module in self.named_students().values():
            module.on_train_batch_start(batch, batch_idx)

    # -- training ----------------------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One batch for all students -> the sum of their totals; their parameters, and so gradients, are apart."""
        answers = self._ask(batch["image"])
        totals, logged = [], logs_now(self)
        for name, module in self.named_students().items():
            module.seed_step(batch_idx)
            total, terms = module.losses(batch, answers if module.listens else {})
            totals.append(total)
            if logged:
                for term, value in terms.items():
                    self.log(f"{name}/train/{term}", value)
        loss = torch.stack(totals).sum()
        if logged:
            self.log("train/loss", loss.detach())
        return self._first.for_its_window(loss, batch_idx)

    def _ask(self, images: Tensor) -> Answers:
        listening = [module for module in self.named_students().values() if module.listens]
        if self.teacher is None or not listening:
            return {}
        with ExitStack() as stack:
            for module in listening:
                stack.enter_context(module.tapping_the_teacher())
            return self.teacher.answers(images)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips each student's gradients by their own norm."""
        assert isinstance(optimizer, Together)
        for module, own in zip(self.named_students().values(), optimizer.optimizers, strict=True):
            module.configure_gradient_clipping(own, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Steps, then moves the averages."""
        super().optimizer_step(*args, **kwargs)
        for module in self.named_students().values():
            module.move_average()

    # -- validation --------------------------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """Each student's own."""
        for module in self.named_students().values():
            module.on_train_end()

    def on_validation_start(self) -> None:
        """Each student's own."""
        for module in self.named_students().values():
            module.on_validation_start()

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Adds one batch to each student's metrics; see :meth:`DistillationModule.validation_step`."""
        each = {name: module.validation_step(batch, batch_idx) for name, module in self.named_students().items()}
        return {name: found[""] for name, found in each.items() if found}

    def on_validation_epoch_end(self) -> None:
        """Logs ``<student>/val/<metric>``."""
        for name, module in self.named_students().items():
            if not module.classifies:
                continue
            self.log_dict({f"{name}/val/{metric}": value for metric, value in module.task.compute().items()})
            module.task.reset()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Stores who the teacher was, and each student's settings."""
        for module in self.named_students().values():
            module.on_save_checkpoint(checkpoint)
        checkpoint["kd_optim"] = {name: asdict(module.optim_spec) for name, module in self.named_students().items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As :meth:`DistillationModule.on_load_checkpoint`."""
        self._optim_before = checkpoint.get("kd_optim", {})
        for name, module in self.named_students().items():
            module.optim_spec.check_resumed(self._optim_before.get(name, {}))
        self._first.on_load_checkpoint(checkpoint)
