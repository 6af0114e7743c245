"""Parts of results: what terminal, page and card print of one that was measured."""

from pathlib import Path

import pytest

from kd.report.evaluated import cascade_parts, exports_parts
from kd.report.facts import Facts
from kd.report.records import RunRecords
from kd.report.sections import _results
from kd.report.tables import Chart, Gallery, Picture, Table, results_of, write_parts
from kd.report.templates import markdown
from kd.report.terminal import print_parts
from tests._files import read_json, write_json
from tests._pages import CASCADE

TABLE = Table(
    "Of <b>", ["", "acc1", "ms"], [["a | b", "50.0%", 1234.5678], ["c", None, 0.5]], "A note."
)


def test_the_curve_is_drawn_over_milliseconds() -> None:
    chart, numbers, words = cascade_parts({**CASCADE, "pictures": 9})
    assert isinstance(chart, Chart) and isinstance(numbers, Table) and isinstance(words, Table)
    assert list(chart.x) == [98.0, 126.9, 388.1]
    assert list(chart.series["accuracy, %"]) == [77.6, 80.6, 86.7]
    assert numbers.rows[1] == ["10.0%", "80.6%", "126.90", "44%"]
    assert "no threshold is sure to reach it" in str(words.rows)


def test_a_result_is_printed_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written and read again, on the terminal, and as Markdown, whose markup no name opens."""
    (tmp_path / "student.safetensors").write_bytes(b"weights")
    gallery = Gallery("Look", [Picture("data:image/jpeg;base64,AAAA", "x", [("is", "a")])])
    write_parts(tmp_path, "mine", [TABLE, gallery])
    parts = results_of(tmp_path, print)["mine"]
    assert [part.title for part in parts] == ["Of <b>", "Look"]
    print_parts(parts)
    shown = capsys.readouterr().out
    for text in ("Of <b>", "acc1", "1,235", "0.5", "A note."):
        assert text in shown
    assert markdown(parts).splitlines() == [
        "### Of \\<b\\>", "", "|  | acc1 | ms |", "| --- | --- | --- |", "| a \\| b | 50.0% | 1,235 |",
        "| c |  | 0.5 |", "", "A note.",
    ]  # fmt: skip


@pytest.mark.parametrize("part", [
    {"kind": "table", "title": "x", "columns": ["a"], "rows": 3},
    {"kind": "pictures", "title": "x", "items": [{"image": "http://x/y.png", "name": "x", "lines": []}]},
    {"kind": "pictures", "title": "x", "items": [], "legend": [["a", "url(http://x)"]]},
    {"kind": "script"},
])  # fmt: skip
def test_a_damaged_or_foreign_part_is_left_out_and_noted(part: dict, tmp_path: Path) -> None:
    (tmp_path / "student.safetensors").write_bytes(b"weights")
    write_parts(tmp_path, "b", [TABLE])
    file = tmp_path / "tables" / "b.json"
    good = read_json(file)
    write_json(tmp_path / "tables" / "a.json", {**good, "parts": [part]})
    run = RunRecords(tmp_path)
    assert [part.title for part in _results(Facts(run))] == ["Of <b>"]
    assert run.notes == ["tables/a.json can't be read"]


def test_an_export_without_a_number_has_an_empty_cell() -> None:
    (table,) = exports_parts({"onnx": {"agreement": 1.0}})
    assert isinstance(table, Table)
    assert table.rows == [["onnx", None, "100.00%", "", "", None]]
