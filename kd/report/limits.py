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
from kd.report.ratio import ratio, share, speedup, without
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
    gain: float | None
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
    """The limit of a phase, a key of :data:`PHASE_LIMITS`; None where it takes less of the step."""
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
    """A cache of its answers, which computes each view once, where that pays within the run; else a smaller teacher."""
    free = without(part)
    if facts.cached:  # reading costs next to nothing: the cache was being filled
        lever = "later epochs, and runs like this one, read them: at most"
        return " to compute the answers that its cache keeps", lever, free
    smaller = "a smaller teacher, or smaller pictures for it"
    if not facts.header.get("cacheable", True):
        return "", f"{smaller}: at most", free
    cache = "model.teacher.cache=on"
    cache_of_size = cache
    if facts.cache_bytes:
        cache_of_size += f" (needs {readable_bytes(facts.cache_bytes)})"
    epochs, views = facts.epochs, facts.views
    if math.isinf(epochs):
        return "", f"{cache_of_size}, once filled,", free

    # Epochs that compute the answers take a step each, those that read them 1 / free of a step.
    computed = min(views, epochs)
    gain = speedup(epochs, computed + ratio(epochs - computed, free))
    if gain >= LEADS:
        plural = "s" * (computed > 1)
        return (
            "",
            f"{cache_of_size} in the run's {epochs:g} epochs of {computed:g} view{plural}",
            gain,
        )
    why = f"{cache} gives {gain:.2f}x in the run's {epochs:g} epochs of {computed:g} views"
    if epochs <= views:
        why = f"{cache} pays in runs of more than {views} epochs, this one has {epochs:g}"
    return "", f"{smaller} ({why}): at most", free


def _less_waiting(facts: Facts, part: float) -> Lever:
    """A rank that makes all others wait, or less traffic."""
    slowest = slow_rank(facts.compute_ms)
    if slowest is not None:
        rank, extra_ms = slowest
        why = f" because rank {rank} computes {extra_ms:.0f} ms longer than the others"
        waited_ms = facts.phases["communication"]
        gain = speedup(facts.step_ms, facts.step_ms - min(extra_ms, waited_ms))
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
    """The slowest callback, where it takes much of the phase; else all of them."""
    gain = without(part)
    logging_ms = facts.phases["logging"]
    if facts.callbacks_ms:
        slowest, ms = max(facts.callbacks_ms.items(), key=itemgetter(1))
        if ms > 0.3 * logging_ms:
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


def readable_bytes(size: float) -> str:
    """Bytes with a decimal unit (1 KB = 1000 B), for people.

    >>> readable_bytes(1234567)
    '1.2 MB'
    """
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


# -- limits that are no phase -------------------------------------------------------------------------------------------
def data_bound(facts: Facts, at: float = 0.1) -> Limit | None:
    """The step waits for its batch for a share ``at`` of its time, less what those who make it waited for cores that other
    jobs have (:attr:`~kd.report.step_facts.StepFacts.queued`).

    A step with ``n`` loader processes takes, in ms, the longest of

    - the rest of the step, without its wait;
    - one loader process's time for a batch over ``n``;
    - the CPU time of loading and training over the free cores.

    Args:
        facts: of the run.
        at: share of the step, 0 to 1.
    """
    step = facts.step_ms
    wait = facts.phases.get("data", 0.0) - facts.queued
    if share(wait, step) < at:
        return None
    workers = facts.workers
    cores = facts.cores
    processes = facts.processes

    # All in ms: the step without its wait, one loader's time for a batch, and the least that the cores allow.
    rest = max(step - wait, 0.01 * step)
    batch_ms = wait
    if workers:
        batch_ms = workers * (step - facts.queued)
    free_cores = max(1.0, cores - facts.other_cores)
    loader_cpu_ms = facts.loading_busy * batch_ms
    training_cpu_ms = facts.threads * rest
    cpu_ms = processes * (loader_cpu_ms + training_cpu_ms)
    floor = max(rest, ratio(cpu_ms, free_cores))
    cores_are_left = floor == rest

    text = f"the step waits {wait:.0f} of its {step:.0f} ms ({share(wait, step):.0%}) for the next batch"
    if not facts.cpu and not cores_are_left:
        present = ratio(cores, processes)
        text += f"; {cores_needed(facts)} cores a GPU would be enough, there are {present:g}"

    # First lever: more loader processes, one to spare where cores are left, as batches do not take equally long.
    # Each epoch's first batch has nothing to hide behind.
    busy_loaders = math.ceil(ratio(batch_ms, floor))
    wanted = max(1, busy_loaders + cores_are_left)
    next_batch = max(floor, ratio(batch_ms, wanted))
    first_batch = ratio(batch_ms, facts.batches_per_epoch)
    gain = speedup(step, next_batch + first_batch)
    headline_possible = speedup(step, rest) >= LEADS
    least_gain = LEADS if headline_possible else WORTH
    if facts.workers_known and wanted > workers and gain >= least_gain:
        return Limit("data", text, f"data.num_workers={wanted} instead of {workers}", gain)

    # Second lever: the pixels of the cached views.
    repeats_views = math.isfinite(facts.epochs) and facts.epochs > facts.views
    if facts.cached and not facts.has_pixels and repeats_views:
        setting = "model.teacher.cache_pixels=true"
        lever = f"{setting} decodes nothing after {facts.views} epochs: at most"
        later = (facts.epochs - facts.views) * share(rest, step)
        gain = speedup(facts.epochs, facts.views + later)
        return Limit("data", text, lever, gain)

    # Third lever: cheaper pictures, or more cores.
    lever = "" if facts.cpu else "data.engine=device (or dali), "
    lever += "cheaper pictures (resized once, ahead of training: kd-pack short_side=) or more cores: at most"
    busy_threads = processes * (workers + facts.threads)
    if workers > 1 and busy_threads > cores:
        loaders = processes * workers
        text += f", though {loaders} loader processes share {cores} core{'s' * (cores > 1)} with training"
        lever = f"data.num_workers={fewer_workers(facts)}, and {lever}"
    return Limit("data", text, lever, speedup(step, rest))


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
    if tier.queue_is_short:
        lever = f"a larger data.tier.queue_mb ({tier.may_ask} batches fit): at most"
        return Limit("data", text, lever, speedup(step, rest))
    if tier.busy < BUSY:
        rate = ratio(tier.total("mb"), tier.seconds)
        text += f", and send {rate:,.0f} MB/s"
        lever = "a faster network to the data machines, smaller pictures: at most"
        return Limit("data", text, lever, speedup(step, rest))

    # Makers with which no step waits: the ms that one maker needs for a step of all processes, over the step's rest.
    made_ms = 1000 * tier.batch_s * tier.ranks
    makers_needed = math.ceil(ratio(made_ms, rest))
    missing = makers_needed - tier.makers
    makers_of_machine = max(1.0, ratio(tier.cores, len(tier.present)))
    more = max(1, math.ceil(ratio(missing, makers_of_machine)))
    makers_then = tier.makers + more * makers_of_machine
    step_then = max(rest, ratio(made_ms, makers_then))
    gain = speedup(step, step_then)
    lever = f"{more} more data machine{'s' * (more > 1)} of {makers_of_machine:.0f} cores"
    return Limit("data", text, lever, gain)


def cores_needed(facts: Facts) -> int:
    """Cores for each training process, of its loaders and itself, with which no step would wait for its batch.

    The loaders' CPU time for a batch (ms) over the step without its wait (ms), and a core for each thread.
    """
    step = facts.step_ms
    wait = facts.phases.get("data", 0.0)
    rest = max(step - wait, 0.01 * step)
    batch_ms = wait  # one loader's time for a batch
    if facts.workers:
        batch_ms = facts.workers * step
    loaders = ratio(facts.loading_busy * batch_ms, rest)
    return math.ceil(loaders) + facts.threads


def fewer_workers(facts: Facts, needed: float = math.inf) -> int:
    """Loader processes that leave a training process cores for its threads: at least one fewer than now, and of two or
    more at least one.

    Args:
        facts: of the run.
        needed: loader processes that loading needs; no more are left.
    """
    most = math.ceil(needed) if math.isfinite(needed) else facts.workers
    beside_training = int(ratio(facts.cores, facts.processes)) - facts.threads
    return min(facts.workers - 1, max(1, min(beside_training, most)))


def precision_bound(facts: Facts) -> Limit | None:
    """A CPU computes in the one of float32 and bfloat16 that it is slower in.

    By Amdahl's law the computing phases, a share ``p`` of the step, take ``p / slower`` in the faster precision.
    """
    precision = facts.header.get("precision", "")
    bfloat16_time = facts.header.get("bfloat16_time")  # over float32's; none on a GPU
    if not bfloat16_time or precision not in ("bf16-mixed", "32-true") or not facts.step_ms:
        return None
    if precision == "bf16-mixed":
        used, other, faster_setting = "bfloat16", "float32", "32-true"
        slower = bfloat16_time
    else:
        used, other, faster_setting = "float32", "bfloat16", "bf16-mixed"
        slower = ratio(1.0, bfloat16_time)
    if slower < LEADS:
        return None
    text = (
        f"products of matrices in {used} take {slower:.1f} times as long as in {other} on this CPU"
    )
    if used == "bfloat16" and slower >= EMULATED:
        text = "training is in bf16-mixed, and this CPU has no bfloat16 instructions"
    computing = sum(phase_share(facts.phases, name) for name in COMPUTING if name != "optimizer")
    gain = speedup(1.0, 1 - computing + ratio(computing, slower))
    return Limit("precision", text, f"trainer.precision={faster_setting}: at most", gain)


def startup_bound(facts: Facts, at: float = 0.3, least_s: float = 60.0) -> Limit | None:
    """The time before the first step is a share ``at`` of the whole run, and at least ``least_s`` seconds.

    The gain is that without the start's longest part, which the lever names; the rest of a start stays. It is one of
    the run's time, where the gains of other limits are of a step's.

    Args:
        facts: of the run; of one that still trains its planned length counts.
        at: share of the run, 0 to 1.
        least_s: seconds.
    """
    startup_s = facts.startup_s
    parts = facts.startup["parts"]
    run_s = facts.planned_s or 0.0
    part = share(startup_s, run_s)
    if startup_s < least_s or run_s <= startup_s or part < at:
        return None
    longest = "start-up"
    longest_s = startup_s
    if parts:
        longest = max(parts, key=lambda name: parts[name])
        longest_s = parts[longest]
    text = f"start-up takes {startup_s:.0f} of {run_s:.0f} s ({part:.0%}), most of it {longest}"
    if parts:
        text += f" ({longest_s:.0f} s)"
    shorter = f"shorten '{longest}'"
    if longest == FIT_OF_THE_START:
        shorter = "fit the start on fewer pictures (model.student.inherit_pictures)"
    lever = f"{shorter}, or train longer in one run: at most"
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
    levers = ["model.student.compile=true"]
    larger_batch = facts.larger_batch(2)
    if larger_batch:
        levers.append(larger_batch)
    levers.append("a faster device, more of them, or a smaller student")
    return Limit("student", text, ", ".join(levers), None)


# -- the host: cores, launching, callbacks -----------------------------------------------------------------------------
def cpu_contention(facts: Facts, at: float = 0.2) -> Limit | None:
    """Training and loader processes wait for a core for a share ``at`` of the step: too many of them, or other jobs.

    Where the kernel does not report waiting threads, a computing phase that varies on a crowded machine stands for it.
    """
    step, workers, cores = facts.step_ms, facts.workers, facts.cores
    threads, processes = facts.threads, facts.processes
    if not step:
        return None

    # How many ms of a step are lost, and the evidence.
    queued = facts.queued if workers else 0.0  # without loader processes it is training's own delay
    ready_ms = facts.ready_ms + queued
    crowded = processes * (workers + threads) > cores
    swings = facts.swing if facts.thread_wait is None else None
    if share(ready_ms, step) >= at:
        lost = ready_ms
        who = "training"
        if queued:
            who += " and its loader processes"
        elif facts.ready_thread:
            who += f" ({facts.ready_thread})"
        evidence = (
            f"{who} waited for a free core for {lost:.0f} of {step:.0f} ms a step "
            f"({share(lost, step):.0%})"
        )
    elif crowded and swings is not None:
        lost = facts.phases[swings.phase] - swings.low
        evidence = f"{swings.text()} although nothing changes its shapes"
    else:
        return None
    rest = max(0.01 * step, step - lost)  # ms of a step that waits for no core

    # Whose processes take the cores?
    if facts.crowded_out:
        text = f"other processes use {facts.other_cores:.1f} cores: {evidence}"
        return Limit("host", text, "run alone on the machine", speedup(step, rest))
    if not crowded and cores == 1:
        lever = "more cores, or run alone on the machine: at most"
        return Limit("host", f"{evidence} on its only core", lever, speedup(step, rest))
    if not crowded:
        text = f"{evidence}, though not all of the {cores} cores are taken"
        lever = "let the processes use all cores (taskset, srun --cpu-bind, docker --cpus): at most"
        return Limit("host", text, lever, speedup(step, rest))
    text = _share_cores(facts)
    if facts.hot_cores:
        text += f", {facts.hot_cores}"
    text += f": {evidence}"
    if processes * threads > cores:
        lever = "fewer processes (trainer.devices) or threads, or more cores: at most"
        return Limit("host", text, lever, speedup(step, rest))

    # Fewer loader processes: one of each training process where cores are full, else as many as loading needs.
    # Such a step takes at least the CPU time of loading and training (ms) over the cores.
    cores_are_full = bool(facts.hot_cores or swings)
    loaders_needed = 1 if cores_are_full else ratio(facts.loading_cores, processes)
    lever = f"data.num_workers={fewer_workers(facts, loaders_needed)} instead of {workers}"
    cpu_ms = facts.loading_cores * step + processes * threads * rest
    least_ms = 0.0 if cores_are_full else ratio(cpu_ms, cores)
    gain = speedup(step, max(rest, least_ms))
    if gain >= WORTH:
        return Limit("host", text, lever, gain)
    lever += ", and cheaper pictures (resized once, ahead of training): at most"
    return Limit("host", text, lever, speedup(step, rest))


def _share_cores(facts: Facts) -> str:
    """Who shares the cores of a machine, in words.

    ``2 training processes, 8 loader processes and 2 compute threads share 4 cores``; one training process is not named.
    """
    processes = facts.processes
    loaders = processes * facts.workers
    sharers = []
    if processes > 1:
        sharers.append(f"{processes} training processes")
    if loaders:
        sharers.append(counted(loaders, "loader process", "loader processes"))
    sharers.append(counted(processes * facts.threads, "compute thread"))
    *first, last = sharers
    named = f"{', '.join(first)} and {last}" if first else last
    return f"{named} share {counted(facts.cores, 'core')}"


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


# -- which of them is the headline -------------------------------------------------------------------------------------
def host_bound(facts: Facts) -> Limit | None:
    """Waiting for a core comes first: a host that gets none also launches slowly."""
    return cpu_contention(facts) or launch_bound(facts)


def input_bound(facts: Facts) -> Limit | None:
    """The wait for batches, of a data tier or of this machine."""
    return tier_bound(facts) if facts.run.tier else data_bound(facts)


LIMITS: dict[str, Callable[[Facts], Limit | None]] = {
    "host": host_bound,
    "data": input_bound,
    **{phase: partial(of_phase, phase) for phase in PHASE_LIMITS},
    "precision": precision_bound,
    "startup": startup_bound,
}
"""What can limit a run, by the name that a failure is reported under."""
