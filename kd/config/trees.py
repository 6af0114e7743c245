"""Nested settings by their dotted keys."""

from typing import Any


def flatten(tree: object, prefix: str = "") -> dict[str, Any]:
    """Nested dicts -> ``{"a.b.c": value}``; lists and empty dicts are values: of ``{}`` it is ``{"": {}}``.

    >>> flatten({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': [2]}
    """
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    flat = {}
    for key, value in tree.items():
        dotted = f"{prefix}.{key}" if prefix else str(key)
        flat.update(flatten(value, dotted))
    return flat
