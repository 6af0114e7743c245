"""The manifest of an export."""

from kd.ship.export.manifest import as_lines


def test_as_lines() -> None:
    assert as_lines(["bread", "two\nlines"]) == "bread\ntwo lines\n"
