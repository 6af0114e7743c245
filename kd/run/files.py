"""Reads YAML files strictly: what PyYAML and omegaconf would pass over in silence is refused here, in one line."""

import copy
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from kd.config.trees import leaves
from kd.errors import UserError
from kd.storage.elsewhere import BoundedLoader, text_of, with_numbers, yaml_of


class _Strict(BoundedLoader):
    """Refuses a key that is given twice, as the last one would win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping of YAML; keys that are given twice raise ConstructorError with their line."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    problem = f"the key '{key.value}' is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


@lru_cache(maxsize=16)  # a command reads its files several times
def _content(text: str) -> object:
    """The content of a YAML text; it is shared by all who read the same text, so callers copy it."""
    return yaml_of(text, _Strict)


def read_settings(file: Path) -> dict[Any, Any]:
    """The settings in a YAML file.

    Raises:
        UserError: it can't be read, is not YAML, or holds no mapping.
    """
    try:
        content = copy.deepcopy(_content(text_of(file)))
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is no YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold settings (key: value), not {type(content).__name__}")
    return content


_Plain: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@with_numbers
class Dumper(_Plain):
    """Writes plain values so that :func:`kd.storage.elsewhere.yaml_of` reads the same: a text ``1e5`` gets quotes."""


BEGIN, END = "---\n", "...\n"
"""Of a run's ``config.yaml``; without the second one it was cut short."""


def as_yaml(config: Mapping[str, Any]) -> str:
    """Resolved settings as text; read again they are the same. The first line names Lightning's version, for people."""
    header = f"# pytorch_lightning=={version('pytorch-lightning')}\n"
    text = yaml.dump(dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True)
    return f"{BEGIN}{header}{text}{END}"


CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""A control character."""


def check_text(tree: Mapping[Any, Any], where: str = "") -> None:
    """Refuses control characters: settings become lines of scripts, tables and records.

    Args:
        tree: nested settings, or settings by key.
        where: begins the message, such as ``FILE: ``.

    Raises:
        UserError: a key or a value with a line break or another control character.
    """
    for key, value in leaves(tree):
        text = str(value)
        if CONTROL.search(key):
            text = f"{key}={value}"
        if CONTROL.search(text):
            plain_key = CONTROL.sub("?", key)
            shown = repr(text)[:80]
            raise UserError(f"{where}{plain_key}: must hold no control characters, got {shown}")


def check_whole(file: Path) -> None:
    """Refuses a run's ``config.yaml`` that was cut short: what it lacks would take its default in silence.

    Raises:
        UserError: names the file, which does not end with :data:`END`, or is no YAML.
    """
    read_settings(file)
    if not text_of(file).endswith(END):
        raise UserError(f"resume: {file} is truncated; give the run's settings (recipe=FILE)")
