"""kd-latency: every runtime in turns, in a table and as JSON."""

import json
from pathlib import Path

import pytest

from kd.cli import main


def test_student_and_teacher_in_every_runtime(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxscript")
    assert main("export", [str(finished), "to=onnx", "layout=nchw"]) == 0
    items = ["runtime=torch,onnx", "batch=4,1", "threads=1", "seconds=0.05"]
    page = finished / "report.html"
    assert "kd-latency RUN measures milliseconds" in page.read_text()
    assert main("latency", [str(finished), *items]) == 0
    assert "kd-latency RUN measures milliseconds" not in page.read_text()
    rows = json.loads((finished / "export" / "latency.json").read_text())["rows"]
    kinds = [("teacher", "torch"), ("student", "torch"), ("student", "onnx")]
    assert [(r["model"], r["runtime"], r["batch"]) for r in rows] == [(*k, b) for b in (1, 4) for k in kinds]
    for row in rows:
        assert 0 < row["median_ms"] <= row["p95_ms"] and row["peak_memory_mb"] > 10 and row["runs"] >= 10
        assert row["images_per_s"] == pytest.approx(1000 * row["batch"] / row["median_ms"], rel=0.05)
        assert ("times_the_teacher" in row) == (row["model"] == "student")
    assert "peak MB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("runtime=torch,tensorrt", "has no export 'tensorrt' (kd-export"),
        ("batch=1,none", "batch: must be whole numbers > 0 with commas between, got '1,none'"),
        ("seconds=-1", "seconds: must be a number > 0, got '-1'"),
    ],
)
def test_mistakes_take_one_line(finished: Path, capsys: pytest.CaptureFixture[str], item: str, message: str) -> None:
    assert main("latency", [str(finished), item]) == 2
    told = capsys.readouterr().err.strip()
    assert message in told and "\n" not in told
