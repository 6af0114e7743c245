"""A window of steps under torch.profiler: operations by named range, and a trace that is kept."""

import json
from pathlib import Path

import pytest
import torch

from kd import annotate
from kd.cli import train_main
from kd.monitor.kernels import summarize
from kd.report.records import PHASES, read_run
from tests._files import read_json
from tests._helpers import TINY, save_teacher
from tests._runs import callback, run_of
from tests._runs import run as trained


def test_a_window_names_the_operations_of_teacher_student_and_backward(
    recipe: Path, tmp_path: Path
) -> None:
    size = {
        "embed_dim": 192,
        "depth": 4,
    }  # a tiny pair's matrix products drown in the small operations around them
    teacher = save_teacher(tmp_path / "teacher.safetensors", **size)
    kwargs = json.dumps({**TINY, **size})
    pair = [
        f"model.teacher.kwargs={kwargs}",
        f"model.student.kwargs={kwargs}",
        f"model.teacher.checkpoint={teacher}",
    ]
    trained(recipe, *pair, "monitor.kernels_at=3", "monitor.kernels_steps=4")
    folder = run_of(recipe)
    run = read_run(folder)
    (window,) = run.kernels
    assert (window["first"], window["last"]) == (3, 6)
    top = window["top"]
    assert len(top) >= 10
    assert [op["ms"] for op in top] == sorted((op["ms"] for op in top), reverse=True)
    assert {"teacher", "student", "backward"} <= {op["range"] for op in top}
    assert sum(window["groups"].values()) == pytest.approx(1, abs=0.01)
    assert window["groups"]["GEMM"] > 0.05
    assert read_json(folder / "records" / window["trace"])["traceEvents"]
    assert "Top operations (steps 3 to 6)" in (folder / "report.html").read_text()
    apart = {s["step"]: s["p"]["profiling"] for s in run.steps[0] if "profiling" in s["p"]}
    assert set(apart) == {2, 6}  # its start, and the trace's writing: no part of a step
    assert apart[6] > 5
    for step in run.steps[0]:
        parts = sum(ms for name, ms in step["p"].items() if name in PHASES)
        assert step["ms"] == pytest.approx(parts, abs=0.02)
    assert "profiling" not in run.summary["verdict"]["phases_ms"]


def test_ranges_nest_and_the_innermost_counts() -> None:
    a = torch.randn(300, 300)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        annotate("outer"),
    ):
        a.exp()
        with annotate("inner"):
            for _ in range(20):
                a @ a
    found = summarize(profile.events(), 1, cuda=False)
    assert {(op["name"], op["range"]) for op in found["top"]} >= {
        ("aten::mm", "inner"),
        ("aten::exp", "outer"),
    }
    assert found["top"][0]["name"] == "aten::mm"
    assert found["busy"] is None
    assert next(op for op in found["top"] if op["name"] == "aten::mm")["calls"] == 20


def test_a_run_that_fails_inside_the_window_leaves_no_profiler_behind(recipe: Path) -> None:
    fail = callback("tests._stop.FailAtStep", step=4)
    items = ["monitor.kernels_at=3", "monitor.kernels_steps=6"]
    assert train_main([f"recipe={recipe}", fail, *items]) == 1
    assert not torch.autograd._profiler_enabled()
