"""A run, explained: what limits it, and by which rules its machine or its training is unusual."""

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

from kd.report import limits, machine_rules, training_rules
from kd.report.charts import by_epoch
from kd.report.facts import OWN, Facts
from kd.report.limits import LEADS, WORTH, Finding, Limit, swing
from kd.report.metric import less_is_better
from kd.report.records import PHASES, Run, read_siblings
from kd.report.step_facts import gpus_of, mean, part

BOUNDS = ("data", "teacher", "student", "communication", "host", "startup", "checkpoint", "precision")
NAMES = {**{name: f"{name}-bound" for name in BOUNDS}, "startup": "start-up-bound", "none": "balanced"}
FEWEST = 20  # steps that a verdict needs
STAYS = 1.15  # a headline that is shown already stays down to this gain
AHEAD = 1.1  # and gives way to another from this multiple of its gain

Found = list[Finding | None]
Rules = Mapping[str, "partial[Finding | None]"]  # By name, with the user's thresholds
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
    "VanishingGradient": training_rules.vanishing_gradient, "ExplodingTensor": training_rules.exploding_tensor,
    "DeadRelu": training_rules.dead_relu, "PoorWeightInitialization": training_rules.poor_weight_initialization,
    "SaturatedActivation": training_rules.saturated_activation, "WeightUpdateRatio": training_rules.weight_update_ratio,
    "AllZero": training_rules.all_zero, "UnchangedTensor": training_rules.unchanged_tensor,
    "TensorVariance": training_rules.tensor_variance, "CheckInputImages": training_rules.check_input_images,
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


def by_rule(thresholds: Thresholds) -> dict[str, dict[str, float]]:
    """Thresholds by rule and argument.

    >>> by_rule({"Overfit.drop": 0.1, "Overfit": {"patience": 5}})
    {'Overfit': {'drop': 0.1, 'patience': 5}}
    """
    found: dict[str, dict[str, float]] = {}
    for key, value in thresholds.items():
        rule, _, name = key.partition(".")
        found.setdefault(rule, {}).update(value if isinstance(value, Mapping) else {name: value})
    return found


def _machine(facts: Facts, rules: Rules, held_up: bool) -> Found:
    found: Found = []
    for samples in facts.run.samples.values():
        gpu_count = max((len(s.get("gpu", [])) for s in samples), default=0)
        whole = [s for s in samples if len(s.get("gpu", [])) == gpu_count]
        cpu = [mean(s["cpu"]) for s in whole]
        readings = gpus_of(whole)
        gpus, memories = ([[g[key] for g in gpu] for gpu in readings] for key in ("util", "mem"))
        gpu, memory = ([mean(values) for values in zip(*each, strict=True)] for each in (gpus, memories))
        found += [
            rules["CPUBottleneck"](cpu, gpu),
            rules["IOBottleneck"]([s.get("iowait", 0.0) for s in whole], gpu),
            rules["LowGPUUtilization"](gpu),
            None if held_up else rules["BatchSize"](cpu, gpu, memory),  # it holds up a larger batch as well
            *(rules["GPUMemoryIncrease"](values) for values in memories),
            rules["LoadBalancing"](gpus),
            *(rules["Throttling"]([g.get("throttle", []) for g in each]) for each in readings),
            rules["MemoryLeak"]([s["rss_mb"] for s in whole if "rss_mb" in s]),
            rules["Swap"]([s["swap_mb"] for s in whole if "swap_mb" in s]),
        ]
    return [*found, rules["HotCores"](facts.core_use, [g["util"] for s in facts.samples for g in s.get("gpu", [])])]


def _steps(facts: Facts, rules: Rules) -> Found:
    taken = part(facts.phases, "data"), facts.workers, facts.threads, facts.cores
    around: dict[str, float] = {"processes": facts.processes, "others": facts.other_cores}
    trains = "status" not in facts.run.summary and facts.steps
    return [
        rules["StepOutlier"](facts.steps_ms),
        rules["MaxInitializationTime"](facts.startup["s"]),
        rules["Dataloader"](*taken, **around) if facts.header and not facts.run.tier else None,
        rules["SlowRank"](facts.compute_ms),
        rules["EfaMissing"](facts.header.get("efa_network", "")),
        rules["PhaseVariation"](swing(facts)),
        rules["SchedulerDelay"](facts.thread_wait, facts.loader_wait, facts.delayed_thread),
        rules["StalledTraining"](time.time() - facts.steps[-1]["t"]) if trains else None,
    ]


def _training(facts: Facts, rules: Rules) -> Found:
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
        rules["LossNotDecreasing"]([row["train/loss"] for row in run.metrics if "train/loss" in row]),
        None if balanced else rules["ClassImbalance"](run.counts.get("train", [])),
        rules["TeacherNearChance"](teacher["acc1"], max(val_counts) / sum(val_counts), sum(val_counts))
        if "acc1" in teacher and val_counts
        else None,
        rules["SimilarAcrossRuns"](loss, others),
        *(finding for student in run.students for finding in _of_student(run, student, rules)),
    ]


def _of_student(run: Run, student: str, rules: Rules) -> Found:
    found = _health(run.health_of(student), rules)
    newest = run.confusion_of(student)
    if newest is not None:
        pairs = [(run.classes[true], run.classes[given], n) for true, given, n in newest["pairs"]]
        found.append(rules["Confusion"](pairs, dict(zip(run.classes, newest["counts"], strict=False))))
    named = [replace(f, text=f"{student}: {f.text}") if f and student else f for f in found]
    return [*_learning(run, student, rules), *named]


def _health(health: list[dict[str, Any]], rules: Rules) -> Found:
    if not health:
        return []
    last, norms = health[-1], [h["grad_norm"] for h in health if "grad_norm" in h]
    spread = {n: s for n, s in health[0].get("spread", {}).items() if s is not None}
    entropy = [h["teacher_entropy"] for h in health if h.get("teacher_entropy") is not None]
    return [
        rules["VanishingGradient"]([n for n in norms if n is not None]),
        rules["ExplodingTensor"](norms),
        rules["DeadRelu"](last.get("dead", {})),
        rules["PoorWeightInitialization"](spread),
        rules["SaturatedActivation"](last.get("saturated", {})),
        rules["WeightUpdateRatio"]([h["update_ratio"] for h in health if h.get("update_ratio") is not None]),
        rules["AllZero"](last.get("zeros", {})),
        rules["UnchangedTensor"]([h["unchanged"] for h in health if "unchanged" in h]),
        rules["TensorVariance"]({n: s for n, s in last.get("spread", {}).items() if s is not None}),
        rules["CheckInputImages"]([h["inputs"] for h in health if h.get("inputs")]),
        partial(rules["TemperatureTooHigh"], **rules["TemperatureTooLow"].keywords)(entropy),
        rules["LossTermDominates"](last.get("loss_shares", {})),
    ]


def _learning(run: Run, student: str, rules: Rules) -> Found:
    place = f"{student}/" if student else ""

    def values(name: str) -> list[float]:
        return list(by_epoch(run, name).values())

    metric = f"{place}val/{run.primary}"
    scores = [] if less_is_better(run.primary) else values(metric)  # the rules read what should rise
    own = {column for row in run.metrics for column in row if column.startswith(f"{place}train/")}
    names = sorted(c for c in own if c.endswith("_loss") and c != f"{place}train/task_loss")
    agreement, start = values(f"{place}val/agreement"), run.model_of(student).get("start", "")
    pictures = next((header.get("val", 0) for header in run.headers.values()), 0)
    return [
        rules["Overfit"](values(f"{place}train/loss"), scores, metric=metric),
        rules["Overtraining"](scores, values(f"{place}val/kl"), metric=metric),
        rules["FeaturesCollapse"](values(f"{place}val/rankme"), pictures),
        rules["StudentIgnoresTeacher"](agreement, {name: values(name) for name in names}),
        rules["StudentUnderTrained"](scores, agreement, start=start, metric=metric)
        if run.summary.get("status") == "done"
        else None,
    ]


# -- what limits the run ----------------------------------------------------------------------------------------------
def limits_of(facts: Facts, shown: str = "") -> list[Limit]:
    """All limits of a run, largest gain first; ``shown`` stays the first unless another is clearly larger.

    Args:
        facts: of the run.
        shown: the bound that a display shows now; it stays unless another is clearly larger.
    """
    if not facts.phases:
        return []
    candidates = [
        limits.cpu_contention(facts) or limits.launch_bound(facts),  # a host that gets no core launches slowly
        limits.tier_bound(facts) if facts.run.tier else limits.data_bound(facts),
        limits.teacher_bound(facts),
        limits.communication_bound(facts),
        limits.bookkeeping_bound(facts),
        limits.optimizer_bound(facts),
        limits.precision_bound(facts),
        limits.checkpoint_bound(facts),
        limits.startup_bound(facts),
    ]
    found = [limit for limit in candidates if limit is not None and (limit.gain or 0) >= WORTH / 1.05]
    found.sort(key=lambda limit: -(limit.gain or 0))
    leader = next((limit for limit in found if (limit.gain or 0) >= (STAYS if limit.bound == shown else LEADS)), None)
    held = next((limit for limit in found if limit.bound == shown and (limit.gain or 0) >= STAYS), None)
    if held and leader and (leader.gain or 0) < AHEAD * (held.gain or 0):
        leader = held
    if leader:
        return [leader, *(limit for limit in found if limit is not leader)]
    return [limits.student_bound(facts, alone=not found) or _largest(facts), *found]


def _largest(facts: Facts) -> Limit:
    groups = {name: part(facts.phases, name) for name in PHASES if name not in OWN}
    groups["the student's own training"] = sum(part(facts.phases, name) for name in OWN)
    name = max(groups, key=lambda group: groups[group])
    named = f"the {name}" if name in PHASES else name
    return Limit("none", f"no part of the step stands out; most of it ({groups[name]:.0%}) is {named}", "", None)


def sentence(limit: Limit) -> str:
    """``data-bound: <evidence>; <lever> <gain>x``."""
    head = f"{NAMES[limit.bound]}: {limit.text}"
    if not limit.gain:
        return head
    return f"{head}; {limit.lever} {'' if 'at most' in limit.lever else 'would give '}{limit.gain:.1f}x"


class Explained:
    """What limits a run and what is unusual about it, each worked out once."""

    def __init__(self, run: Run) -> None:
        self.run, self.facts = run, Facts(run)

    @cached_property
    def limits(self) -> list[Limit]:
        """What limits the run, the largest gain first."""
        return limits_of(self.facts)

    @cached_property
    def verdict(self) -> dict[str, Any]:
        """The headline as ``summary.json`` holds it; it needs :data:`FEWEST` steps."""
        facts = self.facts
        phases = {name: round(ms, 3) for name, ms in facts.phases.items() if name in PHASES}
        if not self.limits or facts.steps_counted < FEWEST:
            text = f"too few steps were recorded to find the limit of the speed ({facts.steps_counted} of {FEWEST})"
            return {"bound": "none", "text": text, "lever": "", "predicted_speedup": None, "phases_ms": phases}
        first, *others = self.limits
        return {
            "bound": first.bound,
            "text": sentence(first),
            "lever": first.lever,
            "predicted_speedup": round(first.gain, 2) if first.gain else None,
            "phases_ms": phases,
            "others": [asdict(limit) for limit in others],
        }

    @cached_property
    def findings(self) -> list[Finding]:
        """All rules that fire, with the thresholds of the run's settings."""
        facts, own = self.facts, by_rule((self.run.config.get("monitor") or {}).get("thresholds") or {})
        rules = {name: partial(rule, **own.get(name, {})) for name, rule in RULES.items()}
        held_up = any(limit.bound in ("host", "data", "communication") for limit in self.limits[:1])
        found = [*_machine(facts, rules, held_up), *_steps(facts, rules), *_training(facts, rules)]
        few = 0 < facts.steps_counted < FEWEST
        return [f for f in found if f is not None and (f.rule in ALWAYS or not few)]
