"""Rules: records on which each must fire, and ones on which it must not."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kd.report import rules
from kd.report.host_limits import Swing
from kd.report.records import Run, read_run
from tests.report.test_html import write_run

PICTURES = {"constant": 0.0, "duplicated": 0.0, "low": 0, "high": 255, "bytes": True}

# rule, arguments that fire it, arguments that don't
CASES: list[tuple[Callable[..., Any], str, tuple[Any, ...], tuple[Any, ...]]] = [
    (rules.cpu_bottleneck, "CPUBottleneck", ([95] * 300, [5] * 300), ([95] * 300, [80] * 300)),
    (rules.cpu_bottleneck, "CPUBottleneck", ([0] * 100 + [95] * 9, [5] * 109), ([95] * 100, [5] * 100)),  # skips 100
    (rules.io_bottleneck, "IOBottleneck", ([60] * 1300, [30] * 1300), ([60] * 1300, [90] * 1300)),
    (rules.io_bottleneck, "IOBottleneck", ([60] * 1300, []), ([10] * 1300, [])),
    (rules.low_gpu_utilization, "LowGPUUtilization", ([40] * 1600,), ([95] * 1600,)),
    (rules.low_gpu_utilization, "LowGPUUtilization", ([95] * 1000 + [95, 0] * 300,), ([0] * 1000 + [95] * 600,)),
    (rules.batch_size, "BatchSize", ([30] * 700, [40] * 700, [20] * 700), ([30] * 700, [40] * 700, [85] * 700)),
    (rules.gpu_memory_increase, "GPUMemoryIncrease", ([40 + n / 50 for n in range(700)],), ([40] * 700,)),
    (rules.memory_leak, "MemoryLeak", ([900 + 2 * n for n in range(600)],), ([900 + min(n, 60) for n in range(600)],)),
    (rules.memory_leak, "MemoryLeak", ([1000 + n for n in range(600)],), ([1000 + n % 50 for n in range(600)],)),
    (rules.load_balancing, "LoadBalancing", ([[95] * 50, [30] * 50],), ([[95] * 50, [80] * 50],)),
    (rules.straggler, "SlowRank", ({0: 50.0, 1: 51.0, 2: 80.0},), ({0: 50.0, 1: 51.0, 2: 52.0},)),
    (rules.step_outlier, "StepOutlier", ([50.0] * 2000 + [500.0] * 11,), ([50.0] * 2000 + [500.0] * 10,)),
    (rules.max_initialization_time, "MaxInitializationTime", (1201.0,), (1199.0,)),
    (rules.dataloader, "Dataloader", (0.0, 16, 2, 2), (0.02, 1, 1, 2)),
    (rules.dataloader, "Dataloader", (0.4, 1, 1, 8), (0.02, 1, 1, 8)),
    (rules.dataloader, "Dataloader", (0.4, 0, 1, 2), (0.4, 0, 1, 2, 0.1, 1, 1.9)),  # others use the second core
    (rules.dataloader, "Dataloader", (0.0, 16, 1, 96, 0.1, 8), (0.0, 8, 1, 96, 0.1, 8)),  # 8 ranks
    (rules.hot_cores, "HotCores", ([[100] * 6 + [35] * 90] * 90,), ([[100] * 6 + [35] * 90] * 90, [95] * 90)),
    (rules.hot_cores, "HotCores", ([[100] * 2 + [0] * 6] * 90,), ([[0, 100] * 4] * 90,)),
    (rules.phase_variation, "PhaseVariation", (Swing("backward", 8e3, 24e3, 31e3),), (None,)),
    (rules.scheduler_delay, "SchedulerDelay", (0.3, None, "pt_autograd_0"), (0.1, 0.1, "")),
    (rules.scheduler_delay, "SchedulerDelay", (0.0, 0.5), (None, None)),
    (rules.throttling, "Throttling", ([["heat"]] * 10 + [[]] * 90,), ([["heat"]] + [[]] * 99,)),
    (rules.swapping, "Swap", ([100, 200, 400],), ([400, 400, 410],)),
    (rules.loss_not_decreasing, "LossNotDecreasing", ([2.0 + 0.01 * (n % 3) for n in range(60)],),
     ([2.0 - 0.01 * n for n in range(60)],)),
    (rules.overfit, "Overfit", ([2, 1.5, 1.2, 1.0, 0.8], [0.5, 0.8, 0.74, 0.72, 0.7]),
     ([2, 1.5, 1.2, 1.0, 0.8], [0.5, 0.6, 0.7, 0.74, 0.75])),
    (rules.vanishing_gradient, "VanishingGradient", ([1e-9] * 6 + [1.0] * 4,), ([1.0] * 10,)),
    (rules.exploding_tensor, "ExplodingTensor", ([1.0] * 9 + [None],), ([1.0] * 9 + [3.0],)),
    (rules.exploding_tensor, "ExplodingTensor", ([1.0] * 9 + [500.0],), ([1.0] * 9 + [50.0],)),
    (rules.dead_relu, "DeadRelu", ({"a": 0.6, "b": 0.1},), ({"a": 0.3},)),
    (rules.poor_weight_initialization, "PoorWeightInitialization", ({"a": 1e-5, "b": 1.0},), ({"a": 0.5, "b": 1.0},)),
    (rules.class_imbalance, "ClassImbalance", ([1000, 50],), ([100, 50],)),
    (rules.teacher_near_chance, "TeacherNearChance", (0.27, 0.25, 400), (0.6, 0.25, 400)),
    (rules.student_ignores_teacher, "StudentIgnoresTeacher",
     ([0.3, 0.5, 0.5, 0.5, 0.5], {"train/dkd_loss": [1, 0.9, 0.9, 0.9, 0.9], "train/at_loss": [-0.5] * 5}),
     ([0.3, 0.5, 0.5, 0.5, 0.5], {"train/dkd_loss": [1, 0.9, 0.9, 0.9, 0.9], "train/at_loss": [5, 4, 3, 2, 1]})),
    (rules.student_ignores_teacher, "StudentIgnoresTeacher", ([0.5] * 5, {"kd": [1] * 5}), ([0.5] * 5, {})),
    (rules.features_collapse, "FeaturesCollapse", ([20.0, 4.8], 296), ([4.8, 28.8], 296)),
    (rules.features_collapse, "FeaturesCollapse", ([4.8], 100), ([4.8], 99)),
    (rules.student_under_trained, "StudentUnderTrained", ([0.2, 0.3, 0.4, 0.5, 0.6], [0.3] * 5),
     ([0.2, 0.5, 0.6, 0.6, 0.605], [0.3] * 5)),
    (rules.student_under_trained, "StudentUnderTrained", ([0.2, 0.3, 0.4, 0.5, 0.6], [0.3] * 5, "scratch"),
     ([0.2, 0.3, 0.4, 0.5, 0.6], [0.3, 0.4, 0.6, 0.8, 0.9])),
    (rules.temperature, "TemperatureTooHigh", ([0.99] * 5,), ([0.5] * 5,)),
    (rules.temperature, "TemperatureTooLow", ([0.001] * 5,), ([0.1] * 5,)),
    (rules.saturated_activation, "SaturatedActivation", ({"gate": 0.9},), ({"gate": 0.3},)),
    (rules.weight_update_ratio, "WeightUpdateRatio", ([1e-9] * 5,), ([1e-3] * 5,)),
    (rules.weight_update_ratio, "WeightUpdateRatio", ([0.4] * 5,), ([0.4, 1e-3, 1e-3, 1e-3],)),  # the first step's
    (rules.all_zero, "AllZero", ({"a": 1.0, "b": 0.5},), ({"a": 0.99},)),
    (rules.unchanged_tensor, "UnchangedTensor", ([["a", "b"], ["a"], ["a", "c"]],), ([["a"], [], ["a"]],)),
    (rules.unchanged_tensor, "UnchangedTensor", ([[], ["a"], ["a"], ["a"]],), ([["a"], ["a"]],)),
    (rules.tensor_variance, "TensorVariance", ({"a": 2e3},), ({"a": 1.0, "b": 30.0},)),
    (rules.tensor_variance, "TensorVariance", ({"a": 1e-6},), ({"a": 1e-3},)),
    (rules.check_input_images, "CheckInputImages", ([PICTURES | {"constant": 0.2}] * 3,), ([PICTURES] * 3,)),
    (rules.check_input_images, "CheckInputImages", ([PICTURES | {"duplicated": 0.5}],), ([PICTURES | {"low": 9}],)),
    (rules.check_input_images, "CheckInputImages", ([PICTURES | {"high": 1}],), ([PICTURES | {"high": 1}, PICTURES],)),
    (rules.check_input_images, "CheckInputImages", ([PICTURES | {"bytes": False}],),
     ([PICTURES | {"bytes": False, "low": -2.1, "high": 2.6}],)),
    (rules.overtraining, "Overtraining", ([0.5, 0.8] + [0.79] * 10,), ([0.5, 0.8] + [0.79] * 9 + [0.81],)),
    (rules.stalled_training, "StalledTraining", (1900.0,), (100.0,)),
    (rules.similar_across_runs, "SimilarAcrossRuns",
     ({n: 2 - n / 9 for n in range(9)}, {"a/000": {n: 2 - n / 9 for n in range(6)}}),
     ({n: 2 - n / 9 for n in range(9)}, {"a/000": {n: 2 - n / 8 for n in range(6)}})),
    (rules.similar_across_runs, "SimilarAcrossRuns", ({n: 1.0 for n in range(5)}, {"b": {n: 1.0 for n in range(5)}}),
     ({n: 1.0 for n in range(5)}, {"b": {n: 1.0 for n in range(4)}})),  # fewer in common say little
    (rules.confusion, "Confusion", ([("cat", "dog", 8), ("dog", "cat", 1)], {"cat": 20, "dog": 20}),
     ([("cat", "dog", 5)], {"cat": 20, "dog": 20})),
    (rules.confusion, "Confusion", ([("cat", "dog", 9)], {"cat": 10}), ([("cat", "dog", 9)], {"cat": 9})),
    (rules.loss_term_dominates, "LossTermDominates", ({"kd": 99.0, "task": 1.0},), ({"kd": 60.0, "task": 40.0},)),
    (rules.loss_term_dominates, "LossTermDominates", ({"kd": 99.0, "task": 1.0},), ({"kd": 1.0},)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "name", "fires", "silent"), CASES, ids=[c[1] for c in CASES])
def test_a_rule_fires_where_it_must_and_only_there(
    rule: Callable[..., Any], name: str, fires: tuple[Any, ...], silent: tuple[Any, ...]
) -> None:
    found = rule(*fires)
    assert found is not None
    assert found.rule == name
    assert found.text
    assert found.lever
    assert rule(*silent) is None


SINGLE = (
    rules.stalled_training,
    rules.max_initialization_time,
    rules.teacher_near_chance,
    rules.phase_variation,
    rules.scheduler_delay,
)  # these take numbers, not readings


@pytest.mark.parametrize("rule", [rule for rule in dict.fromkeys(case[0] for case in CASES) if rule not in SINGLE])
def test_nothing_recorded_nothing_said(rule: Callable[..., Any]) -> None:
    empty: dict[Callable[..., Any], tuple[Any, ...]] = {
        rules.straggler: ({},),
        rules.dead_relu: ({},),
        rules.student_ignores_teacher: ([], {}),
        rules.student_under_trained: ([], []),
        rules.poor_weight_initialization: ({},),
        rules.loss_term_dominates: ({},),
        rules.dataloader: (0.0, 0, 0, 0),
        rules.saturated_activation: ({},),
        rules.all_zero: ({},),
        rules.tensor_variance: ({},),
        rules.similar_across_runs: ({}, {}),
        rules.confusion: ([], {}),
    }
    count = {c[0]: len(c[2]) for c in CASES}[rule]
    assert rule(*empty.get(rule, ([],) * count)) is None


def test_every_rule_has_records_on_which_it_fires() -> None:
    assert {case[1] for case in CASES} == set(rules.RULES)


def test_each_of_several_students_is_judged_by_the_tasks_own_metric() -> None:
    run = Run(Path("x"), summary={"primary": "miou"}, config={"students": {"a": {}, "b": {}}})
    falling, rising = [0.8, 0.6, 0.6, 0.6, 0.6], [0.4, 0.5, 0.6, 0.7, 0.8]
    run.metrics = [
        {"epoch": n, "a/train/loss": 2 - n / 5, "b/train/loss": 2 - n / 5, "a/val/miou": falling[n], "b/val/miou": up}
        for n, up in enumerate(rising)
    ]
    assert [f.text.split()[0] for f in rules.findings(run) if f.rule == "Overfit"] == ["a/val/miou"]


def test_an_under_trained_student_is_named_once_its_run_is_done() -> None:
    run = Run(Path("x"), summary={"primary": "acc1", "status": "done", "student": {"start": "scratch"}})
    run.metrics = [{"epoch": n, "val/acc1": 0.1 * n, "val/agreement": 0.1 * n} for n in range(6)]
    (found,) = [f for f in rules.findings(run) if f.rule == "StudentUnderTrained"]
    assert "val/acc1 still rose (30.0% to 50.0% in the last 2 epochs)" in found.text
    assert found.lever.startswith("model.student.inherit=auto or .pretrained=true")
    run.summary["student"]["start"] = "inherited"
    (found,) = [f for f in rules.findings(run) if f.rule == "StudentUnderTrained"]
    assert found.lever.startswith("more trainer.max_epochs")
    run.summary["status"] = "interrupted"
    assert not [f for f in rules.findings(run) if f.rule == "StudentUnderTrained"]


def test_thresholds_are_arguments() -> None:
    assert rules.low_gpu_utilization([60] * 1600, low=50) is None
    assert rules.step_outlier([50.0] * 2000 + [500.0] * 5, ignore=2) is not None
    assert rules.exploding_tensor([math.nan] * 3) is not None


def test_a_run_that_balances_its_classes_is_not_warned_of_them(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    run.counts["train"] = [1000, 50]
    assert "ClassImbalance" in {finding.rule for finding in rules.findings(run)}
    run.config = {"data": {"balance_classes": True}}
    assert "ClassImbalance" not in {finding.rule for finding in rules.findings(run)}
