"""The first hour on a GPU (scripts/bench/gpu.py), tried on a CPU: every part writes its lines, and fails alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.gpu import PARTS, Part
from tests._files import json_lines
from tests._helpers import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", PARTS)
def test_each_part_writes_what_it_found(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/bench/gpu.py", "--small", "--only", name]
    subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        check=True,
    )
    rows = json_lines(tmp_path / "out" / "results.jsonl")
    assert {row["part"] for row in rows} == {name}
    assert rows[-1]["ended"] == 0
    assert len(rows) > 1
    assert not [row for row in rows if "error" in row or row.get("rc", 0) != 0]


def test_a_measurement_that_fails_is_a_line(tmp_path: Path) -> None:
    def fails() -> dict[str, object]:
        raise MemoryError("no room\nat all")

    part = Part("step", tmp_path, small=True)
    part.tried(fails, arm="live")
    part.tried(lambda: {"ms": 3}, arm="cached")
    rows = json_lines(tmp_path / "results.jsonl")
    assert rows == [{"part": "step", "arm": "live", "error": "MemoryError: no room at all"},
                    {"part": "step", "arm": "cached", "ms": 3}]  # fmt: skip
