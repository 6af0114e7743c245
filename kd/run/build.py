"""Objects from resolved settings. What a run folder's ``config.yaml`` says is enough: no command line's parser.

Classes are those that :func:`kd.run.trust.class_named` gives for a place: the list's, and those that the user trusts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from torch import nn

from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError, causes
from kd.models import Preprocess, TeacherSpec
from kd.run.listed import BASES
from kd.run.trust import arguments_allowed, class_named, trusted_class
from kd.ship.export.student import builder_in, load_student, read_metadata
from kd.storage.elsewhere import json_of
from kd.tasks import Classification, Task
from kd.tasks.label_free import label_free_metrics

CONTAINERS: dict[type, tuple[type, ...]] = {dict: (Mapping,), list: (tuple, Iterable, Sequence)}
"""Other types whose values YAML writes as a mapping or a list."""


def data_of(config: Mapping[str, Any], trusted: Sequence[str] = ()) -> DistillationDataModule:
    """The data of resolved settings; the engine ``ray`` is replaced by loading in this process.

    ``trusted``: what the user trusts beside the list of classes.
    """
    data = {**config["data"], "seed": config.get("seed", 0)}
    if data.get("engine") == "ray":
        data |= {"engine": "torch", "tier": None, "num_workers": "auto"}
    return cast(DistillationDataModule, made(DistillationDataModule, data, "data", trusted))


def task_of(config: Mapping[str, Any], trusted: Sequence[str] = ()) -> Task:
    """The task of resolved settings, classification where none is named; ``trusted`` as in :func:`data_of`."""
    return (
        cast(Task | None, made(Task | None, config["model"].get("task"), "model.task", trusted))
        or Classification()
    )


def metrics_of(config: dict[str, Any], trusted: Sequence[str] = ()) -> list[str]:
    """Validation metrics of a run with these settings, the primary one first."""
    model = config["model"]
    if not model["student"].get("head", True):
        return label_free_metrics(
            model["distill_losses"] or {}, bool((config["data"].get("probe") or {}).get("root"))
        )
    task = task_of(config, trusted)
    names = task.metric_names(bool(model["teacher"] or model.get("teachers")))
    return [task.primary, *(name for name in names if name != task.primary)]


def teacher_specs(config: Mapping[str, Any], trusted: Sequence[str] = ()) -> dict[str, TeacherSpec]:
    """The settings of a run's teachers by name; a single teacher's name is empty."""
    specs: dict[str, TeacherSpec] = {}
    for key, settings in teachers_in(config["model"]).items():
        name = key.removeprefix("model.teachers.").removeprefix("model.teacher")
        specs[name] = cast(TeacherSpec, made(TeacherSpec, settings, key, trusted))
    return specs


def teachers_in(model: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of a run's teachers, by key: ``model.teacher``, or ``model.teachers.NAME`` of each."""
    one, several = model.get("teacher"), model.get("teachers") or {}
    return (
        {"model.teacher": one}
        if one
        else {f"model.teachers.{name}": spec for name, spec in several.items()}
    )


def student_in(file: Path, trusted: Sequence[str]) -> tuple[nn.Module, Preprocess, list[str]]:
    """The model in ``student.safetensors``, its input and its classes.

    Args:
        file: says itself what its model is.
        trusted: what the user trusts beside :mod:`kd.models`: modules and classes of builders.
    """
    return load_student(file, trusted_class(builder_in(file), trusted))


def task_in(file: Path, trusted: Sequence[str]) -> Task:
    """The task of the model in ``student.safetensors``, as the file says; without a word of it, classification."""
    content = json_of(read_metadata(file).get("task", "null"))
    return (
        cast(Task | None, made(Task | None, content, f"{file}: task", trusted)) or Classification()
    )


def made(kind: object, value: object, key: str, trusted: Sequence[str] = ()) -> object:
    """A value as an annotation (``kind``) wants it: a dataclass or a class from its arguments, else a plain value.

    Args:
        kind: the annotation; a class is built where it names a base in :data:`kd.run.listed.BASES` alone.
        value: plain, or ``class_path`` and ``init_args``.
        key: the setting, for messages.
        trusted: what the user trusts beside the list of classes.

    Raises:
        UserError: names ``key``, also where a class refuses its arguments.
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    plain = [
        one for one in kinds if isinstance(one, type) and get_origin(one) is None and one is not Any
    ]
    if value is None:  # where None is not taken, the class says so
        return None
    if (
        isinstance(value, str)
        and str not in plain
        and any(one.__module__.startswith("kd.") for one in plain)
    ):
        value = {"class_path": value}
    if isinstance(value, dict):
        if "class_path" in value:
            takes = next((BASES[one.__name__] for one in plain if one.__name__ in BASES), "")
            return _named(value, takes, key, trusted)
        group = next(
            (one for one in plain if is_dataclass(one) or one is DistillationDataModule), None
        )
        if group is not None:
            return _object(group, value, key, trusted)
        if not _takes(kinds, dict):
            raise UserError(
                f"{key}: takes no settings without a class_path, got {', '.join(map(str, value))[:80]}"
            )
        inner = _inner(kinds, dict)
        return {name: made(inner, entry, f"{key}.{name}", trusted) for name, entry in value.items()}
    if isinstance(value, list):
        if not _takes(kinds, list):
            raise UserError(f"{key}: takes no list, got {str(value)[:80]}")
        items = [made(_inner(kinds, list), item, key, trusted) for item in value]
        return tuple(items) if any(get_origin(one) is tuple for one in kinds) else items
    if str in plain and not isinstance(value, str):
        return value if type(value) in plain else str(value)
    if float in plain and isinstance(value, int | str) and type(value) not in (bool, *plain):
        return _number(value, key)
    return value


def _takes(kinds: Sequence[object], container: type) -> bool:
    """Whether one of several types takes plain values in a ``dict`` or ``list``."""
    origins = [get_origin(kind) or kind for kind in kinds]
    return not {Any, object, container, *CONTAINERS[container]}.isdisjoint(origins)


def _inner(kinds: Sequence[Any], of: type) -> object:
    return next((get_args(one)[-1] for one in kinds if get_origin(one) is of), Any)


def arguments_of(
    kind: Callable[..., object], given: Mapping[str, Any], key: str, trusted: Sequence[str] = ()
) -> dict[str, Any]:
    """Arguments of a function or class from settings."""
    hints: dict[str, Any] = {}
    for of in (kind, kind.__init__):
        with suppress(NameError, TypeError):  # of a user's class: plain values are what it gets
            hints |= get_type_hints(of)
    return {
        name: made(hints.get(name, Any), value, f"{key}.{name}", trusted)
        for name, value in given.items()
    }


def _number(value: int | str, key: str) -> float:
    try:
        return float(value)  # YAML 1.1 takes 1e-3 for text
    except ValueError:
        raise UserError(f"{key}: must be a number, got '{value}'") from None


def _named(value: Mapping[str, Any], takes: str, key: str, trusted: Sequence[str]) -> object:
    """An object of ``class_path`` and ``init_args``; a class of ours ignores the arguments of the class it replaced.

    ``takes``: the kind of class that the place takes.
    """
    name = value["class_path"]
    kind = class_named(name, takes, key, trusted)
    given = value.get("init_args") or {}
    if kind.__module__.startswith("kd."):
        given = {name: own for name, own in given.items() if name in signature(kind).parameters}
    given = arguments_allowed(
        name, takes, {**given, **(value.get("dict_kwargs") or {})}, key, trusted
    )
    try:
        return _object(kind, given, key, trusted)
    except Exception as error:
        mistake = next((cause for cause in causes(error) if isinstance(cause, UserError)), None)
        raise mistake or UserError(_refusal(kind, given, key, error)) from error


def _refusal(kind: type, given: Mapping[str, Any], key: str, error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    if "NoneType" in reason:
        nulls = [
            p.name
            for p in signature(kind).parameters.values()
            if p.default and given.get(p.name, 0) is None
        ]
        return f"{', '.join(f'{key}.{name}' for name in nulls) or key}: can't be null"
    return f"{key}: {kind.__name__} can't be built: {reason[:200]}"


def _object(kind: type, given: Mapping[str, Any], key: str, trusted: Sequence[str]) -> object:
    arguments = arguments_of(kind, given, key, trusted)
    try:
        return kind(**arguments)
    except ValueError as error:
        first, _, rest = " ".join(str(error).split()).partition(
            " "
        )  # our constructors name their argument first
        if isinstance(error, UserError) or first not in given:
            raise
        raise UserError(f"{key}.{first}: {rest}") from error
