"""What can limit a run on the host's side: cores, launching, callbacks. Pure functions, see :mod:`kd.report.limits`."""

from collections.abc import Mapping
from dataclasses import dataclass

from kd.report.limits import WORTH, Limit, fewer_workers
from kd.report.step_facts import part, step_ms


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
        """``backward takes 8.3 to 30.9 s (p5, p95)``."""
        unit, by = ("s", 1000.0) if self.high >= 10_000 else ("ms", 1.0)
        digits = 1 if unit == "s" else 0
        return f"{self.phase} takes {self.low / by:.{digits}f} to {self.high / by:.{digits}f} {unit} (p5, p95)"


def crowded_out(num_workers: int, cores: int, threads: int, loading: float, others: float, processes: int = 1) -> bool:
    """Whether processes other than the job's have the cores that it lacks. See :func:`starved` for the arguments."""
    taken = processes * (num_workers + threads)
    beside = loading + (processes - 1) * threads if taken > cores else 0.0
    return taken + others > 0.75 * cores and others > max(beside, 0.5)


def starved(
    phases: Mapping[str, float],
    ready_ms: float,
    num_workers: int,
    cores: int,
    threads: int,
    loading: float = 0.0,
    others: float = 0.0,
    processes: int = 1,
    at: float = 0.2,
    swing: Swing | None = None,
    hot: str = "",
    thread: str = "",
    queued: float = 0.0,
) -> Limit | None:
    """The training processes are ready to run but get no core: too many processes of their own, or other jobs.

    The evidence is time on the kernel's run queue; where that was not recorded of all threads, a computing phase whose
    time swings although its shapes stay, beside more processes than cores. Fewer loader processes do not make their
    work smaller: the step still takes the CPU time of both over the cores. Where that leaves no gain, the pictures
    themselves cost too much. Where a few cores are full while the others have time, it is not the work that is missing
    cores, but too many processes that press onto them.

    Args:
        phases: mean ms a step.
        ready_ms: ms a step that the most delayed training thread spent on the kernel's run queue.
        num_workers: loader processes of each training process.
        cores: that the job may use on the machine.
        threads: compute threads of each training process.
        loading: cores that all loader processes use.
        others: of these cores, what processes other than the job's use.
        processes: training processes on the machine.
        at: fires when this share of the step is lost.
        swing: the phase that swings, where delays were not recorded.
        hot: that a few cores are full while the others have time; empty where it is not so.
        thread: name of the most delayed thread.
        queued: ms of a step's wait for its batch in which loader processes stood ready while others had the cores.
    """
    step, ready_ms = step_ms(phases), ready_ms + queued
    taken = processes * (num_workers + threads)
    crowded = taken > cores
    if not step:
        return None
    if ready_ms / step >= at:
        lost, who = ready_ms, " and its loader processes" if queued else f" ({thread})" if thread else ""
        missing = (
            f"training{who} stood ready but got no core for {lost:.0f} of {step:.0f} ms a step ({lost / step:.0%})"
        )
    elif crowded and swing is not None:
        lost = phases[swing.phase] - swing.low
        missing = f"{swing.text()} although nothing changes its shapes"
    else:
        return None
    free = max(0.01 * step, step - lost)
    if crowded_out(num_workers, cores, threads, loading, others, processes):
        text = f"other processes use {others:.1f} cores: {missing}"
        return Limit("host", text, "run alone on the machine", step / free)
    if not crowded:
        text = f"{missing}, though not all of the {cores} cores are taken"
        lever = "let the processes use all cores (taskset, srun --cpu-bind, docker --cpus): at most"
        return Limit("host", text, lever, step / free)
    counted = {"training process": processes * (processes > 1), "loader process": processes * num_workers,
               "compute thread": processes * threads}  # fmt: skip
    named = [_count(count, what) for what, count in counted.items() if count]
    shared = f"{', '.join(named[:-1])}{' and ' * (len(named) > 1)}{named[-1]} share {_count(cores, 'core')}"
    text = f"{shared}{f', {hot}' if hot else ''}: {missing}"
    if processes * threads > cores:
        return Limit("host", text, "fewer processes (trainer.devices) or threads, or more cores: at most", step / free)
    fewer = fewer_workers(num_workers, cores, threads, processes, 1 if hot or swing else loading / processes)
    lever = f"data.num_workers={fewer} instead of {num_workers}"
    work = 0.0 if hot or swing else (loading * step + processes * threads * free) / cores
    gain = step / max(free, work)
    if gain >= WORTH:
        return Limit("host", text, lever, gain)
    return Limit("host", text, f"{lever}, and cheaper pictures (resized once, ahead of training): at most", step / free)


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('s') else 's'}"


def launch_bound(
    phases: Mapping[str, float], launch_ms: float, gpu_busy: float | None, at: float = 0.9, busy_below: float = 0.8,
    larger: str = "a larger data.batch_size",
) -> Limit | None:  # fmt: skip
    """The GPU idles between kernels because the host launches them too slowly.

    Args:
        phases: mean device ms a step.
        launch_ms: host ms a step outside the data wait.
        gpu_busy: share of the time that the GPU computes (kernel profile, else NVML); unknown on a CPU.
        at: the host works this share of the step or more.
        busy_below: and the GPU computes less than this.
        larger: how the batch could grow; empty where no more fits.
    """
    step = step_ms(phases)
    if gpu_busy is None or not step or launch_ms / step < at or gpu_busy >= busy_below:
        return None
    text = f"the GPU computes {gpu_busy:.0%} of the time, while the host launches for {launch_ms:.0f} of {step:.0f} ms"
    lever = f"{larger}: kernels grow, their number does not" if larger else "model.student.compile=reduce-overhead"
    return Limit("host", text, f"{lever}: at most", 1 / gpu_busy)


def bookkeeping_bound(
    phases: Mapping[str, float], callbacks_ms: Mapping[str, float] | None = None, at: float = 0.15
) -> Limit | None:
    """Callbacks, loggers and the loop around them take a notable part of the step.

    Args:
        phases: mean ms a step.
        callbacks_ms: ms a step by callback hook.
        at: fires from this share of the step.
    """
    step, share = step_ms(phases), part(phases, "logging")
    if share < at:
        return None
    text = f"callbacks and logging take {phases['logging']:.0f} of {step:.0f} ms ({share:.0%})"
    lever = "trainer.log_every_n_steps, fewer callbacks: at most"
    if callbacks_ms:
        name, ms = max(callbacks_ms.items(), key=lambda item: item[1])
        if ms > 0.3 * phases["logging"]:
            text += f", {name} alone {ms:.0f} ms"
            lever = f"do less in {name}, or less often: at most"
    return Limit("host", text, lever, 1 / (1 - share))
