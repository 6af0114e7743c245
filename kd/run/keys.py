"""All settings with type, default and a line of explanation. Neither torch nor Lightning is imported."""

import re
from dataclasses import MISSING, replace
from dataclasses import fields as declared_fields
from functools import cache
from typing import Any, cast

from kd import settings
from kd.config.kinds import group_in, inner_kind, kinds_of, texts_of
from kd.config.parts import Key, keys_in, kind_of, plain, table
from kd.errors import UserError

FILLED = {"data.seed"}
"""Fields of settings that nobody may give: another setting fills them (``seed``)."""


def first_sentence(text: str) -> str:
    """The first sentence of a text, in one line."""
    line = " ".join(text.split())
    sentence = line
    for end in re.finditer(r"(?<=\.) ", line):
        part = line[: end.start()]
        if part.count("(") == part.count(")"):  # not inside brackets
            sentence = part
            break
    return sentence[:1].upper() + sentence[1:]


@cache
def fields(group: type) -> dict[str, Key]:
    """The settings of a group, a class of ``kd/settings.py``, by their names; the trainer's with Lightning's own."""
    found: dict[str, Key] = {}
    if group is settings.TrainerSettings:
        found = keys_in(table()["trainer"])
    kinds = kinds_of(group)
    texts = texts_of(group)
    for field in declared_fields(cast(Any, group)):
        default = ""
        if field.default is not MISSING:
            default = repr(field.default)
        elif field.default_factory in (dict, list):
            default = repr(field.default_factory())
        elif field.default_factory is not MISSING:
            default = "{}"
        text = first_sentence(texts[field.name])
        if field.name in found:
            text = found[field.name].text
        found[field.name] = Key(field.name, kinds[field.name], default, text)
    return found


@cache
def schema() -> dict[str, Key]:
    """Every setting with a fixed name, by its whole key."""
    return {name: key for name, key in _below("", settings.Settings).items() if name not in FILLED}


def _below(place: str, group: type) -> dict[str, Key]:
    """All keys below a group of settings, by their whole name (``model.student.arch``)."""
    keys_below: dict[str, Key] = {}
    for key in fields(group).values():
        whole_name = f"{place}.{key.name}".lstrip(".")
        inner = group_in(key.kind)
        keys_below |= (
            _below(whole_name, inner) if inner else {whole_name: replace(key, name=whole_name)}
        )
    return keys_below


def declared(key: str) -> object:
    """The type of a setting, a group of them, or an entry of a dict of them (``model.teachers.NAME``); None for others.

    "" is the whole tree.
    """
    kind: object = settings.Settings
    for name in filter(None, plain(key).split(".")):
        group = group_in(kind)
        if group is None:
            kind = inner_kind(kind, dict)
        elif name in fields(group):
            kind = fields(group)[name].kind
        else:
            return None
    return kind


def kind_at(key: str) -> str:
    """The kind of class that a setting takes; empty where it takes none.

    >>> kind_at("model.distill_losses.kd"), kind_at("trainer.callbacks+"), kind_at("optim.kwargs")
    ('loss', 'callback', '')
    """
    return kind_of(declared(key))


def listing(keys: dict[str, Key], pattern: str) -> str:
    """The settings in whose key ``pattern`` occurs, a line each: key, type, default, meaning. "" gives all.

    Raises:
        UserError: no such key.
    """
    part = pattern.lower()
    matching = [key for key in keys.values() if part in key.name.lower()]
    if not matching:
        raise UserError(f"no key with '{pattern}' in its name (kd-train --keys)")
    longest = max(len(key.name) for key in matching)
    width = min(40, longest)
    lines: list[str] = []
    for key in matching:
        default = ""
        if key.default:
            default = f" = {key.default}"
        lines.append(f"{key.name:<{width}}  {key.type}{default}\n")
        if key.text:
            lines.append(f"{'':<{width}}  {key.text}\n")
    return "".join(lines)
