"""Types of settings whose classes can't be imported without torch: built from the annotation in the source.

``kd/settings.py`` is imported, so its types are what Python has. Those of Lightning's Trainer, of our losses, sources
and tasks, and of the listed classes of other packages are in text; here they become the same kind of object.

A *kind* is a type as :mod:`typing` has it: ``float | None``, ``Annotated[int, Range("> 0")]``, ``dict[str, Any]``.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from datetime import timedelta
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from kd import settings
from kd.settings import AnyClass, Like, Range

PLAIN: dict[str, object] = {
    "int": int, "float": float, "bool": bool, "str": str, "dict": dict, "list": list, "tuple": tuple,
    "None": NoneType, "NoneType": NoneType, "Any": Any, "object": Any, "timedelta": timedelta,
}  # fmt: skip
CONTAINERS: dict[str, Any] = {"dict": dict, "list": list, "tuple": tuple}
LIMITS = {"Range": Range, "Like": Like}


class Foreign:
    """A type that is known by its name alone (``Tensor``, ``Iterable[Logger]``): each is a class of its own.

    Which values fit is known when the class is built.
    """


@cache
def foreign(name: str) -> type[Foreign]:
    """The class that stands for a type of this name; the same one each time."""
    return type(name, (Foreign,), {})


def type_of(node: ast.expr | None) -> object:
    """The type that an annotation in the source means; ``Any`` without one.

    Names of ``kd/settings.py`` mean what they mean there; other names become :class:`Foreign`.

    >>> type_of(ast.parse("Optional[Literal['a', 1]]", mode="eval").body)
    typing.Optional[typing.Literal['a', 1]]
    >>> shown(type_of(ast.parse("dict[str, Tensor] | Annotated[float, Range('> 0')]", mode="eval").body))
    'dict[str, Tensor] | float > 0'
    """
    if node is None:
        return Any
    if isinstance(node, ast.Constant):
        if node.value is None:
            return NoneType
        return type_of(ast.parse(str(node.value), mode="eval").body)
    if isinstance(node, ast.BinOp):
        return union([type_of(node.left), type_of(node.right)])
    if isinstance(node, ast.Subscript):
        return _subscripted(node)
    name = ast.unparse(node).rpartition(".")[2]
    if name in PLAIN:
        return PLAIN[name]
    kind = vars(settings).get(name)
    if kind is not None and (get_origin(kind) is not None or is_dataclass(kind)):
        return kind
    return foreign(ast.unparse(node))


def _subscripted(node: ast.Subscript) -> object:
    """The type of ``NAME[...]`` in an annotation: Literal, Annotated, Optional, Union or a container; else it is
    foreign.
    """
    name = ast.unparse(node.value).rpartition(".")[2]
    parts = [node.slice]
    if isinstance(node.slice, ast.Tuple):
        parts = node.slice.elts
    if name == "Literal":
        words = [ast.literal_eval(part) for part in parts]
        return Literal[tuple(words)]
    if name == "Annotated":
        kind = type_of(parts[0])
        limits = [_limit(part) for part in parts[1:]]
        limits = [limit for limit in limits if limit is not None]
        if limits:
            return Annotated[(kind, *limits)]
        return kind
    if name == "Optional":
        return union([type_of(parts[0]), NoneType])
    if name == "Union":
        return union(type_of(part) for part in parts)
    if name in CONTAINERS:
        inside: list[object] = []
        for part in parts:
            repeats = isinstance(part, ast.Constant) and part.value is ...
            inside.append(... if repeats else type_of(part))
        return CONTAINERS[name][tuple(inside)]
    return foreign(ast.unparse(node))


def _limit(node: ast.expr) -> object:
    """A ``Range`` or ``Like`` in an annotation, written out or by its name in ``kd/settings.py``; None for others.

    They are made of the source's text alone: no code of the annotation runs.
    """
    called = node
    if isinstance(node, ast.Call):
        called = node.func
    name = ast.unparse(called).rpartition(".")[2]
    if not isinstance(node, ast.Call):
        return vars(settings).get(name)
    kind = LIMITS.get(name)
    if kind is None:
        return None
    texts = [_text(argument) for argument in node.args]
    return kind(*texts)


def _text(node: ast.expr) -> str:
    """A text in an annotation, or the one that ``kd/settings.py`` gives a name."""
    if isinstance(node, ast.Name):
        return str(vars(settings)[node.id])
    return str(ast.literal_eval(node))


def union(kinds: Iterable[object]) -> object:
    """The type that takes what one of several takes, in their order."""
    # flat: of two nested unions with the same members Python gives the one that was made first
    flat = tuple(member for kind in kinds for member in members(kind))
    return Union[flat]  # noqa: UP007


def within(kind: object, limit: Range) -> object:
    """A type whose numbers have to be in a range; null, words, and what has a limit already stay.

    >>> shown(within(float | None, Range("> 0")))
    'float > 0 | None'
    """
    parts = [
        part
        if part is NoneType or get_origin(part) in (Literal, Annotated)
        else Annotated[part, limit]
        for part in members(kind)
    ]
    return union(parts)


def members(kind: object) -> tuple[Any, ...]:
    """The types of a union, in order; of any other type itself.

    >>> members(int | None), members(dict[str, int])
    ((<class 'int'>, <class 'NoneType'>), (dict[str, int],))
    """
    if get_origin(kind) in (Union, UnionType):
        return get_args(kind)
    return (kind,)


def inner_kind(kind: object, container: type) -> object:
    """The type of what a dict or list holds (``container``: which of the two); ``Any`` where nothing is said of it."""
    for part in members(kind):
        if get_origin(part) is container and get_args(part):
            return get_args(part)[-1]
    return Any


def names_in(kind: object) -> Iterator[str]:
    """The names of all classes in a type, also inside of unions and containers, but for those of plain values.

    >>> [*names_in(dict[str, foreign("Projection")] | None)]
    ['Projection']
    """
    if isinstance(kind, type) and kind not in PLAIN.values():
        yield kind.__name__
    for part in get_args(kind):
        yield from names_in(part)


def takes_class(kind: object) -> bool:
    """Whether a type takes a class by its path: :data:`kd.settings.Class`, alone or in a union or container."""
    if any(isinstance(part, AnyClass) for part in getattr(kind, "__metadata__", ())):
        return True
    return any(takes_class(part) for part in get_args(kind))


def shown(kind: object) -> str:
    """A type as text, with its range: ``float > 0 | None``."""
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(shown(part) for part in members(kind))
    if get_origin(kind) is Annotated:
        inside, *limits = get_args(kind)
        if any(isinstance(limit, AnyClass) for limit in limits):
            return "Class"
        ranges = [limit.text for limit in limits if isinstance(limit, Range)]
        return " ".join([shown(inside), *ranges])
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(kind)))}]"
    if get_origin(kind) in CONTAINERS.values():
        inside_text = ", ".join("..." if part is ... else shown(part) for part in get_args(kind))
        return f"{get_origin(kind).__name__}[{inside_text}]"  # type: ignore[union-attr]
    if kind is NoneType:
        return "None"
    if isinstance(kind, type):
        return kind.__name__
    return str(kind).rpartition(".")[2]
