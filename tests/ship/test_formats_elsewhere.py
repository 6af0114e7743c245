"""Formats that kd does not write lead to the program that does."""

import pytest

from kd.commands.export import usage
from kd.run.request import Request
from kd.ship.export.base import FORMATS, OTHERS, find_format, formats_with
from tests._helpers import ROOT, Command


@pytest.mark.parametrize("name", [*OTHERS, "TensorRT", "TFLite"])
def test_a_name_of_another_program_or_file(name: str, refusal: Command) -> None:
    message = refusal("export", ["runs/none", f"to={name}"])
    assert f"to: no format '{name}': {OTHERS[name.lower()]}" in message
    assert name not in FORMATS
    assert any(f"to={known}" in message for known in FORMATS)


def test_the_page_has_a_row_for_tensorrt() -> None:
    page = (ROOT / "kd/ship/export/README.md").read_text().lower()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert any("tensorrt" in row for row in rows)


def test_a_format_is_one_file() -> None:
    """Its name is in kd-export's help, and leads to the class in it; nothing else lists the formats."""
    files = sorted(file.stem for file in (ROOT / "kd/ship/export/formats").glob("[a-z]*.py"))
    assert [*FORMATS] == files
    help_text = usage(Request())
    for name in files:
        assert f"  to={name} " in help_text
        assert type(find_format(name)).__module__ == f"kd.ship.export.formats.{name}"
    for ability in ("quantises", "halves", "timed"):
        assert formats_with(ability) == [
            name for name in files if getattr(find_format(name), ability)
        ]
