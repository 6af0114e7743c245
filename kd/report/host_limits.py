"""What can limit a run on the host's side: cores, launching, callbacks. Pure functions, see :mod:`kd.report.limits`."""

from dataclasses import dataclass

from kd.report.facts import Facts
from kd.report.limits import WORTH, Limit, fewer_workers
from kd.report.step_facts import part

SWINGS = 1.5  # a computing phase swings from this ratio of its percentiles


@dataclass(frozen=True)
class Swing:
    """A phase whose time changes from step to step."""

    phase: str  # its name
    low: float  # 5th percentile, ms
    middle: float  # median
    high: float  # 95th percentile

    @property
    def size(self) -> float:
        """How far the tails are from the median: the larger of p95 / p50 and p50 / p5."""
        return max(self.high / max(self.middle, 1e-6), self.middle / max(self.low, 1e-6))

    def text(self) -> str:
        unit, by = ("s", 1000.0) if self.high >= 10_000 else ("ms", 1.0)
        digits = 1 if unit == "s" else 0
        return f"{self.phase} takes {self.low / by:.{digits}f} to {self.high / by:.{digits}f} {unit} (p5, p95)"


def swing(facts: Facts, at: float = SWINGS) -> Swing | None:
    """The computing phase that swings most."""
    found = [Swing(name, *percentiles) for name, percentiles in facts.swings.items()]
    largest = max(found, key=lambda s: s.high - s.low, default=None)
    return largest if largest and largest.size >= at else None


def cpu_contention(facts: Facts, at: float = 0.2) -> Limit | None:
    """Training and loader processes wait for a core for a share ``at`` of the step: too many processes, or other jobs.

    The evidence is the kernel's run queue. Where that is not recorded, it is a computing phase that varies while more
    processes run than cores. Fewer loader processes do not shrink their work: a step takes at least the CPU time of
    both over the cores.
    """
    step, workers, cores, threads, processes = facts.step_ms, facts.workers, facts.cores, facts.threads, facts.processes
    queued = facts.queued if workers else 0.0  # without loader processes it is the training's own delay
    ready_ms, crowded = facts.ready_ms + queued, processes * (workers + threads) > cores
    swings = swing(facts) if facts.thread_wait is None else None
    if not step:
        return None
    if ready_ms / step >= at:
        thread = f" ({facts.ready_thread})" if facts.ready_thread else ""
        lost, who = ready_ms, " and its loader processes" if queued else thread
        missing = f"training{who} stood ready but got no core for "
        missing += f"{lost:.0f} of {step:.0f} ms a step ({lost / step:.0%})"
    elif crowded and swings is not None:
        lost = facts.phases[swings.phase] - swings.low
        missing = f"{swings.text()} although nothing changes its shapes"
    else:
        return None
    free = max(0.01 * step, step - lost)
    if facts.crowded_out:
        text = f"other processes use {facts.other_cores:.1f} cores: {missing}"
        return Limit("host", text, "run alone on the machine", step / free)
    if not crowded:
        text = f"{missing}, though not all of the {cores} cores are taken"
        lever = "let the processes use all cores (taskset, srun --cpu-bind, docker --cpus): at most"
        return Limit("host", text, lever, step / free)
    counted = {"training process": processes * (processes > 1), "loader process": processes * workers,
               "compute thread": processes * threads}  # fmt: skip
    named = [_count(count, what) for what, count in counted.items() if count]
    shared = f"{', '.join(named[:-1])}{' and ' * (len(named) > 1)}{named[-1]} share {_count(cores, 'core')}"
    text = f"{shared}{f', {facts.hot}' if facts.hot else ''}: {missing}"
    if processes * threads > cores:
        return Limit("host", text, "fewer processes (trainer.devices) or threads, or more cores: at most", step / free)
    pressed = bool(facts.hot or swings)
    fewer = fewer_workers(facts, 1 if pressed else facts.loading_cores / processes)
    lever = f"data.num_workers={fewer} instead of {workers}"
    gain = step / max(free, 0.0 if pressed else (facts.loading_cores * step + processes * threads * free) / cores)
    if gain >= WORTH:
        return Limit("host", text, lever, gain)
    return Limit("host", text, f"{lever}, and cheaper pictures (resized once, ahead of training): at most", step / free)


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('s') else 's'}"


def launch_bound(facts: Facts, at: float = 0.9, busy_below: float = 0.8) -> Limit | None:
    """The host launches kernels for a share ``at`` of the step, and the GPU computes less than ``busy_below``."""
    step, launch_ms, gpu_busy, larger = facts.step_ms, facts.per_step("launch_ms"), facts.gpu_busy, facts.larger_batch
    if gpu_busy is None or not step or launch_ms / step < at or gpu_busy >= busy_below:
        return None
    text = f"the GPU computes {gpu_busy:.0%} of the time, while the host launches for {launch_ms:.0f} of {step:.0f} ms"
    lever = f"{larger}: kernels grow, their number does not" if larger else "model.student.compile=reduce-overhead"
    return Limit("host", text, f"{lever}: at most", 1 / gpu_busy)


def bookkeeping_bound(facts: Facts, at: float = 0.15) -> Limit | None:
    """Callbacks, loggers and the loop around them take a notable part of the step."""
    phases, step, share = facts.phases, facts.step_ms, part(facts.phases, "logging")
    if share < at:
        return None
    text = f"callbacks and logging take {phases['logging']:.0f} of {step:.0f} ms ({share:.0%})"
    lever = "trainer.log_every_n_steps, fewer callbacks: at most"
    if facts.callbacks_ms:
        name, ms = max(facts.callbacks_ms.items(), key=lambda item: item[1])
        if ms > 0.3 * phases["logging"]:
            text += f", {name} alone {ms:.0f} ms"
            lever = f"do less in {name}, or less often: at most"
    return Limit("host", text, lever, 1 / (1 - share))
