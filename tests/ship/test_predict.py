"""Rows of ``kd-predict``."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kd.ship.predict import Predictions, row_cells


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_name_that_is_no_utf_8_is_written_escaped(suffix: str, tmp_path: Path) -> None:
    opened: Any = SimpleNamespace(kind="classification", folder=tmp_path)
    out = tmp_path / f"a{suffix}"
    name = "caf\udce9.jpg"
    Predictions(opened, [name], torch.device("cpu")).write([{"file": name}], out)
    assert name.encode("ascii", "backslashreplace") in out.read_bytes()


def test_columns() -> None:
    assert row_cells(
        {
            "file": "a.jpg",
            "labels": [{"label": "pie", "p": 0.9}],
            "facts": {"kcal": {"of_label": 300.0}},
        }
    ) == {"file": "a.jpg", "label_1": "pie", "p_1": 0.9, "kcal_of_label": 300.0}
