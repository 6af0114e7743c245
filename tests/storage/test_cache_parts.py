"""Sizes and times of what the cache holds."""

import os
from pathlib import Path
from typing import Any

import pytest

from kd.storage.cache_parts import size_and_time


def test_a_folder_that_goes_while_it_is_read_has_no_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gone", "stays"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"12345")
    os.utime(tmp_path / "stays" / "file", (7.0e9, 8.0e9))
    scandir = os.scandir

    def scan(folder: Any) -> Any:
        if Path(folder).name == "gone":
            raise FileNotFoundError(folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    assert size_and_time(tmp_path) == (5, 8.0e9)
