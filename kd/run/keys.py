"""All settings with type, default and a line of explanation. Neither torch nor Lightning is imported."""

import re
from dataclasses import replace
from functools import cache

from kd import settings
from kd.config.kinds import Key, fields, read
from kd.config.parts import plain_key
from kd.errors import UserError


def first_sentence(text: str) -> str:
    """The first sentence of a text, in one line."""
    line = " ".join(text.split())
    sentence = ""
    for part in re.split(r"(?<=\.) ", line):
        sentence = f"{sentence} {part}".strip()
        if sentence.count("(") == sentence.count(")"):  # not inside brackets
            break
    return sentence[:1].upper() + sentence[1:]


@cache
def schema() -> dict[str, Key]:
    """Every setting with a fixed name, by its whole key."""
    return _below("", settings.Settings)


def _below(place: str, group: type) -> dict[str, Key]:
    """All keys below a group of settings, by their whole name (``model.student.arch``)."""
    keys_below: dict[str, Key] = {}
    for key in fields(group).values():
        name = f"{place}.{key.name}".lstrip(".")
        inner = read(key.kind).group
        if inner:
            keys_below |= _below(name, inner)
            continue
        text = first_sentence(key.text)
        keys_below[name] = replace(key, name=name, text=text)
    return keys_below


def declared(key: str) -> object:
    """The type of a setting, a group of them, or an entry of a dict of them (``model.teachers.NAME``); None for others.

    "" is the whole tree.

    >>> read(declared("model.distill_losses.kd")).part, read(declared("trainer.callbacks+")).part
    ('loss', 'callback')
    """
    kind: object = settings.Settings
    for name in filter(None, plain_key(key).split(".")):
        kind = read(kind).below(name)
    return kind


def keys_listed(keys: dict[str, Key], pattern: str) -> str:
    """The settings in whose key ``pattern`` occurs, a line each: key, type, default, meaning. "" gives all.

    Raises:
        UserError: no such key.
    """
    matching = [key for key in keys.values() if pattern.lower() in key.name.lower()]
    if not matching:
        raise UserError(f"no key with '{pattern}' in its name (kd-train --keys)")
    longest = max(len(key.name) for key in matching)
    width = min(40, longest)
    lines: list[str] = []
    for key in matching:
        default = f" = {key.default}" if key.default else ""
        first = f"{key.name:<{width}}  {key.type}{default}\n"
        lines.append(first)
        if key.text:
            second = f"{'':<{width}}  {key.text}\n"
            lines.append(second)
    return "".join(lines)
