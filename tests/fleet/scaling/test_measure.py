"""Which runs a scaling measurement makes, and what it reads of them."""

from pathlib import Path

import pytest

from kd.errors import UserError
from kd.fleet.scaling.measure import Case, ScalingPlan, reading, ring_times
from kd.report.records import RunRecords


def test_weak_and_strong_cases_of_each_strategy() -> None:
    plan = ScalingPlan([], "food", Path("x"), [1, 2, 4], ["ddp", "zero"], 8, 20, 1)
    assert [case.name for case in plan.cases()] == [
        "ddp-1x8", "ddp-2x8", "ddp-2x4", "zero-2x8", "zero-2x4", "ddp-4x8", "ddp-4x2", "zero-4x8", "zero-4x2",
    ]  # fmt: skip


def test_all_reduces_by_processes_and_size() -> None:
    run = RunRecords(Path("x"))
    run.events.append(
        {"kind": "event", "name": "ring", "processes": 2, "times": [[4096, 0.001], [2**20, 0.02]]}
    )
    assert ring_times([run, RunRecords(Path("y"))]) == [(2, 0.004096, 1.0), (2, 1.048576, 20.0)]


def test_a_run_of_one_step_tells_nothing() -> None:
    with pytest.raises(UserError, match=r"x: no step was recorded after the first \(steps=\)"):
        reading(Case("ddp", 1, 8), RunRecords(Path("x")))
