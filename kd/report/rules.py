"""A run, explained: what limits it, and by which rules its machine or its training is unusual."""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from kd.report import limits, machine_rules, training_rules
from kd.report.charts import by_epoch
from kd.report.facts import STUDENT_PHASES, Facts
from kd.report.limits import LEADS, WORTH, Finding, Limit, swing
from kd.report.metric import less_is_better
from kd.report.plain_words import in_plain_words
from kd.report.ratio import share
from kd.report.records import PHASES, RunRecords, Sample, read_siblings
from kd.report.step_facts import gpus_of, known_utilisation, mean, phase_share

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
    "model": "model-bound",  # as "student", of a training that is not kd's
    "startup": "start-up-bound",
    "none": "balanced",
}
FEWEST = 20  # steps that a verdict needs
STAYS = 1.15  # gain down to which a headline that is shown already stays
AHEAD = 1.1  # multiple of its gain from which another headline replaces it

Rule = Callable[..., Finding | None]
"""A pure function of recorded numbers and thresholds; returns a finding where it fires."""
Thresholds = Mapping[str, float | Mapping[str, float]]
"""The user's thresholds: by rule and argument, or by ``<rule>.<argument>``."""

RULES: dict[str, Rule] = {
    # the machine and the steps
    "CPUBottleneck": machine_rules.cpu_bottleneck,
    "IOBottleneck": machine_rules.io_bottleneck,
    "LowGPUUtilization": machine_rules.low_gpu_utilization,
    "BatchSize": machine_rules.batch_size,
    "GPUMemoryIncrease": machine_rules.gpu_memory_increase,
    "MemoryLeak": machine_rules.memory_leak,
    "LoadBalancing": machine_rules.load_balancing,
    "SlowRank": machine_rules.straggler,
    "StepOutlier": machine_rules.step_outlier,
    "MaxInitializationTime": machine_rules.max_initialization_time,
    "Dataloader": machine_rules.dataloader,
    "HotCores": machine_rules.hot_cores,
    "EfaMissing": machine_rules.efa_missing,
    "PhaseVariation": machine_rules.phase_variation,
    "SchedulerDelay": machine_rules.scheduler_delay,
    "Throttling": machine_rules.throttling,
    "Swap": machine_rules.swapping,
    # losses, tensors and metrics
    "LossNotDecreasing": training_rules.loss_not_decreasing,
    "LossRising": training_rules.loss_rising,
    "Overfit": training_rules.overfit,
    "VanishingGradient": training_rules.vanishing_gradient,
    "ExplodingTensor": training_rules.exploding_tensor,
    "DeadRelu": training_rules.dead_relu,
    "PoorWeightInitialization": training_rules.poor_weight_initialization,
    "SaturatedActivation": training_rules.saturated_activation,
    "WeightUpdateRatio": training_rules.weight_update_ratio,
    "AllZero": training_rules.all_zero,
    "UnchangedTensor": training_rules.unchanged_tensor,
    "TensorVariance": training_rules.tensor_variance,
    "CheckInputImages": training_rules.check_input_images,
    "ClassImbalance": training_rules.class_imbalance,
    "TeacherNearChance": training_rules.teacher_near_chance,
    "StudentIgnoresTeacher": training_rules.student_ignores_teacher,
    "WorseThanStart": training_rules.worse_than_start,
    "StudentUnderTrained": training_rules.student_under_trained,
    "TemperatureTooHigh": training_rules.temperature,
    "TemperatureTooLow": training_rules.temperature,
    "LossTermDominates": training_rules.loss_term_dominates,
    "Overtraining": training_rules.overtraining,
    "StalledTraining": training_rules.stalled_training,
    "SimilarAcrossRuns": training_rules.similar_across_runs,
    "Confusion": training_rules.confusion,
    "FeaturesCollapse": training_rules.features_collapse,
}
"""All rules by name; the numbers among their arguments' defaults are thresholds, without :data:`NOT_THRESHOLDS`."""

NOT_THRESHOLDS = (
    "processes",
    "workers",
    "others",
    "remedy",
    "exported_epoch",
)  # arguments with defaults that are read from the records
NEED_NO_STEPS = (
    "MaxInitializationTime",
    "StalledTraining",
    "TeacherNearChance",
    "ClassImbalance",
    "EfaMissing",
    "WorseThanStart",
)


def thresholds_of(rule: str) -> dict[str, float]:
    """The thresholds of a rule that a user can set, with their defaults.

    Args:
        rule: a key of :data:`RULES`.
    """
    thresholds: dict[str, float] = {}
    for name, parameter in inspect.signature(RULES[rule]).parameters.items():
        if name in NOT_THRESHOLDS:
            continue
        if isinstance(parameter.default, int | float):
            thresholds[name] = parameter.default
    return thresholds


def counts_of(rule: str) -> list[str]:
    """The thresholds of a rule that count samples, steps, epochs or pictures, by name: whole numbers.

    Args:
        rule: a key of :data:`RULES`.
    """
    parameters = inspect.signature(RULES[rule]).parameters
    return [name for name in thresholds_of(rule) if parameters[name].annotation is int]


def by_rule(thresholds: Thresholds) -> dict[str, dict[str, float]]:
    """Thresholds by rule and argument.

    >>> by_rule({"Overfit.drop": 0.1, "Overfit": {"patience": 5}})
    {'Overfit': {'drop': 0.1, 'patience': 5}}
    """
    grouped: dict[str, dict[str, float]] = {}
    for key, value in thresholds.items():
        rule, _, argument = key.partition(".")
        of_rule = grouped.setdefault(rule, {})
        if isinstance(value, Mapping):
            of_rule.update(value)
        else:
            of_rule[argument] = value
    return grouped


class Rulebook:
    """Applies rules one by one. A rule that fails, or whose numbers are missing, does not stop the others.

    Args:
        thresholds: set by the user.
        failures: gets a message for each rule that fails.
    """

    def __init__(self, thresholds: Thresholds, failures: list[str]) -> None:
        self._thresholds = by_rule(thresholds)
        self._failures = failures
        self.findings: list[Finding] = []

    def apply(self, name: str, call: Callable[[Rule], Finding | None], student: str = "") -> None:
        """Applies a rule and keeps its finding, if it fires.

        Args:
            name: a key of :data:`RULES`.
            call: calls the rule that it is given on the recorded numbers; the user's thresholds are already bound.
                Numbers are read inside it, so that a failure there is reported as this rule's.
            student: whose numbers they are; its name precedes the finding's text. Empty for a single student.
        """
        rule = partial(RULES[name], **self.thresholds_of(name))
        finding = attempt(f"rule {name}", self._failures, lambda: call(rule))
        if finding is None:
            return
        if student:
            finding = replace(finding, text=f"{student}: {finding.text}")
        self.findings.append(finding)

    def apply_to(self, name: str, numbers: object, student: str = "") -> None:
        """Like :meth:`apply`, for a rule that reads one argument, ``numbers``, beside its thresholds."""
        self.apply(name, lambda rule: rule(numbers), student)

    def thresholds_of(self, name: str) -> dict[str, float]:
        """The thresholds that the user has set for a rule, by argument; settings hold counts as floats."""
        thresholds: dict[str, float] = {}
        counts = counts_of(name)
        for argument, value in self._thresholds.get(name, {}).items():
            thresholds[argument] = int(value) if argument in counts else value
        return thresholds

    def apply_group(self, what: str, apply: Callable[[], None]) -> None:
        """Applies rules that read the same numbers; a failure of these numbers is reported once.

        Args:
            what: names the numbers in the message.
            apply: calls :meth:`apply` for each rule.
        """
        attempt(f"rules of {what}", self._failures, apply)


Result = TypeVar("Result")
Evidence = TypeVar("Evidence", Limit, Finding)


def attempt(name: str, failures: list[str], work_out: Callable[[], Result]) -> Result | None:
    """Calls a function whose failure must not take the rest of a report with it.

    Args:
        name: of what is worked out, for the message.
        failures: gets ``NAME can't be worked out: ...``, once.
        work_out: the function.

    Returns:
        What ``work_out`` returns; None where it raises.
    """
    try:
        return work_out()
    except Exception as error:
        failure = f"{name} can't be worked out: {type(error).__name__}: {error}"
        if failure not in failures:
            failures.append(failure)
        return None


# -- the rules on the numbers of a run ---------------------------------------------------------------------------------
def _apply_machine_rules(facts: Facts, book: Rulebook, held_up: bool) -> None:
    """Applies the rules over the samples of each machine, and over the cores of all.

    Args:
        facts: of the run.
        book: takes the findings.
        held_up: whether the host, the input or the network limits the run: then a larger batch is not suggested.
    """
    for node, samples in facts.run.samples.items():
        apply = partial(_apply_rules_of_one_machine, samples, book, held_up)
        book.apply_group(f"the machine {node}", apply)
    core_use = facts.core_use_after_start
    gpu_use = known_utilisation(facts.samples)
    book.apply("HotCores", lambda rule: rule(core_use, gpu_use))


def _apply_rules_of_one_machine(samples: Sequence[Sample], book: Rulebook, held_up: bool) -> None:
    """Applies the rules over one machine's samples.

    Args:
        samples: in order of time.
        book: takes the findings.
        held_up: whether the host, the input or the network limits the run: then a larger batch is not suggested.
    """
    # Samples that lack a GPU are left out, so that all series are equally long.
    gpu_counts = [len(sample.get("gpu", [])) for sample in samples]
    most = max(gpu_counts, default=0)
    complete = []
    for sample, gpu_count in zip(samples, gpu_counts, strict=True):
        if gpu_count == most:
            complete.append(sample)
    readings = gpus_of(complete)

    # Of each GPU, a value a sample; [] of one whose use is not known: the place in the list is the GPU's number.
    # NVML reports 0 % throughout where it can't measure (MIG slices, vGPUs).
    gpu_use = _by_gpu(readings, "util")
    gpu_memory = _by_gpu(readings, "mem")
    if not any(any(use) for use in gpu_use):
        gpu_use = []

    # The mean over cores and over GPUs, a value a sample.
    cpu = [mean(sample["cpu"]) for sample in complete]
    known_use = [use for use in gpu_use if use]
    known_memory = [used for used in gpu_memory if used]
    mean_gpu_use = [mean(values) for values in zip(*known_use, strict=True)]
    mean_gpu_memory = [mean(values) for values in zip(*known_memory, strict=True)]
    io_wait = [sample.get("iowait", 0.0) for sample in complete]

    book.apply("CPUBottleneck", lambda rule: rule(cpu, mean_gpu_use))
    book.apply("IOBottleneck", lambda rule: rule(io_wait, mean_gpu_use))
    book.apply_to("LowGPUUtilization", mean_gpu_use)
    if not held_up:
        book.apply("BatchSize", lambda rule: rule(cpu, mean_gpu_use, mean_gpu_memory))
    for used_memory in known_memory:
        book.apply_to("GPUMemoryIncrease", used_memory)
    book.apply_to("LoadBalancing", gpu_use)
    for reading in readings:
        reasons = [gpu.get("throttle", []) for gpu in reading]
        book.apply_to("Throttling", reasons)
    used_mb = [sample["rss_mb"] for sample in complete if "rss_mb" in sample]
    swapped_mb = [sample["swap_mb"] for sample in complete if "swap_mb" in sample]
    book.apply_to("MemoryLeak", used_mb)
    book.apply_to("Swap", swapped_mb)


def _by_gpu(readings: Sequence[Sequence[Mapping[str, float]]], key: str) -> list[list[float]]:
    """The values of ``key``, a list for each GPU; empty for a GPU that lacks one: unknown is not 0.

    Args:
        readings: of each GPU, one a sample.
        key: of a reading, such as ``util``.
    """
    series = []
    for readings_of_gpu in readings:
        values = []
        if all(reading.get(key) is not None for reading in readings_of_gpu):
            values = [reading[key] for reading in readings_of_gpu]
        series.append(values)
    return series


def _apply_step_rules(facts: Facts, book: Rulebook) -> None:
    """Applies the rules over steps, ranks, network and the start.

    A run whose summary has no status yet is also checked for a stall: it still trains, or was killed. Loader processes
    that are not known, or a data tier, leave out the rule ``Dataloader``.

    Args:
        facts: of the run.
        book: takes the findings.
    """
    start_s = facts.startup["s"]
    has_loaders = facts.workers_known and not facts.run.tier
    book.apply("StepOutlier", lambda rule: rule(facts.steps_ms))
    book.apply("MaxInitializationTime", lambda rule: rule(start_s))
    if facts.header and has_loaders:
        book.apply("Dataloader", lambda rule: _call_dataloader(rule, facts))
    book.apply("SlowRank", lambda rule: rule(facts.compute_ms))
    book.apply("EfaMissing", lambda rule: rule(facts.header.get("efa_network", "")))
    book.apply("PhaseVariation", lambda rule: rule(swing(facts)))

    def scheduler_delay(rule: Callable[..., Finding | None]) -> Finding | None:
        """Calls the rule with the waits for a core, shares of the time, and with what takes cores."""
        return rule(
            facts.thread_wait,
            facts.loader_wait,
            facts.delayed_thread,
            processes=facts.processes,
            workers=facts.workers,
            others=facts.other_cores,
        )

    book.apply("SchedulerDelay", scheduler_delay)
    still_trains = "status" not in facts.run.summary
    if still_trains and facts.steps:
        newest = facts.steps[-1]
        seconds = time.time() - newest["t"]
        book.apply("StalledTraining", lambda rule: rule(seconds))


def _call_dataloader(rule: Rule, facts: Facts) -> Finding | None:
    """Calls the rule ``Dataloader`` with the run's workers, threads and cores."""
    return rule(
        phase_share(facts.phases, "data"),
        facts.workers,
        facts.threads,
        facts.cores,
        processes=facts.processes,
        others=facts.other_cores,
    )


def _apply_training_rules(facts: Facts, book: Rulebook) -> None:
    """Applies the rules over losses, classes and teacher, then those of each student; ``book`` takes the findings."""
    run = facts.run
    losses = [row["train/loss"] for row in run.metrics if "train/loss" in row]
    book.apply_to("LossNotDecreasing", losses)
    book.apply_to("LossRising", losses)

    balanced = (run.config.get("data") or {}).get("balance_classes") is True
    if not balanced:
        book.apply_to("ClassImbalance", run.counts.get("train", []))

    teacher_scores = run.teacher.get("val") or {}
    val_counts = run.counts.get("val", [])
    val_pictures: int = sum(val_counts)
    if "acc1" in teacher_scores and val_pictures:
        chance = share(max(val_counts), val_pictures)
        judged_pictures: int = run.teacher.get("pictures", val_pictures)
        book.apply(
            "TeacherNearChance",
            lambda rule: rule(
                teacher_scores["acc1"],
                chance,
                judged_pictures,
                remedy=run.teacher.get("remedy") or "",
            ),
        )

    loss_by_step = _loss_by_step(run.metrics)
    losses_of_siblings = {}
    if len(loss_by_step) >= 5:
        for name, metrics in read_siblings(run.folder).items():
            losses_of_siblings[name] = _loss_by_step(metrics)
    book.apply("SimilarAcrossRuns", lambda rule: rule(loss_by_step, losses_of_siblings))

    for student in run.students:
        whose = student or "the student"
        book.apply_group(f"{whose}'s metrics", partial(_apply_metric_rules, run, student, book))
        book.apply_group(
            f"{whose}'s tensors",
            partial(_apply_tensor_rules, run.health_of(student), student, book),
        )
        book.apply_group(f"{whose}'s mistakes", partial(_apply_confusion_rule, run, student, book))


def _loss_by_step(metrics: Sequence[Mapping[str, float]]) -> dict[float, float]:
    """The training loss by step, from the rows of ``metrics.csv`` that have both."""
    return {
        row["step"]: row["train/loss"] for row in metrics if "train/loss" in row and "step" in row
    }


def _apply_confusion_rule(run: RunRecords, student: str, book: Rulebook) -> None:
    """Applies the rule over the pairs of classes that a student confuses, from the newest validation.

    Args:
        run: with its counts of mistakes; without any nothing is applied.
        student: its name; "" for a single one.
        book: takes the finding.
    """
    newest = run.confusion_of(student)
    if newest is None:
        return
    pairs = [
        (run.classes[true_id], run.classes[called_id], count)
        for true_id, called_id, count in newest["pairs"]
    ]
    counts = dict(zip(run.classes, newest["counts"], strict=False))
    book.apply("Confusion", lambda rule: rule(pairs, counts), student)


def _apply_tensor_rules(health: list[dict[str, Any]], student: str, book: Rulebook) -> None:
    """Applies the rules over a student's gradients, updates and activations.

    Args:
        health: its health records, by step.
        student: its name.
        book: takes the findings.
    """
    if not health:
        return
    first = health[0]
    last = health[-1]
    norms = _recorded(health, "grad_norm")  # None: it was NaN or infinite
    update_ratios = _without_none(_recorded(health, "update_ratio"))
    book.apply_to("VanishingGradient", _without_none(norms), student)
    book.apply_to("ExplodingTensor", norms, student)
    book.apply_to("DeadRelu", last.get("dead", {}), student)
    book.apply_to("PoorWeightInitialization", _known_spread(first), student)
    book.apply_to("SaturatedActivation", last.get("saturated", {}), student)
    book.apply_to("WeightUpdateRatio", update_ratios, student)
    book.apply_to("AllZero", last.get("zeros", {}), student)
    book.apply_to("UnchangedTensor", _recorded(health, "unchanged"), student)
    book.apply_to("TensorVariance", _known_spread(last), student)
    inputs = [reading for reading in _recorded(health, "inputs") if reading]
    book.apply_to("CheckInputImages", inputs, student)
    book.apply_to("LossTermDominates", last.get("loss_shares", {}), student)

    # One rule has two names, and each name its own threshold.
    entropy = _without_none(_recorded(health, "teacher_entropy"))
    low = book.thresholds_of("TemperatureTooLow")
    book.apply("TemperatureTooHigh", lambda rule: rule(entropy, **low), student)


def _recorded(health: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """The values of ``name`` in the readings that have it."""
    return [reading[name] for reading in health if name in reading]


def _without_none(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _known_spread(reading: Mapping[str, Any]) -> dict[str, float]:
    """The activations' standard deviation by layer; layers where it was NaN or infinite are left out."""
    return {
        layer: spread for layer, spread in reading.get("spread", {}).items() if spread is not None
    }


def _apply_metric_rules(run: RunRecords, student: str, book: Rulebook) -> None:
    """Applies the rules over a student's metrics by epoch.

    Args:
        run: with the rows of ``metrics.csv``.
        student: its name; "" for a single one.
        book: takes the findings.
    """
    prefix = f"{student}/" if student else ""

    def values(name: str) -> list[float]:
        return list(by_epoch(run, f"{prefix}{name}").values())

    def distill_losses() -> dict[str, list[float]]:
        """The student's training losses by epoch, without the loss on labels; by their columns of ``metrics.csv``."""
        train = f"{prefix}train/"
        task_loss = f"{train}task_loss"
        losses = {}
        columns = {column for row in run.metrics for column in row}
        for column in sorted(columns):
            is_loss = column.startswith(train) and column.endswith("_loss")
            if is_loss and column != task_loss:
                losses[column] = list(by_epoch(run, column).values())
        return losses

    metric = f"{prefix}val/{run.primary}"
    # The rules read a metric that should rise; of an error they get nothing.
    scores = [] if less_is_better(run.primary) else values(f"val/{run.primary}")
    agreement = values("val/agreement")
    book.apply("Overfit", lambda rule: rule(values("train/loss"), scores, metric=metric))
    book.apply("Overtraining", lambda rule: rule(scores, values("val/kl"), metric=metric))
    header = next(iter(run.headers.values()), {})
    pictures = header.get("val", 0)
    book.apply("FeaturesCollapse", lambda rule: rule(values("val/rankme"), pictures), student)
    book.apply("StudentIgnoresTeacher", lambda rule: rule(agreement, distill_losses()))
    if run.summary.get("status") == "done":
        book.apply(
            "WorseThanStart", lambda rule: _call_worse_than_start(rule, run, student), student
        )
        start = run.model_of(student).get("start", "")
        book.apply(
            "StudentUnderTrained",
            lambda rule: rule(scores, agreement, start=start, metric=metric),
        )


def _call_worse_than_start(rule: Rule, run: RunRecords, student: str) -> Finding | None:
    """Calls the rule ``WorseThanStart`` with a student's values of ``summary.json`` and what its settings suggest.

    Args:
        rule: with the user's thresholds bound.
        run: a finished run.
        student: its name; "" for a single one.
    """
    model = run.model_of(student)
    header = next(iter(run.headers.values()), {})
    settings = run.config.get("model") or {}
    levers = ["a lower optim.lr"]
    if "lr" in model:
        levers = [f"a lower optim.lr (it was {model['lr']:g})"]
    if run.teacher:
        if not settings.get("distill_losses"):
            levers.append("the recipe's model.distill_losses instead of labels alone")
        elif settings.get("task_loss_weight"):
            levers.append("a smaller model.task_loss_weight")
    return rule(
        (model.get("start_val") or {}).get(run.primary),
        (model.get("val") or {}).get(run.primary),
        header.get("val", 0),
        metric=f"val/{run.primary}",
        exported_epoch=(model.get("best_val") or {}).get("epoch", 0),
        levers=levers,
    )


# -- what limits the run ----------------------------------------------------------------------------------------------
def _host_bound(facts: Facts) -> Limit | None:
    """Waiting for a core comes first: a host that gets none also launches slowly."""
    return limits.cpu_contention(facts) or limits.launch_bound(facts)


def _input_bound(facts: Facts) -> Limit | None:
    return limits.tier_bound(facts) if facts.run.tier else limits.data_bound(facts)


LIMITS: dict[str, Callable[[Facts], Limit | None]] = {
    "host": _host_bound,
    "data": _input_bound,
    "teacher": limits.teacher_bound,
    "communication": limits.communication_bound,
    "bookkeeping": limits.bookkeeping_bound,
    "optimizer": limits.optimizer_bound,
    "precision": limits.precision_bound,
    "checkpoint": limits.checkpoint_bound,
    "startup": limits.startup_bound,
}
"""What can limit a run, by the name that a failure is reported under."""


def limits_of(facts: Facts, shown: str = "", failures: list[str] | None = None) -> list[Limit]:
    """The limits of a run whose lever is worth naming, the headline first, then by their gain.

    That is from a gain of about :data:`kd.report.limits.WORTH` on; a headline needs :data:`kd.report.limits.LEADS`. A
    limit that fails does not stop the others.

    Args:
        facts: of the run.
        shown: the bound that a display shows now; it stays first while it gains :data:`STAYS`, unless another gains
            :data:`AHEAD` times as much.
        failures: gets the name of each limit that can't be worked out, and why; None: they are not reported.

    Returns:
        At least one, the headline, which may be the student's own training or a phase without a lever; [] of a run
        without recorded steps.
    """
    if not facts.phases:
        return []
    failures = [] if failures is None else failures

    # Limits whose lever is worth naming, the largest gain first.
    worthy = []
    for name, limit_of in LIMITS.items():
        limit = attempt(f"limit {name}", failures, partial(limit_of, facts))
        if limit is not None and _gain(limit) >= WORTH / 1.05:  # gains are estimates
            worthy.append(limit)
    worthy.sort(key=_gain, reverse=True)

    # The headline: the largest gain that deserves one; the bound already shown keeps its place down to STAYS.
    leader = None
    for limit in worthy:
        if _gain(limit) >= (STAYS if limit.bound == shown else LEADS):
            leader = limit
            break
    already_shown = None
    for limit in worthy:
        if limit.bound == shown and _gain(limit) >= STAYS:
            already_shown = limit
            break
    if leader and already_shown and _gain(leader) < AHEAD * _gain(already_shown):
        leader = already_shown

    if leader:
        return [leader, *(limit for limit in worthy if limit is not leader)]
    return [limits.student_bound(facts, alone=not worthy) or _largest_phase(facts), *worthy]


def _gain(limit: Limit) -> float:
    return limit.gain or 0.0


def _largest_phase(facts: Facts) -> Limit:
    """The headline of a run that nothing limits: its largest phase, the student's own phases taken together."""
    own_training = "the student's own training"
    shares = {
        f"the {name}": phase_share(facts.phases, name)
        for name in PHASES
        if name not in STUDENT_PHASES
    }
    shares[own_training] = sum(phase_share(facts.phases, name) for name in STUDENT_PHASES)
    largest = max(shares, key=lambda name: shares[name])
    text = f"no part of the step stands out; most of it ({shares[largest]:.0%}) is {largest}"
    return Limit("none", text, "", None)


def sentence(limit: Limit) -> str:
    """``data-bound: EVIDENCE; LEVER would give 1.5x``, or ``LEVER at most 1.5x`` where the lever says so."""
    advice = remedy(limit)
    return f"{evidence_of(limit)}; {advice}" if advice else evidence_of(limit)


def evidence_of(limit: Limit) -> str:
    """``data-bound: EVIDENCE``."""
    return f"{NAMES[limit.bound]}: {limit.text}"


def remedy(limit: Limit) -> str:
    """``LEVER would give 1.5x``, or ``LEVER at most 1.5x`` where the lever says so; "" where no gain is predicted."""
    if not limit.gain:
        return ""
    promise = "" if "at most" in limit.lever else "would give "
    return f"{limit.lever} {promise}{limit.gain:.1f}x"


class Explained:
    """What limits a run and what is unusual about it, each worked out once.

    Args:
        run: the records.
    """

    def __init__(self, run: RunRecords) -> None:
        """Takes the records; facts, limits and findings are worked out when they are first read."""
        self.run = run
        self.facts = Facts(run)
        self.failures: list[str] = []
        """Rules, limits and sections that could not be worked out, and why."""

    @cached_property
    def limits(self) -> list[Limit]:
        """What limits the run's speed, the headline first, in words; the page and the terminal show them."""
        ordered = attempt(
            "the limits of the speed",
            self.failures,
            lambda: limits_of(self.facts, "", self.failures),
        )
        limits_in_words = []
        for limit in ordered or []:
            limit = self._worded(limit)
            if limit.bound == "student" and not self.facts.of_kd:
                limit = replace(limit, bound="model")
            limits_in_words.append(limit)
        return limits_in_words

    def _worded(self, evidence: Evidence) -> Evidence:
        """A limit or a finding in the words of the training: kd's keys are those of kd's own runs alone."""
        if self.facts.of_kd:
            return evidence
        text, lever = in_plain_words(evidence.text), in_plain_words(evidence.lever)
        return replace(evidence, text=text, lever=lever)

    @cached_property
    def verdict(self) -> dict[str, Any]:
        """The headline as ``summary.json`` holds it; it needs :data:`FEWEST` steps.

        ``bound``, ``text``, ``lever``, ``predicted_speedup`` (None: unknown), ``phases_ms``; ``others``, the further
        limits, only where there is a verdict.
        """
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
        """All rules that fire, with the thresholds of the run's settings.

        Of a run with a few recorded steps, 1 or more but fewer than :data:`FEWEST`, only those in :data:`NEED_NO_STEPS`.
        """
        facts = self.facts
        monitor = self.run.config.get("monitor") or {}
        book = Rulebook(monitor.get("thresholds") or {}, self.failures)
        first = self.limits[0].bound if self.limits else ""
        held_up = first in ("host", "data", "communication")
        book.apply_group("the machines", partial(_apply_machine_rules, facts, book, held_up))
        book.apply_group("the steps", partial(_apply_step_rules, facts, book))
        book.apply_group("the training", partial(_apply_training_rules, facts, book))

        findings = [self._worded(finding) for finding in book.findings]
        steps = attempt("the number of steps", self.failures, lambda: facts.steps_counted) or 0
        if 0 < steps < FEWEST:
            return [finding for finding in findings if finding.rule in NEED_NO_STEPS]
        return findings
