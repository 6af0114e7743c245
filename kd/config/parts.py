"""The classes that a file from elsewhere may name, each with its typed arguments. Neither torch nor Lightning is imported.

This list is what builds: :mod:`kd.run.trust` checks files by it, and :mod:`kd.run.build` builds by it. A class outside it
needs the user's ``trust=``. ``kd-train --list classes`` prints it. The list is the file ``parts.json``, which
``scripts/parts.py`` writes.
"""

import json
from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter

from kd.config.kinds import (
    AnyClass,
    Duration,
    Range,
    TimeLimit,
    class_in,
    group_of,
    inner_kind,
    shown,
)
from kd.config.suggest import as_question, near, nearest

FILE = Path(__file__).with_name("parts.json")
"""The list."""
SEVERAL = ("callback", "logger", "plugin")
"""Kinds of classes of which a setting takes a list."""


def plain(key: str) -> str:
    """A key as ``--keys`` has it: ``trainer.callbacks+`` and ``model.task.init_args.x`` without what joins them."""
    return key.replace("+", "").replace(".init_args", "")


@dataclass(frozen=True)
class Key:
    """One setting, or one argument of a class."""

    name: str
    """The whole key (``optim.lr``); of a class's argument, or a field of a group, its own name until it has a place."""
    kind: Any
    """Its type; ``Any`` where only the class that is built can tell."""
    default: str
    """As Python writes it; empty where it must be given."""
    text: str
    """What it means, a sentence; "" where nothing is said."""

    @property
    def value(self) -> object:
        """The default; a new object each time. None also where there is none (:attr:`default` is empty)."""
        return literal_eval(self.default or "None")

    @property
    def type(self) -> str:
        """The type as text, with its range: ``float > 0``."""
        return shown(self.kind)


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
    from_elsewhere: Mapping[str, object]
    """The types of arguments to which a file from elsewhere may give less than the user: their value is imported."""

    @property
    def short(self) -> str:
        """The class's name without its module."""
        return self.name.rpartition(".")[2]

    @property
    def names(self) -> set[str]:
        """All names by which it can be given: short, public, and by the module that defines it."""
        return {self.short, *self.paths}

    @property
    def fields(self) -> Mapping[str, object]:
        """The type of each argument that it may be given."""
        return {name: argument.kind for name, argument in self.arguments.items()}

    @cached_property
    def model(self) -> TypeAdapter[Any]:
        """The arguments as a group of settings; one that must be given, of a class of kd's, has no default."""
        defaults = {
            name: partial(getattr, key, "value")
            for name, key in self.arguments.items()
            if key.default or not self.all_known
        }
        return TypeAdapter(group_of(self.short, self.fields, defaults))

    @property
    def fields_from_elsewhere(self) -> Mapping[str, object]:
        """The type of what a file from elsewhere may give to each argument."""
        return {**self.fields, **self.from_elsewhere}


def part(kind: str) -> object:
    """The type of an argument that takes a class of a kind."""
    return Annotated[Any, AnyClass(kind)]


NAMES = {"Annotated": Annotated, "Any": Any, "Literal": Literal, "Part": part, "Range": Range,
         "TimeLimit": TimeLimit, "timedelta": Duration}  # fmt: skip
"""What names in the table's types mean, beside Python's own types."""


@cache
def table() -> dict[str, Any]:
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
    found = []
    for kind, of_kind in table()["classes"].items():
        for path, entry in of_kind.items():
            narrower = {
                name: kind_named(argument["from_elsewhere"])
                for name, argument in entry["arguments"].items()
                if "from_elsewhere" in argument
            }
            paths, arguments = frozenset(entry["paths"]), keys_in(entry["arguments"])
            one = Listed(path, kind, paths, entry["text"], entry["all_known"], arguments, narrower)
            found.append(one)
    return tuple(found)


@cache
def listed(name: str, kind: str) -> Listed | None:
    """The class of a kind that a name means; None where the list has none.

    Args:
        name: short (``KDLoss``), public (``kd.losses.KDLoss``), or by the module that defines it.
        kind: what the place takes (``loss``, ``source``, ...); "" finds none.
    """
    for one in classes():
        if one.kind == kind and name in one.names:
            return one
    return None


def of_kind(kind: str) -> list[Listed]:
    """The classes of a kind, in the list's order."""
    return [one for one in classes() if one.kind == kind]


def module_of(kind: str) -> str:
    """Lightning's module whose classes a command line may name without it, of a kind; "" of other kinds."""
    return str(table()["short_names"].get(kind, {}).get("module", ""))


def lightnings(kind: str) -> list[str]:
    """The classes of Lightning's that a setting takes by name alone; [] of other kinds."""
    return list(table()["short_names"].get(kind, {}).get("names", ()))


@cache
def kind_of(annotation: object) -> str:
    """The kind of class that a type takes; empty where it takes none, or several by name."""
    mark = None if class_in(inner_kind(annotation, dict)) else class_in(annotation)
    return mark.kind if mark else ""


def no_class(kind: str, given: str, in_module: Sequence[str] = ()) -> str:
    """The message for an unknown class in the place of a setting, without the setting's key: it ends in the name that is
    spelt most alike, or where none is in what the place takes.

    Args:
        kind: what the place takes (``loss``); "": the place takes no class of the list.
        given: the unknown name, short or a class path.
        in_module: the classes of the module that a class path names; empty: they are not known.
    """
    module, _, short_name = given.rpartition(".")
    of_user = module != "" and not module.startswith("kd.")
    known = sorted(one.short for one in of_kind(kind))
    near_in_module = [f"{module}.{name}" for name in nearest(short_name, in_module)]
    near_names = near(short_name, [*known, *lightnings(kind)])
    suggestion = as_question(near_in_module) or near_names
    what = "class"
    if kind == "source" and not module:
        what = "class or folder"
    allowed = ""
    if of_user:
        if in_module:
            allowed = f" ({module} has {_few(in_module)})"
    elif module_of(kind) or not known:
        allowed = " (a class path: package.Class)"
    else:
        allowed = f" (ours: {_few(known)}; kd-train --list classes; others by their class path)"
    return f"no {what} '{given}'{suggestion or allowed}"


def _few(names: Sequence[str]) -> str:
    """Names with commas between; of more than twelve the first three and dots."""
    return ", ".join(names if len(names) <= 12 else [*names[:3], "..."])


def unknown_class(kind: str, given: str, is_name: bool = True) -> str:
    """What is wrong with the name of a class that is not listed; "" for one that is imported when it is built.

    That is any path outside kd, one in a module of kd that has no listed class, and a name of :func:`lightnings`.

    Args:
        kind: as of :func:`no_class`.
        given: likewise.
        is_name: it may name a class of Python at all.
    """
    module = given.rpartition(".")[0]
    modules = {one.name.rpartition(".")[0] for one in classes() if one.name.startswith("kd.")}
    of_kd = module == "" or module in modules
    is_open = not of_kd or given in lightnings(kind) or "${" in given
    if is_name and is_open:
        return ""
    return no_class(kind, given[:80])


def class_of(node: object) -> str:
    """The short name of one of kd's classes in settings; "" for anything else."""
    path = str(node.get("class_path")) if isinstance(node, dict) else ""
    return path.rpartition(".")[2] if path.startswith("kd.") else ""


def described() -> str:
    """The list as ``kd-train --list classes`` prints it: by kind, a line for each class with its arguments."""
    lines: list[str] = []
    for kind in table()["classes"]:
        lines.append(f"{kind}\n")
        for one in of_kind(kind):
            fields = one.fields_from_elsewhere.items()
            arguments = ", ".join(f"{name}: {shown(type_)}" for name, type_ in fields)
            lines.append(f"  {one.name}({arguments})\n")
    return "".join(lines)
