"""What a file from elsewhere may say in its settings: it is merged alone into their one form, and walked once. And which
classes the user's own files and words stand for, by the same walk.

The form (:mod:`kd.run.resolve`) has a class only where a setting's type takes one, and there alone a class is built
(:mod:`kd.run.build`): anywhere else a file's words stay plain data.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kd.config import parts as listed
from kd.config.parts import plain_key
from kd.config.trees import leaves
from kd.errors import UserError
from kd.run.resolve import Tree, class_nodes, merged
from kd.run.trust import ALL, Trust, is_trusted, refused_at, remember_made, unlisted

SENDING_KEY = re.compile(r"data\.tier\.address|monitor\.(otlp|webhook|prometheus_host)")
"""Settings of a training that name another machine, or what is sent to one; Ray's answers are pickles."""
HERE = ("auto", "127.0.0.1", "localhost")
"""Values of these that stay on this machine."""
PLACE_KEY = re.compile(r"(?<!class_)(dir|path|folder|file|root|ur[il])$")
"""A key whose value is a file, a folder or an address, by its last letters (``data.root``, ``checkpoint_dir``)."""
PATH = re.compile(r"[/\\]|^~|^\.\.$")
"""A value that holds a path: a slash, the home folder, or the folder above."""
IN_RUN = re.compile(r"RUN(/[\w.+-]*[\w+-])*")
"""Paths in the run's folder (``RUN/NAME``)."""
METRIC = re.compile(r"(val|train)/\w+")
"""Values that only look like paths, at a key that takes none: names of metrics (``val/acc1``)."""
WRITTEN = ("cache_dir", "data_dir")
"""The last parts of keys outside of the trainer whose folder is written to (``Food101`` downloads into ``data_dir``)."""


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
        typed: keys of the command line of a training: a setting that names another machine, or what is sent to one, must
            be among them. None: of a command after a training, which sends nothing, so this is not checked.

    Raises:
        UserError: names the file, the key and what it holds; or the settings are none.
    """
    names = list(trusted)
    for layer in layers:
        texts = [(plain_key(key), text) for key, text in leaves(layer) if isinstance(text, str)]
        problems = [problem for key, text in texts for problem in _problems_of_text(text, key)]
        problems += _problems_of_classes(merged([layer]), names)
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
    """Notes that this machine has written a run's settings, if :func:`check_foreign` would refuse them from elsewhere.

    Settings that any file may name need no note.

    Args:
        text: the content of the run's ``config.yaml``.
        config: the same settings, resolved.
    """
    try:
        check_foreign(Path(), [config], [], ())
    except UserError:
        remember_made(text.encode())


def vouched(own: Iterable[Mapping[Any, Any]], words: Sequence[str], all_own: bool) -> Trust:
    """What the user trusts in settings: ``trust=``, and the classes that files of one's own and the command line name.

    Args:
        own: settings of the files that are one's own, and those of the command line.
        words: ``trust=MODULE``, and ``--trust``, as they were typed.
        all_own: no file is from elsewhere.

    Returns:
        Names, without those of kd's own classes that get nothing beyond the list; :data:`ALL` first where all of these
        settings are one's own. Lightning's short names of classes (``ModelSummary``) are written in full.
    """
    names = []
    if all_own:
        names.append(ALL)
    for word in words:
        if word != "--trust":
            names.append(word.removeprefix("trust="))
    for _, kind, node in class_nodes(merged([*own])):
        name, given = str(node["class_path"]), node.get("init_args") or {}
        one = listed.listed_class(name, kind)
        beyond_list = one is not None and not given.keys() <= set(one.fields)
        if name and (beyond_list or not name.startswith("kd.")):
            names.append(name)
    return Trust([*dict.fromkeys(names)], words=words)


def _problems_of_classes(tree: Tree, trusted: list[str]) -> Iterator[str]:
    """What a file from elsewhere may not say of classes, a text for each.

    Args:
        tree: its settings, merged alone.
        trusted: names that the user trusts.
    """
    for key, kind, node in class_nodes(tree):
        # the name is empty where another file names the class
        name, given = str(node["class_path"]), node.get("init_args") or {}
        one = listed.listed_class(name, kind)
        if name and not is_trusted(name, trusted):
            if one is None:
                yield f"{key} {refused_at(name, kind)}"
                continue
            for argument, value in given.items():
                if argument not in one.fields and value is not None:
                    yield f"{key}.{argument}: {unlisted(one)}"


def _problems_of_text(value: str, key: str) -> Iterator[str]:
    """What a file from elsewhere may not say in a text: another key's value, a run to resume, paths outside the run."""
    if key == "resume":
        yield f"resume: a file from elsewhere resumes no run, got {value}; give resume= yourself"
    if "${" in value:
        yield f"{key} looks up '{value}'; if you trust this file: --trust"
    if key.rpartition(".")[2] in WRITTEN:
        yield f"{key}: a file from elsewhere names no folder to write to, got '{value}'; if you trust it: --trust"
    is_place = PLACE_KEY.search(key) or (PATH.search(value) and not METRIC.fullmatch(value))
    if key.startswith("trainer.") and is_place and not IN_RUN.fullmatch(value):
        yield f"{key} must lie in the run's folder (RUN, RUN/NAME), got '{value}'; if you trust this file: --trust"
