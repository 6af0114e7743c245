"""kd-latency: every runtime in turns, in a table and as JSON."""

import json
import operator
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kd.cli import main
from kd.commands.latency import unsteady
from kd.ship.export.stopwatch import Stopwatch
from kd.ship.latency import _repeats, medians
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


def test_a_model_is_timed_in_a_process_of_its_own() -> None:
    """Where nothing of the caller's is in memory; what it loads is pickled."""
    watch = Stopwatch(partial(operator.methodcaller, "sum"), 1)
    took, peak_mb = watch.measure(np.zeros((2, 8, 8, 3), np.uint8), 5)
    watch.close()
    assert len(took) == 5 and all(ms > 0 for ms in took) and peak_mb > 10


def test_a_script_without_a_guard_may_time(tmp_path: Path) -> None:
    """multiprocessing's spawn would run the caller's script again, which then needs ``if __name__ == "__main__"``."""
    script = tmp_path / "mine.py"
    script.write_text(
        "import operator, numpy as np\n"
        "from functools import partial\n"
        "from kd.ship.export.stopwatch import Stopwatch\n"
        "print('once')\n"
        "watch = Stopwatch(partial(operator.methodcaller, 'sum'), 1)\n"
        "print(len(watch.measure(np.zeros((2, 8, 8, 3), np.uint8), 5)[0]))\n"
        "watch.close()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["once", "5"]


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
    rows = json.loads((finished / "export" / "latency.json").read_text())["rows"]
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


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("runtime=torch,tensorrt", "has no export 'tensorrt' that this machine made (kd-export"),
        ("batch=1,none", "batch: each must be a valid integer, got 'none'"),
        ("seconds=-1", "seconds: must be > 0 and < 3600, got -1"),
    ],
)
def test_mistakes_take_one_line(
    finished: Path, capsys: pytest.CaptureFixture[str], item: str, message: str
) -> None:
    assert main("latency", [str(finished), item]) == 2
    told = capsys.readouterr().err.strip()
    assert message in told and "\n" not in told
