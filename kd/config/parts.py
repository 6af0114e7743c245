"""The classes that a file from elsewhere may name, each with its typed arguments. Neither torch nor Lightning is imported.

This list is what builds: :mod:`kd.run.trust` checks files by it, and :mod:`kd.run.build` builds by it. A class outside it
needs the user's ``trust=``. ``kd-train --list classes`` prints it. The list is the file ``parts.json``, which
``scripts/parts.py`` writes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter

from kd.config.kinds import AnyClass, Key, Range, TimeLimit, group_of, read
from kd.config.suggest import as_question, nearest

FILE = Path(__file__).with_name("parts.json")
"""The list."""
SEVERAL = ("callback", "logger", "plugin")
"""Kinds of classes of which a setting takes a list."""


def plain_key(key: str) -> str:
    """A key as ``--keys`` shows it, without ``+`` and ``.init_args``: ``model.task.init_args.x`` is ``model.task.x``."""
    return key.replace("+", "").replace(".init_args", "")


@dataclass(frozen=True)
class Listed:
    """A class that files from elsewhere may name."""

    name: str
    """Its public class path."""
    kind: str
    """What it is: ``loss``, ``source``, ..."""
    paths: frozenset[str]
    """The class paths by which it can be given: its public one, and by the modules that define or import it."""
    text: str
    """The first line of its docstring; "" of a class of another package."""
    all_known: bool
    """Whether :attr:`arguments` are all, with their defaults: it is one of kd's."""
    arguments: Mapping[str, Key]
    """The arguments that it may be given, by name in their order; a key's own ``name`` is that name, without a place."""

    @property
    def short(self) -> str:
        """The class's name without its module."""
        return self.name.rpartition(".")[2]

    @property
    def names(self) -> set[str]:
        """All names by which it can be given: short, public, and by the module that defines it."""
        return {self.short, *self.paths}

    @property
    def fields(self) -> dict[str, Any]:
        """The type of each argument that it may be given."""
        return {name: argument.kind for name, argument in self.arguments.items()}

    @cached_property
    def model(self) -> TypeAdapter[Any]:
        """pydantic's check of the class's arguments as a group of settings (:func:`kd.config.kinds.group_of`).

        Where :attr:`all_known` is false, an argument without a default need not be given, and is None.
        """
        return TypeAdapter(group_of(self.short, [*self.arguments.values()], self.all_known))


def part(kind: str) -> object:
    """The type of an argument that takes a class of a kind."""
    return Annotated[Any, AnyClass(kind)]


UNLISTED = part("")
"""The type of an argument that is not on the list: it may take a class."""
NAMES = {"Annotated": Annotated, "Any": Any, "Literal": Literal, "Part": part, "Range": Range,
         "TimeLimit": TimeLimit, "timedelta": timedelta}  # fmt: skip
"""What names in the table's types mean, beside Python's own types."""


@cache
def positive_list() -> dict[str, Any]:
    """The content of ``parts.json``."""
    content: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return content


@cache
def kind_named(text: str) -> object:
    """The type that a text of the table means."""
    return eval(text, dict(NAMES))


def keys_in(entries: Mapping[str, Mapping[str, str]]) -> dict[str, Key]:
    """The arguments in an entry of the table, by name."""
    return {
        name: Key(name, kind_named(entry["type"]), entry.get("default", ""), entry["text"])
        for name, entry in entries.items()
    }


@cache
def classes() -> tuple[Listed, ...]:
    """The whole list, each class with its kind; :mod:`kd.run.trust` and :mod:`kd.run.build` read it."""
    return tuple(
        Listed(path, kind, frozenset(entry["paths"]), entry["text"], entry["all_known"], keys_in(entry["arguments"]))
        for kind, of_kind in positive_list()["classes"].items()
        for path, entry in of_kind.items()
    )  # fmt: skip


@cache
def listed_class(name: str, kind: str) -> Listed | None:
    """The class of a kind that a name means; None where the list has none.

    Args:
        name: short (``KDLoss``), public (``kd.losses.KDLoss``), or by the module that defines it.
        kind: what the place takes (``loss``, ``source``, ...); "" finds none.
    """
    return next((one for one in of_kind(kind) if name in one.names), None)


def of_kind(kind: str) -> list[Listed]:
    """The classes of a kind, in the list's order."""
    return [one for one in classes() if one.kind == kind]


def lightnings(kind: str) -> dict[str, str]:
    """Lightning's classes that a setting of this kind takes by their short name: short name -> class path; {} for kinds that
    take none.
    """
    short_names = positive_list()["short_names"].get(kind, {"names": ()})
    return {name: f"{short_names['module']}.{name}" for name in short_names["names"]}


def no_class(kind: str, given: str, in_module: Sequence[str] = ()) -> str:
    """The message for an unknown class that a setting names, without the setting's key.

    It ends in the known name that is spelt most alike. Without one it ends in the first of these that applies: a hint at
    the pictures' folder (for a YAML file as source), the classes of the module that was named, the form of a class path, or
    kd's own classes of the kind.

    Args:
        kind: what the place takes (``loss``); "": the place takes no class of the list.
        given: the unknown name, short or a class path.
        in_module: the classes of the module that a class path names; empty: they are not known.
    """
    module, _, short_name = given.rpartition(".")
    known = sorted(one.short for one in of_kind(kind))
    of_lightning = lightnings(kind)
    near_names = [f"{module}.{name}" for name in nearest(short_name, in_module)]
    if not near_names:
        near_names = nearest(short_name, [*known, *of_lightning])
    remedy = as_question(near_names)
    if kind == "source" and given.endswith((".yaml", ".yml")):
        remedy = "; give the pictures' folder"
    if remedy:
        pass
    elif in_module:
        remedy = f" ({module} has {_few(in_module)})"
    elif of_lightning or not known:
        remedy = " (a class path: package.Class)"
    elif not module or module.startswith("kd."):
        remedy = f" (ours: {_few(known)}; kd-train --list classes; others by their class path)"
    what = "class or folder" if kind == "source" and not module else "class"
    return f"no {what} '{given[:80]}'{remedy}"


def _few(names: Sequence[str]) -> str:
    """Names, joined by commas; of more than twelve the first three and dots."""
    return ", ".join(names if len(names) <= 12 else [*names[:3], "..."])


def may_be_imported(kind: str, path: str) -> bool:
    """Whether a class that is not on the list may exist all the same, so that only its import can tell.

    True for one of :func:`lightnings`, and for a path with a module outside kd or a module of kd's that has no listed class.
    """
    module = path.rpartition(".")[0]
    modules = {one.name.rpartition(".")[0] for one in classes() if one.name.startswith("kd.")}
    return path in lightnings(kind) or module not in {"", *modules}


def class_of(node: object) -> str:
    """The short name of the class in a node of settings (its ``class_path``), if it is one of kd's; "" for anything else."""
    path = str(node.get("class_path")) if isinstance(node, dict) else ""
    return path.rpartition(".")[2] if path.startswith("kd.") else ""


def describe_list() -> str:
    """The list as ``kd-train --list classes`` prints it: by kind, a line for each class with its arguments."""
    lines: list[str] = []
    for kind in positive_list()["classes"]:
        lines.append(f"{kind}\n")
        for one in of_kind(kind):
            arguments = ", ".join(f"{key.name}: {read(key.kind).shown}" for key in one.arguments.values())  # fmt: skip
            lines.append(f"  {one.name}({arguments})\n")
    return "".join(lines)
