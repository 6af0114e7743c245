"""Teachers from settings; which of their classes are the data's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor, nn

from kd.errors import UserError
from kd.models import (
    ModelSpec,
    Preprocess,
    TeacherSpec,
    build_model,
    completed,
    preprocess_for,
    read_names,
)
from kd.models.own import error_of_builder
from kd.models.weights import about, say
from kd.teachers.answer import ALL
from kd.teachers.base import Ensemble, OwnTeacher, RunTeacher, Teacher, errors_of_user
from kd.teachers.frozen import FrozenTeacher
from kd.teachers.stored import StoredAnswers

SAME_MOMENTS = 0.002  # a mean or deviation that differs by no more is the same, rounded


def build_teacher(
    spec: TeacherSpec,
    num_classes: int,
    classes: Sequence[str] = (),
    key: str = "model.teacher",
    dense: bool = False,
) -> RunTeacher:
    """A teacher from its settings, its logits in the order of the data's classes.

    Building a model leaves torch's random numbers on the CPU as they were: losses' parameters don't depend on whether
    candidates (``kd-size``) share a teacher. Prints a line where the input differs from what the weights name.

    Args:
        spec: the settings; a ``builder`` that is a :class:`kd.teachers.base.Teacher` already is wrapped, or what its
            ``build`` returns where it has one; stored answers (:class:`StoredAnswers`) are returned themselves.
        num_classes: C of the data.
        classes: names of the data's classes, by class id; empty: unknown, then no class is looked up by name.
        key: the teacher's configuration key, named in messages.
        dense: whether logits are maps ``(N, C, h, w)``.

    Raises:
        UserError: settings, weights or classes that do not fit.
    """
    if isinstance(spec.builder, StoredAnswers):
        return spec.builder.named(spec, key)
    if isinstance(spec.builder, Teacher):
        if spec.class_map:
            raise UserError(
                f"{key}.class_map: a teacher of your own gives logits in the data's classes; map them there"
            )
        size: Any = spec.img_size
        users_teacher: Any = spec.builder
        if hasattr(spec.builder, "build"):
            with errors_of_user(spec.builder, "build", key):
                users_teacher = spec.builder.build(num_classes, size)
        named_spec = replace(spec, arch=type(users_teacher).__name__)
        return OwnTeacher(users_teacher, named_spec, key)
    full_spec = completed(spec, key)
    names, places = class_columns(full_spec, classes, key)
    count = num_classes
    if places is not None:
        count = len(names)
    with torch.random.fork_rng(devices=[]):
        model = build_model(
            full_spec,
            count if full_spec.head else 0,
            key,
            names or classes,
            head=full_spec.head,
            dense=dense,
        )
    prepare = preprocess_for(
        model, full_spec.img_size, full_spec.channels_last, full_spec.mean, full_spec.std
    )
    teacher = FrozenTeacher(model, prepare, full_spec, places, key, count)
    say_differing_input(prepare, input_named_by_weights(full_spec, model), teacher.spec, key)
    return teacher


def input_named_by_weights(spec: ModelSpec, model: nn.Module) -> dict[str, tuple[float, ...]]:
    """``mean``, ``std`` and ``img_size`` (height, width in pixels) as the weights name them; without what they do not
    name, {} without weights.

    The weights are the checkpoint's, timm's pre-trained ones, or a builder's, which names no ``img_size``.

    Args:
        spec: complete settings of a teacher or a student.
        model: built of them.
    """
    if spec.checkpoint:
        file = about(spec.checkpoint)
        named: dict[str, Any] = {"mean": file.mean, "std": file.std, "img_size": file.img_size}
    elif spec.builder is not None:
        config = getattr(model, "pretrained_cfg", {})
        named = {"mean": config.get("mean"), "std": config.get("std")}
    else:
        pretrained = None
        if spec.pretrained:
            pretrained = timm.get_pretrained_cfg(spec.arch)
        if pretrained is None:
            return {}
        named = {
            "mean": pretrained.mean,
            "std": pretrained.std,
            "img_size": pretrained.input_size[-2:],
        }
    return {name: tuple(values) for name, values in named.items() if values is not None}


def say_differing_input(
    prepare: Preprocess, named: Mapping[str, tuple[float, ...]], spec: ModelSpec, key: str
) -> None:
    """Reports in one line which settings of an input differ from what the weights name; nothing where none does.

    Args:
        prepare: the input as it is set.
        named: what :func:`input_named_by_weights` returns.
        spec: names the weights in the line.
        key: of the model's settings, likewise.
    """
    now = {"mean": prepare.mean, "std": prepare.std, "img_size": prepare.size}
    settings = []
    for name, values in named.items():
        if not np.allclose(values, now[name], rtol=0, atol=SAME_MOMENTS):
            given = as_setting(now[name])
            wanted = as_setting(values)
            settings.append(f"{key}.{name}={given}, not {wanted}")
    if settings:
        say(f"{'; '.join(settings)} as {spec.checkpoint or spec.arch} was trained with")


def as_setting(values: Sequence[float]) -> str:
    """Numbers as the command line takes them, with six significant digits: for messages, nothing computes with them.

    >>> as_setting((0.5, 0.25))
    '[0.5,0.25]'
    """
    return f"[{','.join(f'{value:g}' for value in values)}]"


def build_teachers(
    one: TeacherSpec | None, several: Mapping[str, TeacherSpec], classes: Sequence[str], dense: bool
) -> RunTeacher | None:
    """The teacher of ``model.teacher``, or the ensemble of ``model.teachers``; None without either.

    Args:
        one: the settings of ``model.teacher``.
        several: those of ``model.teachers``, by name.
        classes: of the data, in order.
        dense: whether logits are maps.

    Raises:
        UserError: both are given, or a teacher that can't be built.
    """
    if one and several:
        raise UserError(
            "model.teachers: give model.teacher or model.teachers, not both (model.teacher=null)"
        )
    built = {}
    for name, spec in ({ALL: one} if one else several).items():
        key = f"model.teachers.{name}" if name else "model.teacher"
        built[name] = build_teacher(spec, len(classes), classes, key, dense)
    if not built:
        return None
    return built[ALL] if one else Ensemble(built)


def class_columns(
    spec: TeacherSpec, classes: Sequence[str], key: str
) -> tuple[list[str], Tensor | None]:
    """Finds the data's classes among a teacher's, by name; ``class_map`` gives the teacher's name of a class of the data.

    Args:
        spec: its complete settings.
        classes: names of the data's classes, by class id; empty: unknown.
        key: the teacher's configuration key, named in errors.

    Returns:
        The teacher's class names in the order of its logits (empty: unknown), and the place of each of the data's
        classes among them, ``(C,)``; None where both are the same in the same order, names are not known, or the
        teacher has no classifier.

    Raises:
        UserError: a class of the data that the teacher lacks or has twice, or a ``class_map`` that can't be followed.
    """
    unknown = [name for name in spec.class_map if classes and name not in classes]
    if unknown:
        raise UserError(f"{key}.class_map: '{unknown[0]}' is no class of the data")
    names = _names(spec, classes, key)
    if spec.class_map and not spec.head:
        raise UserError(
            f"{key}.class_map: the teacher has no classes ({key}.head=false), so nothing can be mapped"
        )
    if spec.class_map and classes and not names:
        raise UserError(
            f"{key}.class_map: the names of the teacher's classes are unknown, so nothing can be mapped; "
            f"{key}.classes=FILE or a list names them in the teacher's order"
        )
    if not names or not classes or not spec.head:
        return names, None
    wanted = [spec.class_map.get(name, name) for name in classes]
    if names == wanted:
        return names, None
    twice = next((name for name in wanted if names.count(name) > 1), None)
    if twice is not None:
        count = names.count(twice)
        raise UserError(
            f"{key}.classes: must name '{twice}' once, got it {count} times in {len(names)} names"
        )
    places = {name: i for i, name in enumerate(names)}
    missing = []
    for data_class, name in zip(classes, wanted, strict=True):
        if name not in places:
            missing.append((data_class, name))
    if missing:
        data_class, name = missing[0]
        for_class = ""
        if data_class != name:
            for_class = f" (for {data_class})"
        raise UserError(
            f"{key}.class_map: the teacher has no class '{name}'{for_class} among its "
            f"{len(names)}, {len(missing)} of the data's {len(classes)} are missing; name them: "
            f"{key}.class_map.{data_class}=NAME"
        )
    return names, torch.tensor([places[name] for name in wanted])


def _names(spec: TeacherSpec, classes: Sequence[str], key: str) -> list[str]:
    """The teacher's class names in the order of its logits; empty: unknown.

    Taken from the first of these that is given: the settings (a file or a list), the checkpoint, the builder's
    ``class_names``, timm's pre-trained weights (:func:`_imagenet_names`).

    Raises:
        UserError: the file can't be read, or the builder fails.
    """
    if isinstance(spec.classes, str):
        return read_names(Path(spec.classes), f"{key}.classes")
    if spec.classes:
        return list(spec.classes)
    if spec.checkpoint:
        return about(spec.checkpoint).classes
    if spec.builder is not None:
        try:
            return list(getattr(spec.builder, "class_names", []))
        except UserError as error:
            raise error_of_builder(error, key) from error
    return _imagenet_names(spec, classes)


def _imagenet_names(spec: TeacherSpec, classes: Sequence[str]) -> list[str]:
    """timm's names (n01440764 ...) of a pre-trained model's classes, where they cover the data's; else [].

    Also [] where the data has as many classes: these are taken to be the model's, in its order.
    """
    config = None
    if spec.pretrained:
        config = timm.get_pretrained_cfg(spec.arch)
    if config is None or config.num_classes == len(classes):
        return []
    subset = infer_imagenet_subset({"num_classes": config.num_classes})
    if subset is None:
        return []
    names = list(ImageNetInfo(subset).label_names())
    wanted = {spec.class_map.get(name, name) for name in classes}
    if wanted <= set(names):
        return names
    return []
