"""A run, explained: what limits it, and by which rules its machine or its training is unusual."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, TypeVar

from kd.proof.luck import CHANCE_SIGMAS
from kd.report import judges
from kd.report.facts import STUDENT_PHASES, Facts
from kd.report.judges import Evidence, fires, often
from kd.report.limits import LEADS, LIMITS, UNNAMED, WORTH, Finding, Limit, student_bound
from kd.report.plain_words import in_plain_words
from kd.report.records import PHASES, RunRecords
from kd.report.series import Series
from kd.report.step_facts import gpus_of, mean, phase_share, slow_rank
from kd.storage.elsewhere import Json

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

Thresholds = Mapping[str, float | Mapping[str, float]]
"""The user's thresholds: by rule and argument, or by ``<rule>.<argument>``."""


@dataclass(frozen=True)
class Rule:
    """One rule: its row in the table is all there is of it, but for a judge of its own shape or a new series."""

    name: str
    judge: Callable[..., Evidence]
    """Takes the series, then the thresholds by name."""
    reads: tuple[str, ...]
    """The series' names (:mod:`kd.report.series`)."""
    text: str
    """The evidence, with the judge's values and the thresholds in their places."""
    lever: str
    """What to do."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Those that a user can set, with their defaults; whole numbers are counts."""
    of: str = "run"
    """What has the series: the run, each ``machine`` or each ``gpu``."""
    when: str = ""
    """A series that must be there (not None) and hold for the rule to be applied."""
    needs_steps: bool = True
    """It says little of a run with fewer than :data:`FEWEST` steps."""

    @property
    def counts(self) -> list[str]:
        """The thresholds that count samples, steps, epochs or pictures, by name: whole numbers."""
        return [name for name, default in self.thresholds.items() if isinstance(default, int)]

    def __call__(self, *series: object, **thresholds: float) -> Finding | None:
        """The finding where the rule fires on these series, else None; ``thresholds`` take the place of the rule's own."""
        used = {**self.thresholds, **thresholds}
        evidence = self.judge(*series, **used)
        if evidence is None:
            return None
        text = evidence.get("text", self.text).format(**{**used, **evidence})
        return Finding(self.name, text, evidence.get("lever") or self.lever)

    def applied_to(self, series: Series, thresholds: Mapping[str, float]) -> Finding | None:
        """The finding where the rule fires on the series of a run, a machine or a GPU; None where it doesn't, or where
        :attr:`when` is None or False.

        Args:
            series: whose names are those of :attr:`reads`, and :attr:`when`.
            thresholds: the user's, by name, as floats; those that count are made whole numbers.
        """
        holds = series[self.when] if self.when else True
        if holds is None or holds is False:
            return None
        read = [series[name] for name in self.reads]
        own = {}
        for name, value in thresholds.items():
            own[name] = int(value) if name in self.counts else value
        return self(*read, **own)


def _too_long(seconds: float, limit_s: float) -> Evidence:
    """It takes more than ``limit_s`` seconds."""
    return fires(seconds > limit_s, minutes=seconds / 60)


# The names, thresholds and warm-up lengths are those of the SageMaker Debugger's built-in rules where it has such a rule
# (samples every 500 ms).
_ALL = (
    # the machine and the steps
    Rule("CPUBottleneck", judges.full_while_idle, ("cpu", "gpu"),
         "CPU above {high:.0f} % and GPU below {low:.0f} % in {part:.0%} of the samples",
         "move work off the CPU, or give it more cores",
         {"high": 90.0, "low": 10.0, "share": 0.5, "skip": 100}, "machine"),
    Rule("IOBottleneck", judges.full_while_idle, ("iowait", "gpu_or_idle"),
         "I/O wait above {high:.0f} % in {part:.0%} of the samples",
         "a faster disk, a local copy of the data, or fewer and larger files",
         {"high": 50.0, "low": 70.0, "share": 0.5, "skip": 1000}, "machine"),
    Rule("LowGPUUtilization", judges.low_use, ("gpu",),
         "GPU utilisation is {p5:.0f} to {p95:.0f} % (p5, p95)",
         "the phases of a step show what the GPU waits for (report.html)",
         {"low": 70.0, "floor": 10.0, "window": 500, "skip": 1000}, "machine"),
    Rule("BatchSize", judges.room_left, ("cpu", "gpu", "gpu_memory"),
         "p95 of CPU {cpu:.0f} %, GPU {gpu:.0f} %, GPU memory {memory:.0f} %",
         "a larger data.batch_size (with a learning rate to match)",
         {"low": 70.0, "window": 500, "skip": 100}, "machine", when="free"),
    Rule("GPUMemoryIncrease", judges.growth, ("used_memory",),
         "GPU memory grew steadily from {first:.0f} to {last:.0f} %",
         "something keeps tensors or objects alive: lists of losses, logged tensors with a graph",
         {"increase": 0.1, "window": 500, "skip": 100}, "gpu"),
    Rule("MemoryLeak", judges.growth, ("rss_mb",),
         "memory grew steadily from {first:.0f} to {last:.0f} MB",
         "something keeps tensors or objects alive: lists of losses, logged tensors with a graph",
         {"increase": 0.1, "least_mb": 100.0, "skip": 20}, "machine"),
    Rule("LoadBalancing", judges.unbalanced, ("gpus",),
         "GPU {busy} is used {most:.0f} %, GPU {idle} {least:.0f} %", "give all devices the same share of work",
         {"imbalance": 0.5, "skip": 10}, "machine"),
    Rule("SlowRank", slow_rank, ("compute_ms",),
         "rank {rank} computes {extra:.0f} ms a step longer than the median of the others",
         "check its machine (throttling, other jobs, a slow disk)", {"late": 1.15}),
    Rule("StepOutlier", judges.outliers, ("steps_ms",),
         "{count} steps are {sigma:.0f} sigma above the mean of {mean:.0f} ms (slowest {most:.0f} ms)",
         "see which phase is long in them", {"sigma": 5.0, "ignore": 10}),
    Rule("MaxInitializationTime", _too_long, ("startup_s",),
         "start-up took {minutes:.0f} min", "copy or prepare data beforehand", {"limit_s": 1200.0}, needs_steps=False),
    Rule("Dataloader", judges.loaders,
         ("data_share", "workers", "threads", "cores", "processes", "other_cores", "sharers", "data_lever"),
         "{part:.0%} of the step waits for data with {unused} to spare",
         "data.num_workers=auto tries 0, 1, 2, ... under the real step", {"low": 0.1}, when="data_share"),
    Rule("HotCores", lambda words, gpu, busy: fires(words and not mean(gpu) >= busy, words=words),
         ("hot_cores", "gpu_use"), "{words}",
         "fewer loader processes (data.num_workers), or processes bound to cores of their own", {"busy": 70.0}),
    Rule("EfaMissing", lambda network: fires(network == "Socket"), ("header.efa_network",),
         "the machines have EFA, but NCCL sends over TCP (its log: Using network Socket)",
         "an image with AWS's plugin aws-ofi-nccl (kd/strategies/README.md)", needs_steps=False),
    Rule("PhaseVariation", lambda swing: fires(swing, words=swing and swing.text()), ("swing",), "{words}",
         "check for other programs on the machine, and for a device that lowers its clocks"),
    Rule("SchedulerDelay", judges.delayed,
         ("thread_wait", "loader_wait", "delayed_thread", "cores_lever"),
         "waiting for a free core: {words} of the time", "more cores", {"at": 0.2}),
    Rule("Throttling", judges.throttled, ("lowered",),
         "the GPU lowered its clocks in {part:.0%} of the samples ({names})", "cooling, or a higher power limit",
         {"share": 0.05}, "gpu"),
    Rule("Swap", lambda mb, grown_mb: fires(mb and max(mb) - mb[0] >= grown_mb, growth=mb and max(mb) - mb[0]), ("swap_mb",),
         "swap grew by {growth:.0f} MB",
         "fewer loader processes, smaller batches", {"grown_mb": 200.0}, "machine"),
    # losses, tensors and metrics
    Rule("LossNotDecreasing", judges.flat_loss, ("losses",), "train/loss went from {first:.4g} to {last:.4g}",
         "the learning rate (optim.lr), the labels, the loss weights", {"percent": 0.1, "least": 20}),
    Rule("LossRising", judges.rising_loss, ("losses",), "train/loss went from {start:.3g} to {now:.3g}{times}",
         "a lower optim.lr (the usual reason), longer optim.warmup_epochs", {"factor": 3.0, "first": 3, "newest": 3}),
    Rule("Overfit", judges.overfit, ("epoch.train/loss", "val", "metric"),
         "{metric} fell from {before} to {now} while train/loss still falls",
         "stronger data.augment, fewer epochs; the best epoch is exported anyway", {"drop": 0.03, "patience": 3}),
    Rule("VanishingGradient", lambda norms, least, share: often([norm < least for norm in norms], share),
         ("known.grad_norm",),
         "the gradient's norm is below {least:g} in {part:.0%} of the readings",
         "activations that saturate, loss weights near 0, a frozen part", {"least": 1e-7, "share": 0.5}),
    Rule("ExplodingTensor", judges.exploding, ("recorded.grad_norm",),
         "the gradient's norm reached {most:.3g} (median {median:.3g})",
         "a lower optim.lr, longer optim.warmup_epochs, trainer.gradient_clip_val", {"factor": 100.0}),
    Rule("DeadRelu", judges.worst_layer, ("newest.dead",),
         "layers with dead units: {count}; in {name} {value:.0%} never fire",
         "a lower optim.lr or longer optim.warmup_epochs", {"share": 0.5}),
    Rule("PoorWeightInitialization", judges.far_apart, ("first.spread",),
         "activations spread {low:.2g} in {lowest} but {high:.2g} in {highest}", "the student's initial weights",
         {"factor": 1000.0}),
    Rule("SaturatedActivation", judges.worst_layer, ("newest.saturated",),
         "saturated layers: {count}; in {name} {value:.0%} of the outputs",
         "a lower optim.lr, or smaller weights before it (optim.weight_decay)", {"share": 0.8}),
    Rule("WeightUpdateRatio", judges.update_size, ("known.update_ratio",),
         "a step moves the weights by {median:.2g} of their size (median)", "optim.lr", {"low": 1e-8, "high": 0.1}),
    Rule("AllZero", judges.all_zero, ("newest.zeros",), "all outputs are 0: {names}",
         "the layer's weights and input, the step before", {"share": 1.0}),
    Rule("UnchangedTensor", judges.unchanged, ("recorded.unchanged",), "weights that do not change: {count}, {name} for one",
         "a part that gets no gradient (frozen, detached, unused), or a rate of 0", {"times": 3}),
    Rule("TensorVariance", judges.variance_outside, ("newest.spread",), "the variance of {name} is {variance:.2g}",
         "normalisation, the initial weights, a lower optim.lr", {"low": 1e-10, "high": 1e6}),
    Rule("CheckInputImages", judges.odd_pictures, ("known.inputs",), "", "the data: its files, its decoding, data.augment",
         {"constant": 0.05, "duplicated": 0.1}),
    Rule("ClassImbalance", judges.class_imbalance, ("class_counts",),
         "the most frequent class has {most} pictures, the rarest {least}",
         "data.balance_classes=true, or more pictures of the rare classes", {"factor": 10.0}, when="class_counts",
         needs_steps=False),
    Rule("TeacherNearChance", judges.weak_teacher, ("teacher_acc1", "chance", "judged", "teacher.remedy"),
         "the teacher is right on {right} of {pictures} validation pictures ({reached}), no better than always naming the "
         "most frequent class ({guessed})",
         "check that its classes are in the data's order (classes), that img_size is what it was trained with, and that "
         "checkpoint names the trained weights", {"sigma": CHANCE_SIGMAS}, when="teacher_acc1", needs_steps=False),
    Rule("StudentIgnoresTeacher", judges.ignored_teacher, ("epoch.val/agreement", "distill_losses"),
         "agreement with the teacher has stayed at {agreement:.1%} for {patience} epochs and the distillation "
         "losses fall no more ({names})",
         "the weight of the distillation losses, the temperature", {"flat": 0.01, "patience": 3, "below": 0.8}),
    Rule("WorseThanStart", judges.worse_than_start,
         ("start_value", "last_value", "pictures", "metric", "exported_epoch", "student.lr"),
         "{metric} was {before} before the first step and is {now} after the last epoch: training has undone part of what "
         "it began with; {kept}",
         "a lower optim.lr", {"drop": 0.02}, when="done", needs_steps=False),
    Rule("NoStart", lambda start: fires(start == "scratch"), ("student.start",),
         "the student began with random weights, as stored answers have no layers",
         "model.student.pretrained=true or model.student.checkpoint=FILE of a backbone gives it a start",
         when="header.stored_teacher", needs_steps=False),
    Rule("StudentUnderTrained", judges.under_trained,
         ("val", "epoch.val/agreement", "student.start", "metric", "pictures", "start_value"),
         "{rose}, with {agreement:.1%} agreement with the teacher: the student is under-trained",
         "more trainer.max_epochs", {"gain": 0.01, "part": 0.2, "below": 0.8, "least": 5}, when="done"),
    Rule("TemperatureTooHigh", lambda entropy, high: fires(mean(entropy) > high, level=mean(entropy)),
         ("known.teacher_entropy",),
         "at this temperature the teacher's answers are nearly uniform (entropy {level:.1%} of its maximum)",
         "a lower temperature of the distillation loss, or a teacher that tells the classes apart", {"high": 0.98}),
    Rule("TemperatureTooLow", lambda entropy, low: fires(mean(entropy) < low, level=mean(entropy)),
         ("known.teacher_entropy",),
         "at this temperature the teacher's answers are nearly one-hot (entropy {level:.1%} of its maximum)",
         "a higher temperature of the distillation loss", {"low": 0.02}),
    Rule("LossTermDominates", judges.dominant_term, ("newest.loss_shares",), "'{name}' is {value:.0%} of the loss",
         "the weights of the losses", {"share": 0.98}),
    Rule("Overtraining", judges.overtrained, ("val", "epoch.val/kl", "metric"),
         "{metric} has been no better than {best} for {patience} epochs{no_lower}",
         "stop here: the best epoch is exported; or a lower optim.lr", {"patience": 10, "delta": 0.001}),
    Rule("StalledTraining", _too_long, ("silent_s",), "no step has ended for {minutes:.0f} min",
         "a rank that waits for another, a disk or a store that does not answer, a process that is gone",
         {"limit_s": 1800.0}, when="silent_s", needs_steps=False),
    Rule("SimilarAcrossRuns", judges.same_losses, ("loss_by_step", "siblings"),
         "train/loss is that of {name} in all {count} steps that both have logged",
         "the setting that differs has no effect, or nothing differs", {"least": 5, "near": 1e-6}),
    Rule("Confusion", judges.confused, ("confusions", "val_counts"),
         "{part:.0%} of '{true}' are taken for '{called}' ({count} of {of})",
         "their labels, more pictures of both; the teacher may mix them up as well", {"share": 0.3, "least": 10}),
    Rule("FeaturesCollapse", judges.collapsed, ("epoch.val/rankme", "pictures"),
         "the student's features use {rank:.1f} directions (val/rankme of {pictures} pictures)",
         "model.student.inherit=true, more pictures, more epochs", {"below": 10.0, "least": 100}),
)  # fmt: skip
RULES: dict[str, Rule] = {rule.name: rule for rule in _ALL}
"""All rules by name."""


def by_rule(thresholds: Thresholds) -> dict[str, dict[str, float]]:
    """Thresholds by rule and argument.

    >>> by_rule({"Overfit.drop": 0.1, "Overfit": {"patience": 5}})
    {'Overfit': {'drop': 0.1, 'patience': 5}}
    """
    grouped: dict[str, dict[str, float]] = {}
    for key, value in thresholds.items():
        rule, _, argument = key.partition(".")
        of_rule = value if isinstance(value, Mapping) else {argument: value}
        grouped.setdefault(rule, {}).update(of_rule)
    return grouped


Result = TypeVar("Result")
Words = TypeVar("Words", Limit, Finding)


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


# -- what limits the run ----------------------------------------------------------------------------------------------
def limits_of(facts: Facts, failures: list[str] | None = None) -> list[Limit]:
    """The limits of a run whose lever is worth naming, the headline first, then by their gain.

    A lever is worth naming from a gain of about :data:`kd.report.limits.WORTH` on, and makes a headline from
    :data:`kd.report.limits.LEADS` on. A limit that fails does not stop the others.

    Args:
        facts: of the run.
        failures: gets the name of each limit that can't be worked out, and why; None: they are not reported.

    Returns:
        At least one, the headline, which may be the student's own training or a phase without a lever; [] of a run
        without recorded steps.
    """
    if not facts.phases:
        return []
    failures = [] if failures is None else failures

    # Limits whose lever is worth naming, the largest gain first.
    least = WORTH / 1.05  # gains are estimates
    worthy = []
    for name, limit_of in LIMITS.items():
        limit = attempt(f"limit {name}", failures, partial(limit_of, facts))
        if limit is not None and limit.gain is not None and limit.gain >= least:
            worthy.append((limit.gain, limit))
    worthy.sort(key=itemgetter(0), reverse=True)

    limits = [limit for _, limit in worthy]
    if worthy and worthy[0][0] >= LEADS:
        return limits
    return [student_bound(facts, alone=not limits) or _largest_phase(facts), *limits]


def _largest_phase(facts: Facts) -> Limit:
    """The headline of a run that nothing limits: its largest phase, the student's own phases taken together."""
    shares = {}
    own = 0.0
    for name in PHASES:
        part = phase_share(facts.phases, name)
        if name in STUDENT_PHASES:
            own += part
        else:
            shares[f"the {name}"] = part
    shares["the student's own training"] = own
    shares[UNNAMED] = shares.pop("the rest")
    largest = max(shares, key=shares.__getitem__)
    text = f"no part of the step stands out; most of it ({shares[largest]:.0%}) is {largest}"
    return Limit("none", text, "", None)


def sentence(limit: Limit) -> str:
    """``data-bound: EVIDENCE; LEVER would give 1.5x the speed``, or ``LEVER at most 1.5x the speed`` where the lever says
    so; without a lever where no gain is predicted.
    """
    evidence = f"{NAMES[limit.bound]}: {limit.text}"
    if not limit.gain:
        return evidence
    promise = "" if "at most" in limit.lever else "would give "
    return f"{evidence}; {limit.lever} {promise}{limit.gain:.1f}x the speed"


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
        """What limits the run's speed, the headline first; [] without recorded steps. The page and the terminal show it.

        Of a training that is not kd's the texts have no keys of kd, and the bound ``student`` is called ``model``.
        """
        ordered = attempt(
            "the limits of the speed",
            self.failures,
            lambda: limits_of(self.facts, self.failures),
        )
        limits_in_words = []
        for limit in ordered or []:
            limit = self._worded(limit)
            if limit.bound == "student" and not self.facts.of_kd:
                limit = replace(limit, bound="model")
            limits_in_words.append(limit)
        return limits_in_words

    def _worded(self, evidence: Words) -> Words:
        """A limit or a finding in the words of the training: kd's keys are those of kd's own runs alone."""
        if self.facts.of_kd:
            return evidence
        text = in_plain_words(evidence.text)
        lever = in_plain_words(evidence.lever)
        return replace(evidence, text=text, lever=lever)

    @cached_property
    def verdict(self) -> Json:
        """The headline as ``summary.json`` holds it; it needs :data:`FEWEST` steps.

        ``bound``, ``text``, ``lever``, ``predicted_speedup`` (None: unknown), ``phases_ms``; ``others``, the further
        limits, only where there is a verdict.
        """
        facts = self.facts
        phases = {name: round(ms, 3) for name, ms in facts.phases.items() if name in PHASES}
        first = Limit("none", "", "", None)
        others: Json = {}
        text = f"too few steps were recorded to find the limit of the speed ({facts.steps_counted} of {FEWEST})"
        if self.limits and facts.steps_counted >= FEWEST:
            first, *rest = self.limits
            text = sentence(first)
            others = {"others": [asdict(limit) for limit in rest]}
        return {
            "bound": first.bound,
            "text": text,
            "lever": first.lever,
            "predicted_speedup": round(first.gain, 2) if first.gain else None,
            "phases_ms": phases,
            **others,
        }

    @cached_property
    def findings(self) -> list[Finding]:
        """All rules that fire, with the thresholds of the run's settings.

        Of a run with a few recorded steps, 1 or more but fewer than :data:`FEWEST`, only those that need no steps. A rule
        that fails does not stop the others.
        """
        monitor = self.run.config.get("monitor") or {}
        of_user = by_rule(monitor.get("thresholds") or {})
        scopes = self._scopes()
        steps = attempt("the number of steps", self.failures, lambda: self.facts.steps_counted)
        has_few_steps = 0 < (steps or 0) < FEWEST
        findings = []
        for rule in RULES.values():
            if has_few_steps and rule.needs_steps:
                continue
            for series in scopes:
                if series.of == rule.of:
                    call = partial(rule.applied_to, series, of_user.get(rule.name, {}))
                    findings.append(attempt(f"rule {rule.name}", self.failures, call))
        return [self._worded(finding) for finding in findings if finding is not None]

    def _scopes(self) -> list[Series]:
        """What has series: the run, each machine and each of its GPUs.

        Samples that lack a GPU are left out, and cores that the run may not use. A machine has the series ``free``: True
        where neither host, input nor network limits the run, so that a larger batch may be suggested.
        """
        first = self.limits[0].bound if self.limits else ""
        free = first not in ("host", "data", "communication")
        scopes = [Series("run", self.facts)]
        for node, samples in self.run.samples.items():
            cores = self.facts.core_use_of(node)
            usable: Any = [
                {**sample, "cpu": use} for sample, use in zip(samples, cores, strict=True)
            ]
            most = max(len(sample.get("gpu", [])) for sample in samples)
            whole = [sample for sample in usable if len(sample.get("gpu", [])) == most]
            scopes.append(Series("machine", whole, free=free))
            scopes += [Series("gpu", readings) for readings in gpus_of(whole)]
        return scopes
