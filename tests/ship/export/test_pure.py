"""Helpers that are pure functions, one call each."""

from kd.ship.export.manifest import as_lines


def test_as_lines() -> None:
    assert as_lines(["bread", "two\nlines"]) == "bread\ntwo lines\n"
