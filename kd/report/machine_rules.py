"""Rules over the machine's readings and the steps: pure functions that return a :class:`Finding` where they fire.

Names, thresholds and warm-up lengths are those of the SageMaker Debugger's built-in rules where it has such a rule
(samples every 500 ms).

Series are in order of time, a value a sample, use in %; ``cpu``, ``gpu`` and ``gpu_memory`` are means over a machine's
cores or GPUs. ``skip`` is how many samples of the start do not count. A share is in [0, 1]. The first line of a rule's
docstring is the text of its alert; thresholds are arguments with a default, which ``monitor.thresholds`` changes by name.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from kd.report.limits import Finding, Swing, slow_rank
from kd.report.ratio import ratio, share
from kd.report.records import percentile
from kd.report.step_facts import hot_cores_text, mean

A_PROGRAM = 0.3
"""Cores that other programs use, from which on they are named as the reason."""
WHICH_PHASE = "the phases of a step show what the GPU waits for (report.html)"


def cpu_bottleneck(
    cpu: Sequence[float],
    gpu: Sequence[float],
    high: float = 90,
    low: float = 10,
    share: float = 0.5,
    skip: int = 100,
) -> Finding | None:
    """CPUs above ``high`` % while GPUs are below ``low`` %, for more than ``share`` of the samples.

    Args:
        cpu: use in %, a value a sample.
        gpu: likewise.
        high: in %.
        low: in %.
        share: in [0, 1].
        skip: samples of the start that do not count.
    """
    bound = []
    for cpu_use, gpu_use in zip(cpu, gpu, strict=False):
        bound.append(cpu_use > high and gpu_use < low)
    hits = mean(bound[skip:])
    if not hits > share:  # also of no samples, whose mean is NaN
        return None
    text = f"CPU above {high:.0f} % and GPU below {low:.0f} % in {hits:.0%} of the samples"
    return Finding("CPUBottleneck", text, "move work off the CPU, or give it more cores")


def io_bottleneck(
    io_wait: Sequence[float],
    gpu: Sequence[float],
    high: float = 50,
    low: float = 70,
    share: float = 0.5,
    skip: int = 1000,
) -> Finding | None:
    """I/O wait above ``high`` % and GPUs (none: 0 %) below ``low`` %, in more than ``share`` of the samples.

    Args:
        io_wait: share of the cores' time in %, a value a sample.
        gpu: use in %, likewise; empty: no GPU.
        high: in %.
        low: in %.
        share: in [0, 1].
        skip: samples of the start that do not count.
    """
    gpu_use = gpu or [0.0] * len(io_wait)
    bound = []
    for wait, use in zip(io_wait, gpu_use, strict=False):
        bound.append(wait > high and use < low)
    hits = mean(bound[skip:])
    if not hits > share:
        return None
    text = f"I/O wait above {high:.0f} % in {hits:.0%} of the samples"
    lever = "a faster disk, a local copy of the data, or fewer and larger files"
    return Finding("IOBottleneck", text, lever)


def low_gpu_utilization(
    gpu: Sequence[float], low: float = 70, floor: float = 10, window: int = 500, skip: int = 1000
) -> Finding | None:
    """In the newest ``window`` samples p95 is below ``low`` % (low), or p5 is below ``floor`` % (fluctuating).

    Args:
        gpu: use in %, a value a sample.
        low: in %.
        floor: in %.
        window: samples.
        skip: samples of the start that do not count.
    """
    recent = gpu[skip:][-window:]
    if not recent:
        return None
    p95 = percentile(recent, 95)
    p5 = percentile(recent, 5)
    if p95 < low:
        text = f"p95 of GPU utilisation is {p95:.0f} %"
        return Finding("LowGPUUtilization", text, WHICH_PHASE)
    if p5 < floor:
        text = f"GPU utilisation varies between {p5:.0f} and {p95:.0f} % (p5, p95)"
        return Finding("LowGPUUtilization", text, WHICH_PHASE)
    return None


def batch_size(
    cpu: Sequence[float],
    gpu: Sequence[float],
    gpu_memory: Sequence[float],
    low: float = 70,
    window: int = 500,
    skip: int = 100,
) -> Finding | None:
    """p95 of CPU, GPU and GPU memory are all below ``low`` %: there is room for a larger batch.

    Args:
        cpu: use in %, a value a sample.
        gpu: likewise.
        gpu_memory: likewise.
        low: in %.
        window: newest samples that count.
        skip: samples of the start that do not count.
    """
    highest = []
    for values in (cpu, gpu, gpu_memory):
        recent = values[skip:][-window:]
        if not recent:
            return None
        highest.append(percentile(recent, 95))
    if max(highest) >= low:
        return None
    p95_cpu, p95_gpu, p95_memory = highest
    text = f"p95 of CPU {p95_cpu:.0f} %, GPU {p95_gpu:.0f} %, GPU memory {p95_memory:.0f} %"
    return Finding("BatchSize", text, "a larger data.batch_size (with a learning rate to match)")


def gpu_memory_increase(
    memory: Sequence[float], increase: float = 0.1, window: int = 500, skip: int = 100
) -> Finding | None:
    """GPU memory grew steadily by ``increase`` from the first to the last tenth of the newest ``window`` samples.

    Args:
        memory: of one GPU in %, a value a sample.
        increase: as a share of the first tenth's mean.
        window: samples.
        skip: samples of the start that do not count.
    """
    recent = memory[skip:][-window:]
    return _steady_growth("GPUMemoryIncrease", "GPU memory", " %", recent, increase, least=0)


def memory_leak(
    rss_mb: Sequence[float], increase: float = 0.1, least_mb: float = 100, skip: int = 20
) -> Finding | None:
    """Memory of the training processes and their children grows in nearly all tenths after the first third of the run.

    Args:
        rss_mb: MB in use, a value a sample.
        increase: from the first to the last of these tenths, as a share.
        least_mb: MB that it must grow by in any case.
        skip: samples of the start that do not count.
    """
    after_start = rss_mb[skip:]
    rest = after_start[len(after_start) // 3 :]
    return _steady_growth("MemoryLeak", "memory", " MB", rest, increase, least_mb)


def _steady_growth(
    rule: str, what: str, unit: str, values: Sequence[float], increase: float, least: float
) -> Finding | None:
    """The mean of the last tenth is above the first's by a share ``increase`` and by ``least``, and rose steadily.

    Steadily: at most one of the nine steps between tenths does not rise, and the median rise is at least half of the
    mean one. One jump, as when validation's loader starts, is no leak.

    Args:
        rule: name of the finding's rule.
        what: names the values in its text.
        unit: of the values, with a space before it.
        values: in order of time; fewer than 20 are not judged.
        increase: as a share of the first tenth's mean.
        least: in the values' unit.
    """
    count = len(values)
    if count < 20:
        return None
    ends = [round(tenth * count / 10) for tenth in range(11)]
    tenths = []
    for start, end in pairwise(ends):
        tenths.append(mean(values[start:end]))
    first = tenths[0]
    last = tenths[-1]
    growth = last - first
    needed = max(increase * first, least)

    # Steadily: at most one tenth did not rise, and the median rise is no less than half of the mean one.
    rises = [after - before for before, after in pairwise(tenths)]
    rises.sort()
    median_rise = percentile(rises, 50)
    is_steady = rises[1] > 0 and median_rise >= mean(rises) / 2
    if not is_steady or growth < needed:
        return None
    text = f"{what} grew steadily from {first:.0f} to {last:.0f}{unit}"
    lever = "something keeps tensors or objects alive: lists of losses, logged tensors with a graph"
    return Finding(rule, text, lever)


def load_balancing(
    gpus: Sequence[Sequence[float]], imbalance: float = 0.5, skip: int = 10
) -> Finding | None:
    """Mean utilisation of the idlest GPU is ``imbalance`` below the busiest one's.

    Args:
        gpus: use in % by GPU, a value a sample; empty of a GPU whose use is not known.
        imbalance: as a share of the busiest one's, in [0, 1].
        skip: samples of the start that do not count.
    """
    means = {}  # by the GPU's number
    for number, values in enumerate(gpus):
        if len(values) > skip:
            means[number] = mean(values[skip:])
    if len(means) < 2:
        return None
    busiest = max(means, key=means.__getitem__)
    idlest = min(means, key=means.__getitem__)
    most = means[busiest]
    least = means[idlest]
    if share(most - least, most) < imbalance:
        return None
    text = f"GPU {busiest} is used {most:.0f} %, GPU {idlest} {least:.0f} %"
    return Finding("LoadBalancing", text, "give all devices the same share of work")


def straggler(compute_ms: Mapping[int, float], late: float = 1.15) -> Finding | None:
    """One rank computes ``late`` times as long as the median of the others: all wait for it.

    Args:
        compute_ms: milliseconds of a mean step by rank, without communication.
        late: multiple of the median.
    """
    slowest = slow_rank(compute_ms, late)
    if slowest is None:
        return None
    rank, extra_ms = slowest
    text = f"rank {rank} computes {extra_ms:.0f} ms a step longer than the median of the others"
    return Finding("SlowRank", text, "check its machine (throttling, other jobs, a slow disk)")


def step_outlier(step_ms: Sequence[float], sigma: float = 5, ignore: int = 10) -> Finding | None:
    """More than ``ignore`` steps lie ``sigma`` standard deviations above the mean.

    Args:
        step_ms: milliseconds of each recorded step that starts no loader.
        sigma: standard deviations.
        ignore: so many slow steps are usual.
    """
    if len(step_ms) < 2:
        return None
    mean_ms = mean(step_ms)
    deviation = math.sqrt(mean([(ms - mean_ms) ** 2 for ms in step_ms]))
    if not deviation:
        return None
    slow = [ms for ms in step_ms if ms > mean_ms + sigma * deviation]
    if len(slow) <= ignore:
        return None
    text = f"{len(slow)} steps are {sigma:.0f} sigma above the mean of {mean_ms:.0f} ms (slowest {max(slow):.0f} ms)"
    return Finding("StepOutlier", text, "see which phase is long in them")


def max_initialization_time(startup_s: float, limit_s: float = 20 * 60) -> Finding | None:
    """More than ``limit_s`` seconds before the first step is done."""
    if startup_s <= limit_s:
        return None
    text = f"start-up took {startup_s / 60:.0f} min"
    return Finding("MaxInitializationTime", text, "copy or prepare data beforehand")


def dataloader(
    data_share: float,
    num_workers: int,
    threads: int,
    cores: int,
    low: float = 0.1,
    processes: int = 1,
    others: float = 0.0,
) -> Finding | None:
    """More loader processes and threads than cores; or waits above ``low`` of the step with cores to spare.

    One more than there are cores is usual. Where each training process has one loader process or none, its compute threads
    do not count.

    Args:
        data_share: share of the step that waits for its batch, 0 to 1.
        num_workers: loader processes of each training process.
        threads: compute threads of each.
        cores: that the processes of one machine may use.
        low: fires above this ``data_share``.
        processes: training processes of a machine.
        others: cores that other programs use; they are not to spare.
    """
    loaders = processes * num_workers
    taken = processes * (num_workers + threads)
    too_many_loaders = loaders > max(1, cores)
    too_many_together = num_workers > 1 and taken > cores + 1
    if too_many_loaders or too_many_together:
        text = f"{loaders} loader processes and {processes * threads} compute threads on "
        text += f"{cores} core{'s' * (cores > 1)}"
        lever = "data.num_workers=auto tries 0, 1, 2, ... under the real step"
        return Finding("Dataloader", text, lever)
    idle = round(cores - taken - others)
    if data_share > low and idle >= 1:
        unused = "1 core is"
        if idle != 1:
            unused = f"{idle} cores are"
        text = f"{data_share:.0%} of the step waits for data while {unused} not used"
        more = max(1, int(ratio(idle, processes)))
        return Finding("Dataloader", text, f"data.num_workers={num_workers + more}")
    return None


def hot_cores(
    cores: Sequence[Sequence[float]], gpu: Sequence[float] = (), busy: float = 70
) -> Finding | None:
    """A few cores are full while the others have time, and the GPUs are below ``busy`` %.

    What counts as full, as a few and as time: :func:`kd.report.step_facts.hot_cores_text`.

    Args:
        cores: use of each core in %, a row a sample, without those of the start.
        gpu: use of all GPUs in %, of all samples; empty: none is known.
        busy: %, of their mean; GPUs at or above it have enough to do.
    """
    text = hot_cores_text(cores)
    if not text or (gpu and mean(gpu) >= busy):
        return None
    lever = "fewer loader processes (data.num_workers), or processes bound to cores of their own"
    return Finding("HotCores", text, lever)


def efa_missing(network: str) -> Finding | None:
    """NCCL sends over TCP between machines that have AWS's faster network, EFA.

    Args:
        network: NCCL's name of what it sends over (``Socket`` is TCP); empty on one machine, without EFA, or where NCCL
            names none.
    """
    if network != "Socket":
        return None
    text = "the machines have EFA, but NCCL sends over TCP (its log: Using network Socket)"
    return Finding(
        "EfaMissing", text, "an image with AWS's plugin aws-ofi-nccl (kd/strategies/README.md)"
    )


def phase_variation(swing: Swing | None) -> Finding | None:
    """A computing phase swings although nothing changes its shapes: its threads wait for a core, or a clock changes.

    ``swing``: of :func:`kd.report.limits.swing`, which says how far it must swing; None: no phase does.
    """
    if swing is None:
        return None
    lever = "check for other programs on the machine, and for a device that lowers its clocks"
    return Finding("PhaseVariation", f"{swing.text()} although nothing changes its shapes", lever)


def scheduler_delay(
    training: float | None,
    loading: float | None,
    thread: str = "",
    at: float = 0.2,
    processes: int = 1,
    workers: int = 0,
    others: float = 0.0,
) -> Finding | None:
    """Threads wait for a core for ``at`` of the time.

    Args:
        training: share of the time, of the training processes' most delayed thread; None: not recorded.
        loading: likewise, of a loader process.
        thread: name of that thread.
        at: fires from here.
        processes: training processes of a machine.
        workers: loader processes of each.
        others: cores that other programs use.
    """
    trainer = "training"
    if thread:
        trainer = f"training ({thread})"
    delayed = []
    for who, waiting in ((trainer, training), ("a loader process", loading)):
        if waiting is not None and waiting >= at:
            delayed.append(f"{who} {waiting:.0%}")
    if not delayed:
        return None
    text = f"waiting for a free core: {' and '.join(delayed)} of the time"

    # what of this run, or beside it, takes cores
    levers = []
    if others >= A_PROGRAM:
        levers.append(f"end other programs (they use {others:.1f} cores)")
    if workers:
        levers.append(f"fewer loader processes (data.num_workers, now {workers})")
    if processes > 1:
        levers.append(f"fewer training processes on a machine (now {processes})")
    if not levers:
        levers.append("fewer threads (OMP_NUM_THREADS)")
    return Finding("SchedulerDelay", text, f"{', '.join(levers)}, or more cores")


def throttling(reasons: Sequence[Sequence[str]], share: float = 0.05) -> Finding | None:
    """A GPU lowered its clocks (heat, power) in more than ``share`` of the samples.

    Args:
        reasons: of one GPU, NVML's reasons in each sample; empty where the clocks were not lowered.
        share: in [0, 1].
    """
    throttled = [bool(reasons_of_sample) for reasons_of_sample in reasons]
    hits = mean(throttled)
    if not hits > share:
        return None
    different: set[str] = set()
    for reasons_of_sample in reasons:
        different.update(reasons_of_sample)
    names = ", ".join(sorted(different))
    text = f"the GPU lowered its clocks in {hits:.0%} of the samples ({names})"
    return Finding("Throttling", text, "cooling, or a higher power limit")


def swapping(swap_mb: Sequence[float], grown_mb: float = 200) -> Finding | None:
    """Memory was moved to disk during the run.

    Args:
        swap_mb: swap in use on the machine, in each sample.
        grown_mb: fires where it grew by this much since the first sample.
    """
    if not swap_mb:
        return None
    growth = max(swap_mb) - swap_mb[0]
    if growth < grown_mb:
        return None
    text = f"swap grew by {growth:.0f} MB"
    return Finding("Swap", text, "fewer loader processes, smaller batches")
