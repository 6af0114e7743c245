"""A student and a teacher as one step, for any training loop."""

from collections.abc import Callable, Mapping
from typing import Any

from timm.utils import ModelEmaV3
from torch import Tensor, nn

from kd.data.batch import Batch, DataInfo
from kd.distill.headless import student_of
from kd.distill.objective import Objective, Terms
from kd.distill.student import Student
from kd.errors import UserError
from kd.losses import DistillLoss
from kd.models import input_of
from kd.models.taps import TapSpec
from kd.optim import OptimSpec
from kd.tasks import Classification, Task
from kd.teachers import FrozenTeacher, Teacher
from kd.teachers.answer import Answer


class Distillation(nn.Module):
    """One training step: ``step(images, targets).total.backward()``. Works in a plain loop, compiled, under DDP.

    Its parameters are the student's and those of losses that have some; the teacher is not among them. It follows the
    pictures to their device. A teacher under DDP: wrap the step, not the student.

    Args:
        student: any model that gives logits for pictures (:func:`kd.models.own.logits_of`).
        teacher: likewise, or any callable, or a :class:`kd.Teacher`; it is frozen.
        task: what the labels mean; it must know the number of classes, unless ``data`` does.
        losses: distillation losses by name, each with its weight.
        task_loss_weight: weight of the task's own loss, >= 0.
        taps: the layers that a feature loss of the same name looks at.
        teacher_of: the one of several teachers that a loss of that name listens to; default: the mean of all.
        data: classes and sizes of the data, where losses need to know more than the task.
        prepare: uint8 pictures -> the student's input: a :class:`kd.Preprocess`, or a function. Default: as timm says
            of the model. Float pictures pass as they are.
        teacher_prepare: likewise for the teacher.

    Raises:
        ValueError: a negative weight.
        UserError: models, losses and data that do not fit each other.

    >>> import kd, torch
    >>> student = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    >>> teacher = lambda images: torch.zeros(len(images), 3)
    >>> step = kd.Distillation(student, teacher, task=kd.Classification(3), losses={"kd": kd.KDLoss(4.0)})
    >>> sorted(step(torch.zeros(2, 3, 2, 2), torch.tensor([0, 2])).named)
    ['kd_loss', 'loss', 'task_loss']
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module | Callable[[Tensor], Any] | Teacher | None = None,
        *,
        losses: Mapping[str, DistillLoss] | None = None,
        task: Task | None = None,
        task_loss_weight: float = 1.0,
        taps: Mapping[str, TapSpec] | None = None,
        teacher_of: Mapping[str, str] | None = None,
        data: DataInfo | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
        teacher_prepare: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        found = as_teacher(teacher, teacher_prepare)
        object.__setattr__(self, "teacher", found)
        self.teacher: Teacher | None
        objective = Objective(task or Classification(), losses, task_loss_weight, taps, teacher_of)
        self.student = own_student(student, found, objective, data, prepare)

    def forward(self, images: Tensor, targets: Tensor, index: Tensor | None = None) -> Terms:
        """The losses of one batch.

        Args:
            images: uint8 or float ``(N, 3, H, W)``.
            targets: see :class:`kd.data.batch.Batch`.
            index: the samples' numbers ``(N,)``, where a loss needs them (CRD).
        """
        batch: Batch = {"image": images, "target": targets}
        if index is not None:
            batch["index"] = index
        wanted = self.student.objective.wanted
        if self.teacher is None or not wanted:
            return self.student.learn(batch, Answer())
        for member in self.teacher.members.values():
            if isinstance(member, FrozenTeacher) and member.device != images.device:
                member.to(images.device, member.dtype)
        return self.student.learn(batch, self.teacher.answer(batch, wanted))


def own_student(
    model: nn.Module,
    teacher: Teacher | None,
    objective: Objective,
    data: DataInfo | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    ema_decay: float | None = None,
    optim: OptimSpec | None = None,
) -> Student:
    """A student of any model; see :class:`Distillation` for the arguments."""
    data = data or info_of(objective.task)
    objective.task.settle(len(data.classes), data.ignore_index)
    average = moving_average(model, ema_decay)
    return student_of(objective)(
        model, input_of(model, "the student", prepare), objective, data, teacher, average, optim
    )


def as_teacher(
    teacher: nn.Module | Callable[[Tensor], Any] | Teacher | None, prepare: Callable[[Tensor], Tensor] | None = None
) -> Teacher | None:
    """Any model, any callable, or a teacher as it is."""
    if teacher is None or isinstance(teacher, Teacher):
        return teacher
    return FrozenTeacher(teacher, input_of(teacher, "the teacher", prepare))


def info_of(task: Task) -> DataInfo:
    """What a task knows of its data.

    Raises:
        UserError: it does not know the number of classes.
    """
    if not task.labels:
        return DataInfo([], labels=False)
    if not task.num_classes:
        name = type(task).__name__
        raise UserError(f"task: how many classes has the data? task={name}(num_classes) or data=kd.DataInfo(classes)")
    classes = [str(i) for i in range(task.num_classes)]
    return DataInfo(classes, masks=task.dense, multi_label=task.multi_label, ignore_index=task.ignore_index)


def moving_average(model: nn.Module, decay: float | None) -> ModelEmaV3 | None:
    """Of the model's weights, frozen; None without a decay.

    Raises:
        ValueError: a decay outside (0, 1).
    """
    if decay is None:
        return None
    if not 0 < decay < 1:
        raise ValueError(f"ema_decay must be > 0 and < 1, got {decay}")
    # its decay grows from 0, so that a short run's average does not keep the first, random weights
    return ModelEmaV3(model, decay=decay, use_warmup=True).requires_grad_(False)
