"""Rows of ``kd-predict``."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Flatten

from kd.ship.predict import Predictions
from tests._helpers import draw_picture


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_name_that_is_no_utf_8_is_written_escaped(suffix: str, tmp_path: Path) -> None:
    opened: Any = SimpleNamespace(kind="numbers", folder=tmp_path)
    rows = [{"file": "caf\udce9.jpg"}]
    file = Predictions(opened, [], torch.device("cpu")).write(rows, tmp_path / f"a{suffix}")
    assert file is not None and b"\\udce9" in file.read_bytes()


def test_a_picture_whose_answer_is_no_number_is_left_out(tmp_path: Path) -> None:
    opened: Any = SimpleNamespace(
        kind="features", model=Flatten(), size=(6, 8), crop_ratio=1.0, preprocess=lambda x: x / x
    )
    black, white = (
        str(draw_picture(tmp_path / f"{name}.png", color=name)) for name in ("black", "white")
    )
    found = Predictions(opened, [black, white], torch.device("cpu"))
    assert [row["file"] for row in found.rows(1)] == [white] and [*found.bad] == [black]
