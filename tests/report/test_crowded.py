"""Too many processes on the cores: KT's six iterations, where the data wait is nothing and backward swings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kd.report.facts import Facts
from kd.report.records import RunRecords
from kd.report.rules import Explained

# data, forward, backward in seconds: 8 ranks x 16 loader processes, 96 cores of which 6 at 100 %. The cure was
# num_workers 0 or 1. What starves is the thread that launches backward (autograd's): the main thread sleeps.
SIX = [
    (0.00053, 7.77474, 1.58002), (0.00063, 0.67429, 24.74539), (0.00061, 0.90976, 8.31253),
    (0.00060, 0.60958, 30.93830), (0.00080, 0.83237, 8.41030), (0.00067, 0.75715, 29.88415),
]  # fmt: skip
STEADY = [(0.0006, 0.7, 1.5)] * 6


def crowded(
    workers: int, iterations: list[tuple[float, float, float]] = SIX, util: float = 30, main: float = 0.0,
    autograd: float | None = None, hot: int = 6, cool: float = 35,
) -> RunRecords:  # fmt: skip
    """Records of one machine; ``main`` and ``autograd``: shares of the time that these threads wait for a core."""
    steps: list[dict[str, Any]] = []
    for k in range(50):
        for data, forward, backward in iterations[1:] if k else iterations:
            ms = 1000 * (data + forward + backward)
            phases = {
                "data": 1000 * data,
                "student": 400 * forward,
                "teacher": 600 * forward,
                "backward": 1000 * backward,
            }
            steps.append({"step": len(steps), "epoch": 0, "t": float(len(steps)), "ms": ms, "p": phases, "host_ms": ms,
                          "ready_ms": main * ms, "data_cpu_ms": 0.1, "launch_ms": ms - 1000 * data})  # fmt: skip
    total: dict[str, Any] = {"kind": "total", "steps": len(steps) - 1, "max_ms": 0.0, "p": {}}
    for step in steps[1:]:
        for key in ("ms", "host_ms", "ready_ms", "data_cpu_ms", "launch_ms"):
            total[key] = total.get(key, 0.0) + step[key]
        for name, ms in step["p"].items():
            total["p"][name] = total["p"].get(name, 0.0) + ms
    header = {"of": "steps", "rank": 0, "world_size": 8, "processes": 8, "device": "cuda", "cores": 96, "threads": 1,
              "batch_size": 128, "num_workers": workers, "batches_per_epoch": 1000, "max_epochs": 300,
              "cacheable": True, "feature_bytes": 0, "cached": False}  # fmt: skip
    sample = {"cpu": [100.0] * hot + [cool] * (96 - hot), "iowait": 0.0, "mem": 50.0, "swap_mb": 0, "main": 800.0,
              "workers": [24.0] * (workers * 8), "rss_mb": 1000.0,
              "gpu": [{"util": util, "mem": 60.0} for _ in range(8)]}  # fmt: skip
    if autograd is not None:
        sample |= {
            "thread_wait": [3.0] * 7 + [100 * autograd],
            "thread": "pt_autograd_0",
            "loader_wait": [5.0] * 8,
        }
    samples = [{**sample, "t": i * 0.5} for i in range(3000)]
    return RunRecords(Path("x"), headers={0: header}, totals={0: total}, steps={0: steps}, samples={"0-a": samples},
               nodes={"0-a": {"core_ids": list(range(96))}})  # fmt: skip


@pytest.mark.parametrize(
    "evidence",
    [{}, {"util": 85}, {"main": 0.6}, {"autograd": 0.6}],
    ids=["swings", "busy GPU", "main", "autograd"],
)
def test_the_loader_processes_are_named(evidence: dict[str, Any]) -> None:
    run = crowded(16, **evidence)
    found = Explained(run).verdict
    assert found["bound"] == "host"
    assert "128 loader processes" in found["text"]
    assert "share 96 cores" in found["text"]
    assert found["lever"] == "data.num_workers=1 instead of 16"
    assert 2 <= found["predicted_speedup"] <= 3
    assert "larger" not in str(
        [found["others"], [f.lever for f in Explained(run).findings]]
    )  # a batch helps nobody here
    if "autograd" in evidence:
        assert "training (pt_autograd_0) waited for a free core" in found["text"]
        assert "SchedulerDelay" in {f.rule for f in Explained(run).findings}


@pytest.mark.parametrize("workers", [0, 1])
def test_the_cured_run_gets_no_such_verdict(workers: int) -> None:
    run = crowded(workers, STEADY, util=95, autograd=0.01, hot=0)
    assert Explained(run).verdict["bound"] == "student"
    assert not {"HotCores", "PhaseVariation", "SchedulerDelay", "Dataloader"} & {
        f.rule for f in Explained(run).findings
    }


def test_many_processes_that_get_their_cores_limit_nothing() -> None:
    assert Explained(crowded(16, STEADY, util=95, hot=0)).verdict["bound"] == "student"
    nobody_waits = Explained(crowded(16, SIX, util=95, autograd=0.02, hot=0))  # measured
    assert nobody_waits.verdict["bound"] == "student"
    assert "PhaseVariation" in {f.rule for f in nobody_waits.findings}


def test_a_teacher_whose_cache_answers_half_of_the_steps_does_not_swing() -> None:
    run = crowded(1, [(0.0006, 2.0, 0.5)] * 6, util=95, autograd=0.01, hot=0)
    for step in run.steps[0][::2]:
        step["p"]["teacher"] /= 20  # health computes a few of its answers
    assert "PhaseVariation" in {f.rule for f in Explained(run).findings}
    run.headers[0]["cached"] = True
    assert "PhaseVariation" not in {f.rule for f in Explained(run).findings}


def test_the_last_worker_is_advised_away_too() -> None:
    run = crowded(1, autograd=0.6, cool=5)
    for header in run.headers.values():
        header["cores"] = 12
    assert Explained(run).verdict["lever"] == "data.num_workers=0 instead of 1"


def test_cores_are_the_machines_however_they_are_dealt() -> None:
    run = crowded(16)
    run.headers = {r: {**run.headers[0], "host": "a", "core_ids": list(range(12 * r, 12 * r + 12)), "cores": 12}
                   for r in range(8)}  # fmt: skip
    assert Facts(run).cores == 96  # each rank is bound to its own twelve
    of_quota = {r: {**h, "cores": 6} for r, h in run.headers.items()}
    assert (
        Facts(replace(run, headers=of_quota)).cores == 6
    )  # which the container's quota limits together
    run.headers = {
        r: {**h, "core_ids": list(range(96)), "cores": 12} for r, h in run.headers.items()
    }
    assert Facts(run).cores == 12  # all may run everywhere, within their container's quota
    run.headers[3]["host"] = "b"
    assert Facts(run).cores == 12


def test_the_start_of_each_machine_is_left_out() -> None:
    run = crowded(16)
    (samples,) = run.samples.values()
    of_both = {"0-a": samples[:25], "1-b": samples[:30]}
    facts = Facts(replace(run, samples=of_both))
    assert (len(facts.core_use), len(facts.core_use_after_start)) == (55, 15)


def test_full_cores_of_a_machine_that_has_no_others_are_no_news() -> None:
    assert "HotCores" in {f.rule for f in Explained(crowded(16)).findings}
    assert "HotCores" not in {f.rule for f in Explained(crowded(16, hot=96)).findings}
    assert "HotCores" not in {f.rule for f in Explained(crowded(16, hot=6, cool=90)).findings}


def test_a_thread_without_a_core_on_a_free_machine_is_bound_wrongly() -> None:
    run = crowded(1, STEADY, autograd=0.5, cool=20)
    found = Explained(run).limits[0]
    assert "though not all of the 96 cores are taken" in found.text
    assert "taskset" in found.lever
