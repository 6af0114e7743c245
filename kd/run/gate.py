"""What a file from elsewhere may say in its settings: it is merged alone into their one form, and walked once.

The form (:mod:`kd.run.resolve`) has a class only where a setting's type takes one, and there alone a class is built
(:mod:`kd.run.build`): anywhere else a file's words stay plain data.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kd.config import parts as listed
from kd.config.kinds import group_in, inner_kind, wrong
from kd.config.parts import Listed
from kd.errors import UserError
from kd.run.files import leaves
from kd.run.keys import fields, plain
from kd.run.resolve import merged
from kd.run.trust import is_trusted, refused_at, remember_made, unlisted
from kd.settings import Settings

SENDING_KEY = re.compile(r"data\.tier\.address|monitor\.(otlp|webhook|prometheus_host)")
"""Settings of a training that name another machine, or what is sent to one; Ray's answers are pickles."""
HERE = ("auto", "127.0.0.1", "localhost")
"""Values of these that stay on this machine."""
PLACE_KEY = re.compile(r"(?<!class_)(dir|path|folder|file|root|ur[il])$")
"""A key whose value is a file, a folder or an address, by its last letters (``data.root``, ``checkpoint_dir``)."""
PATH = re.compile(r"[/\\]|^~|^\.\.$")
"""A value that holds a path: a slash, the home folder, or the folder above."""
NO_PATH = re.compile(r"(val|train)/\w+|RUN(/[\w.+-]*[\w+-])*|")
"""Values that only look like paths: metrics (``val/acc1``), and what is in the run's folder (``RUN/NAME``)."""


def check_foreign(
    file: Path,
    layers: Iterable[Mapping[Any, Any]],
    trusted: Iterable[str],
    typed: Container[str] | None = None,
) -> None:
    """Rejects what a file from elsewhere must not say.

    Args:
        file: where the settings are from.
        layers: settings by key, nested, dotted or both; each is merged alone.
        trusted: modules and classes that the user trusts beside the list.
        typed: keys of the command line, for a training: it asks no machine that a file alone names. None: for the commands
            after a training, which ask none.

    Raises:
        UserError: names the file, the key and what it holds; or the settings are none.
    """
    names = list(trusted)
    for layer in layers:
        texts = []
        problems: list[str] = []
        for key, value in leaves(layer):
            if isinstance(value, str):
                name = plain(key)
                texts.append((name, value))
                problems += _problems_of_text(value, name)
        tree = merged([layer])
        problems += _problems(tree, Settings, "", names)
        if problems:
            raise UserError(f"{file}: {problems[0]}")
        if typed is None:
            continue
        for key, text in texts:
            if SENDING_KEY.fullmatch(key) and text not in HERE and key not in typed:
                raise UserError(
                    f"{key}: a file from elsewhere names no other machine, nor what is sent to one, got {text}; "
                    f"if you trust it: --trust, or give {key} yourself"
                )


def remember(text: str, config: dict[str, Any]) -> None:
    """Notes that a run of these settings was started here, where a file from elsewhere could not have named them.

    Settings that any file may name need no note.

    Args:
        text: the content of the run's ``config.yaml``.
        config: the same settings, resolved.
    """
    try:
        check_foreign(Path(), [config], [], ())
    except UserError:
        remember_made(text.encode())


def _problems(value: object, kind: object, key: str, trusted: list[str]) -> Iterator[str]:
    """What a file from elsewhere may not say of classes in a value, a text for each.

    Args:
        value: of ``key``, in the one form of settings.
        kind: the type of its place.
        key: whole, dotted, without ``init_args``.
        trusted: names that the user trusts.
    """
    class_kind = listed.kind_of(kind)
    group = group_in(kind)
    if class_kind and isinstance(value, list):
        for item in value:
            yield from _problems(item, kind, key, trusted)
    elif class_kind and isinstance(value, Mapping):
        yield from _problems_of_class(value, class_kind, key, trusted)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            below = inner_kind(kind, dict)
            if group:
                below = fields(group)[name].kind
            inner_key = f"{key}.{name}".lstrip(".")
            yield from _problems(inner, below, inner_key, trusted)


def _problems_of_class(
    node: Mapping[str, Any], kind: str, key: str, trusted: list[str]
) -> Iterator[str]:
    """What a file from elsewhere may not say of a class, a text for each.

    Args:
        node: ``class_path``, which is empty where another file names the class, and ``init_args``.
        kind: of class that the place takes.
        key: its place.
        trusted: names that the user trusts.
    """
    name = node["class_path"]
    one = listed.listed(name, kind)
    if name and not is_trusted(name, trusted):
        if one is None:
            yield f"{key} {refused_at(name, kind)}"
            return
        for argument, value in node["init_args"].items():
            if argument not in one.fields and value is not None:
                yield f"{key}.{argument}: {unlisted(one)}"
    classes: list[Listed] = [one] if one else listed.of_kind(kind)
    for argument, value in node["init_args"].items():
        inner_key = f"{key}.{argument}"
        for narrower in (other.from_elsewhere.get(argument, Any) for other in classes):
            problem = wrong(narrower, value)
            if problem:
                yield f"{inner_key}: {problem}"
        below = one.fields.get(argument, Any) if one else Any
        yield from _problems(value, below, inner_key, trusted)


def _problems_of_text(value: str, key: str) -> Iterator[str]:
    """What a file from elsewhere may not say in a text: another key's value, a run to resume, paths outside the run."""
    if key == "resume":
        yield f"resume: a file from elsewhere resumes no run, got {value}; give resume= yourself"
    if "${" in value:
        yield f"{key} looks up '{value}'; if you trust this file: --trust"
    if key.endswith(".cache_dir"):
        yield f"{key}: a file from elsewhere names no folder to write to, got '{value}'; if you trust it: --trust"
    is_place = PLACE_KEY.search(key) or PATH.search(value)
    if key.startswith("trainer.") and is_place and not NO_PATH.fullmatch(value):
        yield f"{key} must lie in the run's folder (RUN, RUN/NAME), got '{value}'; if you trust this file: --trust"
