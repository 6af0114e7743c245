"""Limits: each fires on the records it is for, stays silent on healthy ones, and predicts by Amdahl."""

from pathlib import Path
from typing import Any

import pytest

from kd.report import limits
from kd.report import rules as v
from kd.report.facts import Facts
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


def test_a_healthy_run_is_bound_by_its_student_and_nothing_else() -> None:
    assert [limit.bound for limit in Explained(run_of(HEALTHY)).limits] == ["student"]
    found = Explained(run_of(HEALTHY)).verdict
    assert found["bound"] == "student"
    assert found["predicted_speedup"] is None
    assert found["phases_ms"] == HEALTHY


@pytest.mark.parametrize(
    ("room", "told"),
    [
        ({}, "compile=true, a larger data.batch_size, a faster"),
        ({"more_fit": 128}, "compile=true, data.batch_size=128 (128 more fit), a faster"),
        ({"more_fit": 128, "batches_per_epoch": 12}, "compile=true, a faster"),
        ({"more_fit": 0}, "compile=true, a faster"),
    ],
)  # fmt: skip
def test_the_batch_that_fits_is_told_by_its_number(room: dict[str, int], told: str) -> None:
    found = Explained(run_of(HEALTHY, "cuda", **room)).verdict
    assert found["bound"] == "student"
    assert told in found["lever"]


def test_a_batch_is_only_as_large_as_fills_the_gpu() -> None:
    """7,728 more fitted on a GPU, of an epoch of 9,025 pictures: one step an epoch was advised."""
    phases = with_()
    counted = {"batch_size": 64, "more_fit": 7728, "batches_per_epoch": 141}
    launching = given(
        phases, total={"launch_ms": sum(phases.values())}, gpu_busy=0.43, header=counted
    )
    launching.run.headers[0] = counted
    limit = limits.launch_bound(launching)
    assert limit is not None
    assert "data.batch_size=192 (7728 more fit)" in limit.lever
    assert "model.student.compile=reduce-overhead, or" in limit.lever  # keeps the batch


@pytest.mark.parametrize(
    ("engine", "h2d", "named"),
    [
        ("device", 300.0, True),
        ("dali", 300.0, True),
        ("device", 5.0, False),
        ("torch", 300.0, False),
    ],
)
def test_views_of_the_training_process_are_named(engine: str, h2d: float, named: bool) -> None:
    """12 times the load of views took 2.4 times as long with ``device``, and the run was called balanced."""
    facts = given(with_(h2d=h2d))
    facts.run.config["data"] = {"engine": engine}
    limit = limits.views_bound(facts)
    assert (limit is not None) is named
    if limit:
        assert limit.text.startswith("the training process makes the views for 300 of the step's ")
        assert limit.lever.startswith("data.engine=torch makes them in loader processes")


def test_no_records_no_verdict() -> None:
    assert Explained(RunRecords(Path("x"))).verdict["bound"] == "none"


@pytest.mark.parametrize(
    ("phases", "bound"),
    [
        (with_(data=100.0), "data"),
        (with_(teacher=200.0), "teacher"),
        (with_(communication=60.0), "communication"),
        (with_(logging=60.0), "host"),
        (with_(checkpoint=30.0), "checkpoint"),
        (with_(optimizer=150.0), "student"),
    ],
)
def test_each_bound_is_named(phases: dict[str, float], bound: str) -> None:
    found = Explained(run_of(phases)).verdict
    assert found["bound"] == bound
    assert found["text"].startswith(v.NAMES[bound])
    assert found["predicted_speedup"] >= 1.1


def test_limits_are_ordered_by_their_gain() -> None:
    found = Explained(run_of(with_(teacher=100.0, communication=60.0))).limits
    assert [limit.bound for limit in found] == ["teacher", "communication"]
    assert found[0].gain > found[1].gain  # type: ignore[operator]


def test_a_teacher_of_61_percent_could_be_2_4_times_as_fast_from_a_cache() -> None:
    limit = limits.of_phase("teacher", given({"teacher": 58.0, "student": 42.0}, cache_bytes=1.1e9))
    assert limit is not None
    assert limit.gain == pytest.approx(1 / 0.42)
    assert "58 %" in limit.text.replace("%", " %")
    assert "needs 1.1 GB" in limit.lever
    assert v.sentence(limit).endswith(
        "model.teacher.cache=on (needs 1.1 GB), once filled, would give 2.4x the speed"
    )
    assert limits.of_phase("teacher", given({"teacher": 29.0, "student": 71.0})) is None


def test_a_cache_is_advised_only_where_it_is_possible_and_not_there_yet() -> None:
    slow = with_(teacher=200.0)
    assert "model.teacher.cache=on" in Explained(run_of(slow)).verdict["text"]
    assert "a smaller teacher" in Explained(run_of(slow, cacheable=False)).verdict["lever"]
    assert "cache" not in Explained(run_of(slow, cacheable=False)).verdict["text"]
    told = run_of(slow)
    told.config = {"model": {"teacher": {"cache": True}}}
    for run in (told, run_of(slow, cached=True)):  # what is read costs nothing: it is being filled
        assert "to compute the answers that its cache keeps" in Explained(run).verdict["text"]
        assert "later epochs" in Explained(run).verdict["lever"]
    told.headers[0]["cached"] = False  # asked for ("auto"), and found not to pay
    assert "to compute" not in Explained(told).verdict["text"]


def test_a_cache_is_as_large_as_its_records() -> None:
    run = run_of(with_(teacher=200.0))
    run.summary = {"data": {"train": 1_000_000, "classes": 96}}
    run.config = {"trainer": {"max_epochs": 100}, "model": {"teacher": {"cache_views": 2}}}
    assert "needs 0.4 GB" in Explained(run).verdict["lever"]  # 2 views of (4 + 4 + 96 * 2) bytes
    run.config["model"]["teacher"]["cache_topk"] = 8
    assert "needs 0.08 GB" in Explained(run).verdict["lever"]


def test_waiting_workers_need_no_cores_computing_ones_do() -> None:
    slow = {"data": 80.0, "student": 20.0}
    sleeping = limits.data_bound(given(slow, workers=0, cores=1, loading_busy=0.0))
    assert sleeping is not None
    assert sleeping.lever == "data.num_workers=5 instead of 0"
    assert sleeping.gain == pytest.approx(5)
    computing = limits.data_bound(given(slow, workers=0, cores=2, loading_busy=1.0))
    assert computing is not None
    assert computing.lever == "data.num_workers=2 instead of 0"
    assert computing.gain == pytest.approx(2)  # 100 ms of CPU time on two cores
    no_core = limits.data_bound(given(slow, workers=0, cores=1, loading_busy=1.0))
    assert no_core is not None
    assert "cheaper pictures" in no_core.lever
    crowded = limits.data_bound(given(slow, workers=16, cores=1, loading_busy=1.0))
    assert crowded is not None
    assert "though 16 loader processes share 1 core with training" in crowded.text
    assert no_core.gain == pytest.approx(5)


def test_cores_that_a_gpu_needs_are_counted() -> None:
    """A batch costs one core 240 ms, the GPU 20: thirteen cores with the one that launches, four are there."""
    slow = {"data": 40.0, "student": 20.0}
    limit = limits.data_bound(
        given(slow, workers=4, cores=8, loading_busy=1.0, processes=2, cpu=False)
    )
    assert limit is not None
    assert limit.text.endswith(
        "; 13 cores a GPU would be enough, there are 4, though 8 loader processes share 8 cores with training"
    )
    assert "data.engine=device (or dali)" in limit.lever
    assert (
        "data.engine" not in limits.data_bound(given(slow, workers=4, cores=8, processes=2)).lever
    )  # type: ignore[union-attr]


def test_workers_that_cannot_keep_up_are_counted_at_their_rate() -> None:
    # two workers give a batch each 100 ms between them: one takes 200 ms
    limit = limits.data_bound(
        given({"data": 60.0, "student": 40.0}, workers=2, cores=16, loading_busy=1.0)
    )
    assert limit is not None
    assert limit.lever == "data.num_workers=6 instead of 2"
    assert limit.gain == pytest.approx(100 / 40)
    assert limits.data_bound(given({"data": 5.0, "student": 95.0}, workers=2, cores=8)) is None


def test_starvation_names_who_took_the_core() -> None:
    phases = {"data": 0.0, "student": 50.0, "backward": 50.0}
    limit = limits.cpu_contention(
        given(phases, ready_ms=60.0, workers=16, cores=2, loading_cores=0.4)
    )
    assert limit is not None
    assert limit.bound == "host"
    assert limit.gain == pytest.approx(
        2.5
    )  # what loading takes, 40 ms of 200, fits beside the 40 ms of training
    assert limit.lever == "data.num_workers=1 instead of 16"
    assert limits.cpu_contention(given(phases, ready_ms=5.0, workers=16, cores=2)) is None
    full = limits.cpu_contention(
        given(phases, ready_ms=60.0, workers=16, cores=2, loading_cores=1.6)
    )
    assert full is not None
    assert "cheaper pictures" in full.lever  # fewer workers would have the same work to do
    neighbour = limits.cpu_contention(
        given(phases, ready_ms=60.0, workers=0, cores=2, other_cores=1.5)
    )
    assert neighbour is not None
    assert "other processes use 1.5 cores" in neighbour.text
    assert neighbour.lever == "run alone on the machine"
    ranks = limits.cpu_contention(
        given(phases, ready_ms=60.0, workers=0, cores=1, other_cores=0.2, processes=2)
    )
    assert ranks is not None
    assert ranks.text.startswith("2 training processes and 2 compute threads share 1 core: ")
    fits = limits.cpu_contention(
        given(phases, ready_ms=60.0, workers=1, cores=8, loading_cores=0.4)
    )
    assert fits is not None
    assert "though not all of the 8 cores are taken" in fits.text
    assert "trainer.devices" in ranks.lever
    others = limits.cpu_contention(
        given(phases, ready_ms=60.0, cores=2, other_cores=0.9, processes=2)
    )
    assert "other processes" in others.text  # type: ignore[union-attr]
    shared_fairly = limits.cpu_contention(
        given(phases, ready_ms=60.0, workers=0, cores=1, other_cores=0.5)
    )
    assert shared_fairly is not None
    assert shared_fairly.text.startswith("other processes use 0.5 cores: ")
    alone = limits.cpu_contention(given(phases, ready_ms=60.0, workers=0, cores=1, other_cores=0.1))
    assert alone is not None
    assert alone.text.endswith(" on its only core")
    assert "taskset" not in alone.lever, "there are no other cores"


def shared(count: int, others: float, wait: float, ready: float, **sample: Any) -> RunRecords:
    """Two cores, of which other processes use so many; ``wait`` and ``ready`` of a step's 207 ms."""
    run = run_of({"data": wait, "student": 207 - wait}, cores=2, threads=1, num_workers=count)
    run.totals[0] |= {"ready_ms": 100 * ready, "data_cpu_ms": 100 * 0.2 * wait}
    run.totals[0]["data_ready_ms"] = 100 * min(ready, 0.8 * wait)
    used = {"main": 40.0, "workers": [30.0] * count, **sample}
    rest = 100 * others + used["main"] + sum(used["workers"])
    run.samples["n"] = [{"t": 0.5 * i, "cpu": [rest / 2] * 2, **used} for i in range(50)]
    return run


def test_a_limit_promises_no_more_than_its_own_share() -> None:
    """46 of 207 ms waited for a batch, 150 for a core that others had: without the former the step takes 161 ms."""
    waited = limits.data_bound(
        given({"data": 46.0, "student": 161.0}, workers=4, cores=2, loading_busy=0.4)
    )
    assert waited is not None and waited.gain is not None
    assert waited.gain == pytest.approx(207 / 161)
    for workers in (0, 4):
        found = Explained(shared(workers, 1.9, 46.0, 150.0, workers=[45.0] * workers)).limits
        assert found[0].text.startswith("other processes use 1.9 cores: ")
        assert all(
            (limit.gain or 0) <= 207 / 161 + 0.01 for limit in found if limit.bound == "data"
        )


def test_the_loaders_own_cpu_time_tells_slow_ones_from_those_without_a_core() -> None:
    """The step waits 150 of 207 ms for its batch; its loader stood ready without a core for 80 % of the time."""
    late = Explained(shared(1, 1.6, 150.0, 10.0, loader_wait=[80.0])).limits
    assert [limit.bound for limit in late] == ["host", "data"]
    assert late[1].gain == pytest.approx(207 / 177)  # what the loader itself takes
    assert (
        "training and its loader processes waited for a free core for 130 of 207 ms" in late[0].text
    )
    assert late[0].lever == "run alone on the machine"
    assert late[0].gain == pytest.approx(207 / 77)
    slow = Explained(shared(1, 0.1, 150.0, 10.0, loader_wait=[2.0], workers=[95.0])).limits
    assert slow[0].bound == "data"
    here = Explained(
        shared(0, 1.6, 150.0, 115.0)
    ).limits  # made by the training process, whose delay is on record
    assert [limit.bound for limit in here] == ["host", "data"]
    assert here[0].gain == pytest.approx(207 / 92)
    assert (here[1].gain or 0) <= 207 / 172  # the 35 ms that were no wait for a core


def test_only_the_cores_that_the_run_may_use_count_as_taken_by_others() -> None:
    run = RunRecords(
        Path("x"), samples={"n": [{"cpu": [100.0, 100.0], "main": 30.0, "workers": [40.0]}] * 3}
    )
    assert Facts(run).other_cores == pytest.approx(1.3)
    run.nodes["n"] = {"core_ids": [0]}
    assert Facts(run).other_cores == pytest.approx(0.3)


def test_a_cache_gains_what_the_runs_own_epochs_give() -> None:
    slow = {"teacher": 60.0, "student": 40.0}
    long = limits.of_phase("teacher", given(slow, cache_bytes=1e6, epochs=20, views=4))
    assert long is not None
    assert long.gain == pytest.approx(20 / (4 + 16 * 0.4))  # four epochs compute, sixteen read
    assert "in the run's 20 epochs of 4 views" in long.lever
    for epochs in (1, 4):  # no view comes again
        short = limits.of_phase("teacher", given(slow, cache_bytes=1e6, epochs=epochs, views=4))
        assert short is not None
        assert short.lever.startswith("a smaller teacher")
        assert f"more than 4 epochs, this one has {epochs}" in short.lever
        assert short.gain == pytest.approx(2.5)


def test_what_holds_most_of_the_step_is_the_headline() -> None:
    """Data 11 %, student 88 %: the headline is the student's, and does not say that nothing holds it up."""
    run = run_of({"data": 11.0, "student": 40.0, "backward": 48.0, "h2d": 1.0})
    found = Explained(run).verdict
    assert found["bound"] == "student"
    assert found["text"] == "student-bound: the student's own training takes 88% of the step"
    assert [limit["bound"] for limit in found["others"]] == ["data"]
    assert found["others"][0]["gain"] < 1.25
    leads = Explained(run_of({"data": 30.0, "student": 40.0, "backward": 30.0})).verdict
    assert leads["bound"] == "data"
    assert leads["others"] == []
    mixed = Explained(
        run_of(
            {"data": 9.0, "teacher": 29.0, "communication": 14.0, "logging": 10.0, "student": 38.0}
        )
    ).verdict
    assert mixed["text"].startswith(
        "balanced: no part of the step stands out; most of it (38%) is the student's own"
    )


def test_of_few_steps_nothing_is_said() -> None:
    run = run_of(with_(checkpoint=200.0))
    run.totals[0]["steps"] = 19
    found = Explained(run).verdict
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


def test_a_late_rank_is_the_reason_where_there_is_one() -> None:
    phases = {"student": 60.0, "communication": 40.0}
    limit = limits.of_phase("communication", given(phases, compute_ms={0: 60.0, 1: 60.0, 2: 100.0}))
    assert limit is not None
    assert "rank 2 computes 40 ms longer" in limit.text
    assert limit.gain == pytest.approx(100 / 60)
    network = limits.of_phase(
        "communication", given(phases, compute_ms={0: 60.0, 1: 61.0, 2: 62.0})
    )
    assert network is not None
    assert "network" in network.lever


def test_launching_limits_only_an_idle_gpu() -> None:
    phases = {"student": 100.0}
    assert limits.launch_bound(
        given(phases, total={"launch_ms": 97.0}, gpu_busy=0.4)
    ).gain == pytest.approx(2.5)  # type: ignore[union-attr]
    assert limits.launch_bound(given(phases, total={"launch_ms": 97.0}, gpu_busy=0.95)) is None
    assert limits.launch_bound(given(phases, total={"launch_ms": 30.0}, gpu_busy=0.4)) is None
    assert limits.launch_bound(given(phases, total={"launch_ms": 97.0}, gpu_busy=None)) is None


def test_a_host_that_waits_behind_a_busy_gpu_loses_nothing() -> None:
    run = run_of(HEALTHY, device="cuda")
    run.totals[0]["ready_ms"] = 100 * 50.0
    assert [limit.bound for limit in Explained(run).limits] == ["student"]
    run.totals[0]["launch_ms"] = 100 * 99.0
    assert Explained(run).limits[0].bound == "host"


def test_the_costly_callback_is_named() -> None:
    slow = {"Slow.on_train_batch_start": 45.0, "Other.x": 1.0}
    limit = limits.of_phase("logging", given({"student": 50.0, "logging": 50.0}, callbacks_ms=slow))
    assert limit is not None
    assert "Slow.on_train_batch_start alone 45 ms" in limit.text
    assert limits.of_phase("logging", given({"student": 95.0, "logging": 5.0})) is None


def test_a_long_fit_of_the_start_names_its_setting() -> None:
    parts = {"imports, models, data": 60.0, FIT_OF_THE_START: 1500.0}
    limit = limits.startup_bound(given({}, startup={"s": 1560.0, "parts": parts}, planned_s=1680.0))
    assert limit is not None
    assert "most of it fit of the inherited start (1500 s)" in limit.text
    assert "model.student.inherit_pictures" in limit.lever


def test_startup_needs_a_long_start_of_a_short_run() -> None:
    parts = {"imports, models, data": 500.0, "first step": 20.0}
    limit = limits.startup_bound(given({}, startup={"s": 520.0, "parts": parts}, planned_s=1000.0))
    assert limit is not None
    assert "imports, models, data" in limit.lever
    assert limit.gain == pytest.approx(1000 / 500)  # without its longest part
    crowded = {"crowded_out": True, "other_cores": 1.6}
    parts = {"imports, models, data": 40.0, "first step": 36.2}
    limit = limits.startup_bound(
        given({}, startup={"s": 76.2, "parts": parts}, planned_s=77.2, **crowded)
    )
    assert limit is not None
    assert limit.gain == pytest.approx(77.2 / 37.2)  # not 77.2x
    assert "while other processes use 1.6 cores" in limit.text
    assert limit.lever.startswith("run alone on the machine, shorten 'imports")
    assert (
        limits.startup_bound(given({}, startup={"s": 520.0, "parts": parts}, planned_s=100_000.0))
        is None
    )
    assert (
        limits.startup_bound(given({}, startup={"s": 20.0, "parts": parts}, planned_s=30.0)) is None
    )


def test_a_cpu_that_computes_in_the_slower_precision() -> None:
    phases = {"data": 10.0, "teacher": 40.0, "student": 20.0, "backward": 20.0, "optimizer": 10.0}

    def bound(precision: str, times: float | None) -> limits.Limit | None:
        return limits.precision_bound(
            given(phases, header={"precision": precision, "bfloat16_time": times})
        )

    emulated = bound("bf16-mixed", 966.3)
    assert (
        emulated is not None
        and emulated.text == "training is in bf16-mixed, and this CPU has no bfloat16 instructions"
    )
    found, other = bound("bf16-mixed", 5.0), bound("32-true", 0.25)
    assert found is not None and found.lever == "trainer.precision=32-true: at most"
    assert found.gain == pytest.approx(1 / (0.2 + 0.8 / 5))
    assert other is not None and other.lever == "trainer.precision=bf16-mixed: at most"
    for precision, times in (
        ("bf16-mixed", 0.25),
        ("32-true", 5.0),
        ("32-true", None),
        ("16-mixed", 5.0),
    ):
        assert bound(precision, times) is None
