"""Names from files neither steer a terminal nor compute in a spreadsheet."""

import ast
import csv
import io

import pytest

from kd.storage.shown import Table, on_terminal
from scripts.house import tree_of
from tests._helpers import ROOT


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "  ="])
def test_no_cell_is_a_formula(first: str) -> None:
    text = io.StringIO()
    Table(text).add([f"{first}cmd|'/c calc'!A0", -1.5, 3, "cat", None])
    (row,) = csv.reader(io.StringIO(text.getvalue(), newline=""))
    assert row == [f"'{first}cmd|'/c calc'!A0", "-1.5", "3", "cat", ""]


@pytest.mark.parametrize(
    "letter", ["\x1b", "\x07", "\r", "\n", "\x7f", "\x9b", "\u202e", "\u2028", "\udce9"]
)
def test_no_letter_steers_a_terminal(letter: str) -> None:
    shown = on_terminal(f"a{letter}[2Jb \u00e9\u4e2d")
    assert letter not in shown
    assert shown.isprintable()
    assert shown.startswith("a\\")
    assert shown.endswith("\u00e9\u4e2d")


def test_tables_are_written_in_one_place() -> None:
    """A writer of :mod:`csv` elsewhere would not see what a spreadsheet computes."""
    writers = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "kd").rglob("*.py")
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Attribute | ast.Name)
        and ast.unparse(node).split(".")[-1] in ("writer", "DictWriter")
        and ast.unparse(node).startswith("csv.")
    }
    assert writers == {"kd/storage/shown.py"}
