"""Values that a setting can't have, by its type: reported before torch is imported.

Whether a value fits its type is said in :mod:`kd.config.kinds`; here is what other programs' users mean by one, and what is
said of names of classes, models and optimizers. ``key`` names a setting in messages, which are one line.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kd.config import parts as listed
from kd.config.suggest import MOST, as_question, near, nearest, words
from kd.errors import NEARLY, UserError, builder_hint, did_you_mean
from kd.run.paths import SETTINGS

FEW = 12
"""So many names fit into a message; of more the first :data:`kd.config.suggest.MOST` are shown."""
LISTS = {"loss": "losses", "source": "sources", "task": "tasks"}
"""Kind of class -> the word of ``kd-train --list`` that lists them; the others are listed by ``classes``."""
TIMMS = {"optim.name": "optim", "model.student.arch": "models", "model.teacher.arch": "models"}
"""Settings that name an optimizer or a model of timm's -> the ``part`` of :func:`timm_names`."""


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
    why = words()["reasons"].get(key, {}).get(str(value))
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
    if key in words()["groups"]:
        return f"{words()['groups'][key]}={value}"
    if key == "model.distill_losses":
        return f"{key}.{next(iter(losses), 'kd')}={value}"
    names = words()["values"].get(key, {})
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
    """Names with commas between; of more than :data:`FEW` the first :data:`kd.config.suggest.MOST` and dots."""
    shown = list(names) if len(names) <= FEW else [*names[:MOST], "..."]
    return ", ".join(shown)


def unknown_class(kind: str, given: str) -> str:
    """What is wrong with the name of a class that is not listed; "" for one that is imported when it is built.

    That is any path outside kd, one in a module of kd that has no listed class, and a name of
    :func:`kd.config.parts.lightnings`. Arguments as of :func:`no_class`.
    """
    if not re.fullmatch(r"\w+|kd(\.\w+)+", given) or given in listed.lightnings(kind):
        return ""
    module = given.rpartition(".")[0]
    modules = {one.name.rpartition(".")[0] for one in listed.classes()}
    if module and module not in modules:
        return ""
    return no_class(kind, given)


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


def unknown_to_timm(key: str, value: object) -> str:
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
    other = (
        other
        or builder_hint(name, key.removesuffix(".arch"))
        or near(name.replace("-", "_"), known)
    )
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
