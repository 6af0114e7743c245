"""Rows of ``kd-predict``."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kd.ship.predict import Predictions


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_name_that_is_no_utf_8_is_written_escaped(suffix: str, tmp_path: Path) -> None:
    opened: Any = SimpleNamespace(kind="numbers", folder=tmp_path)
    rows = [{"file": "caf\udce9.jpg"}]
    file = Predictions(opened, [], torch.device("cpu")).write(rows, tmp_path / f"a{suffix}")
    assert file is not None and b"\\udce9" in file.read_bytes()
