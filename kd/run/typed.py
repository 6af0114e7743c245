"""Values that a setting can't have, by its type: reported before torch is imported.

Pydantic decides whether a value fits its type, after YAML's and the command line's spellings of it are understood
(:func:`_schema`); :mod:`kd.settings` has the ranges.

A *kind* is a type as :mod:`typing` has it; ``key`` names a setting in messages, which are one line.
"""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from kd.errors import NEARLY, UserError, builder_hint, did_you_mean
from kd.run import listed
from kd.run.annotations import members, shown
from kd.run.paths import SETTINGS
from kd.run.suggest import MOST, SYNONYMS, as_question, near, nearest
from kd.settings import Like, limits

TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "dict": "settings (NAME: VALUE)",
    "list": "a list",
    "tuple": "a list",
    "timedelta": "a duration (0:30:00, or seconds)",
}
FEW = 12
"""So many names fit into a message; of more the first :data:`kd.run.suggest.MOST` are shown."""
LISTS = {"loss": "losses", "source": "sources", "task": "tasks"}
"""Kind of class -> the word of ``kd-train --list`` that lists them; the others are listed by ``classes``."""
LOGGERS = {"csv": "CSVLogger", "mlflow": "MLFlowLogger", "tensorboard": "TensorBoardLogger", "wandb": "WandbLogger",
           "comet": "CometLogger", "neptune": "NeptuneLogger"}  # fmt: skip
PRECISIONS = {
    "amp": "16-mixed",
    "fp16": "16-mixed",
    "float16": "16-mixed",
    "half": "16-mixed",
    "bfloat16": "bf16-mixed",
    "fp32": "32-true",
    "float32": "32-true",
}
"""Words of other programs for ``trainer.precision`` -> Lightning's."""
REASONS = {
    "trainer.precision": {
        name: f"{name} has no room for gradients; 16-mixed scales them"
        for name in ("16-true", "transformer-engine-float16")
    },
    "trainer.enable_checkpointing": {
        "False": "must be true: a run is resumed from its last epoch and exports its best one"
    },
    "trainer.strategy": {
        "smddp": "smddp is a backend of DDP; config=smddp_4x8 sets it (no smddp for kd's torch exists yet)"
    }
    | {
        f"{module}ModelParallelStrategy": "tensor and pipeline parallel training is not supported: a student fits on "
        "one device; config=fsdp shards one that does not, model.teacher.placement=shard a teacher"
        for module in ("", "lightning.pytorch.strategies.", "pytorch_lightning.strategies.")
    },
    "trainer.barebones": {
        "True": "must be false: callbacks, checkpoints and log make a run's folder"
    },
}
"""Key -> value as text -> why a run can't use it, though Lightning takes it."""
TIMMS = {"optim.name": "optim", "model.student.arch": "models", "model.teacher.arch": "models"}
"""Settings that name an optimizer or a model of timm's -> the ``part`` of :func:`timm_names`."""


def checked(name: str, value: object, kind: object) -> object:
    """The value of a setting in its type: a number for the text ``1e-3``, a tuple for a list.

    Args:
        name: of the setting, for the message.
        value: as YAML has it; one that refers to another key (``${KEY}``) is returned as it is.
        kind: its type, with its range.

    Returns:
        It in its type: what is checked, written to a run's ``config.yaml``, and built from.

    Raises:
        UserError: the type does not allow it; with what is allowed or probably meant.
    """
    if "${" in str(value):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name}: must be a finite number, got {value}")
    is_relative = (name, value) == ("model.student.arch", "auto")  # of the teacher
    if name in TIMMS and not is_relative and (problem := _unknown_to_timm(name, value)):
        raise UserError(f"{name}: {problem}")
    try:
        typed_value = _validator(kind).validate_python(value)
    except ValidationError as error:
        if value is None:
            raise UserError(f"{name}: can't be null") from error
        suggestion = near(value, allowed_words(kind))
        raise UserError(f"{name}: must be {in_words(kind)}, got '{value}'{suggestion}") from error
    for limit in limits(kind):
        problem = limit.refuses(_number(value))
        if problem:
            suggestion = near(value, allowed_words(kind))
            raise UserError(f"{name}: {problem}, got {_shown(value)}{suggestion}")
    return typed_value


def wrong(kind: object, value: object) -> str:
    """What is wrong with a value of a type: "must be a number, got 'x'"; "" where it fits, or where only the class that is
    built can tell, and for one that refers to another key (``${KEY}``). Ranges are not checked.
    """
    if "${" in str(value) or takes(kind, value):
        return ""
    return f"must be {in_words(kind)}, got '{str(value)[:80]}'"


def no_plain_value(key: str, given: object) -> str:
    """The message for a plain value ``given`` at ``key``, where settings of its own belong."""
    model = key in ("model.teacher", "model.student")
    if model:
        own = f"{key}.arch=NAME, {key}.checkpoint=FILE"
    else:
        own = f"{key}.NAME=VALUE"
    return (
        f"{key}: has settings of its own ({own}), got '{given}'{as_question(SYNONYMS.get(key, []))}"
    )


def _shown(value: object) -> str:
    """A value in a message: text in quotes and at most 80 characters of it, anything else as it is."""
    if isinstance(value, str):
        return f"'{value[:80]}'"
    return f"{value}"


def check_meant(key: str, value: object, names: Sequence[str]) -> None:
    """Refuses what a run can't use, and what other programs' users mean by a value.

    Args:
        key: where the value is given, as ``--keys`` has it.
        value: as it is given.
        names: of the entries that the setting had before: of ``model.distill_losses`` its losses.

    Raises:
        UserError: with the setting that is meant, or why the value can't be used.
    """
    suggestion = meant_by(key, value, names)
    if suggestion:
        shown = "null" if value is None else value
        raise UserError(f"{key}: got '{shown}'; did you mean '{suggestion}'?")
    why = REASONS.get(key, {}).get(str(value))
    if why:
        raise UserError(f"{key}: {why}")


def meant_by(key: str, value: object, losses: Sequence[str] = ()) -> str:
    """The setting that other programs' users mean by a value, for a hint; "" where it is none.

    Args:
        key: that was given the value.
        value: as YAML reads it.
        losses: names of the run's losses.
    """
    if not isinstance(value, str) or value.endswith(SETTINGS):
        if value is None and re.fullmatch(r"model\.distill_losses\.\w+", key):
            return f"{key}.weight=0"
        return ""
    if key == "optim":
        return f"optim.name={next(iter(nearest(value, timm_names('optim'))), value.lower())}"
    if key in ("data", "monitor"):
        if key == "data":
            return f"{key}.source={value}"
        return f"checkpoint.monitor={value}"
    if key == "model.distill_losses":
        return f"{key}.{next(iter(losses), 'kd')}={value}"
    names = {"trainer.logger": LOGGERS, "trainer.precision": PRECISIONS}.get(key, {})
    if value.lower() in names:
        return f"{key}={names[value.lower()]}"
    if key.endswith("class_weights") and value == "balanced":
        return "model.task.class_weights=auto"
    return ""


def no_class(kind: str, given: str, in_module: Sequence[str] = ()) -> str:
    """The message for an unknown class in the place of a setting, without the setting's key: it ends in the name that is
    spelt most alike, or where none is in what the place takes.

    That is for a class path outside kd ``in_module``, or nothing where this is empty. For any other name it is "a class
    path" where the list has no class of the kind, or Lightning has more of it; else the list's classes of the kind, of
    more than :data:`FEW` the first, and then the command that lists all.

    Args:
        kind: what the place takes (``loss``); "": the place takes no class of the list.
        given: the unknown name, short or a class path.
        in_module: the classes of the module that a class path names; empty: they are not known.
    """
    known = sorted(one.short for one in listed.of_kind(kind))
    module, _, short_name = given.rpartition(".")
    of_user = module != "" and not module.startswith("kd.")
    near_in_module = [f"{module}.{name}" for name in nearest(short_name, in_module)]
    near_names = near(short_name, [*known, *listed.lightnings(kind)])
    suggestion = as_question(near_in_module) or near_names
    if of_user and not suggestion:
        if not in_module:
            return f"no class '{given}'"
        return f"no class '{given}' ({module} has {_few(in_module)})"
    what = "class"
    if kind == "source" and "." not in given:
        what = "class or folder"
    if listed.module_of(kind) or not known:
        allowed = "a class path: package.Class"
    else:
        allowed = f"ours: {_few(known)}; others by their class path"
        if len(known) > FEW:
            allowed += f"; kd-train --list {LISTS.get(kind, 'classes')}"
    return f"no {what} '{given}'{suggestion or f' ({allowed})'}"


def _few(names: Sequence[str]) -> str:
    """Names with commas between; of more than :data:`FEW` the first :data:`kd.run.suggest.MOST` and dots."""
    shown = list(names) if len(names) <= FEW else [*names[:MOST], "..."]
    return ", ".join(shown)


def unknown_class(kind: str, given: str) -> str:
    """What is wrong with the name of a class that is not listed; "" for one that is imported when it is built.

    That is any path outside kd, one in a module of kd that has no listed class, and a name of
    :func:`kd.run.listed.lightnings`. Arguments as of :func:`no_class`.
    """
    if not re.fullmatch(r"\w+|kd(\.\w+)+", given) or given in listed.lightnings(kind):
        return ""
    module = given.rpartition(".")[0]
    if module and not any(one.name.rpartition(".")[0] == module for one in listed.classes()):
        return ""
    return no_class(kind, given)


def _number(value: object) -> object:
    """A number that YAML took for text (``1e-3``); anything else as it is."""
    try:
        if isinstance(value, str):
            return float(value)
        return value
    except ValueError:
        return value


def fitted(kind: object, value: object) -> object:
    """A value in a type, where it fits; else the value itself, of which the class that is built has to say more."""
    try:
        return _validator(kind).validate_python(value)
    except ValidationError:
        return value


def takes(kind: object, value: object) -> bool:
    """Whether a type takes a value; yes where only the class that is built can tell."""
    try:
        _validator(kind).validate_python(value)
    except ValidationError:
        return False
    return True


@cache
def _validator(kind: object) -> SchemaValidator:
    """Pydantic's validator of a type, made once: ``validate_python`` gives a value in the type or raises."""
    return SchemaValidator(_schema(kind))


def _schema(kind: object) -> CoreSchema:
    """A type as pydantic reads it, with all that YAML and a command line may write for a value of it.

    Numbers may be text (YAML takes ``1e-3`` for it), text may look like a number or a truth value, null may be a word, a
    list or group may be the name of a YAML file. A truth value is not a number.
    """
    container = get_origin(kind) or kind
    inside = get_args(kind)
    if len(members(kind)) > 1:
        return core_schema.union_schema([_schema(part) for part in members(kind)])
    if container is Annotated:  # ranges are checked apart: their messages show the value as it is
        return _schema(inside[0])
    if container is Literal:
        return _after(partial(_word_of, inside), core_schema.literal_schema([*inside]))
    if kind is bool:
        return core_schema.bool_schema(strict=True)
    plain_kinds: dict[object, tuple[Callable[[object], object], CoreSchema]] = {
        int: (_as_number, core_schema.int_schema()),
        float: (_as_number, core_schema.float_schema()),
        str: (_as_text, core_schema.str_schema()),
        NoneType: (_as_null, core_schema.none_schema()),
        # it stays as it is written, as in a run's config.yaml
        timedelta: (_checked_duration, core_schema.any_schema()),
    }
    if kind in plain_kinds:
        return _after(*plain_kinds[kind])
    items = [_schema(part) for part in inside if part is not ...]
    if container is dict:
        return _or_a_file(core_schema.dict_schema(*items))
    if container is list:
        return _or_a_file(core_schema.list_schema(*items))
    if container is tuple:
        repeated = 0 if ... in inside else None  # the item that comes any number of times
        return _or_a_file(core_schema.tuple_schema(items, variadic_item_index=repeated))
    return core_schema.any_schema()


def _after(convert: Callable[[object], object], schema: CoreSchema) -> CoreSchema:
    """``schema`` for a value that ``convert`` has turned into the type's own spelling."""
    return core_schema.no_info_before_validator_function(convert, schema)


def _or_a_file(schema: CoreSchema) -> CoreSchema:
    """``schema``, or the name of a YAML file."""
    names = core_schema.str_schema(pattern=r"\.ya?ml$")
    return core_schema.union_schema([schema, names])


def _word_of(words: tuple[object, ...], value: object) -> object:
    """The word that is written as the value is: ``16`` and ``'16'``; YAML 1.1 reads ``off`` as a truth value."""
    if isinstance(value, bool):
        value = "on" if value else "off"
    if value in words:
        return value
    return next((word for word in words if str(word) == str(value)), value)


def _as_number(value: object) -> object:
    """As :func:`_number`; ValueError for a truth value, which Python counts among the whole numbers."""
    if isinstance(value, bool):
        raise ValueError("a truth value is not a number")
    return _number(value)


def _as_text(value: object) -> object:
    """A number or truth value as text (a folder called 007); null, lists and groups stay, which the type then refuses."""
    if isinstance(value, dict | list | NoneType):
        return value
    return str(value)


def duration(value: object) -> timedelta:
    """A duration that is written as ``0:30:00``, ``1 day, 0:00:00``, ``PT30M`` or as seconds.

    Raises:
        ValidationError: pydantic's, for any other value.
    """
    validator = SchemaValidator(core_schema.timedelta_schema())
    return cast(timedelta, validator.validate_python(_number(value)))


def _checked_duration(value: object) -> object:
    """A duration in one of the spellings of :func:`duration`, unchanged; ValueError for another."""
    if isinstance(value, bool):
        raise ValueError("a truth value is no duration")
    try:
        duration(value)
    except ValidationError as error:
        raise ValueError("no duration") from error
    return value


def _as_null(value: object) -> object:
    return None if value == "null" else value


def in_words(kind: object) -> str:
    """What a type takes, in words: ``a whole number or one of auto``."""
    return " or ".join(dict.fromkeys(_words(kind)))


def _words(kind: object) -> list[str]:
    """The names of a type's parts, for "must be X or Y"; words of a Literal are listed, null in a union is left out."""
    if len(members(kind)) > 1:
        words: list[str] = []
        for part in members(kind):
            words += _words(part) if part is not NoneType else []
        return words
    if get_origin(kind) is Annotated:
        return _words(get_args(kind)[0])
    if get_origin(kind) is Literal:
        values = dict.fromkeys(map(str, get_args(kind)))
        return [f"one of {', '.join(values)}"]
    path, _, _ = shown(kind).partition("[")
    _, _, name = path.rpartition(".")
    return [TYPES.get(name, name)]


def allowed_words(kind: object) -> list[str]:
    """The words that a type takes, for a suggestion: of each ``Literal``, and those alternatives of the pattern of a
    ``Like`` that its message names.
    """
    words = [str(word) for word in _literals(kind)]
    for limit in limits(kind):
        if isinstance(limit, Like):
            patterns = limit.pattern.split("|")
            words += [word for word in re.findall(r"\w+", limit.text) if word in patterns]
    return words


def _literals(kind: object) -> list[object]:
    """The members of all ``Literal`` in a type, but those of values by name (``dict``): the type takes none of these."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) is dict:
        return []
    return [word for part in get_args(kind) for word in _literals(part)]


@cache
def timm_names(part: str) -> frozenset[str]:
    """Names of timm's models, or of its optimizers, from its source: timm, which imports torch, is not imported.

    Empty without timm, or where its source is written in another way.

    Args:
        part: ``optim`` or ``models``.
    """
    timm = find_spec("timm")
    if timm is None:
        return frozenset()
    root = Path(next(iter(timm.submodule_search_locations or ())))
    if part == "optim":
        files = [root / "optim" / "_optim_factory.py"]
        pattern = r"^\s+name=[\"'](\w+)[\"']"
    else:
        files = list((root / "models").glob("*.py"))
        pattern = r"^@register_model\s*\n(?:@.*\n)*def (\w+)"
    return frozenset(
        name
        for f in files
        if f.is_file()
        for name in re.findall(pattern, f.read_text("utf-8"), re.M)
    )


def _unknown_to_timm(key: str, value: object) -> str:
    """What is wrong with the name of an optimizer or a model; empty where it may be one.

    Args:
        key: of :data:`TIMMS`.
        value: as given; what is no text is left to the type.
    """
    part = TIMMS[key]
    known = timm_names(part)
    if not value or not isinstance(value, str) or not known:
        return ""
    if part == "optim":
        suggestion = near(value, known, 3)
        if value in known:
            return ""
        return f"must be one of timm's optimizers, got '{value}'{suggestion}"
    name = value.removeprefix("timm/")
    timm = sys.modules.get("timm")  # where it is imported, models of one's own may be registered
    if ":" in name or name.partition(".")[0] in known or (timm and timm.is_model(name)):
        return ""
    without_tag, has_tag, _ = name.partition(".")
    other = did_you_mean(without_tag, known, NEARLY) if has_tag else ""
    other = other or builder_hint(name, key.removesuffix(".arch")) or near(name, known)
    return f"timm has no model '{name}'{other}"


def make_object(make: Callable[..., object], arguments: Mapping[str, Any], key: str) -> object:
    """Builds an object; a ValueError that begins with the name of a given argument becomes a user's error with that key.

    Args:
        make: the class or function.
        arguments: by name.
        key: of the object in the settings.

    Raises:
        UserError: such a ValueError, or one that ``make`` raises; other errors of ``make`` pass through too.
    """
    try:
        return make(**arguments)
    except ValueError as error:  # our constructors name their argument first
        first, _, rest = " ".join(str(error).split()).partition(" ")
        if isinstance(error, UserError) or first not in arguments:
            raise
        raise UserError(f"{key}.{first}: {rest}") from error
