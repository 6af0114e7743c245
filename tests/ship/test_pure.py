"""Helpers that are pure functions, one call each."""

from pathlib import Path

from kd.ship.latency import runtimes_of
from kd.ship.predict import _columns


def test_columns() -> None:
    assert _columns(
        {
            "file": "a.jpg",
            "labels": [{"label": "pie", "p": 0.9}],
            "facts": {"kcal": {"of_label": 300.0}},
        }
    ) == {"file": "a.jpg", "label_1": "pie", "p_1": 0.9, "kcal_of_label": 300.0}


def test_a_damaged_record_of_exports_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "export.json").write_text('{"onnx": ')
    assert runtimes_of(tmp_path, None, lambda _: True) == {"torch": {}}
