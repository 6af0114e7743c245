"""What can limit a run: pure functions of its facts.

A gain is the step's time over its time without the limit: ``1 / (1 - p)`` for a share ``p`` (Amdahl, "Validity of the
single processor approach", AFIPS 1967).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kd.report.facts import AT, BUSY, OWN, Facts
from kd.report.ratio import ratio, share, speedup, without
from kd.report.records import percentile
from kd.report.step_facts import part

WORTH = 1.1  # a lever below this gain is not worth naming
LEADS = 1.25  # a limit below this gain is no headline
EMULATED = 10.0  # times as long as in float32, or longer: bfloat16 is computed in software
SWINGS = 1.5  # a computing phase swings from this ratio of its percentiles
FUSED_OPTIMIZER_SHARE = (
    0.05  # what a fused optimizer is expected to take, over the rest of the step
)


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
    """Predicted speed-up of the lever; None: unknown."""


@dataclass(frozen=True)
class Finding:
    """A rule that fired."""

    rule: str
    """Name of the rule."""
    text: str
    """The evidence, a sentence."""
    lever: str
    """What to do."""


def data_bound(facts: Facts, at: float = 0.1) -> Limit | None:
    """The step waits for its batch for a share ``at`` of its time, without the training's own wait for a core."""
    step, wait = facts.step_ms, facts.phases.get("data", 0.0) - facts.queued
    if share(wait, step) < at:
        return None
    workers, cores, threads, processes = facts.workers, facts.cores, facts.threads, facts.processes
    rest = max(step - wait, 0.01 * step)
    cost = wait if workers == 0 else workers * (step - facts.queued)
    free = max(1.0, cores - facts.other_cores)
    floor = max(rest, ratio(processes * (facts.loading_busy * cost + threads * rest), free))
    spare = floor == rest  # cores are left: one worker more, as batches do not take equally long
    wanted = max(1, math.ceil(ratio(cost, floor)) + spare)
    gain = speedup(step, max(floor, ratio(cost, wanted)) + ratio(cost, facts.batches_per_epoch))
    text = f"the step waits {wait:.0f} of its {step:.0f} ms ({share(wait, step):.0%}) for the next batch"
    if not facts.cpu and floor > rest:
        text += f"; {cores_needed(facts)} cores a GPU would be enough, there are {ratio(cores, processes):g}"
    if wanted > workers and gain >= (LEADS if speedup(step, rest) >= LEADS else WORTH):
        return Limit("data", text, f"data.num_workers={wanted} instead of {workers}", gain)
    if (
        facts.cached
        and not facts.has_pixels
        and math.isfinite(facts.epochs)
        and facts.epochs > facts.views
    ):
        lever = (
            f"model.teacher.cache_pixels=true decodes nothing after {facts.views} epochs: at most"
        )
        later = (facts.epochs - facts.views) * share(rest, step)
        return Limit("data", text, lever, speedup(facts.epochs, facts.views + later))
    lever = "" if facts.cpu else "data.engine=device (or dali), "
    lever += "cheaper pictures (resized once, ahead of training: kd-pack short_side=) or more cores: at most"
    if workers > 1 and processes * (workers + threads) > cores:
        text += f", though {processes * workers} loader processes share {cores} core{'s' * (cores > 1)} with training"
        lever = f"data.num_workers={fewer_workers(facts)}, and {lever}"
    return Limit("data", text, lever, speedup(step, rest))


def tier_bound(facts: Facts) -> Limit | None:
    """The step waits for a data tier: for too few makers, or for the network or the queue where makers are idle."""
    step, wait, tier = facts.step_ms, facts.phases.get("data", 0.0), facts.tier
    if tier is None or not tier.makers or part(facts.phases, "data") < AT:
        return None
    rest = max(step - wait, 0.01 * step)
    text = f"the step waits {wait:.0f} of its {step:.0f} ms ({share(wait, step):.0%}) for a batch of the data tier, whose "
    text += f"{tier.makers} makers work {tier.busy:.0%} of the time"
    if tier.queue_is_short:
        return Limit(
            "data",
            text,
            f"a larger data.tier.queue_mb ({tier.may_ask} batches fit): at most",
            speedup(step, rest),
        )
    if tier.busy < BUSY:
        rate = ratio(tier.total("mb"), tier.seconds)
        text += f", and send {rate:,.0f} MB/s"
        return Limit(
            "data",
            text,
            "a faster network to the data machines, smaller pictures: at most",
            speedup(step, rest),
        )
    made_ms = (
        1000 * tier.batch_s * tier.ranks
    )  # of one maker that makes the batches of all processes
    needed = math.ceil(ratio(made_ms, rest))
    each = max(1.0, ratio(tier.cores, len(tier.present)))
    more = max(1, math.ceil(ratio(needed - tier.makers, each)))
    gain = speedup(step, max(rest, ratio(made_ms, tier.makers + more * each)))
    return Limit(
        "data", text, f"{more} more data machine{'s' * (more > 1)} of {each:.0f} cores", gain
    )


def cores_needed(facts: Facts) -> int:
    """Cores for each training process, of its loaders and itself, with which no step would wait for its batch."""
    step, wait = facts.step_ms, facts.phases.get("data", 0.0)
    cost = wait if facts.workers == 0 else facts.workers * step
    return (
        math.ceil(ratio(facts.loading_busy * cost, max(step - wait, 0.01 * step))) + facts.threads
    )


def fewer_workers(facts: Facts, needed: float = math.inf) -> int:
    """Loader processes that leave a training process a core, at least one fewer than now; ``needed``: for loading."""
    most = math.ceil(needed) if math.isfinite(needed) else facts.workers
    return min(
        facts.workers - 1,
        max(1, min(int(ratio(facts.cores, facts.processes)) - facts.threads, most)),
    )


def teacher_bound(facts: Facts, at: float = 0.3) -> Limit | None:
    """The teacher's forward pass takes a share ``at`` of the step. A cache still computes each view once."""
    step, taken, epochs, views = (
        facts.step_ms,
        part(facts.phases, "teacher"),
        facts.epochs,
        facts.views,
    )
    if taken < at:
        return None
    text = (
        f"the teacher takes {facts.phases['teacher']:.0f} of the step's {step:.0f} ms ({taken:.0%})"
    )
    free = without(taken)
    if facts.cached:  # as reading it costs next to nothing, it was being filled
        text += " to compute the answers that its cache keeps"
        return Limit(
            "teacher", text, "later epochs, and runs like this one, read them: at most", free
        )
    if not facts.header.get("cacheable", True):
        return Limit(
            "teacher", text, "a smaller teacher, or smaller pictures for it: at most", free
        )
    needs = f" (needs {readable_bytes(facts.cache_bytes)})" if facts.cache_bytes else ""
    if math.isinf(epochs):
        return Limit("teacher", text, f"model.teacher.cache=on{needs}, once filled,", free)
    computed = min(views, epochs)
    gain = speedup(epochs, computed + ratio(epochs - computed, free))
    if gain < LEADS:
        kept = f"model.teacher.cache=on gives {gain:.2f}x in the run's {epochs:g} epochs of {computed:g} views"
        if epochs <= views:
            kept = f"model.teacher.cache=on pays in runs of more than {views} epochs, this one has {epochs:g}"
        return Limit(
            "teacher",
            text,
            f"a smaller teacher, or smaller pictures for it ({kept}): at most",
            free,
        )
    lever = f"model.teacher.cache=on{needs} in the run's {epochs:g} epochs of {computed:g} view{'s' * (computed > 1)}"
    return Limit("teacher", text, lever, gain)


def communication_bound(facts: Facts, at: float = 0.15) -> Limit | None:
    """Gradients are waited for after the last one is computed; or one rank makes all others wait."""
    phases, step, waited = facts.phases, facts.step_ms, part(facts.phases, "communication")
    if waited < at:
        return None
    text = f"the step waits {phases['communication']:.0f} of {step:.0f} ms ({waited:.0%}) for gradients"
    slow = slow_rank(facts.compute_ms)
    if slow is not None:
        rank, extra = slow
        text += f" because rank {rank} computes {extra:.0f} ms longer than the others"
        extra = min(extra, phases["communication"])
        return Limit(
            "communication",
            text,
            f"check rank {rank}'s machine, or remove it",
            speedup(step, step - extra),
        )
    lever = (
        "config=bf16_gradients (half the traffic) or config=powersgd, larger batches or gradient accumulation "
        "(trainer.accumulate_grad_batches), a faster network: at most"
    )
    return Limit("communication", text, lever, without(waited))


def slow_rank(compute_ms: Mapping[int, float], late: float = 1.15) -> tuple[int, float] | None:
    """The rank that computes ``late`` times as long as the median of the others, and by how many ms."""
    if len(compute_ms) < 2:
        return None
    rank = max(compute_ms, key=lambda r: compute_ms[r])
    others = percentile([ms for r, ms in compute_ms.items() if r != rank], 50)
    return (rank, compute_ms[rank] - others) if compute_ms[rank] > late * others else None


def optimizer_bound(facts: Facts, at: float = 0.25) -> Limit | None:
    """The optimizer's step is usually a few percent."""
    taken = part(facts.phases, "optimizer")
    if taken < at:
        return None
    text = f"the optimizer takes {facts.phases['optimizer']:.0f} of {facts.step_ms:.0f} ms ({taken:.0%})"
    gain = speedup(1.0, (1 - taken) * (1 + FUSED_OPTIMIZER_SHARE))
    return Limit(
        "student", text, "a fused optimizer (optim.name=adamw, with an optim.lr of its own)", gain
    )


def precision_bound(facts: Facts) -> Limit | None:
    """A CPU computes in the one of float32 and bfloat16 that it is slower in."""
    precision, bfloat16_time = (
        facts.header.get("precision", ""),
        facts.header.get("bfloat16_time"),
    )  # none on a GPU
    used, other = ("bfloat16", "float32") if precision == "bf16-mixed" else ("float32", "bfloat16")
    if not bfloat16_time or precision not in ("bf16-mixed", "32-true") or not facts.step_ms:
        return None
    slower = bfloat16_time if used == "bfloat16" else ratio(1.0, bfloat16_time)
    if slower < LEADS:
        return None
    computing = sum(part(facts.phases, name) for name in ("teacher", "student", "loss", "backward"))
    text = (
        f"products of matrices in {used} take {slower:.1f} times as long as in {other} on this CPU"
    )
    if used == "bfloat16" and slower >= EMULATED:
        text = "training is in bf16-mixed, and this CPU has no bfloat16 instructions"
    lever = f"trainer.precision={'32-true' if used == 'bfloat16' else 'bf16-mixed'}: at most"
    return Limit("precision", text, lever, speedup(1.0, 1 - computing + ratio(computing, slower)))


def checkpoint_bound(facts: Facts, at: float = 0.05) -> Limit | None:
    """Saving takes a notable part of the training time."""
    taken = part(facts.phases, "checkpoint")
    if taken < at:
        return None
    text = f"saving checkpoints takes {taken:.0%} of the training time ({facts.phases['checkpoint']:.0f} ms a step)"
    return Limit(
        "checkpoint", text, "save less often, or to a faster disk: at most", without(taken)
    )


def startup_bound(facts: Facts, at: float = 0.3, least_s: float = 60.0) -> Limit | None:
    """The run spends its time before the first step."""
    startup_s, parts, wall_s = facts.startup["s"], facts.startup["parts"], facts.planned_s or 0.0
    if startup_s < least_s or wall_s <= startup_s or share(startup_s, wall_s) < at:
        return None
    longest = max(parts, key=lambda name: parts[name]) if parts else "start-up"
    text = f"start-up takes {startup_s:.0f} of {wall_s:.0f} s ({share(startup_s, wall_s):.0%}), most of it {longest}"
    text += f" ({parts[longest]:.0f} s)" if parts else ""
    lever = f"shorten '{longest}', or train longer in one run: at most"
    return Limit("startup", text, lever, speedup(wall_s, wall_s - startup_s))


def student_bound(facts: Facts, alone: bool = True, at: float = 0.5) -> Limit | None:
    """What is left is the student's own work: the healthy case, where nothing around it (``alone``) is worth naming."""
    own = sum(part(facts.phases, name) for name in OWN)
    if own < at:
        return None
    text = f"the student's own training takes {own:.0%} of the step"
    if alone:
        text += "; nothing around it holds it up"
    levers = [
        "model.student.compile=true",
        facts.larger_batch,
        "a faster device, more of them, or a smaller student",
    ]
    return Limit("student", text, ", ".join(lever for lever in levers if lever), None)


# -- the host: cores, launching, callbacks -----------------------------------------------------------------------------
class Swing(NamedTuple):
    """A phase whose time changes from step to step."""

    phase: str
    """Name of the phase."""
    low: float
    """5th percentile, ms."""
    middle: float
    """Median, ms."""
    high: float
    """95th percentile, ms."""

    def text(self) -> str:
        """The spread in words: ``backward takes 8.3 to 30.9 s (p5, p95)``."""
        times = f"{self.low:.0f} to {self.high:.0f} ms"
        if self.high >= 10_000:
            times = f"{self.low / 1000:.1f} to {self.high / 1000:.1f} s"
        return f"{self.phase} takes {times} (p5, p95)"


def swing(facts: Facts) -> Swing | None:
    """The phase that swings most: p95 over p50, or p50 over p5, is at least :data:`SWINGS`; no cached teacher's."""
    found = [
        Swing(name, *times)
        for name, times in facts.swings.items()
        if name != "teacher" or not facts.cached
    ]
    most = max(found, key=lambda s: s.high - s.low, default=None)
    swings = (
        most
        and max(ratio(most.high, max(most.middle, 1e-6)), ratio(most.middle, max(most.low, 1e-6)))
        >= SWINGS
    )
    return most if swings else None


def cpu_contention(facts: Facts, at: float = 0.2) -> Limit | None:
    """Training and loader processes wait for a core for a share ``at`` of the step: too many of them, or other jobs."""
    step, workers, cores, threads, processes = (
        facts.step_ms,
        facts.workers,
        facts.cores,
        facts.threads,
        facts.processes,
    )
    queued = (
        facts.queued if workers else 0.0
    )  # without loader processes it is the training's own delay
    ready_ms, crowded = facts.ready_ms + queued, processes * (workers + threads) > cores
    swings = swing(facts) if facts.thread_wait is None else None
    if not step:
        return None
    if share(ready_ms, step) >= at:
        thread = f" ({facts.ready_thread})" if facts.ready_thread else ""
        lost, who = ready_ms, " and its loader processes" if queued else thread
        missing = f"training{who} waited for a free core for "
        missing += f"{lost:.0f} of {step:.0f} ms a step ({share(lost, step):.0%})"
    elif crowded and swings is not None:
        lost = facts.phases[swings.phase] - swings.low
        missing = f"{swings.text()} although nothing changes its shapes"
    else:
        return None
    free = max(0.01 * step, step - lost)
    if facts.crowded_out:
        text = f"other processes use {facts.other_cores:.1f} cores: {missing}"
        return Limit("host", text, "run alone on the machine", speedup(step, free))
    if not crowded:
        text = f"{missing}, though not all of the {cores} cores are taken"
        lever = "let the processes use all cores (taskset, srun --cpu-bind, docker --cpus): at most"
        return Limit("host", text, lever, speedup(step, free))
    counted = {
        "training process": processes * (processes > 1),
        "loader process": processes * workers,
        "compute thread": processes * threads,
    }
    named = [_count(count, what) for what, count in counted.items() if count]
    shared = f"{', '.join(named[:-1])}{' and ' * (len(named) > 1)}{named[-1]} share {_count(cores, 'core')}"
    text = f"{shared}{f', {facts.hot}' if facts.hot else ''}: {missing}"
    if processes * threads > cores:
        return Limit(
            "host",
            text,
            "fewer processes (trainer.devices) or threads, or more cores: at most",
            speedup(step, free),
        )
    pressed = bool(facts.hot or swings)
    fewer = fewer_workers(facts, 1 if pressed else ratio(facts.loading_cores, processes))
    lever = f"data.num_workers={fewer} instead of {workers}"
    busy = facts.loading_cores * step + processes * threads * free
    gain = speedup(step, max(free, 0.0 if pressed else ratio(busy, cores)))
    if gain >= WORTH:
        return Limit("host", text, lever, gain)
    return Limit(
        "host",
        text,
        f"{lever}, and cheaper pictures (resized once, ahead of training): at most",
        speedup(step, free),
    )


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('s') else 's'}"


def launch_bound(facts: Facts, at: float = 0.9, busy_below: float = 0.8) -> Limit | None:
    """The host launches kernels for a share ``at`` of the step, and the GPU computes less than ``busy_below``."""
    step, launch_ms, gpu_busy, larger = (
        facts.step_ms,
        facts.per_step("launch_ms"),
        facts.gpu_busy,
        facts.larger_batch,
    )
    if gpu_busy is None or share(launch_ms, step) < at or gpu_busy >= busy_below:
        return None
    text = f"the GPU computes {gpu_busy:.0%} of the time, while the host launches for {launch_ms:.0f} of {step:.0f} ms"
    lever = (
        f"{larger}: kernels grow, their number does not"
        if larger
        else "model.student.compile=reduce-overhead"
    )
    return Limit("host", text, f"{lever}: at most", speedup(1.0, gpu_busy))


def bookkeeping_bound(facts: Facts, at: float = 0.15) -> Limit | None:
    """Callbacks, loggers and the loop around them take a notable part of the step."""
    phases, step, taken = facts.phases, facts.step_ms, part(facts.phases, "logging")
    if taken < at:
        return None
    text = f"callbacks and logging take {phases['logging']:.0f} of {step:.0f} ms ({taken:.0%})"
    lever = "trainer.log_every_n_steps, fewer callbacks: at most"
    if facts.callbacks_ms:
        name, ms = max(facts.callbacks_ms.items(), key=lambda item: item[1])
        if ms > 0.3 * phases["logging"]:
            text += f", {name} alone {ms:.0f} ms"
            lever = f"do less in {name}, or less often: at most"
    return Limit("host", text, lever, without(taken))


def readable_bytes(size: float) -> str:
    """Bytes with a decimal unit.

    >>> readable_bytes(1234567)
    '1.2 MB'
    """
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
