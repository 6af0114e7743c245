"""Names from files neither steer a terminal nor compute in a spreadsheet."""

import ast
import csv
import io
import re

import pytest

from kd.storage.elsewhere import json_of
from kd.storage.shown import csv_text, in_html, in_markdown, on_terminal
from scripts.house import tree_of
from tests._helpers import ROOT


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "  ="])
def test_no_cell_is_a_formula(first: str) -> None:
    text = csv_text([[f"{first}cmd|'/c calc'!A0", -1.5, 3, "cat", None]])
    (row,) = csv.reader(io.StringIO(text, newline=""))
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
    """A writer of :mod:`csv` elsewhere would not see what a spreadsheet computes; metrics.csv holds numbers alone."""
    writers = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "kd").rglob("*.py")
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Attribute | ast.Name)
        and ast.unparse(node).split(".")[-1] in ("writer", "DictWriter")
        and ast.unparse(node).startswith("csv.")
    }
    assert writers == {"kd/storage/shown.py", "kd/callbacks/metrics_csv.py"}


@pytest.mark.parametrize(
    "name",
    ["<img src=x onerror=alert(1)>", "[a](http://b)", "a | b", "*b*", "![i](j)", "~~x~~", "http://b", "www.b.c",
     "@everyone", "a\n# b", "a\u202eb", "a\x1b[2Jb", "&lt;b&gt;", "back\\<b>"],
)  # fmt: skip
def test_a_name_is_plain_text_in_markdown(name: str) -> None:
    shown = in_markdown(name)
    without_escapes = re.sub(r"\\.", "", shown)
    assert not re.search(r"[|<>*_`~\[\]#&!@]|://|www\.", without_escapes)
    assert shown.isprintable()


def test_no_text_ends_the_script_of_a_page() -> None:
    names = ["</script><script>alert(1)</script>", "<!--", "a"]
    text = in_html(names)
    assert "<" not in text and json_of(text) == names


def test_pages_and_cards_are_filled_through_one_function() -> None:
    """Whoever reads a template imports the function for it, and nobody else escapes markup."""
    templates = {".html": "in_html", ".md.j2": "in_markdown"}
    for file in (ROOT / "kd").rglob("*.py"):
        text = file.read_text()
        for ending, function in templates.items():
            if f'{ending}"' in text and "__file__" in text:
                assert f"import {function}" in text, file
        if file.name != "shown.py":
            assert "u003c" not in text and "html.escape" not in text, file
