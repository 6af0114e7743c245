"""From the settings below ``model`` to the module that trains."""

from typing import Any

from torch import nn

from kd.data.batch import DataInfo
from kd.distill.objective import Objective
from kd.distill.step import moving_average
from kd.distill.student import Student
from kd.errors import UserError
from kd.losses import DistillLoss
from kd.models import StudentSpec, TeacherSpec, build_model, completed, preprocess_for
from kd.models.taps import TapSpec
from kd.module import DistillationModule
from kd.optim import OptimSpec
from kd.tasks import Classification, Task
from kd.teachers import FrozenTeacher, Teacher, build_teachers


def assemble(
    data: DataInfo,
    student: StudentSpec,
    teacher: TeacherSpec | None = None,
    teachers: dict[str, TeacherSpec] | None = None,
    task: Task | None = None,
    task_loss_weight: float = 1.0,
    distill_losses: dict[str, DistillLoss] | None = None,
    taps: dict[str, TapSpec] | None = None,
    teacher_of: dict[str, str] | None = None,
    ema_decay: float | None = None,
    optim: OptimSpec | None = None,
) -> DistillationModule:
    """A module from settings: what recipes hold below ``model``.

    Args:
        data: classes and sizes of the data.
        student: the model to train.
        teacher: the model to learn from; without one the student learns from labels alone.
        teachers: several of them by name, in place of ``teacher``; their mean counts by each one's ``weight``.
        task: what the labels mean.
        task_loss_weight: weight of the task's own loss, >= 0. Without labels there is no such loss.
        distill_losses: distillation losses by name, each with its weight.
        taps: the layers that a feature loss of the same name looks at.
        teacher_of: the one of ``teachers`` that a loss of that name listens to; default: the mean of all.
        ema_decay: keep an exponential moving average of the student, validate and export that.
        optim: optimizer and schedule.

    Raises:
        ValueError: weights that leave nothing to learn from.
        UserError: models, losses, data or checkpoints that do not fit each other.
    """
    losses = distill_losses or {}
    if losses and teacher is None and not teachers:
        raise UserError(f"model.teacher: the distillation losses {', '.join(losses)} need one (or config=no_teacher)")
    if not data.classes:
        raise UserError("data.source: its pictures have no labels, and the student's classifier needs classes; beside "
                        "labelled pictures such a folder is data.unlabeled")  # fmt: skip
    task = task or Classification()
    weight = (
        task_loss_weight if data.labels or not task_loss_weight >= 0 else 0.0
    )  # without labels there is no such loss
    objective = Objective(task, losses, weight, taps, teacher_of)
    task.settle(len(data.classes), data.ignore_index)
    student = completed(student, "model.student")
    model = build_model(student, len(data.classes), "model.student", data.classes, dense=task.dense)
    prepare = preprocess_for(model, student.img_size, False, student.mean, student.std)
    if student.grad_checkpointing:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    average = moving_average(model, ema_decay)
    found = build_teachers(teacher, teachers or {}, data.classes, task.dense)
    start, not_inherited = choose_start(student, model, found, task.dense)
    learner = Student(model, prepare, objective, data, found, average, optim, student, start, not_inherited)
    return DistillationModule(learner, found)


def choose_start(spec: StudentSpec, model: nn.Module, teacher: Teacher | None, dense: bool) -> tuple[str, str]:
    """Where the student's first weights come from, settled before data are read and the teacher is measured.

    Returns:
        ``inherited``, ``pre-trained`` or ``scratch``; and why it does not inherit, where it would if it could.

    Raises:
        UserError: layers that must be inherited (``inherit=true``) and can't be.
    """
    start = "pre-trained" if spec.pretrained or spec.checkpoint else "scratch"
    if not spec.inherit or (spec.inherit == "auto" and (teacher is None or start == "pre-trained")):
        return start, ""
    problem = _not_inheritable(model, teacher, dense)
    if not problem:
        return "inherited", ""
    if spec.inherit == "auto":
        return start, problem
    without = "" if teacher is None else "; model.student.inherit=auto trains such a student without them"
    raise UserError(f"model.student.inherit: {problem}{without}")


def _not_inheritable(model: nn.Module, teacher: Teacher | None, dense: bool) -> str:
    """Why the student can't start from the teacher's layers; empty where it can."""
    from kd.distill.inherit import check_pair

    if teacher is None:
        return "needs a model.teacher"
    if not isinstance(teacher, FrozenTeacher):
        return "needs one model.teacher, not model.teachers"
    pair: list[Any] = [model, teacher.model]
    try:
        check_pair(*(own.backbone if dense else own for own in pair))
    except ValueError as error:
        return str(error)
    return ""
