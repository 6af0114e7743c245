"""Recipes and overlays by their names; paths in the place of a class: a source from its folder or list."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kd.errors import UserError, did_you_mean
from kd.run import files, keys
from kd.storage.objects import is_url

SOURCE = "data.source"
LISTS = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".ndjson")
SETTINGS = (".yaml", ".yml")
OF_A_FOLDER = ("Pictures", "SegmentationFolder")  # a recipe's source that stays what it is


def source_items(item: str, contents: Iterable[dict[Any, Any]]) -> list[str]:
    """``data.source=FILE.csv`` and ``data.source=DIR`` as a class and its argument; any other item as it is."""
    key, _, path = item.partition("=")
    if key != SOURCE or path.startswith("{") or path in keys.subclasses("Source"):
        return [item]
    if path.endswith(SETTINGS):
        if Path(path).is_file() and "class_path" not in files.read(Path(path)):
            raise UserError(
                f"{SOURCE}: {path} names no source (class_path); give the pictures' folder, or a list of "
                f"them ({', '.join(LISTS)})"
            )
        return [item]
    if path.lower().endswith(LISTS):
        return [f"{SOURCE}=Manifest", f"{SOURCE}.train={path}"]
    if not (is_url(path) or Path(path).is_dir()):
        if "/" in path and not Path(path).exists():
            raise UserError(f"{SOURCE}: there is no folder {path}")
        return [item]
    own = keys.merged([*contents], {}).get("data", {}).get("source") or ""
    if (own.get("class_path", "") if isinstance(own, dict) else str(own)).rpartition(".")[
        2
    ] in OF_A_FOLDER:
        return [f"{SOURCE}.root={path}"]
    return [
        f"{SOURCE}={'Shards' if Path(path, 'train.json').is_file() else 'ImageFolder'}",
        f"{SOURCE}.root={path}",
    ]


def implied(overrides: Sequence[str], contents: Iterable[dict[Any, Any]]) -> list[str]:
    """What typed settings mean for others: a list is a ``Manifest``'s, arguments in a recipe are its family's."""
    typed = dict(item.split("=", 1) for item in overrides if "=" in item)
    own, found = keys.merged([*contents], {}), []
    source = (own.get("data") or {}).get("source") or ""
    name = str(source.get("class_path", "") if isinstance(source, dict) else source).rpartition(
        "."
    )[2]
    if (
        typed.get(f"{SOURCE}.train", "").lower().endswith(LISTS)
        and SOURCE not in typed
        and name in ("", "ImageFolder")
    ):
        found.append(f"{SOURCE}=Manifest")
    for key, arch in typed.items():
        node: Any = own
        for part in key.split(".")[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        if not (
            key.startswith("model.")
            and key.endswith(".arch")
            and isinstance(node, dict)
            and node.get("kwargs")
        ):
            continue
        typed_family, own_family = (
            re.findall("[a-z]+", name.rpartition("/")[2])[:1]
            for name in (arch, f"{node.get('arch')}")
        )
        if typed_family != own_family:
            found.append(f"{key.removesuffix('arch')}kwargs={{}}")
    return found


def check_no_files(items: Iterable[tuple[str, Any]]) -> None:
    """Refuses a file where settings or a class are wanted: its content would end up in a message."""
    for key, value in items:
        if (
            isinstance(value, str)
            and is_file(value)
            and not value.endswith(SETTINGS)
            and _takes_no_text(key)
        ):
            model = key in ("model.teacher", "model.student")
            raise UserError(
                f"{key}: takes no file, got {value}{f' ({key}.checkpoint=FILE does)' if model else ''}"
            )


def pairs(
    contents: Iterable[dict[Any, Any]], overrides: Iterable[str]
) -> Iterator[tuple[str, Any]]:
    """Keys and values of files in order, then of ``key=value`` items, the latter as text; ``+`` after a key is
    dropped.
    """
    for content in contents:
        yield from files.leaves(content)
    for item in overrides:
        key, _, value = item.partition("=")
        yield key.rstrip("+"), value


def is_file(value: str) -> bool:
    """Whether a file is there; a name that no file can have is not one."""
    with suppress(OSError, ValueError):  # too long for a name, or a null byte
        return "\n" not in value and Path(value).is_file()
    return False


def holds_settings(key: str) -> bool:
    """Whether a key takes a group of settings, a class, a dict or a list, and no text of its own."""
    key = re.sub(r"^students\.[^.]+(\.|$)", "", key)
    key = re.sub(r"^model\.teachers\.[^.]+", "model.teacher", key)
    return not key or _takes_no_text(key)


def _takes_no_text(key: str) -> bool:
    """Groups, and keys whose type is a class, a dict or a list without ``str`` beside it."""
    known = keys.schema()
    if key in ("trainer.logger", "trainer.strategy"):  # names and classes
        return True
    if key not in known:
        return any(name.startswith(f"{key}.") for name in known)
    kind = re.sub(r"'[^']*'", "", known[key].type)
    text = re.search(r"\bstr\b", re.sub(r"\[[^\[\]]*\]", "", kind))
    return not text and bool(
        re.search(r"\b(dict|list|(?!Literal|Union|Iterable|None|Any)[A-Z]\w*)\b", kind)
    )


PARTS = ("EachLayer", "FeatureRegression")  # what losses are made of
PACKAGE = Path(__file__).parent.parent


def folder(kind: str) -> Path:
    """The folder of ``recipes`` or ``configs``: the wheel carries them as ``kd/_recipes`` and ``kd/_configs``."""
    inside = PACKAGE / f"_{kind}"
    return inside if inside.is_dir() else PACKAGE.parent / kind


def names(kind: str) -> dict[str, str]:
    """All recipes or overlays by name, with the first line of the file where that is a comment.

    Args:
        kind: ``recipes`` or ``configs``.
    """
    first = {
        p.stem: p.read_text(encoding="utf-8").splitlines()[0]
        for p in sorted(folder(kind).glob("*.yaml"))
    }
    return {name: line[1:].strip() if line.startswith("#") else "" for name, line in first.items()}


def listing(kind: str, prefix: str) -> str:
    """Recipes or overlays with their first comment line, a line each.

    Args:
        kind: ``recipes`` or ``configs``.
        prefix: before each name, as one types it (``recipe=``).
    """
    return "".join(f"  {prefix}{name:<22} {first}\n" for name, first in names(kind).items())


def part_of(overlay: str, recipe: str) -> list[Path]:
    """What an overlay changes of one recipe alone: ``recipes/<overlay>/<recipe>.yaml``, where there is such a file."""
    file = folder("recipes") / overlay / f"{recipe}.yaml"
    return [file] if file.is_file() else []


def find(kind: str, name: str) -> Path:
    """The file of a recipe or overlay, by its name or as a path.

    Args:
        kind: ``recipes`` or ``configs``.
        name: a path where it has a slash or ends in ``.yaml`` or ``.yml``.

    Raises:
        UserError: no such file or name; the message has the nearest name.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or "/" in name:
        if path.is_file():
            return path
        raise UserError(f"no file {name}")
    found = folder(kind) / f"{name}.yaml"
    if found.is_file():
        return found
    what = {"recipes": "recipe", "configs": "overlay"}[kind]
    raise UserError(f"no {what} '{name}'{did_you_mean(name, names(kind), 0.5)} (kd-train --list)")


def listed(kind: str) -> str:
    """What ``--list`` prints: recipes and overlays, or the losses, sources, tasks or models that there are."""
    if not kind:
        return listing("recipes", "recipe=") + listing("configs", "config=")
    if kind == "models":
        import timm

        return "".join(f"{name}\n" for name in timm.list_models())
    if kind == "classes":
        from kd.run.listed import described

        return described()
    if kind not in keys.CLASSES:
        raise UserError(
            f"--list: lists {', '.join([*keys.CLASSES, 'models', 'classes'])}, not '{kind}'"
        )
    found = keys.subclasses(*keys.CLASSES[kind])
    return "".join(
        f"  {name:<20} {text}\n" for name, text in sorted(found.items()) if name not in PARTS
    )
