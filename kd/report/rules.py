"""A run, explained: what limits it, and by which rules its machine or its training is unusual."""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from kd.report import limits, machine_rules, training_rules
from kd.report.charts import by_epoch
from kd.report.facts import OWN, Facts
from kd.report.limits import LEADS, WORTH, Finding, Limit, swing
from kd.report.metric import less_is_better
from kd.report.ratio import share
from kd.report.records import PHASES, RunRecords, Sample, read_siblings
from kd.report.step_facts import gpus_of, known_utilisation, mean, part

BOUNDS = (
    "data",
    "teacher",
    "student",
    "communication",
    "host",
    "startup",
    "checkpoint",
    "precision",
)
NAMES = {
    **{name: f"{name}-bound" for name in BOUNDS},
    "startup": "start-up-bound",
    "none": "balanced",
}
FEWEST = 20  # steps that a verdict needs
STAYS = 1.15  # a headline that is shown already stays down to this gain
AHEAD = 1.1  # and gives way to another from this multiple of its gain

Rule = Callable[..., Finding | None]
Thresholds = Mapping[
    str, float | Mapping[str, float]
]  # By rule and argument, or by ``<rule>.<argument>``

RULES: dict[str, Rule] = {
    "CPUBottleneck": machine_rules.cpu_bottleneck, "IOBottleneck": machine_rules.io_bottleneck,
    "LowGPUUtilization": machine_rules.low_gpu_utilization, "BatchSize": machine_rules.batch_size,
    "GPUMemoryIncrease": machine_rules.gpu_memory_increase, "MemoryLeak": machine_rules.memory_leak,
    "LoadBalancing": machine_rules.load_balancing, "SlowRank": machine_rules.straggler,
    "StepOutlier": machine_rules.step_outlier, "MaxInitializationTime": machine_rules.max_initialization_time,
    "Dataloader": machine_rules.dataloader, "HotCores": machine_rules.hot_cores,
    "EfaMissing": machine_rules.efa_missing,
    "PhaseVariation": machine_rules.phase_variation, "SchedulerDelay": machine_rules.scheduler_delay,
    "Throttling": machine_rules.throttling, "Swap": machine_rules.swapping,
    "LossNotDecreasing": training_rules.loss_not_decreasing, "LossRising": training_rules.loss_rising,
    "Overfit": training_rules.overfit,
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
ALWAYS = (
    "MaxInitializationTime",
    "StalledTraining",
    "TeacherNearChance",
    "ClassImbalance",
    "EfaMissing",
)


def thresholds_of(rule: str) -> dict[str, float]:
    """What of a rule can be set, with its default."""
    found = {
        name: p.default
        for name, p in inspect.signature(RULES[rule]).parameters.items()
        if name not in READ
    }
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


class Rulebook:
    """Applies rules one by one: what one of them, or its numbers, can't be worked out from takes no other with it."""

    def __init__(self, thresholds: Thresholds, failures: list[str]) -> None:
        self._own = by_rule(thresholds)
        self._failures = failures
        self.findings: list[Finding] = []

    def apply(self, name: str, ask: Callable[[Rule], Finding | None], student: str = "") -> None:
        """Keeps the finding of the rule ``name``; ``ask`` calls it, with the user's thresholds set, on its numbers."""
        rule = partial(RULES[name], **self._own.get(name, {}))
        finding = attempt(f"rule {name}", self._failures, lambda: ask(rule))
        if finding is not None:
            self.findings.append(
                replace(finding, text=f"{student}: {finding.text}") if student else finding
            )

    def thresholds_of(self, name: str) -> dict[str, float]:
        """What the user has set of a rule."""
        return self._own.get(name, {})

    def apply_all(self, what: str, apply: Callable[[], None]) -> None:
        """Applies rules that share numbers (``what``), which may be missing."""
        attempt(f"rules of {what}", self._failures, apply)


Result = TypeVar("Result")


def attempt(name: str, failures: list[str], work_out: Callable[[], Result]) -> Result | None:
    """What ``work_out`` returns; None where it fails, which is noted by its name: the rest of a report stands."""
    try:
        return work_out()
    except Exception as error:
        failure = f"{name} can't be worked out: {type(error).__name__}: {error}"
        if failure not in failures:
            failures.append(failure)
        return None


def _machine(facts: Facts, book: Rulebook, held_up: bool) -> None:
    for node, samples in facts.run.samples.items():
        book.apply_all(f"the machine {node}", partial(_one_machine, samples, book, held_up))
    book.apply("HotCores", lambda rule: rule(facts.core_use, known_utilisation(facts.samples)))


def _one_machine(samples: Sequence[Sample], book: Rulebook, held_up: bool) -> None:
    gpu_count = max((len(s.get("gpu", [])) for s in samples), default=0)
    whole = [s for s in samples if len(s.get("gpu", [])) == gpu_count]
    cpu = [mean(s["cpu"]) for s in whole]
    readings = gpus_of(whole)
    gpus, memories = _by_gpu(readings, "util"), _by_gpu(readings, "mem")
    if not any(
        map(any, gpus)
    ):  # 0 % while a run trains is what NVML reports where it can't measure
        gpus = []
    gpu, memory = (
        [mean(values) for values in zip(*each, strict=True)] for each in (gpus, memories)
    )
    book.apply("CPUBottleneck", lambda rule: rule(cpu, gpu))
    book.apply("IOBottleneck", lambda rule: rule([s.get("iowait", 0.0) for s in whole], gpu))
    book.apply("LowGPUUtilization", lambda rule: rule(gpu))
    if not held_up:  # it holds up a larger batch as well
        book.apply("BatchSize", lambda rule: rule(cpu, gpu, memory))
    for used_memory in memories:
        book.apply("GPUMemoryIncrease", partial(_call, used_memory))
    book.apply("LoadBalancing", lambda rule: rule(gpus))
    for reading in readings:
        book.apply("Throttling", partial(_call, [g.get("throttle", []) for g in reading]))
    book.apply("MemoryLeak", lambda rule: rule([s["rss_mb"] for s in whole if "rss_mb" in s]))
    book.apply("Swap", lambda rule: rule([s["swap_mb"] for s in whole if "swap_mb" in s]))


def _call(values: object, rule: Rule) -> Finding | None:
    return rule(values)


def _by_gpu(readings: Sequence[Sequence[Mapping[str, float]]], key: str) -> list[list[float]]:
    """A reading's values of each GPU; a GPU that lacks one is left out: unknown is not 0."""
    values = [[reading.get(key) for reading in gpu] for gpu in readings]
    return [
        [value for value in of_gpu if value is not None] for of_gpu in values if None not in of_gpu
    ]


def _steps(facts: Facts, book: Rulebook) -> None:
    book.apply("StepOutlier", lambda rule: rule(facts.steps_ms))
    book.apply("MaxInitializationTime", lambda rule: rule(facts.startup["s"]))
    if facts.header and not facts.run.tier:
        book.apply(
            "Dataloader",
            lambda rule: rule(
                part(facts.phases, "data"),
                facts.workers,
                facts.threads,
                facts.cores,
                processes=facts.processes,
                others=facts.other_cores,
            ),
        )
    book.apply("SlowRank", lambda rule: rule(facts.compute_ms))
    book.apply("EfaMissing", lambda rule: rule(facts.header.get("efa_network", "")))
    book.apply("PhaseVariation", lambda rule: rule(swing(facts)))
    book.apply(
        "SchedulerDelay",
        lambda rule: rule(facts.thread_wait, facts.loader_wait, facts.delayed_thread),
    )
    if "status" not in facts.run.summary and facts.steps:
        book.apply("StalledTraining", lambda rule: rule(time.time() - facts.steps[-1]["t"]))


def _training(facts: Facts, book: Rulebook) -> None:
    run = facts.run
    teacher = (run.summary.get("teacher") or {}).get("val") or {}
    val_counts = run.counts.get("val", [])
    losses = [row["train/loss"] for row in run.metrics if "train/loss" in row]
    loss = {
        row["step"]: row["train/loss"]
        for row in run.metrics
        if "train/loss" in row and "step" in row
    }
    others = {
        name: {
            row["step"]: row["train/loss"]
            for row in metrics
            if "train/loss" in row and "step" in row
        }
        for name, metrics in (read_siblings(run.folder).items() if len(loss) >= 5 else ())
    }
    book.apply("LossNotDecreasing", lambda rule: rule(losses))
    book.apply("LossRising", lambda rule: rule(losses))
    if (run.config.get("data") or {}).get("balance_classes") is not True:
        book.apply("ClassImbalance", lambda rule: rule(run.counts.get("train", [])))
    val_count: int = sum(val_counts)
    if "acc1" in teacher and val_count:
        chance = share(max(val_counts), val_count)
        book.apply("TeacherNearChance", lambda rule: rule(teacher["acc1"], chance, val_count))
    book.apply("SimilarAcrossRuns", lambda rule: rule(loss, others))
    for student in run.students:
        whose = student or "the student"
        book.apply_all(f"{whose}'s metrics", partial(_learning, run, student, book))
        book.apply_all(
            f"{whose}'s tensors", partial(_health, run.health_of(student), student, book)
        )
        book.apply_all(f"{whose}'s mistakes", partial(_mistakes, run, student, book))


def _mistakes(run: RunRecords, student: str, book: Rulebook) -> None:
    newest = run.confusion_of(student)
    if newest is None:
        return
    pairs = [(run.classes[true], run.classes[called], n) for true, called, n in newest["pairs"]]
    counts = dict(zip(run.classes, newest["counts"], strict=False))
    book.apply("Confusion", lambda rule: rule(pairs, counts), student)


def _health(health: list[dict[str, Any]], student: str, book: Rulebook) -> None:
    if not health:
        return
    last, norms = health[-1], [h["grad_norm"] for h in health if "grad_norm" in h]
    first_spread = {n: s for n, s in health[0].get("spread", {}).items() if s is not None}
    last_spread = {n: s for n, s in last.get("spread", {}).items() if s is not None}
    entropy = [h["teacher_entropy"] for h in health if h.get("teacher_entropy") is not None]
    ratios = [h["update_ratio"] for h in health if h.get("update_ratio") is not None]
    numbers: dict[str, object] = {
        "VanishingGradient": [n for n in norms if n is not None],
        "ExplodingTensor": norms,
        "DeadRelu": last.get("dead", {}),
        "PoorWeightInitialization": first_spread,
        "SaturatedActivation": last.get("saturated", {}),
        "WeightUpdateRatio": ratios,
        "AllZero": last.get("zeros", {}),
        "UnchangedTensor": [h["unchanged"] for h in health if "unchanged" in h],
        "TensorVariance": last_spread,
        "CheckInputImages": [h["inputs"] for h in health if h.get("inputs")],
        "LossTermDominates": last.get("loss_shares", {}),
    }
    for name, values in numbers.items():
        book.apply(name, partial(_call, values), student)
    low = book.thresholds_of(
        "TemperatureTooLow"
    )  # one rule has two names, each with its own threshold
    book.apply("TemperatureTooHigh", lambda rule: rule(entropy, **low), student)


def _learning(run: RunRecords, student: str, book: Rulebook) -> None:
    place = f"{student}/" if student else ""

    def values(name: str) -> list[float]:
        return list(by_epoch(run, name).values())

    metric = f"{place}val/{run.primary}"
    scores = (
        [] if less_is_better(run.primary) else values(metric)
    )  # the rules read what should rise
    columns = {
        column for row in run.metrics for column in row if column.startswith(f"{place}train/")
    }
    names = sorted(c for c in columns if c.endswith("_loss") and c != f"{place}train/task_loss")
    agreement, start = values(f"{place}val/agreement"), run.model_of(student).get("start", "")
    pictures = next((header.get("val", 0) for header in run.headers.values()), 0)
    book.apply("Overfit", lambda rule: rule(values(f"{place}train/loss"), scores, metric=metric))
    book.apply("Overtraining", lambda rule: rule(scores, values(f"{place}val/kl"), metric=metric))
    book.apply("FeaturesCollapse", lambda rule: rule(values(f"{place}val/rankme"), pictures))
    book.apply(
        "StudentIgnoresTeacher",
        lambda rule: rule(agreement, {name: values(name) for name in names}),
    )
    if run.summary.get("status") == "done":
        book.apply(
            "StudentUnderTrained", lambda rule: rule(scores, agreement, start=start, metric=metric)
        )


# -- what limits the run ----------------------------------------------------------------------------------------------
LIMITS: dict[str, Callable[[Facts], Limit | None]] = {
    # a host that gets no core launches slowly
    "host": lambda facts: limits.cpu_contention(facts) or limits.launch_bound(facts),
    "data": lambda facts: limits.tier_bound(facts) if facts.run.tier else limits.data_bound(facts),
    "teacher": limits.teacher_bound,
    "communication": limits.communication_bound,
    "bookkeeping": limits.bookkeeping_bound,
    "optimizer": limits.optimizer_bound,
    "precision": limits.precision_bound,
    "checkpoint": limits.checkpoint_bound,
    "startup": limits.startup_bound,
}


def limits_of(facts: Facts, shown: str = "", failures: list[str] | None = None) -> list[Limit]:
    """All limits of a run, largest gain first; ``shown`` stays the first unless another is clearly larger.

    A limit that can't be worked out takes no other with it.

    Args:
        facts: of the run.
        shown: the bound that a display shows now; it stays unless another is clearly larger.
        failures: gets the name of each limit that can't be worked out, and why.
    """
    if not facts.phases:
        return []
    failures = [] if failures is None else failures
    candidates = [
        attempt(f"limit {name}", failures, partial(limit, facts)) for name, limit in LIMITS.items()
    ]
    found = [
        limit for limit in candidates if limit is not None and (limit.gain or 0) >= WORTH / 1.05
    ]
    found.sort(key=lambda limit: -(limit.gain or 0))
    leader = next(
        (
            limit
            for limit in found
            if (limit.gain or 0) >= (STAYS if limit.bound == shown else LEADS)
        ),
        None,
    )
    held = next(
        (limit for limit in found if limit.bound == shown and (limit.gain or 0) >= STAYS), None
    )
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
    return Limit(
        "none",
        f"no part of the step stands out; most of it ({groups[name]:.0%}) is {named}",
        "",
        None,
    )


def sentence(limit: Limit) -> str:
    """``data-bound: <evidence>; <lever> <gain>x``."""
    head = f"{NAMES[limit.bound]}: {limit.text}"
    if not limit.gain:
        return head
    return f"{head}; {limit.lever} {'' if 'at most' in limit.lever else 'would give '}{limit.gain:.1f}x"


class Explained:
    """What limits a run and what is unusual about it, each worked out once."""

    def __init__(self, run: RunRecords) -> None:
        self.run, self.facts = run, Facts(run)
        self.failures: list[
            str
        ] = []  # rules, limits and sections that could not be worked out, and why

    @cached_property
    def limits(self) -> list[Limit]:
        """What limits the run, the largest gain first."""
        return (
            attempt(
                "the limits of the speed",
                self.failures,
                lambda: limits_of(self.facts, "", self.failures),
            )
            or []
        )

    @cached_property
    def verdict(self) -> dict[str, Any]:
        """The headline as ``summary.json`` holds it; it needs :data:`FEWEST` steps."""
        facts = self.facts
        phases = {name: round(ms, 3) for name, ms in facts.phases.items() if name in PHASES}
        if not self.limits or facts.steps_counted < FEWEST:
            text = f"too few steps were recorded to find the limit of the speed ({facts.steps_counted} of {FEWEST})"
            return {
                "bound": "none",
                "text": text,
                "lever": "",
                "predicted_speedup": None,
                "phases_ms": phases,
            }
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
        facts = self.facts
        book = Rulebook(
            (self.run.config.get("monitor") or {}).get("thresholds") or {}, self.failures
        )
        held_up = any(limit.bound in ("host", "data", "communication") for limit in self.limits[:1])
        book.apply_all("the machines", lambda: _machine(facts, book, held_up))
        book.apply_all("the steps", lambda: _steps(facts, book))
        book.apply_all("the training", lambda: _training(facts, book))
        few = (
            0
            < (attempt("the number of steps", self.failures, lambda: facts.steps_counted) or 0)
            < FEWEST
        )
        return [finding for finding in book.findings if finding.rule in ALWAYS or not few]
