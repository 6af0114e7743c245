"""Plain values of a resolved configuration."""

from typing import Any


def flatten(tree: object, prefix: str = "") -> dict[str, Any]:
    """Nested dicts -> ``{"a.b.c": value}``.

    >>> flatten({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': [2]}
    """
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
