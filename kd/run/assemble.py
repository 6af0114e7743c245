"""From the settings below ``model`` to the module that trains."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from kd.data.info import DataInfo
from kd.distill.objective import Objective
from kd.distill.step import moving_average
from kd.distill.student import Student
from kd.errors import UserError
from kd.losses import DistillLoss
from kd.models import (
    Preprocess,
    StudentSpec,
    TeacherSpec,
    build_model,
    completed,
    count_parameters,
    preprocess_for,
)
from kd.models.build import AUTO, PATCHES
from kd.models.hub import is_downloadable
from kd.models.segmenter import backbone_of
from kd.models.weights import about, say
from kd.module.distillation import DistillationModule
from kd.optim import OptimSpec
from kd.settings import HEADLESS_WITHOUT_LOSSES, LearningSettings, TapSpec
from kd.tasks import Classification, Features, Task
from kd.teachers import FrozenTeacher, RunTeacher, build_teachers
from kd.teachers.answer import ALL
from kd.teachers.build import input_named_by_weights, say_differing_input
from kd.teachers.stored import A_START


def assemble(
    data: DataInfo,
    student: StudentSpec,
    teacher: TeacherSpec | None = None,
    teachers: dict[str, TeacherSpec] | None = None,
    task: Task | None = None,
    task_loss_weight: float = LearningSettings.task_loss_weight,
    distill_losses: dict[str, DistillLoss] | None = None,
    taps: dict[str, TapSpec] | None = None,
    teacher_of: dict[str, str] | None = None,
    ema_decay: float | None = None,
    optim: OptimSpec | None = None,
    built: RunTeacher | None = None,
) -> DistillationModule:
    """A module from settings: what recipes hold below ``model``.

    For a student without a classifier the teachers are built without theirs. A start or a size that the user may not expect
    is reported, a line each.

    Args:
        data: classes and sizes.
        student: the student's settings.
        teacher: the only teacher's.
        teachers: several, by name; not beside ``teacher``.
        task: what the labels mean; None: classification, and for a student without a classifier features.
        task_loss_weight: weight of the task's own loss, >= 0; it does not count without labels.
        distill_losses: by name, each with its weight.
        taps: the layers that a loss of that name reads.
        teacher_of: the teacher that a loss of that name reads.
        ema_decay: of the moving average of the weights; None: without.
        optim: the optimizer's settings; None: the defaults.
        built: the teacher, built of these settings before; None: it is built.

    Raises:
        UserError: settings that contradict each other; it names the key.
    """
    losses = distill_losses or {}
    _check_parts(data, student, losses, has_teacher=teacher is not None or bool(teachers))
    task = _task(task, student.head, data)
    # without labels 0; a negative weight is passed on, and Objective refuses it
    weight = task_loss_weight if data.labels else min(task_loss_weight, 0.0)
    objective = Objective(task, losses, weight, taps, teacher_of)
    if student.freeze and not (objective.task_loss_weight or objective.trains_logits):
        raise UserError(
            "model.student.freeze: backbone needs a loss that trains the classifier: "
            "model.task_loss_weight, or a loss over logits (not SimKDLoss)"
        )
    task.settle(len(data.classes), data.ignore_index)
    if not student.head:  # then a teacher's classifier is of no use either
        teacher = teacher and replace(teacher, head=False)
        teachers = {name: replace(spec, head=False) for name, spec in (teachers or {}).items()}
    found = built or build_teachers(teacher, teachers or {}, data.classes, task.dense)
    if student.arch == AUTO:
        student = _relative_student(student, found)
    student = completed(student, "model.student")
    classes = data.classes if student.head else []
    build = partial(
        build_model,
        num_classes=len(classes),
        key="model.student",
        classes=classes,
        dense=task.dense,
    )
    begun = choose_start(student, found, build)
    _report_larger(student, begun.model, found)
    if begun.start == "scratch" and not student.inherit and found is not None and found.stored:
        say(
            f"model.student: begins with random weights, as stored answers have no layers; {A_START} gives it a start"
        )
    prepare = _prepared(student, begun)
    average = moving_average(begun.model, ema_decay)
    learner = Student(
        begun.model,
        prepare,
        objective,
        data,
        found,
        average,
        optim,
        student,
        begun.start,
        begun.note,
        begun.parent,
    )
    return DistillationModule(learner, found)


def _check_parts(
    data: DataInfo, student: StudentSpec, losses: Mapping[str, DistillLoss], has_teacher: bool
) -> None:
    """Refuses settings that contradict each other before anything is built; a UserError that names the key."""
    if losses and not has_teacher:
        raise UserError(
            f"model.teacher: the distillation losses {', '.join(losses)} need one (model.distill_losses={{}}: by labels "
            "alone)"
        )
    if not student.head and not losses:
        raise UserError(HEADLESS_WITHOUT_LOSSES)
    if student.head and data.probed:
        raise UserError(
            "data.probe.root: is for a student without a classifier (model.student.head=false)"
        )


def _report_larger(student: StudentSpec, model: nn.Module, teacher: RunTeacher | None) -> None:
    """Reports a student that has more parameters, by 5 % and more, than each of its teachers of a known size."""
    members = {} if teacher is None else teacher.members
    sizes = {}
    for member in members.values():
        if not member.closed:
            sizes[member.arch] = count_parameters(member.model)
    own = count_parameters(model)
    largest = max(sizes, key=lambda arch: sizes[arch], default="")
    if largest and own > 1.05 * sizes[largest]:
        say(
            f"model.student: {student.arch} has {own / 1e6:.1f} M parameters, more than its teacher {largest} "
            f"({sizes[largest] / 1e6:.1f} M); model.student.arch=NAME takes a smaller one"
        )


def _prepared(student: StudentSpec, begun: "Begun") -> Preprocess:
    """The input of a student that was built, whose model keeps fewer activations where that is set.

    An input that its weights were not trained with is reported.

    Args:
        student: its complete settings.
        begun: its model.

    Raises:
        UserError: a backbone that would be frozen with random weights.
    """
    model = begun.model
    prepare = preprocess_for(model, img_size=student.img_size, mean=student.mean, std=student.std)
    if begun.start == "pre-trained":  # a student may be trained on at another size
        moments = input_named_by_weights(student, model)
        moments.pop("img_size", None)
        say_differing_input(prepare, moments, student, "model.student")
    if student.grad_checkpointing:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    if student.freeze and begun.start == "scratch":
        raise UserError(
            "model.student.freeze: backbone would keep random weights; give model.student.checkpoint"
        )
    return prepare


def _task(task: Task | None, head: bool, data: DataInfo) -> Task:
    """What is learnt; a student without a classifier has one task, whatever the data's labels.

    Args:
        task: of the settings; None: none is named.
        head: whether the student has a classifier.
        data: its classes count.

    Raises:
        UserError: a task that does not fit the student, or a classifier and pictures without labels.
    """
    if head and isinstance(task, Features):
        raise UserError(
            "model.task: Features is for a student without a classifier (model.student.head=false)"
        )
    if head and not data.classes:
        raise UserError(
            "data.source: its pictures have no labels, which the student's classifier needs; take "
            "model.student.head=false, or give labelled pictures and these as data.unlabeled"
        )
    if head:
        return task or Classification()
    if task is not None and type(task) not in (Classification, Features):
        raise UserError(
            f"model.task: {type(task).__name__} needs a classifier (model.student.head=false has none)"
        )
    return Features()


@dataclass(frozen=True)
class Begun:
    """A student's model before it has its teacher's layers; the last three are arguments of its
    :class:`~kd.distill.student.Student`, which explains them.
    """

    spec: StudentSpec
    """The settings that the model is built from."""
    model: nn.Module
    start: str
    note: str
    parent: str


def choose_start(
    asked: StudentSpec, teacher: RunTeacher | None, build: Callable[[StudentSpec], nn.Module]
) -> Begun:
    """The one place that decides where a student's first weights come from, and what ``patch_size: auto`` means.

    Args:
        asked: the student's settings, perhaps with ``patch_size: auto``.
        teacher: the run's, or None.
        build: makes the model of settings; called twice where the student gets its teacher's patches.

    Raises:
        UserError: as of :func:`_start`.
    """
    members = {} if teacher is None else dict(teacher.members)
    spec = _own_patches(asked)
    model = build(spec)
    start, note, parent = _start(spec, model, members)
    if start == "inherited":
        is_auto = spec is not asked
        inheriting_spec, note = _patches_of(members[parent], spec, model, is_auto)
        if inheriting_spec is not spec:
            spec = inheriting_spec
            model = build(spec)
    return Begun(spec, model, start, note, parent)


def _start(
    spec: StudentSpec, model: nn.Module, members: Mapping[str, FrozenTeacher]
) -> tuple[str, str, str]:
    """Where the student's first weights will come from; no weights are changed here.

    Args:
        spec: the student's settings.
        model: built from them.
        members: the run's teachers by name; none without a teacher.

    Returns:
        ``start``, ``note`` and ``parent`` of :class:`~kd.distill.student.Student`.

    Raises:
        UserError: ``inherit=true`` beside other weights, without a teacher, or with layers that do not fit.
    """
    start = "pre-trained" if spec.pretrained or spec.checkpoint else "scratch"
    if spec.inherit is True and start == "pre-trained":
        given = "checkpoint" if spec.checkpoint else "pretrained"
        raise UserError(
            f"model.student.inherit: true would overwrite the weights of model.student.{given}; "
            f"give one of them (inherit=auto takes {given}'s)"
        )
    is_auto = spec.inherit == "auto"
    if not spec.inherit or (is_auto and (not members or start == "pre-trained")):
        return start, "", ALL
    if is_auto and len(members) > 1:
        note = "there are several: model.student.inherit=true takes the first whose layers fit"
        return start, note, ALL
    problems = []
    for name, member in members.items():
        problem = not_inheritable(model, member)
        if not problem:
            return "inherited", "", name
        problems.append(problem)
    problem, *_ = problems or ["needs a model.teacher"]
    if members:
        with suppress(ValueError):
            _relative_kwargs(next(iter(members.values())))
            problem += (
                f"; model.student.arch={AUTO} is a smaller relative of the teacher, which can"
            )
    if is_auto:
        return start, problem, ALL
    without = ""
    if members:
        without = "; model.student.inherit=auto trains such a student without them"
    raise UserError(f"model.student.inherit: {problem}{without}")


def _relative_student(spec: StudentSpec, teacher: RunTeacher | None) -> StudentSpec:
    """The settings of a student of ``arch: auto``: a relative of its first teacher, reported in a line.

    A relative has the teacher's architecture at half its width, so about a quarter of its parameters; ``kwargs`` of ``spec``
    win. Where no relative could inherit it is :func:`_unrelated_student`. Both have the teacher's input size unless ``spec``
    has one.

    Raises:
        UserError: no teacher.
    """
    if teacher is None:
        raise UserError(
            f"model.student.arch: {AUTO} takes a relative of the teacher, and there is none"
        )
    parent = next(iter(teacher.members.values()))
    if spec.img_size is None:
        spec = replace(spec, img_size=parent.spec.img_size)
    try:
        kwargs = _relative_kwargs(parent)
    except ValueError:
        return _unrelated_student(spec, parent)
    say(
        f"model.student: {parent.arch} with {kwargs}, a smaller relative of its teacher (arch={AUTO})"
    )
    return replace(spec, arch=parent.arch, kwargs={**kwargs, **spec.kwargs})


def _unrelated_student(spec: StudentSpec, parent: FrozenTeacher) -> StudentSpec:
    """The settings of a small student for a teacher whose layers no student can start from; a line tells the user.

    A ResNet-18 where the teacher's layers are known and none is attention, else a ViT-Ti; with timm's pre-trained weights
    where they can be downloaded.

    Args:
        spec: the student's settings, of ``arch: auto``; ``inherit: auto`` becomes false.
        parent: the teacher.
    """
    arch = "vit_tiny_patch16_224"
    if not parent.closed:
        kinds = {type(module).__name__ for module in parent.model.modules()}
        if not any("Attention" in kind for kind in kinds):
            arch = "resnet18"
    begins = "timm's pre-trained weights, which knows nothing of its teacher yet"
    pretrained = is_downloadable(arch)
    if not pretrained:
        begins = (
            "random weights, as timm's can't be downloaded: that costs most of the accuracy where pictures are few "
            "(recipes/README.md); model.student.checkpoint=FILE gives it others"
        )
    say(
        f"model.student: {arch}, as no student can start from the layers of {parent.arch}; it starts from {begins}"
    )
    return replace(
        spec, arch=arch, pretrained=pretrained or spec.pretrained, inherit=spec.inherit is True
    )


def _relative_kwargs(parent: FrozenTeacher) -> dict[str, Any]:
    """timm's arguments of a teacher's relative at half its width, beside its architecture's name.

    Raises:
        ValueError: no relative of it could inherit; one line says why.
    """
    from kd.distill.inherit import relative_of

    if parent.closed:
        raise ValueError(f"the teacher {parent.closed}")
    if parent.spec.builder is not None:
        raise ValueError("the teacher is built by a function of your own")
    return {**parent.spec.kwargs, **relative_of(parent.model)}


def _own_patches(spec: StudentSpec) -> StudentSpec:
    """The settings without ``patch_size: auto``, the same object where it is not given; a checkpoint keeps its own."""
    if spec.kwargs.get(PATCHES) != AUTO:
        return spec
    kwargs = dict(spec.kwargs)
    del kwargs[PATCHES]
    patches_of_checkpoint = about(spec.checkpoint).kwargs.get(PATCHES)
    if patches_of_checkpoint:
        kwargs[PATCHES] = patches_of_checkpoint
    return replace(spec, kwargs=kwargs)


def _patches_of(
    parent: FrozenTeacher, spec: StudentSpec, model: nn.Module, auto: bool
) -> tuple[StudentSpec, str]:
    """The settings of a student that inherits, with its teacher's number of patches if ``auto``; and ``note`` of
    :class:`Begun`, "" where nothing is to be said.

    Args:
        parent: the teacher whose layers it gets.
        spec: the student's settings, without ``auto``; the same object comes back where they stay.
        model: built from them.
        auto: whether ``patch_size: auto`` was given.
    """
    from kd.distill.inherit import matching_patches

    key = f"model.student.kwargs.{PATCHES}={AUTO}"
    side = None
    if spec.builder is None:
        side = matching_patches(model, parent.model)
    if side is not None and auto:
        with_side = replace(spec, kwargs={**spec.kwargs, PATCHES: side})
        return with_side, f"has patches of {side} pixels, as many as its teacher ({key})"
    if side is not None:
        note = f"has fewer patches than its teacher; {key} gives it as many ({side} pixels): slower, and closer"
        return spec, note
    embeds = [getattr(backbone_of(each), "patch_embed", None) for each in (model, parent.model)]
    of_student, of_teacher = [getattr(embed, "num_patches", 0) for embed in embeds]  # 0: a CNN's
    if auto and 0 < of_student < of_teacher:
        note = f"keeps its own patches, fewer than its teacher's: as many can't be had by {key}"
        return spec, note
    return spec, ""


def not_inheritable(model: nn.Module, teacher: RunTeacher) -> str:
    """Why a student's ``model`` can't start from a teacher's layers; "" if it can."""
    if teacher.closed:
        return f"the teacher {teacher.closed}"
    from kd.distill.inherit import check_pair

    try:
        check_pair(model, teacher.model)
    except ValueError as error:
        return str(error)
    return ""
