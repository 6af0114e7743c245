"""kd-latency: every runtime in turns, in a table and as JSON."""

import subprocess
import sys
from pathlib import Path

import pytest

from kd.cli import main
from kd.commands.latency import unsteady
from kd.ship.latency import _repeats, medians
from tests._files import read_json
from tests._helpers import StopwatchHere


def test_figures_that_drift_are_told() -> None:
    slow = {
        "model": "student",
        "runtime": "onnx",
        "batch": 8,
        "threads": 2,
        **medians([[3.0, 3.1, 9.0], [4.0, 3.9, 4.1]]),
    }
    assert (slow["median_ms"], slow["fastest_round_ms"], slow["slowest_round_ms"]) == (
        3.95,
        3.1,
        4.0,
    )
    steady = {**slow, "runtime": "torch", "slowest_round_ms": 3.4}
    assert not unsteady([steady])
    row = "student in onnx (batch 8, 2 threads)"
    assert unsteady([steady, slow]).startswith(
        f"not steady: the medians of {row} by round lie between 3.1 and 4 ms"
    )


def test_a_round_takes_its_share_of_the_seconds() -> None:
    assert _repeats(lambda count: ([0.5] * count, 0.0), 15) == 6000


def test_a_model_is_timed_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Pickled, where nothing of the caller's is in memory; multiprocessing's spawn would run the script again."""
    script = tmp_path / "mine.py"
    script.write_text(
        "import operator, numpy as np\n"
        "from functools import partial\n"
        "from kd.ship.export.stopwatch import Stopwatch\n"
        "print('once')\n"
        "watch = Stopwatch(partial(operator.methodcaller, 'sum'), 1)\n"
        "took, peak_mb = watch.measure(np.zeros((2, 8, 8, 3), np.uint8), 5)\n"
        "print(len(took), all(ms > 0 for ms in took), peak_mb > 10)\n"
        "watch.close()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["once", "5", "True", "True"]


def test_student_and_teacher_in_every_runtime(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kd.ship.latency.Stopwatch", StopwatchHere)
    pytest.importorskip("onnxscript")
    assert main("export", [str(finished), "to=onnx"]) == 0
    items = ["runtime=torch,onnx", "batch=4,1", "threads=1", "seconds=0.05"]
    page = finished / "report.html"
    assert "kd-latency RUN measures milliseconds" in page.read_text()
    assert main("latency", [str(finished), *items]) == 0
    assert "kd-latency RUN measures milliseconds" not in page.read_text()
    rows = read_json(finished / "export" / "latency.json")["rows"]
    kinds = [("teacher", "torch"), ("student", "torch"), ("student", "onnx")]
    assert [(r["model"], r["runtime"], r["batch"]) for r in rows] == [
        (*k, b) for b in (1, 4) for k in kinds
    ]
    for row in rows:
        assert (
            0 < row["median_ms"] <= row["p95_ms"]
            and row["peak_memory_mb"] > 10
            and row["runs"] >= 10
        )
        assert row["images_per_s"] == pytest.approx(
            1000 * row["batch"] / row["median_ms"], rel=0.05
        )
        assert ("times_the_teacher" in row) == (row["model"] == "student")
    printed = capsys.readouterr()
    assert "peak MB" in printed.out
