"""All rules over a run: what is unusual about the machine or the training, and what to do about it."""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kd.report import health_rules, machine_rules, training_rules
from kd.report.charts import metrics_by_epoch
from kd.report.facts import Facts
from kd.report.host_limits import swing
from kd.report.limits import Finding, Limit
from kd.report.metric import less_is_better
from kd.report.records import Run, read_siblings
from kd.report.step_facts import mean, part
from kd.report.verdict import FEWEST

Found = list[Finding | None]
Thresholds = Mapping[str, float | Mapping[str, float]]  # By rule and argument, or by ``<rule>.<argument>``

RULES: dict[str, Callable[..., Finding | None]] = {
    "CPUBottleneck": machine_rules.cpu_bottleneck, "IOBottleneck": machine_rules.io_bottleneck,
    "LowGPUUtilization": machine_rules.low_gpu_utilization, "BatchSize": machine_rules.batch_size,
    "GPUMemoryIncrease": machine_rules.gpu_memory_increase, "MemoryLeak": machine_rules.memory_leak,
    "LoadBalancing": machine_rules.load_balancing, "SlowRank": machine_rules.straggler,
    "StepOutlier": machine_rules.step_outlier, "MaxInitializationTime": machine_rules.max_initialization_time,
    "Dataloader": machine_rules.dataloader, "HotCores": machine_rules.hot_cores,
    "EfaMissing": machine_rules.efa_missing,
    "PhaseVariation": machine_rules.phase_variation, "SchedulerDelay": machine_rules.scheduler_delay,
    "Throttling": machine_rules.throttling, "Swap": machine_rules.swapping,
    "LossNotDecreasing": training_rules.loss_not_decreasing, "Overfit": training_rules.overfit,
    "VanishingGradient": health_rules.vanishing_gradient, "ExplodingTensor": health_rules.exploding_tensor,
    "DeadRelu": health_rules.dead_relu, "PoorWeightInitialization": health_rules.poor_weight_initialization,
    "SaturatedActivation": health_rules.saturated_activation, "WeightUpdateRatio": health_rules.weight_update_ratio,
    "AllZero": health_rules.all_zero, "UnchangedTensor": health_rules.unchanged_tensor,
    "TensorVariance": health_rules.tensor_variance, "CheckInputImages": health_rules.check_input_images,
    "ClassImbalance": training_rules.class_imbalance, "TeacherNearChance": training_rules.teacher_near_chance,
    "StudentIgnoresTeacher": training_rules.student_ignores_teacher,
    "StudentUnderTrained": training_rules.student_under_trained, "TemperatureTooHigh": training_rules.temperature,
    "TemperatureTooLow": training_rules.temperature, "LossTermDominates": training_rules.loss_term_dominates,
    "Overtraining": training_rules.overtraining, "StalledTraining": training_rules.stalled_training,
    "SimilarAcrossRuns": training_rules.similar_across_runs, "Confusion": training_rules.confusion,
    "FeaturesCollapse": training_rules.features_collapse,
}  # fmt: skip


READ = ("processes", "others")  # arguments of rules that are read, not set
# they need no steps
ALWAYS = ("MaxInitializationTime", "StalledTraining", "TeacherNearChance", "ClassImbalance", "EfaMissing")


def thresholds_of(rule: str) -> dict[str, float]:
    """What of a rule can be set, with its default."""
    found = {name: p.default for name, p in inspect.signature(RULES[rule]).parameters.items() if name not in READ}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def findings_of(facts: Facts, limits: Sequence[Limit]) -> list[Finding]:
    """All rules that fire on a run, with the thresholds of its settings; ``limits`` are the run's."""
    ask = _Rules((facts.run.config.get("monitor") or {}).get("thresholds") or {})
    held_up = any(limit.bound in ("host", "data", "communication") for limit in limits[:1])
    found = [*_machine(facts, ask, held_up), *_steps(facts, ask), *_training(facts, ask)]
    few = 0 < facts.steps_counted < FEWEST
    return [f for f in found if f is not None and (f.rule in ALWAYS or not few)]


def by_rule(thresholds: Thresholds) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for key, value in thresholds.items():
        rule, _, name = key.partition(".")
        found.setdefault(rule, {}).update(value if isinstance(value, Mapping) else {name: value})
    return found


class _Rules:
    """Asks a rule by its name, with the user's thresholds."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = by_rule(thresholds)

    def __call__(self, rule: str, *readings: object, **more: object) -> Finding | None:
        return RULES[rule](*readings, **{**more, **self.thresholds.get(rule, {})})


def _machine(facts: Facts, ask: _Rules, held_up: bool) -> Found:
    found: Found = []
    for samples in facts.run.samples.values():
        gpu_count = max((len(s.get("gpu", [])) for s in samples), default=0)
        whole = [s for s in samples if len(s.get("gpu", [])) == gpu_count]
        cpu = [mean(s["cpu"]) for s in whole]
        gpus = [[s["gpu"][i]["util"] for s in whole] for i in range(gpu_count)]
        memories = [[s["gpu"][i]["mem"] for s in whole] for i in range(gpu_count)]
        gpu = [mean(values) for values in zip(*gpus, strict=True)]
        memory = [mean(values) for values in zip(*memories, strict=True)]
        found += [
            ask("CPUBottleneck", cpu, gpu),
            ask("IOBottleneck", [s.get("iowait", 0.0) for s in whole], gpu),
            ask("LowGPUUtilization", gpu),
            None if held_up else ask("BatchSize", cpu, gpu, memory),  # it holds up a larger batch as well
            *(ask("GPUMemoryIncrease", values) for values in memories),
            ask("LoadBalancing", gpus),
            *(ask("Throttling", [s["gpu"][i].get("throttle", []) for s in whole]) for i in range(gpu_count)),
            ask("MemoryLeak", [s["rss_mb"] for s in whole if "rss_mb" in s]),
            ask("Swap", [s["swap_mb"] for s in whole if "swap_mb" in s]),
        ]
    return [*found, ask("HotCores", facts.core_use, [g["util"] for s in facts.samples for g in s.get("gpu", [])])]


def _steps(facts: Facts, ask: _Rules) -> Found:
    taken = part(facts.phases, "data"), facts.workers, facts.threads, facts.cores
    around: dict[str, float] = {"processes": facts.processes, "others": facts.other_cores}
    trains = "status" not in facts.run.summary and facts.steps
    return [
        ask("StepOutlier", facts.steps_ms),
        ask("MaxInitializationTime", facts.startup["s"]),
        ask("Dataloader", *taken, **around) if facts.header and not facts.run.tier else None,
        ask("SlowRank", facts.compute_ms),
        ask("EfaMissing", facts.header.get("efa_network", "")),
        ask("PhaseVariation", swing(facts)),
        ask("SchedulerDelay", facts.thread_wait, facts.loader_wait, facts.delayed_thread),
        ask("StalledTraining", time.time() - facts.steps[-1]["t"]) if trains else None,
    ]


def _training(facts: Facts, ask: _Rules) -> Found:
    run = facts.run
    teacher = (run.summary.get("teacher") or {}).get("val") or {}
    val_counts = run.counts.get("val", [])
    balanced = (run.config.get("data") or {}).get("balance_classes") is True
    loss = {row["step"]: row["train/loss"] for row in run.metrics if "train/loss" in row and "step" in row}
    others = {
        name: {row["step"]: row["train/loss"] for row in metrics if "train/loss" in row and "step" in row}
        for name, metrics in (read_siblings(run.folder).items() if len(loss) >= 5 else ())
    }
    return [
        ask("LossNotDecreasing", [row["train/loss"] for row in run.metrics if "train/loss" in row]),
        None if balanced else ask("ClassImbalance", run.counts.get("train", [])),
        ask("TeacherNearChance", teacher["acc1"], max(val_counts) / sum(val_counts), sum(val_counts))
        if "acc1" in teacher and val_counts
        else None,
        ask("SimilarAcrossRuns", loss, others),
        *(finding for student in run.students for finding in _of_student(run, student, ask)),
    ]


def _of_student(run: Run, student: str, ask: _Rules) -> Found:
    found = [*_health(run.health_of(student), ask), _confusion(run, student, ask)]
    named = [replace(f, text=f"{student}: {f.text}") if f and student else f for f in found]
    return [*_learning(run, f"{student}/" if student else "", ask), *named]


def _health(health: list[dict[str, Any]], ask: _Rules) -> Found:
    if not health:
        return []
    last, norms = health[-1], [h["grad_norm"] for h in health if "grad_norm" in h]
    spread = {n: s for n, s in health[0].get("spread", {}).items() if s is not None}
    entropy = [h["teacher_entropy"] for h in health if h.get("teacher_entropy") is not None]
    softened = {**ask.thresholds.get("TemperatureTooHigh", {}), **ask.thresholds.get("TemperatureTooLow", {})}
    return [
        ask("VanishingGradient", [n for n in norms if n is not None]),
        ask("ExplodingTensor", norms),
        ask("DeadRelu", last.get("dead", {})),
        ask("PoorWeightInitialization", spread),
        ask("SaturatedActivation", last.get("saturated", {})),
        ask("WeightUpdateRatio", [h["update_ratio"] for h in health if h.get("update_ratio") is not None]),
        ask("AllZero", last.get("zeros", {})),
        ask("UnchangedTensor", [h["unchanged"] for h in health if "unchanged" in h]),
        ask("TensorVariance", {n: s for n, s in last.get("spread", {}).items() if s is not None}),
        ask("CheckInputImages", [h["inputs"] for h in health if h.get("inputs")]),
        training_rules.temperature(entropy, **softened),
        ask("LossTermDominates", last.get("loss_shares", {})),
    ]


def _confusion(run: Run, student: str, ask: _Rules) -> Finding | None:
    newest = run.confusion_of(student)
    if newest is None or not run.classes:
        return None
    names = run.classes
    pairs = [(names[true], names[given], n) for true, given, n in newest["pairs"]]
    return ask("Confusion", pairs, dict(zip(names, newest["counts"], strict=False)))


def _learning(run: Run, place: str, ask: _Rules) -> Found:
    """One student's; its metrics are logged below ``place``."""

    def by_epoch(name: str) -> list[float]:
        return metrics_by_epoch(run, [name])[1].get(name, [])

    metric = f"{place}val/{run.primary}"
    scores = [] if less_is_better(run.primary) else by_epoch(metric)  # the rules read what should rise
    own = {column for row in run.metrics for column in row if column.startswith(f"{place}train/")}
    names = sorted(c for c in own if c.endswith("_loss") and c != f"{place}train/task_loss")
    agreement = by_epoch(f"{place}val/agreement")
    each = run.summary.get("students") or {"": run.summary.get("student") or {}}
    start = (each.get(place.removesuffix("/")) or {}).get("start", "")
    pictures = next((header.get("val", 0) for header in run.headers.values()), 0)
    return [
        ask("Overfit", by_epoch(f"{place}train/loss"), scores, metric=metric),
        ask("Overtraining", scores, metric=metric),
        ask("FeaturesCollapse", by_epoch(f"{place}val/rankme"), pictures),
        ask("StudentIgnoresTeacher", agreement, {name: by_epoch(name) for name in names}),
        ask("StudentUnderTrained", scores, agreement, start=start, metric=metric)
        if run.summary.get("status") == "done"
        else None,
    ]
