"""Teachers from settings; which of their classes are the data's."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor

from kd.errors import UserError
from kd.models import TeacherSpec, build_model, completed, preprocess_for, read_names
from kd.models.weights import about
from kd.teachers.base import Ensemble, OwnTeacher, RunTeacher, Teacher
from kd.teachers.frozen import FrozenTeacher


def build_teacher(
    spec: TeacherSpec,
    num_classes: int,
    classes: Sequence[str] = (),
    key: str = "model.teacher",
    dense: bool = False,
) -> RunTeacher:
    """A teacher from its settings, its logits in the order of the data's classes.

    Leaves torch's random numbers as they were: losses' parameters don't depend on whether students share a teacher.
    """
    if isinstance(spec.builder, Teacher):
        if spec.class_map:
            raise UserError(
                f"{key}.class_map: a teacher of your own gives logits in the data's classes; map them there"
            )
        size: Any = spec.img_size
        made: Any = spec.builder.build(num_classes, size)
        return OwnTeacher(made, replace(spec, arch=type(made).__name__), key)
    given, spec = spec, completed(spec, key)
    names, places = columns(spec, classes, key)
    count = len(names) if places is not None else num_classes
    with torch.random.fork_rng(devices=[]):
        model = build_model(
            spec, count if spec.head else 0, key, names or classes, head=spec.head, dense=dense
        )
    prepare = preprocess_for(model, spec.img_size, spec.channels_last, spec.mean, spec.std)
    kept = (
        given if given.arch == spec.arch else spec
    )  # what is only completed keeps its key among the caches
    return FrozenTeacher(model, prepare, kept, places, key, count)


def build_teachers(
    one: TeacherSpec | None, several: Mapping[str, TeacherSpec], classes: Sequence[str], dense: bool
) -> RunTeacher | None:
    """The teacher of ``model.teacher``, the ensemble of ``model.teachers``, or none.

    Raises:
        UserError: both are given, or a teacher that can't be built.
    """
    if one and several:
        raise UserError(
            "model.teachers: give model.teacher or model.teachers, not both (model.teacher=null)"
        )
    if not several:
        return _shared(one, classes, "model.teacher", dense) if one else None
    return Ensemble(
        {name: _shared(s, classes, f"model.teachers.{name}", dense) for name, s in several.items()}
    )


_pool: dict[str, RunTeacher] | None = None


@contextmanager
def shared_teachers() -> Iterator[None]:
    """Inside, teachers of equal settings are one object: several students of one run learn from it."""
    global _pool
    _pool = {}
    try:
        yield
    finally:
        _pool = None


def _shared(spec: TeacherSpec, classes: Sequence[str], key: str, dense: bool) -> RunTeacher:
    pool, name = {} if _pool is None else _pool, repr((spec, list(classes), dense))
    if name not in pool:
        pool[name] = build_teacher(spec, len(classes), classes, key, dense)
    return pool[name]


def columns(spec: TeacherSpec, classes: Sequence[str], key: str) -> tuple[list[str], Tensor | None]:
    """The teacher's class names, and where the data's classes are among them; None where they are the same."""
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
    missing = [(own, name) for own, name in zip(classes, wanted, strict=True) if name not in places]
    if missing:
        own, name = missing[0]
        raise UserError(
            f"{key}.class_map: the teacher has no class '{name}'{f' (for {own})' if own != name else ''} among its "
            f"{len(names)}, {len(missing)} of the data's {len(classes)} are missing; name them: "
            f"{key}.class_map.{own}=NAME"
        )
    return names, torch.tensor([places[name] for name in wanted])


def _names(spec: TeacherSpec, classes: Sequence[str], key: str) -> list[str]:
    """From the settings, the checkpoint, or timm's list of ImageNet's classes."""
    if isinstance(spec.classes, str):
        return read_names(Path(spec.classes), f"{key}.classes")
    if spec.classes:
        return list(spec.classes)
    if spec.checkpoint:
        return about(spec.checkpoint).classes
    if spec.builder is not None:
        return list(getattr(spec.builder, "class_names", []))
    return _imagenet_names(spec, classes)


def _imagenet_names(spec: TeacherSpec, classes: Sequence[str]) -> list[str]:
    """timm's names (n01440764 ...) of a pre-trained model's classes, where they cover the data's."""
    config = timm.get_pretrained_cfg(spec.arch) if spec.pretrained else None
    subset = infer_imagenet_subset({"num_classes": config.num_classes}) if config else None
    if subset is None or config is None or config.num_classes == len(classes):
        return []
    names = list(ImageNetInfo(subset).label_names())
    return names if {spec.class_map.get(name, name) for name in classes} <= set(names) else []
