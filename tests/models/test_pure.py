"""Helpers that are pure functions, one call each."""

from kd.models.weights import _name_list


def test_name_list() -> None:
    assert _name_list({"bread": 1, "apple": 0}) == ["apple", "bread"]
    assert _name_list({"1": "bread", "0": "apple"}) == ["apple", "bread"]
    assert _name_list([3, 4]) == []
