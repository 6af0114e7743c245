"""What ``kd-latency`` measures."""

from pathlib import Path

import pytest

from kd.ship.timed_exports import runtimes_of


def test_a_damaged_record_of_exports_counts_as_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "export.json").write_text('{"onnx": ')
    assert runtimes_of(tmp_path, None, lambda _: True) == {"torch": {}}
    assert capsys.readouterr().err == "export/export.json can't be read\n"
