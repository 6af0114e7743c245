"""Types of settings: what is in a type, and a type as text.

A *kind* is a type as :mod:`typing` has it: ``float | None``, ``Annotated[int, Range("> 0")]``, ``dict[str, Any]``.
"""

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from kd.settings import AnyClass, Range


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


def class_in(kind: object) -> AnyClass | None:
    """The mark of a type that takes a class (:data:`kd.settings.Class`), alone or in a union or container; else None."""
    for part in (*getattr(kind, "__metadata__", ()), *map(class_in, get_args(kind))):
        if isinstance(part, AnyClass):
            return part
    return None


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
    if get_origin(kind) in (dict, list, tuple):
        inside_text = ", ".join("..." if part is ... else shown(part) for part in get_args(kind))
        return f"{get_origin(kind).__name__}[{inside_text}]"  # type: ignore[union-attr]
    if kind is NoneType:
        return "None"
    if isinstance(kind, type):
        return kind.__name__
    return str(kind).rpartition(".")[2]
