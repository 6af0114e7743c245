"""All settings with type, default and a line of explanation. Neither torch nor Lightning is imported."""

import ast
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, replace
from dataclasses import fields as declared_fields
from functools import cache
from itertools import pairwise

from kd import settings
from kd.config.kinds import group_in, inner_kind, kinds_of
from kd.config.parts import Key, keys_in, kind_of, plain, table
from kd.errors import UserError

__all__ = [
    "FILLED",
    "Key",
    "fields",
    "first_sentence",
    "group_in",
    "kind_at",
    "listing",
    "plain",
    "schema",
]

FILLED = {"data.seed"}
"""Fields of settings that nobody may give: another setting fills them (``seed``)."""


def first_sentence(text: str) -> str:
    """The first sentence of a text, or what its first semicolon ends, in one line."""
    line = " ".join(text.split())
    ends = [end.start() for end in re.finditer(r"(?<=[.;]) ", line)]
    parts = [line[:end] for end in (*ends, len(line))]
    # not inside brackets
    sentence = next((part for part in parts if part.count("(") == part.count(")")), line).rstrip(
        ";"
    )
    return sentence[:1].upper() + sentence[1:]


def texts_of(group: type) -> Mapping[str, str]:
    """What is written below each field of a class, by the field's name, in one line."""
    return _texts(group.__module__).get(group.__name__, {})


@cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """What is written below the fields of all classes of a module, by class and field."""
    source = inspect.getsource(sys.modules[module])
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        of_group = texts[node.name] = {}
        for field, below in pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                words = ast.literal_eval(below.value).split()
                name = ast.unparse(field.target)
                of_group[name] = " ".join(words)
    return texts


@cache
def fields(group: type) -> dict[str, Key]:
    """The settings of a group, a class of ``kd/settings.py``, by their names; the trainer's with Lightning's own."""
    found: dict[str, Key] = {}
    if group is settings.TrainerSettings:
        found = keys_in(table()["trainer"])
    kinds = kinds_of(group)
    for field in declared_fields(group):
        default = "" if field.default is MISSING else repr(field.default)
        if field.default_factory is not MISSING:
            default = (
                repr(field.default_factory()) if field.default_factory in (dict, list) else "{}"
            )
        texts = [texts_of(base).get(field.name) for base in group.__mro__[:-1]]
        text = first_sentence(next(filter(None, texts), ""))
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
        if inner is not None:
            keys_below |= _below(whole_name, inner)
        else:
            keys_below[whole_name] = replace(key, name=whole_name)
    return keys_below


def declared(key: str) -> object:
    """The type of a setting, a group of them, or an entry of a dict of them (``model.teachers.NAME``); None for others.

    "" is the whole tree.
    """
    kind: object = settings.Settings
    names = plain(key)
    for name in names.split(".") if names else ():
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
    matching = [key for key in keys.values() if pattern.lower() in key.name.lower()]
    if not matching:
        raise UserError(f"no key with '{pattern}' in its name (kd-train --keys)")
    width = min(40, max(len(key.name) for key in matching))
    lines: list[str] = []
    for key in matching:
        default = ""
        if key.default:
            default = f" = {key.default}"
        lines.append(f"{key.name:<{width}}  {key.type}{default}\n")
        if key.text:
            lines.append(f"{'':<{width}}  {key.text}\n")
    return "".join(lines)
