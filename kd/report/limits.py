"""What can limit a run: a table of the phases that may take too much of a step, and functions of the facts for what is
no phase; None: the limit does not hold.

A gain is the step's time over its time without the limit: ``1 / (1 - p)`` for a share ``p`` (Amdahl, "Validity of the
single processor approach", AFIPS 1967).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

from kd.report.facts import BUSY, DATA_WAIT_AT, STUDENT_PHASES, Facts
from kd.report.metric import counted
from kd.report.ratio import Number, ratio, share, speedup, without
from kd.report.records import FIT_OF_THE_START
from kd.report.step_facts import COMPUTING, phase_share, slow_rank

WORTH = 1.1  # a lever below this gain is not worth naming
LEADS = 1.25  # a limit below this gain is no headline
UNNAMED = "time in no phase, which watch.phase(NAME) would name"
MUCH = 0.2  # of the step: time in no phase is said beside what the rest is
EMULATED = 10.0  # times as long as in float32, or longer: bfloat16 is computed in software
FUSED_OPTIMIZER_SHARE = 0.05  # expected of a fused optimizer, over the rest of the step


@dataclass(frozen=True)
class Limit:
    """One thing that limits a run."""

    bound: str
    """A key of :data:`kd.report.rules.NAMES`."""
    text: str
    """The evidence, a sentence."""
    lever: str
    """What to change."""
    gain: Number
    """Predicted speed-up of the lever, time before over time after (1.5: the step takes two thirds); None: unknown."""


@dataclass(frozen=True)
class Finding:
    """A rule that fired."""

    rule: str
    """Name of the rule."""
    text: str
    """The evidence, a sentence."""
    lever: str
    """What to do."""


# -- phases that take too much of the step -------------------------------------------------------------------------------
Lever = tuple[str, str, float]
"""What is added to the evidence, what to change, and the predicted gain."""


@dataclass(frozen=True)
class PhaseLimit:
    """A phase that limits a run where it takes too large a share of the step."""

    bound: str
    """As of :class:`Limit`."""
    at: float
    """Share of the step, 0 to 1, from which on it limits."""
    text: str
    """The evidence: ``ms`` of the phase, ``step`` (ms), ``part``."""
    lever: Callable[[Facts, float], Lever]
    """Of the facts and the phase's share."""


def of_phase(phase: str, facts: Facts) -> Limit | None:
    """The limit of a phase, a key of :data:`PHASE_LIMITS`; None where its share is below :attr:`PhaseLimit.at`."""
    limit = PHASE_LIMITS[phase]
    part = phase_share(facts.phases, phase)
    if part < limit.at:
        return None
    taken_ms = facts.phases[phase]
    evidence = limit.text.format(ms=taken_ms, step=facts.step_ms, part=part)
    more, lever, gain = limit.lever(facts, part)
    text = evidence + more
    return Limit(limit.bound, text, lever, gain)


def _cheaper_teacher(facts: Facts, part: float) -> Lever:
    """Levers for the teacher's share of the step, ``part``.

    A cache of the teacher's answers, which computes each view once, where that pays within the run; else a smaller teacher.
    In a run that has a cache the share is that of filling it.
    """
    free = without(part)
    if facts.cached:  # reading costs next to nothing: the cache was being filled
        lever = "later epochs, and runs like this one, read them: at most"
        return " to compute the answers that its cache keeps", lever, free
    smaller = "a smaller teacher, or smaller pictures for it"
    if not facts.header.get("cacheable", True):
        return "", f"{smaller}: at most", free
    cache = "model.teacher.cache=on"
    size = f" (needs {facts.cache_bytes / 1e9:.2g} GB)" if facts.cache_bytes else ""
    epochs = facts.epochs
    views = facts.views
    if math.isinf(epochs):
        return "", f"{cache}{size}, once filled,", free

    # Epochs that compute the answers take a step each, those that read them 1 / free of a step.
    computed = min(views, epochs)
    gain = speedup(epochs, computed + ratio(epochs - computed, free))
    of_run = f"in the run's {epochs:g} epochs of {computed:g} view{'s' * (computed > 1)}"
    if gain >= LEADS:
        return "", f"{cache}{size} {of_run}", gain
    why = f"{cache} gives {gain:.2f}x {of_run}"
    if epochs <= views:
        why = f"{cache} pays in runs of more than {views} epochs, this one has {epochs:g}"
    return "", f"{smaller} ({why}): at most", free


def _less_waiting(facts: Facts, part: float) -> Lever:
    """Levers for the wait for gradients: a slow rank that makes all others wait; without one, less traffic."""
    slowest = slow_rank(facts.compute_ms)
    if slowest is not None:
        rank = slowest["rank"]
        extra_ms = slowest["extra"]
        why = f" because rank {rank} computes {extra_ms:.0f} ms longer than the others"
        gain = speedup(facts.step_ms, facts.step_ms - min(extra_ms, facts.phases["communication"]))
        return why, f"check rank {rank}'s machine, or remove it", gain
    lever = (
        "config=bf16_gradients (half the traffic) or config=powersgd, larger batches or gradient accumulation "
        "(trainer.accumulate_grad_batches), a faster network: at most"
    )
    return "", lever, without(part)


def _fused_optimizer(_facts: Facts, part: float) -> Lever:
    """With a fused one a step would take the rest and :data:`FUSED_OPTIMIZER_SHARE` of it."""
    gain = speedup(1.0, (1 - part) * (1 + FUSED_OPTIMIZER_SHARE))
    return "", "a fused optimizer (optim.name=adamw, with an optim.lr of its own)", gain


def _fewer_callbacks(facts: Facts, part: float) -> Lever:
    """Levers for callbacks and logging: the slowest callback, where it takes over 30 % of the phase; else fewer of all."""
    gain = without(part)
    by_ms = itemgetter(1)
    slowest, ms = max(facts.callbacks_ms.items(), key=by_ms, default=("", 0.0))
    if ms > 0.3 * facts.phases["logging"]:
        lever = f"do less in {slowest}, or less often: at most"
        return f", {slowest} alone {ms:.0f} ms", lever, gain
    return "", "trainer.log_every_n_steps, fewer callbacks: at most", gain


PHASE_LIMITS = {
    "teacher": PhaseLimit(
        "teacher",
        0.3,
        "the teacher takes {ms:.0f} of the step's {step:.0f} ms ({part:.0%})",
        _cheaper_teacher,
    ),
    "communication": PhaseLimit(
        "communication",
        0.15,
        "the step waits {ms:.0f} of {step:.0f} ms ({part:.0%}) for gradients",
        _less_waiting,
    ),
    "logging": PhaseLimit(
        "host",
        0.15,
        "callbacks and logging take {ms:.0f} of {step:.0f} ms ({part:.0%})",
        _fewer_callbacks,
    ),
    "optimizer": PhaseLimit(
        "student",
        0.25,
        "the optimizer takes {ms:.0f} of {step:.0f} ms ({part:.0%})",
        _fused_optimizer,
    ),
    "checkpoint": PhaseLimit(
        "checkpoint",
        0.05,
        "saving checkpoints takes {part:.0%} of the training time ({ms:.0f} ms a step)",
        lambda facts, part: ("", "save less often, or to a faster disk: at most", without(part)),
    ),
}
"""Phases that may take too much of a step."""


# -- batches, and who makes them -----------------------------------------------------------------------------------------
WAITS = 0.05  # share of the step that waits for its batch: below it, those who make batches keep up


def waits(facts: Facts) -> bool:
    """Whether the step waits for its batch for long enough that other makers could help."""
    return phase_share(facts.phases, "data") >= WAITS


def batch_ms(facts: Facts) -> float:
    """Ms that one loader process takes to make a batch; an upper bound where loader processes keep up. Without any it is
    the step's wait.

    Where the step waits, ``n`` processes deliver one batch each in ``n`` steps. Where they keep up, their CPU time a
    step is known: the cores that they use times the step, over the share of the time in which they compute. Where these
    were not sampled either, it is the step without its wait.
    """
    wait_ms = facts.phases.get("data", 0.0)
    if not facts.workers:
        return wait_ms
    if waits(facts):
        return facts.workers * facts.step_ms
    if not facts.loading_cores:
        return facts.step_ms - wait_ms
    cpu_ms = ratio(facts.loading_cores, facts.processes) * facts.step_ms
    return ratio(cpu_ms, max(0.05, facts.loading_busy))


def step_with(facts: Facts, workers: float, rest: float, made_ms: float) -> float:
    """Ms of a step whose batches a number of loader processes make; limits and ``--what-if`` predict by it.

    The longest of the rest of the step, a loader's time for a batch over the number of loaders, and the CPU time of loading
    and training over the free cores. Without loader processes the batch's time is added.

    Args:
        facts: of the run.
        workers: loader processes of each training process; infinite: what the cores allow.
        rest: ms of the step without its wait.
        made_ms: ms that one loader takes for a batch.
    """
    if not workers:
        return rest + made_ms
    loading_ms = facts.loading_busy * made_ms
    training_ms = facts.threads * rest
    cpu_ms = facts.processes * (loading_ms + training_ms)
    free_cores = max(1.0, facts.cores - facts.other_cores)
    by_loaders = ratio(made_ms, workers)
    by_cores = ratio(cpu_ms, free_cores)
    return max(rest, by_loaders, by_cores)


def data_bound(facts: Facts, at: float = DATA_WAIT_AT) -> Limit | None:
    """The step waits for its batch for a share ``at`` of its time, less what those who make it waited for cores that other
    jobs have (:attr:`~kd.report.step_facts.StepFacts.queued`).
    """
    step = facts.step_ms
    workers = facts.workers
    cores = facts.cores
    processes = facts.processes
    wait = facts.phases.get("data", 0.0) - facts.queued
    if share(wait, step) < at:
        return None
    rest = max(step - wait, 0.01 * step)
    made_ms = batch_ms(facts) - max(1, workers) * facts.queued
    floor = step_with(facts, math.inf, rest, made_ms)
    cores_are_left = floor == rest

    text = f"the step waits {wait:.0f} of its {step:.0f} ms ({share(wait, step):.0%}) for the next batch"
    if not facts.cpu and not cores_are_left:
        present = ratio(cores, processes)
        text += f"; {cores_needed(facts)} cores a GPU would be enough, there are {present:g}"

    # First lever: more loader processes, one to spare where cores are left, as batches do not take equally long.
    # Each epoch's first batch has nothing to hide behind.
    wanted = max(1, math.ceil(ratio(made_ms, floor)) + cores_are_left)
    first_batch = ratio(made_ms, facts.batches_per_epoch)
    gain = speedup(step, step_with(facts, wanted, rest, made_ms) + first_batch)
    without_wait = speedup(step, rest)
    least_gain = LEADS if without_wait >= LEADS else WORTH
    if facts.workers_known and wanted > workers and gain >= least_gain:
        return Limit("data", text, f"data.num_workers={wanted} instead of {workers}", gain)

    # Second lever: the pixels of the cached views.
    repeats_views = math.isfinite(facts.epochs) and facts.epochs > facts.views
    if facts.cached and not facts.has_pixels and repeats_views:
        setting = "model.teacher.cache_pixels=true"
        lever = f"{setting} decodes nothing after {facts.views} epochs: at most"
        later = (facts.epochs - facts.views) * share(rest, step)
        return Limit("data", text, lever, speedup(facts.epochs, facts.views + later))

    # Third lever: cheaper pictures, or more cores.
    lever = "" if facts.cpu else "data.engine=device (or dali), "
    lever += "cheaper pictures (resized once, ahead of training: kd-pack short_side=) or more cores: at most"
    if workers > 1 and processes * (workers + facts.threads) > cores:
        loaders = processes * workers
        text += f", though {loaders} loader processes share {counted(cores, 'core')} with training"
        lever = f"data.num_workers={fewer_workers(facts)}, and {lever}"
    return Limit("data", text, lever, without_wait)


# -- limits that are no phase -------------------------------------------------------------------------------------------
def tier_bound(facts: Facts) -> Limit | None:
    """The step waits for a data tier: for too few makers, or for the network or the queue where makers are idle.

    None where a run has no tier, or none with makers at the end, or waits for less than ``DATA_WAIT_AT`` of its steps' time.
    """
    step = facts.step_ms
    wait = facts.phases.get("data", 0.0)
    tier = facts.tier
    if tier is None or not tier.makers or phase_share(facts.phases, "data") < DATA_WAIT_AT:
        return None
    rest = max(step - wait, 0.01 * step)  # ms
    text = (
        f"the step waits {wait:.0f} of its {step:.0f} ms ({share(wait, step):.0%}) for a batch of the data tier, "
        f"whose {tier.makers} makers work {tier.busy:.0%} of the time"
    )
    if tier.may_ask < ratio(tier.makers, tier.ranks):
        lever = f"a larger data.tier.queue_mb ({tier.may_ask} batches fit): at most"
        return Limit("data", text, lever, speedup(step, rest))
    if tier.busy < BUSY:
        text += f", and send {ratio(tier.mb, tier.seconds):,.0f} MB/s"
        lever = "a faster network to the data machines, smaller pictures: at most"
        return Limit("data", text, lever, speedup(step, rest))

    # Makers with which no step waits: the ms that one maker needs for a step of all processes, over the step's rest.
    made_ms = 1000 * ratio(tier.busy_s, tier.batches) * tier.ranks
    missing = math.ceil(ratio(made_ms, rest)) - tier.makers
    makers_of_machine = max(1.0, ratio(tier.cores, tier.machines))
    more = max(1, math.ceil(ratio(missing, makers_of_machine)))
    makers_then = tier.makers + more * makers_of_machine
    lever = f"{counted(more, 'more data machine')} of {makers_of_machine:.0f} cores"
    return Limit("data", text, lever, speedup(step, max(rest, ratio(made_ms, makers_then))))


def cores_needed(facts: Facts) -> int:
    """Cores for each training process, of its loaders and itself, with which no step would wait for its batch.

    The loaders' CPU time for a batch (ms) over the step without its wait (ms), and a core for each thread.
    """
    step = facts.step_ms
    wait = facts.phases.get("data", 0.0)
    without_wait = max(step - wait, 0.01 * step)
    loading = facts.loading_busy * batch_ms(facts)
    loaders = math.ceil(ratio(loading, without_wait))
    return loaders + facts.threads


def fewer_workers(facts: Facts, needed: float = math.inf) -> int:
    """Loader processes that leave a training process cores for its threads: at least one fewer than now, and of two or
    more at least one.

    Args:
        facts: of the run.
        needed: loader processes that loading needs; no more are left.
    """
    cores = int(ratio(facts.cores, facts.processes))
    beside_training = cores - facts.threads
    most = math.ceil(min(needed, facts.workers))
    fitting = min(beside_training, most)
    return min(facts.workers - 1, max(1, fitting))


def precision_bound(facts: Facts) -> Limit | None:
    """A CPU trains in float32 or bfloat16, and is faster in the other of the two by :data:`LEADS` or more.

    By Amdahl's law the computing phases, a share ``p`` of the step, take ``p / slower`` in the faster precision. None on
    GPUs and for other precisions.
    """
    used = facts.header.get("precision", "")
    bfloat16_time = facts.header.get("bfloat16_time")  # over float32's; none on a GPU
    if not bfloat16_time or used not in ("bf16-mixed", "32-true") or not facts.step_ms:
        return None
    names = ("bfloat16", "float32")
    other = "32-true"
    slower = bfloat16_time
    if used == "32-true":
        names = ("float32", "bfloat16")
        other = "bf16-mixed"
        slower = ratio(1.0, bfloat16_time)
    if slower < LEADS:
        return None
    text = f"products of matrices in {names[0]} take {slower:.1f} times as long as in {names[1]} on this CPU"
    if used == "bf16-mixed" and slower >= EMULATED:
        text = "training is in bf16-mixed, and this CPU has no bfloat16 instructions"
    computing = sum(phase_share(facts.phases, name) for name in COMPUTING if name != "optimizer")
    gain = speedup(1.0, 1 - computing + ratio(computing, slower))
    return Limit("precision", text, f"trainer.precision={other}: at most", gain)


def startup_bound(facts: Facts, at: float = 0.3, least_s: float = 60.0) -> Limit | None:
    """The time before the first step is a share ``at`` of the whole run, and at least ``least_s`` seconds.

    The gain is that without the start's longest part, which the lever names; the rest of a start stays. It compares
    times of the whole run; most other limits' gains compare times of a step.

    Args:
        facts: of the run; of one that still trains its planned length counts.
        at: share of the run, 0 to 1.
        least_s: seconds.
    """
    startup_s = facts.startup_s
    run_s = facts.planned_s or 0.0
    part = share(startup_s, run_s)
    if startup_s < least_s or run_s <= startup_s or part < at:
        return None
    parts = facts.startup["parts"]
    longest = max(parts, key=parts.__getitem__, default="start-up")
    longest_s = parts.get(longest, startup_s)
    text = f"start-up takes {startup_s:.0f} of {run_s:.0f} s ({part:.0%})"
    if parts:
        text += f", most of it {longest} ({longest_s:.0f} s)"
    lever = f"shorten '{longest}'"
    if longest == FIT_OF_THE_START:
        lever = "fit the start on fewer pictures (model.student.inherit_pictures)"
    lever += ", or train longer in one run: at most"
    if facts.crowded_out:
        text += f", while other processes use {facts.other_cores:.1f} cores"
        lever = f"run alone on the machine, {lever}"
    return Limit("startup", text, lever, speedup(run_s, run_s - longest_s))


def student_bound(facts: Facts, alone: bool = True, at: float = 0.5) -> Limit | None:
    """The student's own work takes a share ``at`` of the step: the healthy case.

    Args:
        facts: of the run.
        alone: whether nothing else is worth naming as a limit.
        at: share of the step, 0 to 1.
    """
    taken = sum(phase_share(facts.phases, name) for name in STUDENT_PHASES)
    if taken < at:
        return None
    text = f"the student's own training takes {taken:.0%} of the step"
    unnamed = phase_share(facts.phases, "rest")
    if unnamed >= MUCH:
        text += f", and {unnamed:.0%} of it is {UNNAMED}"
    elif alone:
        text += "; nothing around it holds it up"
    levers = []
    if not facts.header.get("compiled", False):
        levers.append("model.student.compile=true")
    larger_batch = facts.larger_batch(2)
    if larger_batch:
        levers.append(larger_batch)
    levers.append("a faster device, more of them, or a smaller student")
    return Limit("student", text, ", ".join(levers), None)


# -- the host: cores, launching, callbacks -----------------------------------------------------------------------------
def cpu_contention(facts: Facts, at: float = 0.2) -> Limit | None:
    """Training and loader processes wait for a core for a share ``at`` of the step: too many of them, or other jobs.

    Where the kernel does not report waiting threads, a computing phase that varies on a crowded machine is the evidence.
    """
    step = facts.step_ms
    lost = facts.without_core_ms
    swings = facts.swing if facts.thread_wait is None else None
    if share(lost, step) >= at:
        who = "training"
        if facts.workers and facts.queued:
            who += " and its loader processes"
        elif facts.ready_thread:
            who += f" ({facts.ready_thread})"
        evidence = f"{who} waited for a free core for {lost:.0f} of {step:.0f} ms a step ({share(lost, step):.0%})"
        return who_takes_cores(facts, evidence, lost)
    if facts.crowded and swings is not None:
        lost = facts.phases[swings.phase] - swings.low
        return who_takes_cores(facts, swings.text(), lost)
    return None


def who_takes_cores(facts: Facts, evidence: str, lost: float) -> Limit:
    """The limit of a host on which training or its loaders wait for a core: why, and what to change.

    The first reason that holds: other programs' processes; a single core; processes bound to a part of the cores; more
    compute threads than cores; too many loader processes. The rule SchedulerDelay takes its lever from here.

    Args:
        facts: of the run.
        evidence: that training or its loaders wait for a core, in words.
        lost: ms of a step in which they do.
    """
    step = facts.step_ms
    cores = facts.cores
    crowded = facts.crowded
    rest = max(0.01 * step, step - lost)  # ms of a step that waits for no core
    gain = speedup(step, rest)
    if facts.crowded_out:
        text = f"other processes use {facts.other_cores:.1f} cores: {evidence}"
        return Limit("host", text, "run alone on the machine", gain)
    if not crowded and cores == 1:
        lever = "more cores, or run alone on the machine: at most"
        return Limit("host", f"{evidence} on its only core", lever, gain)
    if not crowded:
        text = f"{evidence}, though not all of the {cores} cores are taken"
        lever = "let the processes use all cores (taskset, srun --cpu-bind, docker --cpus): at most"
        return Limit("host", text, lever, gain)
    text = share_cores(facts)
    if facts.hot_cores:
        text += f", {facts.hot_cores}"
    text += f": {evidence}"
    if facts.processes * facts.threads > cores:
        lever = "fewer processes (trainer.devices) or threads, or more cores: at most"
        return Limit("host", text, lever, gain)

    return _fewer_loaders(facts, text, rest)


def _fewer_loaders(facts: Facts, text: str, rest: float) -> Limit:
    """The limit of a host with too many loader processes; what it advises is fewer.

    That is one of each training process where cores are full, else as many as loading needs. The step then takes at least
    the CPU time of loading and training (ms) over the cores. If that gains too little, cheaper pictures are advised as well.

    Args:
        facts: of the run.
        text: the evidence.
        rest: ms of a step that waits for no core.
    """
    step = facts.step_ms
    processes = facts.processes
    cores_are_full = bool(facts.hot_cores or (facts.thread_wait is None and facts.swing))
    needed = 1 if cores_are_full else ratio(facts.loading_cores, processes)
    lever = f"data.num_workers={fewer_workers(facts, needed)} instead of {facts.workers}"
    cpu_ms = facts.loading_cores * step + processes * facts.threads * rest
    least_ms = 0.0 if cores_are_full else ratio(cpu_ms, facts.cores)
    gain = speedup(step, max(rest, least_ms))
    if gain < WORTH:
        lever += ", and cheaper pictures (resized once, ahead of training): at most"
        gain = speedup(step, rest)
    return Limit("host", text, lever, gain)


def share_cores(facts: Facts) -> str:
    """Who shares the cores of a machine, in words; one training process is not named.

    ``2 training processes, 8 loader processes and 2 compute threads share 4 cores``.
    """
    loaders = facts.processes * facts.workers
    sharers = [counted(facts.processes * facts.threads, "compute thread")]
    if loaders:
        sharers.insert(0, counted(loaders, "loader process", "loader processes"))
    if facts.processes > 1:
        sharers.insert(0, f"{facts.processes} training processes")
    *first, last = sharers
    named = f"{', '.join(first)} and {last}" if first else last
    return f"{named} share {counted(facts.cores, 'core')}"


def views_bound(facts: Facts, at: float = 0.3) -> Limit | None:
    """The training process makes the views itself (``data.engine=device``, ``dali``), for a share ``at`` of the step.

    Args:
        facts: of the run.
        at: share of the step, 0 to 1.
    """
    engine = (facts.run.config.get("data") or {}).get("engine")
    part = phase_share(facts.phases, "h2d")
    if engine not in ("device", "dali") or part < at:
        return None
    views_ms = facts.phases["h2d"]
    text = f"the training process makes the views for {views_ms:.0f} of the step's {facts.step_ms:.0f} ms ({part:.0%})"
    lever = "data.engine=torch makes them in loader processes (data.num_workers): at most"
    return Limit("data", text, lever, without(part))


def launch_bound(facts: Facts, at: float = 0.9, busy_below: float = 0.8) -> Limit | None:
    """The host launches kernels for a share ``at`` of the step, and the GPU computes less than ``busy_below``.

    None also on CPUs, and where the GPU's use is not known.

    Args:
        facts: of the run.
        at: share of the step, 0 to 1.
        busy_below: share of the time that the GPU computes, 0 to 1.
    """
    step = facts.step_ms
    launch_ms = facts.per_step("launch_ms")
    gpu_busy = facts.gpu_busy
    if gpu_busy is None or share(launch_ms, step) < at or gpu_busy >= busy_below:
        return None
    text = f"the GPU computes {gpu_busy:.0%} of the time, while the host launches for {launch_ms:.0f} of {step:.0f} ms"
    lever = "model.student.compile=reduce-overhead"
    larger_batch = facts.larger_batch(ratio(1, max(gpu_busy, 0.01)))
    if larger_batch:
        lever = f"{lever}, or {larger_batch} (kernels grow, their number does not)"
    return Limit("host", text, f"{lever}: at most", speedup(1.0, gpu_busy))


LIMITS: dict[str, Callable[[Facts], Limit | None]] = {
    # a host that gets no core also launches slowly
    "host": lambda facts: cpu_contention(facts) or launch_bound(facts),
    "data": lambda facts: tier_bound(facts) if facts.run.tier else data_bound(facts),
    "views": views_bound,
    **{phase: partial(of_phase, phase) for phase in PHASE_LIMITS},
    "precision": precision_bound,
    "startup": startup_bound,
}
"""What can limit a run, by the name that a failure is reported under."""
