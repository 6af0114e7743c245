"""Traces of several ranks side by side, by HolisticTraceAnalysis."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kd.cli import report_main
from kd.report.records import read_run
from tests._pages import section, write_run


def write_trace(file: Path, computing: int) -> None:
    """What torch.profiler writes of a GPU: 600 us (or less) of computing and, from 500 us on, 300 us of all-reduce."""
    events: list[dict[str, Any]] = []

    def add(name: str, cat: str, start: float, us: float, **args: Any) -> None:
        gpu = {"pid": 0, "tid": args["stream"]} if cat == "kernel" else {"pid": 1, "tid": 1}
        events.append(
            {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": us, **gpu, "args": args}
        )

    for step in range(3):
        at, launch = 1000 + 1000 * step, 10 * step
        add(f"ProfilerStep#{step}", "user_annotation", at, 1000)
        add("cudaLaunchKernel", "cuda_runtime", at + 5, 5, correlation=launch)
        add("sm90_gemm", "kernel", at + 50, computing, stream=7, device=0, correlation=launch)
        add("cudaLaunchKernel", "cuda_runtime", at + 35, 5, correlation=launch + 1)
        add(
            "ncclDevKernel_AllReduce_Sum_f32",
            "kernel",
            at + 500,
            300,
            stream=20,
            device=0,
            correlation=launch + 1,
        )
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))


def test_ranks_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("hta.trace_analysis", reason="the extra traces is not installed")
    folder = write_run(tmp_path / "run")
    for rank, computing in enumerate((600, 300)):
        write_trace(folder / "records" / f"trace.rank{rank}.json", computing)
    assert report_main([str(folder), "--traces"]) == 0
    (table,) = (
        t for t in section(folder, "table") if t["title"].startswith("GPU time of each rank")
    )
    first, second = ([float(value) for value in row] for row in table["rows"])
    # two whole steps from the first kernel's start to the last one's end: 1750 us
    assert first == pytest.approx(
        [0, 100 * 1200 / 1750, 100 * 300 / 1750, 100 * 250 / 1750, 50], abs=0.01
    )
    assert second == pytest.approx(
        [1, 100 * 600 / 1750, 100 * 600 / 1750, 100 * 550 / 1750, 0], abs=0.01
    )
    assert report_main([str(folder)]) == 0  # what was found stays on the page
    assert "GPU time of each rank" in (folder / "report.html").read_text()


def test_a_torn_trace_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hta.trace_analysis", reason="the extra traces is not installed")
    folder = write_run(tmp_path / "run")
    file = folder / "records" / "trace.rank0.json"
    write_trace(file, 600)
    file.write_bytes(file.read_bytes()[:-300])
    assert report_main([str(folder), "--traces"]) == 2
    assert "can't compare trace.rank0.json" in capsys.readouterr().err


def test_what_is_missing_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    assert report_main([str(folder), "--traces"]) == 2
    assert (
        "has no trace.rank<r>.json (monitor.kernels_at=20 writes them)" in capsys.readouterr().err
    )
    write_trace(folder / "records" / "trace.rank0.json", 600)
    monkeypatch.setitem(sys.modules, "hta", None)
    monkeypatch.setitem(sys.modules, "hta.trace_analysis", None)
    assert report_main([str(folder), "--traces"]) == 2
    assert "--traces: needs the extra traces: " in capsys.readouterr().err
    kernels = folder / "records" / "kernels.rank0.jsonl"
    kernels.write_text(kernels.read_text().replace('"busy": 0.9', '"busy": null'))
    assert report_main([str(folder), "--traces"]) == 2
    assert "are of a CPU" in capsys.readouterr().err
    assert not read_run(folder).event("traces")
