"""A run folder made before students had rooms of their own still resumes (``tests/old_run``)."""

import csv
import shutil
from pathlib import Path

import pytest

from kd.cli import train_main
from tests._helpers import draw_folder

OLD = Path(__file__).parent / "old_run"
FIRST = {"train/hint_loss": 0.04604186, "train/kd_loss": 0.001677078, "train/task_loss": 1.3637609}
"""The first step after the resume, as the code that made the folder gave it."""


def test_a_run_from_before_resumes_at_its_step(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny" / "000"
    shutil.copytree(OLD, run)
    text = (run / "config.yaml").read_text()
    for name, path in (("PICTURES", draw_folder(tmp_path / "pictures")), ("TEACHER", run / "teacher.safetensors"),
                       ("RUNS", tmp_path / "runs")):  # fmt: skip
        text = text.replace(name, str(path))
    (run / "config.yaml").write_text(text)
    assert train_main([f"resume={run}", "trainer.max_epochs=2", "trainer.precision=32-true"]) == 0
    with (run / "metrics.csv").open() as opened:
        rows = [row for row in csv.DictReader(opened) if row["train/loss"]]
    assert [int(row["step"]) for row in rows] == list(range(6, 12))
    assert {name: float(rows[0][name]) for name in FIRST} == pytest.approx(
        FIRST, rel=0.02
    )  # bf16 then, float32 now
