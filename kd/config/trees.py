"""Nested settings by their dotted keys."""

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(
    tree: Mapping[Any, Any] | list[Any], path: str = "", in_lists: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yields all values in nested dicts and lists, each with its dotted key. A list's items have the list's own key.

    An empty dict or list inside counts as a value; with ``in_lists`` false each list does.

    Args:
        tree: the dicts and lists.
        path: dotted key of ``tree`` itself, which the yielded keys begin with.
        in_lists: whether lists are entered.

    >>> [*leaves({"a": {"b": 1, "c": [2, {"d": 3}]}, "e": {}})]
    [('a.b', 1), ('a.c', 2), ('a.c.d', 3), ('e', {})]
    """
    entries = [(path, value) for value in tree]
    if isinstance(tree, Mapping):
        entries = [(f"{path}.{key}".lstrip("."), value) for key, value in tree.items()]
    inner = (dict, list) if in_lists else (dict,)
    for key, value in entries:
        if value and isinstance(value, inner):
            yield from leaves(value, key, in_lists)
        else:
            yield key, value


def flatten(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """The values in nested dicts by dotted key; a list, and an empty dict, is a value.

    >>> flatten({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': [2]}
    """
    return dict(leaves(tree, in_lists=False))
