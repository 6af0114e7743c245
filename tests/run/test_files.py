"""Nested settings as dotted keys."""

from typing import Any

import pytest

from kd.errors import UserError
from kd.run import files
from kd.run.files import flatten, leaves


def test_leaves() -> None:
    assert list(leaves({"a": {"b": 1, "c": [2, {"d": 3}]}})) == [
        ("a.b", 1),
        ("a.c", 2),
        ("a.c.d", 3),
    ]


def test_flatten() -> None:
    assert flatten({"a": {"b": 1}, "c": [2]}) == {"a.b": 1, "c": [2]}


def doubled(value: str, last: object = "x") -> dict[str, Any]:
    """Settings of 40 keys, each the next one twice."""
    names = [f"a{number}" for number in range(40)]
    values = [value.replace("NEXT", f"kwargs.{name}") for name in names[1:]]
    return {"kwargs": dict(zip(names, [*values, last], strict=True)), "name": "${kwargs.a0}"}


@pytest.mark.parametrize("value", ["${NEXT}${NEXT}", "${.NEXT}${NEXT}"])
@pytest.mark.parametrize("last", ["x", [1, 2], {"x": 1}])
def test_a_reference_counts_as_what_it_stands_for(value: str, last: object) -> None:
    tree = doubled(value.replace(".NEXT", "..NEXT"), last)
    with pytest.raises(UserError, match="stands for more than 1000000 values and letters"):
        files.check_references(tree)


def test_references_in_lists_and_circles() -> None:
    many = {f"a{n}": [f"${{a{n + 1}}}", f"${{a{n + 1}[0]}}"] for n in range(60)}
    with pytest.raises(UserError, match="stands for more than"):
        files.check_references({**many, "a60": ["x" * 100_000]})
    files.check_references(
        {"a": "${b}", "b": "${a}", "c": "${nowhere}${oc.env:HOME}", "d": ["${c}"]}
    )
