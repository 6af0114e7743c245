"""The families of models that inherit, each in files of its own, and which one a pair belongs to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.convnext import ConvNeXt
from timm.models.eva import Eva
from timm.models.resnet import ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from kd.distill.inherit.anatomy import Part
from kd.distill.inherit.cnn import CNNStart
from kd.distill.inherit.convnext import ConvNeXtStart, check_convnexts, head_norm
from kd.distill.inherit.pair import check_vits, final_norm, pools_by_attention
from kd.distill.inherit.resnet import ResNetStart, check_resnets
from kd.distill.inherit.start import inherit_vits, passes_of_vits
from kd.models.preprocess import Images, Preprocess, evaluating
from kd.models.segmenter import DenseModel
from kd.progress import bar_at_start

StudentInputs = Sequence[tuple[Any, Preprocess]]
"""Models, each with how its pictures are resized and normalised."""


@dataclass(frozen=True)
class Family:
    """Models whose layers can be inherited from one another."""

    name: str
    """For messages."""
    classes: tuple[type[nn.Module], ...]
    """timm's classes, and kd's :class:`DenseModel` on one; a class derived from one is another model."""
    check: Callable[[Any, Any], None]
    """Raises a ValueError for a pair that does not fit."""
    last_norm: Callable[[Any], nn.Module | None]
    """The norm whose output the features of a model are, pooled or not; None where there is not exactly one."""
    cnn: type[CNNStart] | None = None
    """Fits a student, of convolutional networks."""


def _last_norm_of_vit(model: Part) -> nn.Module | None:
    """:attr:`Family.last_norm` of a vision transformer; None where an attention pooling follows the norm."""
    norm = final_norm(model)
    if norm is model.norm and pools_by_attention(model):
        return None
    return norm


FAMILIES = (
    Family(
        "plain vision transformer",
        (VisionTransformer, Eva, DenseModel),
        check_vits,
        _last_norm_of_vit,
    ),
    Family("ConvNeXt", (ConvNeXt,), check_convnexts, head_norm, ConvNeXtStart),
    # a ResNet's features come from a ReLU
    Family("ResNet", (ResNet,), check_resnets, lambda model: None, ResNetStart),
)
"""All families."""


def family_of(model: nn.Module) -> Family | None:
    """The family of a model, by its exact class (a subclass may compute something else); None: it can't inherit."""
    for family in FAMILIES:
        if type(model) in family.classes:
            return family
    return None


def last_norm(model: nn.Module) -> nn.Module | None:
    """The norm whose output a model's features are (:attr:`Family.last_norm`); None without one, or without a family."""
    family = family_of(model)
    return family.last_norm(model) if family is not None else None


def check_pair(student: nn.Module, teacher: nn.Module) -> None:
    """Checks that the student can start from the teacher's layers.

    Raises:
        ValueError: the pair does not fit; one line says what differs, or what can't be inherited.
    """
    for role, model in (("student", student), ("teacher", teacher)):
        if family_of(model) is None:
            names = " or ".join(f"a {family.name}" for family in FAMILIES)
            kind = type(model).__name__
            raise ValueError(f"the {role} must be {names} of timm's, got {kind}")
    family = family_of(student)
    if family is None or family is not family_of(teacher):
        kinds = f"{type(student).__name__} and {type(teacher).__name__}"
        raise ValueError(f"student and teacher must be of one family, got {kinds}")
    family.check(student, teacher)


@torch.no_grad()
def inherit_together(
    students: StudentInputs,
    teacher: nn.Module,
    pictures: Images,
    teacher_input: Preprocess,
) -> None:
    """Overwrites students' weights with the teacher's layers, fitted to each one's size; deterministic.

    A student that the teacher's weights fit as they are takes those, and nothing is fitted.

    Args:
        students: of the teacher's family, each with how its pictures are resized and normalised.
        teacher: a model of timm's, or a dense model on one.
        pictures: the sample, uint8 ``(N, 3, H, W)``; labels are not needed.
        teacher_input: how the teacher's pictures are resized and normalised.

    Raises:
        ValueError: a pair that does not fit.
    """
    smaller = []
    for student, prepare in students:
        check_pair(student, teacher)
        if not _becomes_teacher(student, prepare, teacher, pictures, teacher_input):
            smaller.append((student, prepare))
    if not smaller:
        return
    students = smaller
    family = family_of(teacher)
    cnn = None if family is None else family.cnn
    starts = [] if cnn is None else [cnn(student, teacher) for student, _ in students]
    if starts:
        total = sum(len(small) for start in starts for small, _ in start.stages)
    else:
        total = passes_of_vits(students, teacher, len(pictures))
    shown = bar_at_start(label="inherit: the student's layers", total=total, unit=" steps")
    with shown, evaluating(teacher, *(student for student, _ in students)):
        for start, (_, prepare) in zip(starts, students, strict=False):
            start.inherit(pictures, prepare, teacher_input, shown.update)
        if not starts:
            inherit_vits(students, teacher, pictures, teacher_input, shown.update)


def _becomes_teacher(
    student: nn.Module,
    prepare: Preprocess,
    teacher: nn.Module,
    pictures: Images,
    teacher_input: Preprocess,
) -> bool:
    """Gives a student the teacher's weights as they are, where names and shapes are equal and it then answers like the
    teacher to the first 64 pictures. Else its weights stay, and the result is False.
    """
    own = student.state_dict()
    weights = teacher.state_dict()
    if {name: x.shape for name, x in own.items()} != {name: x.shape for name, x in weights.items()}:
        return False
    before = {name: x.clone() for name, x in own.items()}
    student.load_state_dict(weights)
    few = pictures[:64]
    with evaluating(teacher, student):
        answers = student(prepare(few)).float()
        wanted = teacher(teacher_input(few)).float()
    if answers.shape == wanted.shape and torch.allclose(answers, wanted, rtol=1e-3, atol=1e-4):
        return True
    student.load_state_dict(before)
    return False
