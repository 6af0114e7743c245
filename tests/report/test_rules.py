"""Rules: records on which each must fire, and ones on which it must not."""

import math
from pathlib import Path
from typing import Any

import pytest

from kd.report.records import RunRecords, read_run
from kd.report.rules import RULES, Explained
from kd.report.step_facts import Swing
from tests._pages import run_of, write_run

PICTURES = {"constant": 0.0, "duplicated": 0.0, "low": 0, "high": 255, "bytes": True}

# rule, arguments that just fire it, arguments that just don't
CASES: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = [
    ("CPUBottleneck", ([91] * 300, [9] * 300), ([91] * 300, [10] * 300)),
    ("CPUBottleneck", ([0] * 100 + [91], [9] * 101), ([0] * 100 + [91, 90], [9] * 102)),  # skips 100
    ("IOBottleneck", ([51] * 1300, [69] * 1300), ([51] * 1300, [70] * 1300)),
    ("IOBottleneck", ([0] * 1000 + [51], [0] * 1001), ([50] * 1300, [0] * 1300)),
    ("LowGPUUtilization", ([69] * 1600,), ([70] * 1600,)),
    ("LowGPUUtilization", ([95] * 1000 + [9],), ([0] * 1000 + [10, 70] * 300,)),
    ("BatchSize", ([99] * 100 + [69], [69] * 700, [69] * 700), ([69] * 700, [69] * 700, [70] * 700)),
    ("GPUMemoryIncrease", ([40 + n for n in range(120)],), ([40] * 700,)),
    ("MemoryLeak", ([900 + 2 * n for n in range(600)],), ([900 + min(n, 60) for n in range(600)],)),
    ("MemoryLeak", ([1000 + n for n in range(600)],), ([1000 + n % 50 for n in range(600)],)),
    ("MemoryLeak", ([1000 + n for n in range(600)],), ([3800 + n / 50 + 1500 * (n > 400) for n in range(600)],)),
    ("LoadBalancing", ([[96] * 11, [48] * 11],), ([[96] * 50, [49] * 50],)),
    ("SlowRank", ({0: 50.0, 1: 50.0, 2: 58.0},), ({0: 50.0, 1: 50.0, 2: 57.0},)),
    ("StepOutlier", ([50.0] * 2000 + [500.0] * 11,), ([50.0] * 2000 + [500.0] * 10,)),
    ("MaxInitializationTime", (1201.0,), (1200.0,)),
    ("Dataloader", (0.0, 2, 2, 2, 1, 0.0, "2 and 2 share 2 cores"), (0.0, 2, 1, 2)),
    ("Dataloader", (0.4, 1, 1, 8), (0.1, 1, 1, 8)),
    ("Dataloader", (0.4, 0, 1, 2), (0.4, 0, 1, 2, 1, 0.6)),  # others use the second core
    ("Dataloader", (0.0, 16, 1, 96, 8, 0.0, "128 and 8 share 96 cores"), (0.0, 1, 3, 8, 8)),  # 8 ranks
    ("HotCores", ("6 of 96 cores are full", []), ("6 of 96 cores are full", [70] * 90)),
    ("HotCores", ("6 of 96 cores are full", [69] * 90), ("", [])),
    ("EfaMissing", ("Socket",), ("Libfabric",)),
    ("NoStart", ("scratch",), ("pre-trained",)),
    ("PhaseVariation", (Swing("backward", 8e3, 24e3, 31e3),), (None,)),
    ("SchedulerDelay", (0.2, None, "pt_autograd_0"), (0.19, 0.19, "")),
    ("SchedulerDelay", (0.0, 0.2), (None, None)),
    ("Throttling", ([["heat"]] * 6 + [[]] * 94,), ([["heat"]] + [[]] * 19,)),
    ("Swap", ([100, 200, 300],), ([400, 400, 599],)),
    ("LossNotDecreasing", ([2.0 + 0.01 * (n % 3) for n in range(20)],),
     ([2.0 - 0.01 * n for n in range(60)],)),
    ("LossNotDecreasing", ([0.01 * n - 2.0 for n in range(60)],), ([-2.0 - 0.01 * n for n in range(60)],)),
    ("LossNotDecreasing", ([0.0] * 10 + [1.0] * 50,), ([0.0] * 60,)),
    ("LossRising", ([2.0, 2.0, 2.2, 5.0, 6.0, 60.0],), ([2.0, 2.0, 2.2, 2.5, 5.9, 60.0, 2.6],)),
    ("LossRising", ([2.0, 2.1, 2.2, 5.0, math.nan, math.nan],), ([0.0, 0.0, 0.0, 1.0, 1.0, 1.0],)),
    ("Overfit", ([2, 1.5, 1.2, 1.0, 0.8], [0.5, 0.8, 0.74, 0.72, 0.7]),
     ([2, 1.5, 1.2, 1.0, 0.8], [0.5, 0.6, 0.7, 0.74, 0.75])),
    ("VanishingGradient", ([1e-9] * 6 + [1.0] * 4,), ([1e-9, 1e-7],)),
    ("ExplodingTensor", ([1.0] * 9 + [None],), ([1.0] * 9 + [3.0],)),
    ("ExplodingTensor", ([1.0] * 4 + [101.0],), ([1.0] * 9 + [100.0],)),
    ("DeadRelu", ({"a": 0.51, "b": 0.1},), ({"a": 0.5},)),
    ("PoorWeightInitialization", ({"a": 0.001, "b": 1.01},), ({"a": 0.0, "b": 0.0},)),
    ("ClassImbalance", ([500, 50],), ([499, 50],)),
    ("TeacherNearChance", (0.27, 0.25, 400), (0.6, 0.25, 400)),
    ("TeacherNearChance", (0.5, 0.5, 100), (0.75, 0.5, 4)),  # few pictures do not judge a teacher
    ("TeacherNearChance", (0.27, 0.25, 400), (0.0, 0.1, 4)),
    ("StudentIgnoresTeacher",
     ([0.3, 0.5, 0.5, 0.5, 0.5], {"train/dkd_loss": [1, 0.9, 0.9, 0.9, 0.9], "train/at_loss": [-0.5] * 5}),
     ([0.3, 0.5, 0.5, 0.5, 0.5], {"train/dkd_loss": [1, 0.9, 0.9, 0.9, 0.9], "train/at_loss": [5, 4, 3, 2, 1]})),
    ("StudentIgnoresTeacher", ([0.5] * 5, {"kd": [1] * 5}), ([0.8] * 5, {"kd": [1] * 5})),
    ("FeaturesCollapse", ([20.0, 9.9], 296), ([4.8, 10.0], 296)),
    ("FeaturesCollapse", ([4.8], 100), ([4.8], 99)),
    ("WorseThanStart", (0.818, 0.733, 371), (0.818, 0.80, 371)),  # two points of 371 pictures are luck
    ("WorseThanStart", (0.2, 0.3, 0, "val/feature_loss"), (50.0, 51.0, 0, "val/feature_loss")),
    ("WorseThanStart", (0.6, 0.5, 0, "val/miou"), (None, 0.5, 0, "val/miou")),
    ("StudentUnderTrained", ([0.2, 0.3, 0.4, 0.5, 0.6], [0.3] * 5),
     ([0.2, 0.5, 0.6, 0.6, 0.605], [0.3] * 5)),
    ("StudentUnderTrained", ([0.2, 0.3, 0.4, 0.5, 0.6], [0.3] * 5, "scratch"),
     ([0.2, 0.3, 0.4, 0.5, 0.6], [0.3, 0.4, 0.6, 0.8, 0.8])),
    # a student that is worse than its start is not told to train on, and two pictures of 100 are luck
    ("StudentUnderTrained", ([0.2, 0.3, 0.4, 0.5, 0.6], [0.3] * 5, "inherited", "val/acc1", 400, 0.5),
     ([0.2, 0.3, 0.4, 0.5, 0.6], [0.3] * 5, "inherited", "val/acc1", 400, 0.7)),
    ("StudentUnderTrained", ([0.5, 0.5, 0.5, 0.5, 0.52], [0.3] * 5, "", "val/acc1", 10_000),
     ([0.5, 0.5, 0.5, 0.5, 0.52], [0.3] * 5, "", "val/acc1", 100)),
    ("TemperatureTooHigh", ([0.99] * 5,), ([0.98],)),
    ("TemperatureTooLow", ([0.001] * 5,), ([0.02],)),
    ("SaturatedActivation", ({"gate": 0.81},), ({"gate": 0.8},)),
    ("WeightUpdateRatio", ([9e-9] * 3,), ([1e-8] * 3,)),
    ("WeightUpdateRatio", ([0.11] * 3,), ([0.4, 0.1, 0.1, 0.1],)),  # the first step's
    ("AllZero", ({"a": 1.0, "b": 0.5},), ({"a": 0.99},)),
    ("UnchangedTensor", ([["a", "b"], ["a"], ["a", "c"]],), ([["a"], [], ["a"]],)),
    ("UnchangedTensor", ([[], ["a"], ["a"], ["a"]],), ([["a"], ["a"]],)),
    ("TensorVariance", ({"a": 1001.0},), ({"a": 1.0, "b": 1000.0},)),
    ("TensorVariance", ({"a": 9e-6},), ({"a": 1e-5},)),
    ("CheckInputImages", ([PICTURES | {"constant": 0.06}] * 3,), ([PICTURES | {"constant": 0.05}],)),
    ("CheckInputImages", ([PICTURES | {"duplicated": 0.11}],), ([PICTURES | {"duplicated": 0.1}],)),
    ("CheckInputImages", ([PICTURES | {"high": 1}],), ([PICTURES, PICTURES | {"high": 2}],)),
    ("CheckInputImages", ([PICTURES | {"bytes": False, "high": 21}],),
     ([PICTURES | {"bytes": False, "low": -2.1, "high": 20}],)),
    ("Overtraining", ([0.5, 0.8] + [0.79] * 10,), ([0.5, 0.8] + [0.79] * 9 + [0.801],)),
    ("Overtraining", ([0.5, 0.8] + [0.79] * 10, [0.3, 0.1] + [0.1] * 10),
     ([0.5, 0.8] + [0.79] * 10, [0.3, 0.1] + [0.1 - 0.002 * n for n in range(10)])),  # it still learns
    ("StalledTraining", (1801.0,), (1800.0,)),
    ("SimilarAcrossRuns",
     ({n: 2 - n / 9 for n in range(9)}, {"a/000": {n: 2 - n / 9 for n in range(6)}}),
     ({n: 2 - n / 9 for n in range(9)}, {"a/000": {n: 2 - n / 8 for n in range(6)}})),
    ("SimilarAcrossRuns", ({n: 100.0 for n in range(5)}, {"b": {n: 100.00005 for n in range(5)}}),
     ({n: 1.0 for n in range(5)}, {"b": {n: 1.0 for n in range(4)}})),  # fewer in common say little
    ("Confusion", ([("cat", "dog", 8), ("dog", "cat", 1)], {"cat": 20, "dog": 20}),
     ([("cat", "dog", 6)], {"cat": 20, "dog": 20})),
    ("Confusion", ([("cat", "dog", 9)], {"cat": 10}), ([("cat", "dog", 9)], {"cat": 9})),
    ("LossTermDominates", ({"kd": 99.0, "task": 1.0},), ({"kd": 98.0, "task": 2.0},)),
    ("LossTermDominates", ({"kd": 99.0, "task": 1.0},), ({"kd": 1.0},)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "fires", "silent"), CASES, ids=[c[0] for c in CASES])
def test_a_rule_fires_where_it_must_and_only_there(
    rule: str, fires: tuple[Any, ...], silent: tuple[Any, ...]
) -> None:
    """A remedy stands alone: a run may have no verdict (kd.Monitor's own loop, a short run)."""
    found = RULES[rule](*fires)
    assert found is not None
    assert found.rule == rule
    assert found.text
    assert found.lever
    assert "verdict" not in found.text + found.lever
    assert RULES[rule](*silent) is None


@pytest.mark.parametrize(
    ("of_run", "lever"),
    [
        ({"cores": 1, "threads": 1, "num_workers": 0}, "more cores, or run alone on the machine"),
        ({"num_workers": 0}, "let the processes use all cores (taskset"),
        ({"num_workers": 16}, "data.num_workers=1 instead of 16"),
        ({"processes": 8}, "fewer processes (trainer.devices) or threads, or more cores"),
    ],
)
def test_the_rule_about_waiting_threads_advises_what_the_limit_predicts(
    of_run: dict[str, Any], lever: str
) -> None:
    """Measured: one process without loaders was advised "fewer processes; see the verdict", and had no verdict."""
    run = run_of({"data": 0.0, "student": 100.0}, **of_run)
    run.samples["n"] = [
        {"t": 0.0, "cpu": [100.0], "mem": 1.0, "thread_wait": [80.0], "thread": "python"}
    ]
    explained = Explained(run)
    (found,) = [one for one in explained.findings if one.rule == "SchedulerDelay"]
    assert found.text == "waiting for a free core: training (python) 80% of the time"
    assert found.lever.startswith(lever)
    limit = explained.limits[0]
    assert limit.bound != "host" or found.lever == limit.lever.removesuffix(": at most")


def test_a_weak_teacher_is_described_in_numbers_and_with_what_to_do() -> None:
    found = RULES["TeacherNearChance"](0.27, 0.25, 400)
    assert found is not None
    assert found.text == (
        "the teacher is right on 108 of 400 validation pictures (27.0%), no better than always naming the most frequent "
        "class (25.0%)"
    )
    assert found.lever.startswith("check that its classes are in the data's order (classes)")
    mended = RULES["TeacherNearChance"](0.27, 0.25, 400, "model.teacher.classes=FILE")
    assert mended is not None
    assert mended.lever == "model.teacher.classes=FILE"


def test_the_rule_about_loaders_advises_what_the_limit_predicts() -> None:
    explained = Explained(run_of({"data": 60.0, "student": 40.0}, cores=8, num_workers=1))
    (found,) = [finding for finding in explained.findings if finding.rule == "Dataloader"]
    (limit,) = [limit for limit in explained.limits if limit.bound == "data"]
    assert found.lever == limit.lever == "data.num_workers=4 instead of 1"


@pytest.mark.parametrize("rule", RULES)
def test_nothing_recorded_nothing_said(rule: str) -> None:
    """Every rule has a row of :data:`CASES`."""
    silent = {name: arguments for name, _, arguments in CASES}[rule]
    assert RULES[rule](*(type(argument)() for argument in silent)) is None


def test_an_under_trained_student_is_named_once_its_run_is_done() -> None:
    run = RunRecords(
        Path("x"), summary={"primary": "acc1", "status": "done", "student": {"start": "scratch"}}
    )
    run.metrics = [{"epoch": n, "val/acc1": 0.1 * n, "val/agreement": 0.1 * n} for n in range(6)]
    (found,) = [f for f in Explained(run).findings if f.rule == "StudentUnderTrained"]
    assert (
        "val/acc1 rose from 30.0% to 50.0% in the last 2 epochs and is 50.0% in the last"
        in found.text
    )
    assert found.lever.startswith("model.student.inherit=auto or .pretrained=true")
    run.summary["student"]["start"] = "inherited"
    (found,) = [f for f in Explained(run).findings if f.rule == "StudentUnderTrained"]
    assert found.lever.startswith("more trainer.max_epochs")
    run.summary["status"] = "interrupted"
    assert not [f for f in Explained(run).findings if f.rule == "StudentUnderTrained"]


def test_an_under_trained_student_whose_last_epoch_fell() -> None:
    """The text says what the last epoch has; one that fell to what was there before ended no rise."""
    agreement = [0.3] * 6
    fell = RULES["StudentUnderTrained"]([0.2, 0.3, 0.4, 0.5, 0.7, 0.6], agreement)
    assert fell and fell.text.startswith(
        "val/acc1 rose from 50.0% to 70.0% in the last 2 epochs and is 60.0% in the last one, with 30.0% agreement"
    )
    assert RULES["StudentUnderTrained"]([0.2, 0.3, 0.4, 0.5, 0.7, 0.5], agreement) is None


def test_thresholds_are_arguments() -> None:
    assert RULES["LowGPUUtilization"]([60] * 1600, low=50) is None
    assert RULES["StepOutlier"]([50.0] * 2000 + [500.0] * 5, ignore=2) is not None
    assert RULES["ExplodingTensor"]([math.nan] * 3) is not None


def test_counts_of_settings_are_whole_numbers(tmp_path: Path) -> None:
    """``monitor.thresholds`` holds floats; a count among them is an index of a series."""
    run = read_run(write_run(tmp_path / "run"))
    expected = [finding.rule for finding in Explained(run).findings]
    thresholds = {
        rule: {name: float(value) for name, value in RULES[rule].thresholds.items()}
        for rule in RULES
    }
    run.config = {**run.config, "monitor": {"thresholds": thresholds}}
    explained = Explained(run)
    assert [finding.rule for finding in explained.findings] == expected
    assert explained.failures == []
    assert RULES["Overtraining"].counts == ["patience"]
    assert RULES["BatchSize"].counts == ["window", "skip"]


def test_a_run_that_balances_its_classes_is_not_warned_of_them(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    run.counts["train"] = [1000, 50]
    assert "ClassImbalance" in {finding.rule for finding in Explained(run).findings}
    run.config = {"data": {"balance_classes": True}}
    assert "ClassImbalance" not in {finding.rule for finding in Explained(run).findings}


def test_a_gpu_whose_use_is_not_known_does_not_renumber_the_others() -> None:
    unknown, busy, idle = {"mem": 50.0}, {"util": 95.0, "mem": 50.0}, {"util": 20.0, "mem": 50.0}
    sample = {"cpu": [50.0], "gpu": [unknown, busy, idle]}
    run = RunRecords(Path(), samples={"0": [sample] * 50})
    (found,) = [f for f in Explained(run).findings if f.rule == "LoadBalancing"]
    assert found.text == "GPU 1 is used 95 %, GPU 2 20 %"
    by_series = RULES["LoadBalancing"]([[], [20] * 50, [95] * 50])
    assert by_series is not None and by_series.text == "GPU 2 is used 95 %, GPU 1 20 %"


def test_only_cores_that_a_run_may_use_are_judged() -> None:
    """Its four are full, sixty others idle: no larger batch helps."""
    sample: Any = {"cpu": [100.0] * 4 + [0.0] * 60, "gpu": [{"util": 5.0, "mem": 20.0}]}
    run = RunRecords(Path(), samples={"a": [sample] * 700}, nodes={"a": {"core_ids": [0, 1, 2, 3]}})
    rules = {finding.rule for finding in Explained(run).findings}
    assert "CPUBottleneck" in rules and "BatchSize" not in rules
