"""A student and a teacher as one step, for any training loop: answer -> student -> terms -> their weighted sum."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kd.clock import annotate
from kd.data.batch import Batch, RangeCheck, as_batch
from kd.data.info import DataInfo
from kd.distill.average import MovingAverage
from kd.distill.objective import Objective
from kd.distill.shares import by_share
from kd.distill.student import Student, info_without_data
from kd.losses import (
    BinaryKDLoss,
    DistillLoss,
    KDLoss,
    LogitLoss,
    PixelKDLoss,
    RegressionKDLoss,
)
from kd.models import Prepare, Preprocess, TapSpec, input_of
from kd.models.own import AsGiven, compile_as, frozen_copy, uncompiled
from kd.models.preprocess import in_type_of
from kd.optim import OptimSpec, as_optim
from kd.processes import in_process_group
from kd.tasks import Classification, Features, Task
from kd.teachers import Ensemble, FrozenTeacher, OwnTeacher, RunTeacher, Teacher
from kd.teachers.answer import Answer

GivenTeacher = Callable[[Tensor], Any] | Teacher | Mapping[str, Callable[[Tensor], Any]] | None
"""What the Python classes take as a teacher (a module is callable too), see :class:`Distillation`."""


@dataclass
class Terms:
    """The losses of one batch."""

    total: Tensor
    """The weighted sum, a scalar with a gradient."""
    named: dict[str, Tensor]
    """Each term unweighted (``task_loss``, ``<name>_loss``) and ``loss``, the total; scalars without gradients."""

    @property
    def loss(self) -> Tensor:
        """The same as :attr:`total`."""
        return self.total


class Distillation(nn.Module):
    """One training step: ``step(images, targets).loss.backward()``. Works in a plain loop, compiled, under DDP.

    Its parameters are the student's and those of losses that have some, not the teacher's. The teacher follows the
    pictures to their device. Under DDP wrap the step, not the student. A loop of one's own calls
    ``step.student.objective.set_epoch(epoch, max_epochs)`` where a loss changes over the epochs.

    Args:
        student: any model that gives logits for pictures (:func:`kd.models.own.logits_of`), with parameters of its own.
        teacher: likewise, or any callable, or a :class:`kd.Teacher`, or several models by name. Of a module a frozen copy
            answers, which shares its memory until it is moved or cast (:func:`kd.models.own.frozen_copy`).
        task: what the labels mean; default: one class a picture, as many classes as the student's last layer has; of a
            timm model with ``num_classes=0`` and losses that read no logits none at all: it needs no labels.
        losses: distillation losses by name, each with its weight. Default with a teacher: ``{"kd": KDLoss()}``, or
            BinaryKDLoss, PixelKDLoss or RegressionKDLoss where the task needs it; ``{}``: none.
        task_loss_weight: weight of the task's own loss, >= 0.
        taps: the layers that a feature loss of the same name reads.
        teacher_of: which of several teachers a loss of that name uses; default: the mean of all, over logits alone: of
            several teachers a loss over features must name one.
        data: classes and sizes of the data, where losses need to know more than the task.
        prepare: uint8 pictures -> the student's input: a :class:`kd.Preprocess`, or a function. Default: as timm says
            of the model. Float pictures pass as they are.
        teacher_prepare: likewise for the teacher.
        ema_decay: keep an exponential moving average of the student: ``step.student.move_average(number)`` after each
            optimizer step.
        optim: how :class:`kd.DistillationModule` optimizes it: a :class:`kd.OptimSpec`, a dict of its fields, or a function
            of the trainable parameters that makes an optimizer, whose learning rate then stays as it is.

    Raises:
        TypeError: an argument of another kind.
        ValueError: a number out of its range, or a task that was made for other data.
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
        student: nn.Module | Student,
        teacher: GivenTeacher = None,
        *,
        losses: Mapping[str, DistillLoss] | None = None,
        task: Task | None = None,
        task_loss_weight: float = 1.0,
        taps: Mapping[str, TapSpec] | None = None,
        teacher_of: Mapping[str, str] | None = None,
        data: DataInfo | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
        teacher_prepare: Callable[[Tensor], Tensor] | None = None,
        ema_decay: float | None = None,
        optim: OptimSpec
        | Mapping[str, Any]
        | Callable[[list[nn.Parameter]], Optimizer]
        | None = None,
    ) -> None:
        """Builds the objective and the student; the arguments are the class's.

        A ``student`` that is a :class:`~kd.distill.student.Student` brings its task, losses and optimizer: beside it
        ``teacher`` and ``teacher_prepare`` alone are read.
        """
        super().__init__()
        self.teacher = run_teacher = as_teacher(teacher, teacher_prepare)
        """No module: it is neither trained nor saved."""
        self.answering_teacher = run_teacher
        """Answers in a step: the teacher, or a cache before it."""
        if not isinstance(student, Student):
            check_types(
                {
                    "student": student,
                    "task": task,
                    "losses": losses,
                    "taps": taps,
                    "teacher_of": teacher_of,
                    "data": data,
                }
            )
            before = AsGiven(student)
            model = uncompiled(student)
            if task is None:
                task = Features() if learns_features_alone(model, losses) else Classification()
            if losses is None and run_teacher is not None:
                losses = usual_losses(task)
            objective = Objective(task, losses, task_loss_weight, taps, teacher_of)
            info = data or info_without_data(task, model)
            task.settle(len(info.classes), info.ignore_index)
            average = moving_average(model, ema_decay)
            own_input = input_of(model, "the student", prepare)
            let_teachers_renormalise(run_teacher, own_input)
            learner = Student(
                model, own_input, objective, info, run_teacher, average, as_optim(optim)
            )
            compile_as(student, model)
            learner.given = before  # the user's modes and types, put back after a run
            student = learner
        self.student = student
        self.range_check = RangeCheck()
        """Looks at the first batch: it warns of float pictures in 0 to 255."""

    def forward(
        self,
        images: Tensor,
        targets: Tensor,
        index: Tensor | None = None,
        window: Sequence[Tensor] | None = None,
    ) -> Terms:
        """The losses of one batch.

        Args:
            images: uint8 or float ``(N, 3, H, W)``.
            targets: see :class:`kd.data.batch.Batch`.
            index: the samples' numbers ``(N,)``, where a loss needs them (CRD).
            window: where gradients are accumulated over several batches and labels are missing: the targets of all
                these batches, whose losses the loop divides by their number (:mod:`kd.data.windows`).

        Raises:
            UserError: targets in another form than the task's.
            ValueError: no ``index`` where a loss needs it.
        """
        batch = as_batch((images, targets))
        if not torch.compiler.is_compiling():
            self.range_check.look(images)
            self.student.objective.check_targets(batch)
        if index is not None:
            batch["index"] = index
        if window is not None:
            batch["window"] = [*window]
        if self.answering_teacher is not None:
            self.answering_teacher.follow(images.device)
        return self.learn(batch, self.answer(batch))

    def answer(self, batch: Batch) -> Answer:
        """The teacher's answer to a batch on its device: what the losses read of it; an empty answer where they read
        nothing, or without a teacher.
        """
        objective = self.student.objective
        if self.answering_teacher is None or not objective.active:
            return Answer()
        return self.answering_teacher.answer(batch, objective.wanted)

    def learn(self, batch: Batch, answer: Answer) -> Terms:
        """The student's forward pass and the losses of one batch: ``total = sum_i weight_i * loss_i``.

        Where labels may be missing, a training step of several batches or processes multiplies each ``loss_i`` in the sum
        by its share of the step's targets (:func:`kd.distill.shares.by_share`).

        Args:
            batch: on the student's device, with ``target``, ``index`` where a loss needs it, and ``window`` where gradients
                are accumulated over batches with missing labels; see :class:`kd.data.batch.Batch`.
            answer: the teacher's to the same pictures, with all that :attr:`Objective.wanted` lists; empty without.
        """
        student = self.student
        objective = student.objective
        task = objective.task
        target = batch["target"]

        # The student, and what its layers give.
        taps: Any = student.taps if objective.layers else nullcontext({})
        with annotate("student"):
            pictures = in_type_of(student.model, student.prepare(batch["image"]))
            # under autocast: all weights are cast at once, to the bits that it would give them one by one
            with student.casts(pictures), taps as caught:
                output = student.model(pictures)
        # DeiT: the class token's logits learn from labels, the distillation token's from the teacher
        if student.has_two_heads and isinstance(output, tuple):
            logits, taught_logits = output
        else:
            logits = taught_logits = student.output_in(output)
        if logits.ndim > 2:  # maps: at the target's size
            logits = task.fit(logits, target)
            taught_logits = task.fit(taught_logits, target)

        # Each term, by name.
        values: dict[str, Tensor] = {}
        for name in objective.active:
            values[name] = objective.value(name, taught_logits, caught, answer, batch)
        if objective.task_loss_weight:
            values["task"] = task.loss(logits, target)

        # Their weighted sum; where labels may be missing, each term times its share of the optimizer step's targets.
        summed = values
        window = batch.get("window")
        has_others = window is not None or in_process_group()
        if objective.lacks_labels and student.training and has_others:
            summed = by_share(objective, values, target, window)
        total = objective.weighted(summed)
        named = {f"{name}_loss": value.detach() for name, value in values.items()}
        named["loss"] = total.detach()
        return Terms(total, named)


ARGUMENTS: dict[str, tuple[type, str]] = {
    "student": (nn.Module, "a torch.nn.Module"),
    "task": (Task, "a task, such as kd.Classification(num_classes=10)"),
    "data": (DataInfo, 'kd.DataInfo(classes=["apple", "bread"])'),
    "losses": (Mapping, 'a dict of losses by name, such as {"kd": kd.KDLoss(temperature=4.0)}'),
    "taps": (Mapping, 'a dict of layers by loss, such as {"hint": kd.TapSpec("layer3", "blocks.11")}'),
    "teacher_of": (Mapping, "a dict: the name of a teacher by the name of a loss"),
}  # fmt: skip
"""Types of arguments of :class:`Distillation`, and what to give in words."""
PARTS: dict[str, tuple[type, str]] = {
    "losses": (
        DistillLoss,
        "a loss of kd.losses, or a subclass of kd.losses.LogitLoss or kd.losses.FeatureLoss of your own",
    ),
    "taps": (TapSpec, 'kd.TapSpec(student="layer3", teacher="blocks.11")'),
}
"""The same of what some of them hold."""


def check_types(given: Mapping[str, object]) -> None:
    """Refuses arguments of :class:`Distillation` by name that are neither None nor of their type (TypeError)."""
    for name, value in given.items():
        _check_type(name, value, *ARGUMENTS[name])
    for name, part in PARTS.items():
        held: Any = given[name] or {}
        for key, value in held.items():
            _check_type(f"{name}['{key}']", value, *part)


def _check_type(name: str, value: object, kind: type, words: str) -> None:
    """Refuses a value that is neither None nor of the type ``kind``; ``words`` say what to give."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name}: must be {words}, got {type(value).__name__}")


def learns_features_alone(student: nn.Module, losses: Mapping[str, DistillLoss] | None) -> bool:
    """Whether a model has no classifier (timm's ``num_classes=0``) and its losses read no logits: it needs no labels."""
    if getattr(student, "num_classes", None) != 0 or not losses:
        return False
    return not any(isinstance(loss, LogitLoss) for loss in losses.values())


def usual_losses(task: Task) -> dict[str, DistillLoss]:
    """The default loss of a task, named ``kd``: over the softmax, or of each label, pixel or number; {} for features."""
    for loss in (KDLoss(), BinaryKDLoss(), PixelKDLoss(), RegressionKDLoss()):
        if not task.refuses(loss):
            return {"kd": loss}
    return {}


def let_teachers_renormalise(teacher: RunTeacher | None, prepare: Prepare) -> None:
    """Lets teachers whose mean and std are known renormalise float pictures, which come normalised for the student.

    Args:
        teacher: changed in place: of each such member ``prepare``, which is copied first.
        prepare: the student's; a function of the user's, whose mean and std are not known, changes nothing.
    """
    if teacher is None or not isinstance(prepare, Preprocess):
        return
    for member in teacher.members.values():
        if isinstance(member, FrozenTeacher) and isinstance(member.prepare, Preprocess):
            member.prepare = copy.copy(member.prepare)  # it may be the student's too, or the user's
            member.prepare.floats = (prepare.mean, prepare.std)


def as_teacher(
    teacher: GivenTeacher, prepare: Callable[[Tensor], Tensor] | None = None, name: str = "teacher"
) -> RunTeacher | None:
    """The run's teacher of what a user may give as one; None of None.

    Args:
        teacher: any model, any callable, several of them by name, or a teacher, which stays as it is.
        prepare: uint8 pictures -> the model's input; default: as timm says of the model.
        name: of the argument, for messages.

    Raises:
        TypeError: something else, or no model by name at all.
    """
    if teacher is None or isinstance(teacher, RunTeacher):
        return teacher
    if isinstance(teacher, Teacher):
        return OwnTeacher(teacher)
    if isinstance(teacher, Mapping) and teacher:
        members: Any = {
            key: as_teacher(model, prepare, f"teacher['{key}']") for key, model in teacher.items()
        }
        return Ensemble(members)
    if not callable(teacher):
        raise TypeError(
            f"{name}: must be a module or a function of pictures (or a kd.Teacher; several go by name, "
            f'{{"a": a, "b": b}}), got {type(teacher).__name__}'
        )
    if isinstance(teacher, nn.Module):
        teacher = frozen_copy(teacher, name)
    return FrozenTeacher(teacher, input_of(teacher, "the teacher", prepare, "teacher_prepare"))


def moving_average(model: nn.Module, decay: float | None) -> MovingAverage | None:
    """A copy of the model that will be the moving average of its weights, frozen; None without a decay.

    Args:
        model: as it is before the first step.
        decay: of the average per optimizer step, in (0, 1): ``average <- decay * average + (1 - decay) * weights``; the
            first steps have a smaller one (:meth:`MovingAverage.update`).

    Raises:
        ValueError: a decay outside (0, 1).
    """
    if decay is None:
        return None
    if not 0 < decay < 1:
        raise ValueError(f"ema_decay must be > 0 and < 1, got {decay}")
    # its decay grows from 0, so that a short run's average does not keep the first, random weights
    return MovingAverage(model, decay=decay, use_warmup=True).requires_grad_(False)
