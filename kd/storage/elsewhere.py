"""Files from elsewhere are data: how large they may be, what they may hold, and which places their names reach.

All readers use these functions; what is written there follows no links. :mod:`kd.run.trust` limits the code they name.
"""

import json
import math
import os
import re
from pathlib import Path
from typing import IO, Any

import yaml

from kd.errors import UserError

LARGEST = 64 * 2**20  # bytes of a file that is read as text
NODES = 1_000_000  # of YAML, each alias counted as what it stands for
NAME = re.compile(r"(?!\.)(?!latest$)[\w.+-]{1,200}")


class Loader(yaml.SafeLoader):
    """Plain values alone; aliases of aliases grow without bound as soon as anyone walks through them."""

    def get_single_node(self) -> yaml.Node | None:
        """The document, whose size is known before anything is made of it."""
        node = super().get_single_node()
        if node is not None and _size(node, {}) > NODES:
            raise yaml.composer.ComposerError(None, None, f"its aliases stand for more than {NODES} values")
        return node


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Values in a document; an alias of what it lies in has no end."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = NODES + 1
        inner = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_size(part, known) for part in inner)
    return known[id(node)]


def yaml_of(text: str, loader: type[yaml.SafeLoader] = Loader) -> Any:
    """Plain values from YAML.

    Raises:
        ValueError: not YAML, or nested too deeply.
    """
    try:
        return yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError) as error:  # a ValueError: thousands of digits
        raise ValueError(str(error)) from error


def json_of(text: str | bytes | bytearray) -> Any:
    """Plain values from JSON.

    Raises:
        ValueError: not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def text_of(file: Path) -> str:
    """A text file's content.

    Raises:
        OSError: it can't be read, or is larger than :data:`LARGEST` bytes.
        ValueError: not UTF-8.
    """
    with file.open("rb") as opened:
        data = opened.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise OSError(None, f"it is larger than {LARGEST >> 20} MB", str(file))
    return data.decode()


def mapping_of(file: Path) -> dict[str, Any]:
    """What a JSON file maps; empty for a file that is missing, damaged or holds something else."""
    try:
        found = json_of(text_of(file))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def number_of(text: str) -> float:
    """The number of a table's field, NaN where it is empty; a ValueError where it is something else, or infinite."""
    value = float(text) if text.strip() else math.nan
    if math.isinf(value):
        raise ValueError(text)
    return value


def plain_name(name: str, where: str) -> str:
    """The name of a run's folder, as a file or a bucket says it."""
    if not NAME.fullmatch(name):
        raise UserError(f"{where}: must name a run's folder (letters, digits, . + - _), got '{name[:80]}'")
    return name


def inside(folder: Path, name: str, where: str) -> Path:
    """The path ``folder/name``, which must stay inside the folder.

    Args:
        folder: the folder.
        name: from elsewhere.
        where: what named it, for the message.

    Raises:
        UserError: it leads out of the folder, also through links.
    """
    file = folder / name
    plain = "\0" not in name and file != folder and file.name != ".."
    if not (plain and file.resolve().is_relative_to(folder.resolve())):
        raise UserError(f"{where}: '{name[:200]}' leads out of {folder}")
    return file


def fresh(file: Path) -> IO[bytes]:
    """A new file to write; what had the name is removed, and a link in its place is not followed."""
    file.unlink(missing_ok=True)
    return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb")


def appended(file: Path) -> IO[str]:
    """A file to write lines at the end of; a link in its place is removed."""
    if file.is_symlink():
        file.unlink()
    return os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "a+", encoding="utf-8")
