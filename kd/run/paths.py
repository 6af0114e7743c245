"""Paths in the place of a class: a source from its folder or list; other files are refused unread."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.run import files, keys
from kd.storage.objects import is_url

SOURCE = "data.source"
LISTS = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".ndjson")
SETTINGS = (".yaml", ".yml")
OF_A_FOLDER = ("Pictures", "SegmentationFolder")  # a recipe's source that stays what it is


def source_items(item: str, contents: Iterable[dict[Any, Any]]) -> list[str]:
    """``data.source=FILE.csv`` and ``data.source=DIR`` as a class and its argument; any other item as it is.

    Args:
        item: ``key=value`` of a command line.
        contents: the settings below it, whose source may be one that takes such a folder.

    Raises:
        UserError: a path where nothing is.

    >>> source_items("data.source=s3://food/train.csv", [])
    ['data.source=Manifest', 'data.source.train=s3://food/train.csv']
    """
    key, _, path = item.partition("=")
    if key != SOURCE or path.startswith("{") or path in keys.subclasses("Source"):
        return [item]
    if path.endswith(SETTINGS):
        if Path(path).is_file() and "class_path" not in files.read(Path(path)):
            raise UserError(f"{SOURCE}: {path} names no source (class_path); give the pictures' folder, or a list of "
                            f"them ({', '.join(LISTS)})")  # fmt: skip
        return [item]
    if path.lower().endswith(LISTS):
        return [f"{SOURCE}=Manifest", f"{SOURCE}.train={path}"]
    if not (is_url(path) or Path(path).is_dir()):
        if "/" in path and not Path(path).exists():
            raise UserError(f"{SOURCE}: there is no folder {path}")
        return [item]
    own = keys.merged([*contents], {}).get("data", {}).get("source") or ""
    name = (own.get("class_path", "") if isinstance(own, dict) else str(own)).rpartition(".")[2]
    if name in OF_A_FOLDER:
        return [f"{SOURCE}.root={path}"]
    return [f"{SOURCE}={'Shards' if Path(path, 'train.json').is_file() else 'ImageFolder'}", f"{SOURCE}.root={path}"]


def implied(overrides: Sequence[str], contents: Iterable[dict[Any, Any]]) -> list[str]:
    """What typed settings mean for others: a list is a ``Manifest``'s, arguments in a recipe are its family's."""
    typed = dict(item.split("=", 1) for item in overrides if "=" in item)
    own, found = keys.merged([*contents], {}), []
    source = (own.get("data") or {}).get("source") or ""
    name = str(source.get("class_path", "") if isinstance(source, dict) else source).rpartition(".")[2]
    if typed.get(f"{SOURCE}.train", "").lower().endswith(LISTS) and SOURCE not in typed and name in ("", "ImageFolder"):
        found.append(f"{SOURCE}=Manifest")
    for key, arch in typed.items():
        node: Any = own
        for part in key.split(".")[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        if not (key.startswith("model.") and key.endswith(".arch") and isinstance(node, dict) and node.get("kwargs")):
            continue
        typed_family, own_family = (
            re.findall("[a-z]+", name.rpartition("/")[2])[:1] for name in (arch, f"{node.get('arch')}")
        )
        if typed_family != own_family:
            found.append(f"{key.removesuffix('arch')}kwargs={{}}")
    return found


def check_no_files(items: Iterable[tuple[str, Any]]) -> None:
    """Refuses a file where settings or a class are wanted: its content would end up in a message.

    Raises:
        UserError: the first such file that is no YAML.
    """
    for key, value in items:
        if isinstance(value, str) and _is_file(value) and not value.endswith(SETTINGS) and _takes_no_text(key):
            model = key in ("model.teacher", "model.student")
            raise UserError(f"{key}: takes no file, got {value}{f' ({key}.checkpoint=FILE does)' if model else ''}")


def pairs(contents: Iterable[dict[Any, Any]], overrides: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Keys and values of files and of a command line."""
    for content in contents:
        yield from files.leaves(content)
    for item in overrides:
        key, _, value = item.partition("=")
        yield key.rstrip("+"), value


def _is_file(value: str) -> bool:
    with suppress(OSError, ValueError):  # too long for a name, or a null byte
        return "\n" not in value and Path(value).is_file()
    return False


def _takes_no_text(key: str) -> bool:
    """Groups, and keys whose type is a class, a dict or a list without ``str`` beside it."""
    known = keys.schema()
    if key not in known:
        return any(name.startswith(f"{key}.") for name in known)
    kind = re.sub(r"'[^']*'", "", known[key].type)
    text = re.search(r"\bstr\b", re.sub(r"\[[^\[\]]*\]", "", kind))
    return not text and bool(re.search(r"\b(dict|list|(?!Literal|Union|Iterable|None|Any)[A-Z]\w*)\b", kind))
