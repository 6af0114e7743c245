"""Limits: each fires on the records it is for, stays silent on healthy ones, and predicts by Amdahl."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from kd.report import rules as v
from kd.report.facts import Facts
from kd.report.limits import LIMITS, launch_bound, views_bound
from kd.report.records import FIT_OF_THE_START, RunRecords
from kd.report.rules import Explained
from kd.report.step_facts import step_ms
from tests._pages import HEALTHY, run_of


def with_(**changes: float) -> dict[str, float]:
    return {**HEALTHY, **changes}


def given(phases: dict[str, float], **numbers: Any) -> Facts:
    """Facts of a CPU whose loaders compute all the time, with these numbers."""
    facts = Facts(RunRecords(Path("x")))
    vars(facts).update(
        {"phases": phases, "step_ms": step_ms(phases), "thread_wait": 0.0, **numbers}
    )
    return facts


BATCHES = {"data": 80.0, "student": 20.0}
RATE = {"data": 60.0, "student": 40.0}  # two workers give a batch each 100 ms: one takes 200 ms
CACHE = {"teacher": 60.0, "student": 40.0}
RANKS = {"student": 60.0, "communication": 40.0}
LAUNCHED = {"student": 100.0}
CPU = {"data": 10.0, "teacher": 40.0, "student": 20.0, "backward": 20.0, "optimizer": 10.0}
SHARED = {"data": 0.0, "student": 50.0, "backward": 50.0, "ready": 60.0}
START = {"imports, models, data": 500.0, "first step": 20.0}
SHORT_START = {"imports, models, data": 40.0, "first step": 36.2}
FITTED = {"imports, models, data": 60.0, FIT_OF_THE_START: 1500.0}


def numbers_of(name: str, phases: dict[str, float], numbers: dict[str, Any]) -> Facts:
    """Facts of a row: ``ready`` is the time of a step that waits for a core; a start has its seconds and parts."""
    steps = {phase: ms for phase, ms in phases.items() if phase != "ready"}
    if name == "startup":
        return given({}, startup={"s": sum(phases.values()), "parts": phases}, **numbers)
    return given(steps, **{"ready_ms": phases.get("ready", 0.0), **numbers})


# name of the limit, phases (ms) or parts of the start (s), numbers; the gain, a pattern of the evidence and the lever
LIMITED: list[tuple[str, dict[str, float], dict[str, Any], float, str]] = [
    # loaders that sleep need no cores, those that compute do
    ("data", BATCHES, {"workers": 0, "cores": 1, "loading_busy": 0.0}, 5, "*; data.num_workers=5 instead of 0"),
    ("data", BATCHES, {"workers": 0, "cores": 2, "loading_busy": 1.0}, 2, "*; data.num_workers=2 instead of 0"),
    ("data", BATCHES, {"workers": 1, "cores": 1, "loading_busy": 1.0}, 5, "* for the next batch; cheaper pictures*"),
    ("data", BATCHES, {"workers": 16, "cores": 1, "loading_busy": 1.0}, 5,
     "*though 16 loader processes share 1 core with training*; *"),
    ("data", RATE, {"workers": 2, "cores": 16, "loading_busy": 1.0}, 2.5, "*; data.num_workers=6 instead of 2"),
    # 20 of 100 ms the loaders wait for a core: a batch takes one of them 160 ms
    ("data", RATE, {"workers": 2, "cores": 16, "loading_busy": 1.0, "queued": 20.0}, 100 / 60,
     "*; data.num_workers=4 instead of 2"),
    # a batch costs one core 240 ms, the GPU 20: thirteen cores with the one that launches, four are there
    ("data", {"data": 40.0, "student": 20.0},
     {"workers": 4, "cores": 8, "loading_busy": 1.0, "processes": 2, "cpu": False}, 3,
     "*; 13 cores a GPU would be enough, there are 4, though 8 loader processes share 8 cores with training; "
     "*data.engine=device (or dali)*"),
    # 46 of 207 ms waited for a batch: without them the step takes 161 ms
    ("data", {"data": 46.0, "student": 161.0}, {"workers": 4, "cores": 2, "loading_busy": 0.4}, 207 / 161, "*"),
    # what loading takes, 40 ms of 200, fits beside the 40 ms of training
    ("host", SHARED, {"workers": 16, "cores": 2, "loading_cores": 0.4}, 2.5, "*; data.num_workers=1 instead of 16"),
    ("host", SHARED, {"workers": 16, "cores": 2, "loading_cores": 1.6}, 2.5, "*; *cheaper pictures*"),
    ("host", SHARED, {"workers": 0, "cores": 2, "other_cores": 1.5}, 2.5,
     "*other processes use 1.5 cores*; run alone on the machine"),
    ("host", SHARED, {"workers": 0, "cores": 1, "other_cores": 0.2, "processes": 2}, 2.5,
     "2 training processes and 2 compute threads share 1 core: *; *trainer.devices*"),
    ("host", SHARED, {"workers": 1, "cores": 8, "loading_cores": 0.4}, 2.5,
     "*though not all of the 8 cores are taken*; *"),
    ("host", SHARED, {"cores": 2, "other_cores": 0.9, "processes": 2}, 2.5, "*other processes*; *"),
    ("host", SHARED, {"workers": 0, "cores": 1, "other_cores": 0.5}, 2.5, "other processes use 0.5 cores: *; *"),
    ("host", SHARED, {"workers": 0, "cores": 1, "other_cores": 0.1}, 2.5, "* on its only core; *"),
    # launching limits an idle GPU alone
    ("host", LAUNCHED, {"total": {"launch_ms": 97.0}, "gpu_busy": 0.4}, 2.5, "*"),
    # a teacher of 58 % could be 2.4 times as fast from a cache, where the run's own epochs read it
    ("teacher", {"teacher": 58.0, "student": 42.0}, {"cache_bytes": 1.1e9}, 1 / 0.42,
     "*58%*; model.teacher.cache=on (needs 1.1 GB), once filled,"),
    ("teacher", CACHE, {"cache_bytes": 1e6, "epochs": 20, "views": 4}, 20 / (4 + 16 * 0.4),
     "*; *in the run's 20 epochs of 4 views"),
    ("teacher", CACHE, {"cache_bytes": 1e6, "epochs": 1, "views": 4}, 2.5,
     "*; a smaller teacher*more than 4 epochs, this one has 1)*"),
    ("teacher", CACHE, {"cache_bytes": 1e6, "epochs": 4, "views": 4}, 2.5,
     "*; a smaller teacher*more than 4 epochs, this one has 4)*"),
    ("communication", RANKS, {"compute_ms": {0: 60.0, 1: 60.0, 2: 100.0}}, 100 / 60,
     "*rank 2 computes 40 ms longer*; *rank 2's machine*"),
    ("communication", RANKS, {"compute_ms": {0: 60.0, 1: 61.0, 2: 62.0}}, 100 / 60, "*; *network*"),
    ("logging", {"student": 50.0, "logging": 50.0},
     {"callbacks_ms": {"Slow.on_train_batch_start": 45.0, "Other.x": 1.0}}, 2,
     "*Slow.on_train_batch_start alone 45 ms; *"),
    # without its longest part; 1560 s of a start are mostly its fit; others' cores are named, and not 77.2x promised
    ("startup", START, {"planned_s": 1000.0}, 1000 / 500, "*; *imports, models, data*"),
    ("startup", FITTED, {"planned_s": 1680.0}, 1680 / 180,
     "*most of it fit of the inherited start (1500 s)*; *model.student.inherit_pictures*"),
    ("startup", SHORT_START, {"planned_s": 77.2, "crowded_out": True, "other_cores": 1.6}, 77.2 / 37.2,
     "*while other processes use 1.6 cores*; run alone on the machine, shorten 'imports*"),
    ("precision", CPU, {"header": {"precision": "bf16-mixed", "bfloat16_time": 966.3}}, 1 / (0.2 + 0.8 / 966.3),
     "training is in bf16-mixed, and this CPU has no bfloat16 instructions; *"),
    ("precision", CPU, {"header": {"precision": "bf16-mixed", "bfloat16_time": 5.0}}, 1 / (0.2 + 0.8 / 5),
     "*; trainer.precision=32-true: at most"),
    ("precision", CPU, {"header": {"precision": "32-true", "bfloat16_time": 0.25}}, 2.5,
     "*; trainer.precision=bf16-mixed: at most"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "phases", "numbers", "gain", "words"), LIMITED)
def test_a_limit_names_its_evidence_its_lever_and_its_gain(
    name: str, phases: dict[str, float], numbers: dict[str, Any], gain: float, words: str
) -> None:
    limit = LIMITS[name](numbers_of(name, phases, numbers))
    assert limit is not None
    assert limit.gain == pytest.approx(gain)
    assert fnmatchcase(f"{limit.text}; {limit.lever}", words), limit
    assert (limit.bound == "host") == (name in ("host", "logging"))
    has_other_cores = numbers.get("cores") != 1
    assert has_other_cores or "taskset" not in limit.lever
    assert "data.engine" not in limit.lever or "cpu" in numbers, "a GPU of its own alone"


@pytest.mark.parametrize(("name", "phases", "numbers"), [
    ("data", {"data": 5.0, "student": 95.0}, {"workers": 2, "cores": 8}),
    ("host", {**SHARED, "ready": 5.0}, {"workers": 16, "cores": 2}),
    ("host", LAUNCHED, {"total": {"launch_ms": 97.0}, "gpu_busy": 0.95}),
    ("host", LAUNCHED, {"total": {"launch_ms": 30.0}, "gpu_busy": 0.4}),
    ("host", LAUNCHED, {"total": {"launch_ms": 97.0}, "gpu_busy": None}),
    ("teacher", {"teacher": 29.0, "student": 71.0}, {}),
    ("logging", {"student": 95.0, "logging": 5.0}, {}),
    ("startup", SHORT_START, {"planned_s": 100_000.0}),
    ("startup", {"imports, models, data": 20.0}, {"planned_s": 30.0}),
    ("precision", CPU, {"header": {"precision": "bf16-mixed", "bfloat16_time": 0.25}}),
    ("precision", CPU, {"header": {"precision": "32-true", "bfloat16_time": 5.0}}),
    ("precision", CPU, {"header": {"precision": "32-true", "bfloat16_time": None}}),
    ("precision", CPU, {"header": {"precision": "16-mixed", "bfloat16_time": 5.0}}),
])  # fmt: skip
def test_a_limit_that_does_not_hold_is_silent(
    name: str, phases: dict[str, float], numbers: dict[str, Any]
) -> None:
    assert LIMITS[name](numbers_of(name, phases, numbers)) is None


SLOW = with_(teacher=200.0)
MIXED = {"data": 9.0, "teacher": 29.0, "communication": 14.0, "logging": 10.0, "student": 38.0}


@pytest.mark.parametrize(("phases", "header", "bound", "words"), [
    (HEALTHY, {}, "student", "*"),
    (with_(data=100.0), {}, "data", "*"),
    (with_(communication=60.0), {}, "communication", "*"),
    (with_(logging=60.0), {}, "host", "*"),
    (with_(checkpoint=30.0), {}, "checkpoint", "*"),
    (with_(optimizer=150.0), {}, "student", "*"),
    # the batch that fits is named by its number
    (HEALTHY, {"device": "cuda"}, "student", "*; *compile=true, a larger data.batch_size, a faster*"),
    (HEALTHY, {"device": "cuda", "more_fit": 128}, "student",
     "*; *compile=true, data.batch_size=128 (128 more fit), a faster*"),
    (HEALTHY, {"device": "cuda", "more_fit": 128, "batches_per_epoch": 12}, "student", "*; *compile=true, a faster*"),
    (HEALTHY, {"device": "cuda", "more_fit": 0}, "student", "*; *compile=true, a faster*"),
    # a cache is advised where it is possible, and not there yet
    (SLOW, {}, "teacher", "*model.teacher.cache=on*; *"),
    (SLOW, {"cacheable": False}, "teacher", "*; a smaller teacher*"),
    (SLOW, {"cached": True}, "teacher", "*to compute the answers that its cache keeps*; *later epochs*"),
    # the headline is the part that holds most of the step
    ({"data": 30.0, "student": 40.0, "backward": 30.0}, {}, "data", "*"),
    (MIXED, {}, "none", "balanced: no part of the step stands out; most of it (38%) is the student's own*; *"),
])  # fmt: skip
def test_a_verdict_is_the_largest_limit(
    phases: dict[str, float], header: dict[str, Any], bound: str, words: str
) -> None:
    found = Explained(run_of(phases, **header)).verdict
    assert found["bound"] == bound
    assert fnmatchcase(f"{found['text']}; {found['lever']}", words), found
    assert found["phases_ms"] == phases
    worthy = phases not in (HEALTHY, MIXED)
    assert found["text"].startswith(v.NAMES[bound]) or not worthy
    assert (found["predicted_speedup"] or 1) >= 1.1 if worthy else not found["predicted_speedup"]
    assert "cache" not in found["text"] or header.get("cacheable", True)


def test_a_healthy_run_has_one_limit_and_others_are_ordered_by_their_gain() -> None:
    found = Explained(run_of(with_(teacher=100.0, communication=60.0))).limits
    assert [limit.bound for limit in found] == ["teacher", "communication"]
    assert found[0].gain > found[1].gain  # type: ignore[operator]
    assert [limit.bound for limit in Explained(run_of(HEALTHY)).limits] == ["student"]
    assert v.sentence(found[0]).endswith(
        "model.teacher.cache=on, once filled, would give 1.7x the speed"
    )
    assert Explained(RunRecords(Path("x"))).verdict["bound"] == "none"


def test_a_batch_is_only_as_large_as_fills_the_gpu() -> None:
    """7,728 more fitted on a GPU, of an epoch of 9,025 pictures: one step an epoch was advised."""
    counted = {"batch_size": 64, "more_fit": 7728, "batches_per_epoch": 141}
    total = {"launch_ms": sum(HEALTHY.values())}
    launching = given(HEALTHY, total=total, gpu_busy=0.43, header=counted)
    launching.run.headers[0] = counted
    limit = launch_bound(launching)
    assert limit is not None
    assert "data.batch_size=192 (7728 more fit)" in limit.lever
    assert "model.student.compile=reduce-overhead, or" in limit.lever  # keeps the batch


@pytest.mark.parametrize(
    ("engine", "h2d", "named"),
    [
        ("device", 300.0, True),
        ("device", 5.0, False),
        ("torch", 300.0, False),
    ],
)
def test_views_of_the_training_process_are_named(engine: str, h2d: float, named: bool) -> None:
    """12 times the load of views took 2.4 times as long with ``device``, and the run was called balanced."""
    facts = given(with_(h2d=h2d))
    facts.run.config["data"] = {"engine": engine}
    limit = views_bound(facts)
    assert ("makes the views for 300 of the step's " in str(limit)) is named


def test_a_cache_that_does_not_pay_is_not_being_filled() -> None:
    run = run_of(SLOW, cached=False)
    run.config = {"model": {"teacher": {"cache": True}}}
    assert (
        "to compute" not in Explained(run).verdict["text"]
    )  # asked for ("auto"), and found not to pay
    del run.headers[0]["cached"]
    assert "to compute the answers that its cache keeps" in Explained(run).verdict["text"]


def test_a_cache_is_as_large_as_its_records() -> None:
    run = run_of(SLOW)
    run.summary = {"data": {"train": 1_000_000, "classes": 96}}
    run.config = {"trainer": {"max_epochs": 100}, "model": {"teacher": {"cache_views": 2}}}
    assert "needs 0.4 GB" in Explained(run).verdict["lever"]  # 2 views of (4 + 4 + 96 * 2) bytes
    run.config["model"]["teacher"]["cache_topk"] = 8
    assert "needs 0.08 GB" in Explained(run).verdict["lever"]


def shared(count: int, others: float, wait: float, ready: float, **sample: Any) -> RunRecords:
    """Two cores, of which other processes use so many; ``wait`` and ``ready`` of a step's 207 ms."""
    run = run_of({"data": wait, "student": 207 - wait}, cores=2, threads=1, num_workers=count)
    run.totals[0] |= {"ready_ms": 100 * ready, "data_cpu_ms": 100 * 0.2 * wait}
    run.totals[0]["data_ready_ms"] = 100 * min(ready, 0.8 * wait)
    used = {"main": 40.0, "workers": [30.0] * count, **sample}
    rest = 100 * others + used["main"] + sum(used["workers"])
    run.samples["n"] = [{"t": 0.5 * i, "cpu": [rest / 2] * 2, **used} for i in range(50)]
    return run


# the records, and of each limit: its bound, its gain and the largest it may promise
@pytest.mark.parametrize(("records", "expected", "text"), [
    # the step waits 150 of 207 ms for its batch; its loader stood ready without a core for 80 % of the time
    ((1, 1.6, 150.0, 10.0, {"loader_wait": [80.0]}), [("host", 207 / 77), ("data", 207 / 177)],
     "*training and its loader processes waited for a free core for 130 of 207 ms*"),
    # made by the training process, whose delay is on record: 35 ms were no wait for a core
    ((0, 1.6, 150.0, 115.0, {}), [("host", 207 / 92), ("data", 207 / 172)], "*"),
    # 46 of 207 ms waited for a batch, 150 for a core that others had
    ((0, 1.9, 46.0, 150.0, {}), [("host", 207 / 57), ("data", 207 / 161)], "other processes use 1.9 cores: *"),
    ((4, 1.9, 46.0, 150.0, {"workers": [45.0] * 4}), [("host", 207 / 57), ("data", 207 / 161)],
     "other processes use 1.9 cores: *"),
])  # fmt: skip
def test_a_limit_promises_no_more_than_its_own_share(
    records: tuple[int, float, float, float, dict[str, Any]],
    expected: list[tuple[str, float]],
    text: str,
) -> None:
    """A loader's own CPU time tells slow ones from those without a core."""
    *numbers, sample = records
    found = Explained(shared(*numbers, **sample)).limits
    assert (found[0].bound, found[0].lever) == ("host", "run alone on the machine")
    assert fnmatchcase(found[0].text, text), found[0].text
    for limit, (bound, gain) in zip(found, expected, strict=False):
        assert limit.bound == bound
        assert (limit.gain or 0) <= gain + 0.01


def test_a_slow_loader_with_a_core_of_its_own_is_the_limit() -> None:
    slow = Explained(shared(1, 0.1, 150.0, 10.0, loader_wait=[2.0], workers=[95.0])).limits
    assert slow[0].bound == "data"


def test_only_the_cores_that_the_run_may_use_count_as_taken_by_others() -> None:
    sample = {"cpu": [100.0, 100.0], "main": 30.0, "workers": [40.0]}
    run = RunRecords(Path("x"), samples={"n": [sample] * 3})
    assert Facts(run).other_cores == pytest.approx(1.3)
    run.nodes["n"] = {"core_ids": [0]}
    assert Facts(run).other_cores == pytest.approx(0.3)


def test_a_small_limit_is_no_headline() -> None:
    """Data 11 %, student 88 %: the headline is the student's, and does not say that nothing holds it up."""
    run = run_of({"data": 11.0, "student": 40.0, "backward": 48.0, "h2d": 1.0})
    found = Explained(run).verdict
    assert found["bound"] == "student"
    assert found["text"] == "student-bound: the student's own training takes 88% of the step"
    assert [limit["bound"] for limit in found["others"]] == ["data"]
    assert found["others"][0]["gain"] < 1.25
    leads = Explained(run_of({"data": 30.0, "student": 40.0, "backward": 30.0})).verdict
    assert leads["others"] == []


def test_of_few_steps_nothing_is_said() -> None:
    run = run_of(with_(checkpoint=200.0))
    run.totals[0]["steps"] = 19
    found = Explained(run).verdict
    assert found["phases_ms"]["checkpoint"] == 1052.632
    assert found["bound"] == "none"
    assert found["text"] == "too few steps were recorded to find the limit of the speed (19 of 20)"
    assert not found.get("others")
    run.samples["n"] = [{"t": 0.0, "cpu": [10.0] * 8, "thread_wait": [90.0]}]
    assert not Explained(run).findings
    run.totals[0]["steps"] = 20
    assert [f.rule for f in Explained(run).findings] == ["SchedulerDelay"]


def test_startup_and_the_whole_run_are_timed_by_one_clock() -> None:
    """82 s in all by the process's own start; the summary's clock began when most of it was over."""
    run = run_of(HEALTHY)
    run.summary = {"status": "done", "wall_s": 2.0}
    parts = {"imports, models, data": 66.0, "checks before the first step": 1.0, "first step": 1.0}
    run.events = [{"name": "startup", "s": 68.0, "parts": parts}]
    run.headers[0]["t"] = 1e9 + 67.0
    run.totals[0]["t"] = 1e9 + 82.0
    assert Facts(run).wall_s == pytest.approx(82.0)
    found = Explained(run).verdict
    assert found["bound"] == "startup"
    assert "68 of 82 s" in found["text"]
    assert found["predicted_speedup"] == pytest.approx(82 / 16, abs=0.01)
    run.summary = {}  # still trains: 100 epochs are to come
    run.headers[0] |= {"batches_per_epoch": 1000, "max_epochs": 100}
    assert "startup" not in {limit.bound for limit in Explained(run).limits}


def test_a_host_that_waits_behind_a_busy_gpu_loses_nothing() -> None:
    run = run_of(HEALTHY, device="cuda")
    run.totals[0]["ready_ms"] = 100 * 50.0
    assert [limit.bound for limit in Explained(run).limits] == ["student"]
    run.totals[0]["launch_ms"] = 100 * 99.0
    assert Explained(run).limits[0].bound == "host"
