"""Nested settings as dotted keys."""

from kd.config.trees import flatten, leaves


def test_leaves() -> None:
    assert list(leaves({"a": {"b": 1, "c": [2, {"d": 3}]}})) == [
        ("a.b", 1),
        ("a.c", 2),
        ("a.c.d", 3),
    ]


def test_flatten() -> None:
    assert flatten({"a": {"b": 1}, "c": [2]}) == {"a.b": 1, "c": [2]}
