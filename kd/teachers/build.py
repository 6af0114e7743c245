"""Teachers from settings."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kd.errors import UserError
from kd.models import TeacherSpec, build_model, completed, preprocess_for
from kd.teachers.base import OwnTeacher, RunTeacher, Teacher
from kd.teachers.class_names import columns
from kd.teachers.ensemble import Ensemble
from kd.teachers.frozen import FrozenTeacher


def build_teacher(
    spec: TeacherSpec, num_classes: int, classes: Sequence[str] = (), key: str = "model.teacher", dense: bool = False
) -> RunTeacher:
    """A teacher from its settings, its logits in the order of the data's classes.

    Leaves torch's random numbers as they were: the losses' parameters do not depend on whether students share a
    teacher.
    """
    if isinstance(spec.builder, Teacher):
        size: Any = spec.img_size
        made: Any = spec.builder.build(num_classes, size)
        return OwnTeacher(made, replace(spec, arch=type(made).__name__), key)
    given, spec = spec, completed(spec, key)
    names, places = columns(spec, classes, key)
    count = len(names) if places is not None else num_classes
    with torch.random.fork_rng(devices=[]):
        model = build_model(spec, count if spec.head else 0, key, names or classes, head=spec.head, dense=dense)
    prepare = preprocess_for(model, spec.img_size, spec.channels_last, spec.mean, spec.std)
    kept = given if given.arch == spec.arch else spec  # what is only completed keeps its key among the caches
    return FrozenTeacher(model, prepare, kept, places, key, count)


def build_teachers(
    one: TeacherSpec | None, several: Mapping[str, TeacherSpec], classes: Sequence[str], dense: bool
) -> RunTeacher | None:
    """The teacher of ``model.teacher``, the ensemble of ``model.teachers``, or none."""
    if one and several:
        raise UserError("model.teachers: give model.teacher or model.teachers, not both (model.teacher=null)")
    if not several:
        return _shared(one, classes, "model.teacher", dense) if one else None
    return Ensemble({name: _shared(s, classes, f"model.teachers.{name}", dense) for name, s in several.items()})


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
    if _pool is None:
        return build_teacher(spec, len(classes), classes, key, dense)
    name = repr((spec, list(classes), dense))
    if name not in _pool:
        _pool[name] = build_teacher(spec, len(classes), classes, key, dense)
    return _pool[name]
