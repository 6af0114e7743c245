"""Which runs a scaling measurement makes, what it reads of them, and what it predicts."""

import json
from pathlib import Path

import pytest

from kd.fleet.scaling.measure import Case, all_reduces, reading
from kd.fleet.scaling.results import content, scaling_headline, tables
from kd.report.costs import Change, outlook_of
from kd.report.facts import Facts
from kd.report.records import RunRecords
from tests._helpers import refuses


def recorded(case: Case, communication_ms: float) -> RunRecords:
    """A run of 12 steps of 100 ms, and its waits for gradients."""
    run = RunRecords(Path(case.name))
    run.headers[0] = {"device": "cuda", "cores": 64, "threads": 1, "num_workers": 0, "world_size": case.processes,
                      "processes": case.processes, "batch_size": case.batch, "batches_per_epoch": 100,
                      "max_steps": 12, "max_epochs": 1000}  # fmt: skip
    phases = {"teacher": 60.0, "student": 20.0, "backward": 20.0, "communication": communication_ms}
    run.steps[0] = [{"step": n, "t": 0.1 * n, "p": phases} for n in range(12)]
    run.totals[0] = {"steps": 11, "p": {name: 11 * ms for name, ms in phases.items()}}
    run.summary = {"peak_memory_mb": 900, "memory_mb": {"student": 8.0, "optimizer": 16.0}}
    if case.processes > 1:
        times = [[4096, 0.001], [2**20, 0.02]]
        run.events.append(
            {"kind": "event", "name": "ring", "processes": case.processes, "times": times}
        )
    return run


def test_all_reduces_by_processes_and_size() -> None:
    assert all_reduces(recorded(Case("ddp", 2, 8), 10.0)) == [
        {"processes": 2, "mb": 0.004096, "ms": 1.0}, {"processes": 2, "mb": 1.048576, "ms": 20.0},
    ]  # fmt: skip
    assert all_reduces(recorded(Case("ddp", 1, 8), 0.0)) == []


def test_a_run_of_one_step_tells_nothing() -> None:
    with refuses(r"x: no step was recorded after the first \(steps=\)"):
        reading(Case("ddp", 1, 8), RunRecords(Path("x")))


def test_what_is_measured_and_predicted() -> None:
    """4 x 8 from one machine of eight: 10 ms of waiting become 10 * (31 / 32) / (7 / 8)."""
    waits = {
        ("ddp", 1, 64): 0.0,
        ("ddp", 8, 64): 10.0,
        ("ddp", 8, 8): 60.0,
        ("fsdp", 8, 64): 25.0,
        ("fsdp", 8, 8): 90.0,
    }
    measured = [(Case(*case), recorded(Case(*case), ms)) for case, ms in waits.items()]
    scale = content("food", measured, 32)
    assert [m["kind"] for m in scale["measured"]] == ["weak", "weak", "strong", "weak", "strong"]
    assert [m["efficiency"] for m in scale["measured"][:2]] == pytest.approx([1, 100 / 110])
    assert scale["measured"][0]["state_mb"] == 24.0
    predicted = scale["predicted"]
    assert predicted["step_ms"] == pytest.approx(100 + 10 * (31 / 32) / (7 / 8))
    assert (
        predicted["images_per_s"] == outlook_of(Facts(measured[1][1]), Change(gpus=32)).images_per_s
    )
    assert predicted["efficiency"] == pytest.approx(100 / predicted["step_ms"])
    assert scaling_headline(scale).startswith("32 processes would train 18")
    assert "over a network as fast as between the measured processes" in scaling_headline(scale)
    table, steps, reduces = tables(scale)
    assert table.rows[1][:2] == ["ddp 8 x 64", "weak"]
    assert table.rows[1][2:5] == pytest.approx([8 * 64 / 0.11, 100 / 1.1, 110.0])
    assert table.note.endswith(scaling_headline(scale))
    assert steps.rows[1] == ["ddp 8 x 64", 60.0, 40.0, 0.0, 10.0, 900, 24.0]
    assert len(reduces.rows) == 2
    json.dumps(scale)
