"""Formats that kd does not write lead to the program that does."""

import pytest

from kd.cli import export_main
from kd.commands.export import usage
from kd.ship.export.base import (
    ELSEWHERE,
    FORMATS,
    OLD_NAMES,
    OTHER_NAMES,
    find_format,
    formats_with,
)
from tests._helpers import ROOT


@pytest.mark.parametrize("name", [*ELSEWHERE, *OTHER_NAMES, "TensorRT"])
def test_a_format_of_another_program(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert export_main(["runs/none", f"to={name}"]) == 2
    message = capsys.readouterr().err
    assert "to: kd does not write" in message and "another program does: " in message
    assert not {*ELSEWHERE, *OTHER_NAMES} & {*FORMATS}


@pytest.mark.parametrize("name", [*OLD_NAMES, "TFLite"])
def test_a_name_of_a_file_leads_to_its_format(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export_main(["runs/none", f"to={name}"]) == 2
    format_name = OLD_NAMES[name.lower()]
    assert f"to: '{name}' is written by to={format_name}" in capsys.readouterr().err
    assert format_name in FORMATS and name not in FORMATS


def test_the_page_has_a_row_for_each() -> None:
    page = (ROOT / "kd/ship/export/README.md").read_text().lower()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for name in ELSEWHERE:
        assert any(name in row for row in rows), f"no row of the page names {name}"


def test_a_format_is_one_file() -> None:
    """Its name is in kd-export's help, and leads to the class in it; nothing else lists the formats."""
    files = sorted(file.stem for file in (ROOT / "kd/ship/export/formats").glob("[a-z]*.py"))
    assert [*FORMATS] == files
    for name in files:
        assert f"  to={name} " in usage()
        assert type(find_format(name)).__module__ == f"kd.ship.export.formats.{name}"
    for ability in ("quantises", "halves", "bounded", "timed"):
        assert formats_with(ability) == [
            name for name in files if getattr(find_format(name), ability)
        ]
