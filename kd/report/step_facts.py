"""Numbers of a run's steps and machines, see :mod:`kd.report.facts`."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from kd.report.ratio import Number, ratio, share
from kd.report.records import PHASES, RunRecords, Sample, Step, percentile
from kd.storage.elsewhere import Json

STEPS_OF_AN_EPOCH = 10
"""A larger batch that leaves fewer is not advised."""
COMPUTING = ("teacher", "student", "forward", "loss", "backward", "optimizer")
"""Phases in which models compute."""
FULL = 95.0
"""% of its time from which on a core is full."""
HAVE_TIME = 60.0
"""% up to which cores have time, on average."""
A_FEW = 0.25
"""Share of the cores that is still a few."""
OF_THE_START = 20
"""Samples of each machine at a run's start in which cores do not count."""


def step_ms(phases: Mapping[str, float]) -> float:
    """A step's length in ms: the sum of its phases', without validation and profiling."""
    return sum(ms for name, ms in phases.items() if name in PHASES)


def phase_share(phases: Mapping[str, float], name: str) -> float:
    """A phase's part of the step, 0 to 1."""
    return share(phases.get(name, 0.0), step_ms(phases))


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of no values."""
    return ratio(sum(values), len(values), otherwise=math.nan)


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
        """The spread in words: ``backward takes 8.3 to 30.9 s (p5, p95) although nothing changes its shapes``."""
        low = self.low
        high = self.high
        times = f"{low:.0f} to {high:.0f} ms"
        if high >= 10_000:
            low_s = low / 1000
            high_s = high / 1000
            times = f"{low_s:.1f} to {high_s:.1f} s"
        return f"{self.phase} takes {times} (p5, p95) although nothing changes its shapes"


def slow_rank(compute_ms: Mapping[int, float], late: float = 1.15) -> Json | None:
    """The slowest rank, where it computes ``late`` times as long as the median of the others.

    Args:
        compute_ms: milliseconds of a mean step by rank, without communication.
        late: multiple of the median.

    Returns:
        ``rank``, and ``extra``: by how many ms it is above that median; None where all are about equally fast.
    """
    if len(compute_ms) < 2:
        return None
    slowest = max(compute_ms, key=compute_ms.__getitem__)
    median = percentile([ms for rank, ms in compute_ms.items() if rank != slowest], 50)
    if compute_ms[slowest] <= late * median:
        return None
    return {"rank": slowest, "extra": compute_ms[slowest] - median}


class StepFacts:
    """Numbers of steps and machines; those of a single rank are the typical rank's, :attr:`rank`.

    Args:
        run: the records.
    """

    def __init__(self, run: RunRecords) -> None:
        self.run = run

    @cached_property
    def phases_by_rank(self) -> dict[int, dict[str, float]]:
        """Mean ms a step by phase, validation and profiling too; the first step of the process left out."""
        ranks = self.run.totals or self.run.steps
        return {rank: self._mean_phases(rank) for rank in ranks}

    def _mean_phases(self, rank: int) -> dict[str, float]:
        """Mean ms a step of a rank, by phase: from the exact totals, else over the recorded steps without the first."""
        total = self.run.totals.get(rank)
        if total and total["steps"]:
            count = total["steps"]
            return {name: ratio(ms, count) for name, ms in total["p"].items()}
        phases = [step["p"] for step in self.run.steps.get(rank, [])[1:]]
        means = {}
        for name in {name for of_step in phases for name in of_step}:
            times = [of_step.get(name, 0.0) for of_step in phases]
            means[name] = mean(times)
        return means

    @cached_property
    def compute_ms(self) -> dict[int, float]:
        """Milliseconds of a mean step of each rank, without communication."""
        return {
            rank: step_ms(phases) - phases.get("communication", 0.0)
            for rank, phases in self.phases_by_rank.items()
        }

    @cached_property
    def rank(self) -> int:
        """The typical rank, whose phases are shown: that with the median computing time, of the middle two the faster."""
        ranks = sorted(self.compute_ms, key=self.compute_ms.__getitem__)
        return ranks[(len(ranks) - 1) // 2] if ranks else 0

    @cached_property
    def phases(self) -> dict[str, float]:
        """Mean milliseconds a step by phase, of the typical rank."""
        return self.phases_by_rank.get(self.rank, {})

    @cached_property
    def step_ms(self) -> float:
        """Milliseconds of the typical rank's mean step."""
        return step_ms(self.phases)

    @cached_property
    def header(self) -> Json:
        """The newest header of the typical rank's records: machine and settings of its steps; {} without records."""
        return self.run.headers.get(self.rank, {})

    @cached_property
    def total(self) -> Json:
        """Sums over all steps of the typical rank but each process's first, also those that were not recorded one by one."""
        return self.run.totals.get(self.rank, {})

    @cached_property
    def steps(self) -> list[Step]:
        """The recorded steps of the typical rank."""
        return self.run.steps.get(self.rank, [])

    @cached_property
    def usual_steps(self) -> list[Step]:
        """The recorded steps without those that start a loader."""
        return [step for step in self.steps if not step.get("first")]

    @cached_property
    def steps_ms(self) -> list[float]:
        """Milliseconds of each usual step."""
        return [step["ms"] for step in self.usual_steps]

    @cached_property
    def steps_counted(self) -> int:
        """How many steps the means are over."""
        return self.total.get("steps") or max(0, len(self.steps) - 1)

    def per_step(self, key: str) -> float:
        """One of the sums in :attr:`total`, divided by the number of steps."""
        return ratio(self.total.get(key, 0.0), max(1, self.total.get("steps", 1)))

    @cached_property
    def callbacks_ms(self) -> dict[str, float]:
        """Milliseconds a step by callback hook: of the eight that took the most time, over all starts."""
        steps = max(1, self.total.get("steps", 1))
        return {name: ratio(ms, steps) for name, ms in self.total.get("callbacks", {}).items()}

    # -- processes, cores and GPUs -------------------------------------------------------------------------------------
    @cached_property
    def cpu(self) -> bool:
        """Whether the run trains on CPUs; True also where no record says."""
        return self.header.get("device", "cpu") == "cpu"

    @cached_property
    def cores(self) -> int:
        """Cores that the processes on one machine may use together, by affinity and by their container's quota.

        A header's ``core_ids`` are those of its rank's affinity, its ``cores`` their number or the quota, if that is less.
        Where ranks are bound to different cores, all their cores count, up to the quota; else the typical rank's ``cores``.
        """
        host = self.header.get("host")
        cores_of_all_ranks: set[int] = set()
        quotas = []
        for header in self.run.headers.values():
            if header.get("host") == host:
                core_ids = header.get("core_ids") or []
                cores_of_all_ranks |= set(core_ids)
                cores_of_rank = header.get("cores", 1)
                if cores_of_rank < len(core_ids):
                    quotas.append(cores_of_rank)
        cores_of_this_rank = self.header.get("core_ids") or cores_of_all_ranks
        if len(cores_of_all_ranks) > len(cores_of_this_rank):  # each rank has its own
            return min([len(cores_of_all_ranks), *quotas])
        return max(1, self.header.get("cores", 1))

    @cached_property
    def processes(self) -> int:
        """Training processes of each machine."""
        return max(1, self.header.get("processes", 1))

    @cached_property
    def threads(self) -> int:
        """Compute threads of each training process; beside a GPU one, which launches its work."""
        return self.header.get("threads", 1) if self.cpu else 1

    @cached_property
    def of_kd(self) -> bool:
        """Whether it is a run of ``kd-train``; else a training that ``kd.Monitor`` has watched."""
        return self.header.get("of_kd", True)

    @cached_property
    def workers_known(self) -> bool:
        """Whether the number of loader processes is known: not of a loader of the user's own."""
        return "num_workers" in self.header or self.of_kd

    @cached_property
    def workers(self) -> int:
        """Loader processes of each training process; 0 where that is not known."""
        return self.header.get("num_workers", 0)

    @cached_property
    def samples(self) -> list[Sample]:
        """The samples of all machines, one machine after the other."""
        return [sample for samples in self.run.samples.values() for sample in samples]

    @cached_property
    def core_use(self) -> list[list[float]]:
        """How busy each core was that the run may use, in %, a row for each of :attr:`samples`."""
        return [row for node in self.run.samples for row in self.core_use_of(node)]

    @cached_property
    def core_use_after_start(self) -> list[list[float]]:
        """:attr:`core_use` without each machine's samples :data:`OF_THE_START`."""
        return [row for node in self.run.samples for row in self.core_use_of(node)[OF_THE_START:]]

    def core_use_of(self, node: str) -> list[list[float]]:
        """The rows of :attr:`core_use` of one machine, in order of time."""
        usable = self.run.nodes.get(node, {}).get("core_ids")
        rows = []
        for sample in self.run.samples[node]:
            use = sample["cpu"]
            if isinstance(usable, list):
                use = [use[core] for core in usable if core < len(use)]
            rows.append(use)
        return rows

    @cached_property
    def hot_cores(self) -> str:
        """Which few cores are full while the others have time, in words; "" where that is not so.

        In more than half of the samples the cores have time: their mean is :data:`HAVE_TIME` at most. In the median of these
        samples a few are full: one at least, and at most a share :data:`A_FEW` of all.
        """
        rows = [row for row in self.core_use_after_start if row]

        # Full cores of each sample in which the cores as a whole have time.
        full_counts = [sum(use >= FULL for use in row) for row in rows if mean(row) <= HAVE_TIME]
        if len(full_counts) <= len(rows) / 2:
            return ""
        median = sorted(full_counts)[len(full_counts) // 2]
        total = len(rows[0])
        if not 0 < median <= A_FEW * total:
            return ""
        average = mean([mean(row) for row in rows])
        return f"{median} of {total} cores are full while all average {average:.0f} %"

    @cached_property
    def loading_cores(self) -> float:
        """Cores that all loader processes of a machine use on average; 0 where that was not sampled."""
        used = [sum(sample["workers"]) / 100 for sample in self.samples if "workers" in sample]
        return mean(used) if used else 0.0

    @cached_property
    def loading_busy(self) -> float:
        """Mean share of the time that a loader process computes, over all machines, 0 to 1 (1: not sampled).

        Without loader processes, the share of training's wait for data in which it computes.
        """
        if self.workers == 0:
            phases = self.total.get("p", {})
            wait_ms = phases.get("data", 0.0)
            cpu_ms = self.total.get("data_cpu_ms", 0.0)
            return min(1.0, ratio(cpu_ms, wait_ms, otherwise=1.0))
        percent: list[float] = []
        for sample in self.samples:
            percent += sample.get("workers", [])
        if not percent:
            return 1.0
        return min(1.0, mean(percent) / 100)

    @cached_property
    def other_cores(self) -> float:
        """Cores of a machine, of those that the run may use, that other processes use on average; 0 if not sampled."""
        used = []
        for core_use, sample in zip(self.core_use, self.samples, strict=True):
            if "main" in sample:
                of_job = sample["main"] + sum(sample["workers"])
                used.append(sum(core_use) - of_job)
        return max(0.0, mean(used) / 100) if used else 0.0

    @cached_property
    def thread_wait(self) -> Number:
        """Share of the time that the training's most delayed thread waits for a core; ``None``: not recorded."""
        waits = [max(sample["thread_wait"]) for sample in self.samples if sample.get("thread_wait")]
        return mean(waits) / 100 if waits else None

    @cached_property
    def delayed_thread(self) -> str:
        """The name that training's most delayed thread had in most samples, of equally many the first; "" without any."""
        names = [sample["thread"] for sample in self.samples if sample.get("thread")]
        return Counter(names).most_common(1)[0][0] if names else ""

    @cached_property
    def loader_wait(self) -> Number:
        """Share of the time that a loader process's most delayed thread waited for a core; ``None``: not recorded."""
        waits = [wait for sample in self.samples for wait in sample.get("loader_wait", [])]
        return mean(waits) / 100 if waits else None

    @cached_property
    def queued_ms(self) -> float:
        """Ms of a step's wait for its batch in which the threads that make it waited for a core."""
        wait_ms = self.phases.get("data", 0.0)
        if self.workers:
            return wait_ms * min(1.0, self.loader_wait or 0.0)
        return min(wait_ms, self.per_step("data_ready_ms"))

    @cached_property
    def crowded_out(self) -> bool:
        """Whether processes other than the job's have the cores that it lacks.

        They do where they use more than half a core (of a single core, which is shared fairly, more than a quarter), and
        this and a core for each of the job's loader processes and threads are more than three quarters of the cores. If
        the job alone needs more cores than there are, they must also use more than the job's loaders and its other training
        processes.
        """
        wanted = self.processes * (self.workers + self.threads)
        least = min(0.5, 0.25 * self.cores)
        if self.crowded:
            job_beside = self.loading_cores + (self.processes - 1) * self.threads
            least = max(least, job_beside)
        nearly_full = wanted + self.other_cores > 0.75 * self.cores
        return nearly_full and self.other_cores > least

    @cached_property
    def queued(self) -> float:
        """:attr:`queued_ms` where other jobs' processes are the reason; else 0."""
        return self.queued_ms if self.crowded_out else 0.0

    @cached_property
    def crowded(self) -> bool:
        """Whether the job alone has more processes and threads that compute than there are cores."""
        return self.processes * (self.workers + self.threads) > self.cores

    @cached_property
    def hidden(self) -> bool:
        """Whether a GPU hides the host's delays: it has work queued while the host waits."""
        return not self.cpu and self.per_step("launch_ms") < 0.9 * self.step_ms

    @cached_property
    def ready_ms(self) -> float:
        """Ms a step that training waits for a core; 0 where a GPU hides it (:attr:`hidden`).

        It is the wait of the main thread, or of a more delayed one; with one thread on a CPU the main thread alone counts.
        """
        if self.hidden:
            return 0.0
        main_thread_ms = self.per_step("ready_ms")
        if self.cpu and self.threads == 1:
            return main_thread_ms
        return max(main_thread_ms, (self.thread_wait or 0.0) * self.step_ms)

    @cached_property
    def without_core_ms(self) -> float:
        """Ms a step that training, or its loaders where it waits for them, wait for a core."""
        # without loader processes it is training's own delay
        return self.ready_ms + (self.queued if self.workers else 0.0)

    @cached_property
    def ready_thread(self) -> str:
        """Whose delay :attr:`ready_ms` is, where it is not the main thread's; else ""."""
        return self.delayed_thread if self.ready_ms > self.per_step("ready_ms") else ""

    def larger_batch(self, times: float) -> str:
        """How the batch could grow, in words; "" where it can't.

        The text names a size where the run has counted how many more pictures fit into memory.

        Args:
            times: how many times as many pictures are enough, rounded up. A size is named only if an epoch keeps
                :data:`STEPS_OF_AN_EPOCH` batches.
        """
        counted = self.run.headers.get(0, {})
        if "more_fit" not in counted:
            return "a larger data.batch_size"
        more = counted["more_fit"]
        size = self.header["batch_size"]
        larger = min(size + more, math.ceil(times) * size)
        batches = self.header.get("batches_per_epoch", math.inf)
        if larger > size and ratio(batches * size, larger, math.inf) >= STEPS_OF_AN_EPOCH:
            return f"data.batch_size={larger} ({more} more fit)"
        return ""

    @cached_property
    def windows(self) -> list[Json]:
        """Profiled windows of the typical rank; of all where it has none."""
        windows = [window for window in self.run.kernels if window.get("rank") == self.rank]
        return windows or self.run.kernels

    @cached_property
    def gpu_busy(self) -> Number:
        """Share of the time that the GPUs compute, 0 to 1: of the newest kernel profile, without one NVML's mean.

        ``None``: not known, or on CPUs. A training that runs keeps its GPU busy, so 0 % is what NVML reports where it can't
        measure (MIG slices, vGPUs).
        """
        if self.cpu:
            return None
        profiled = [window["busy"] for window in self.windows if window.get("busy") is not None]
        if profiled:
            return profiled[-1] or None
        percent = known_utilisation(self.samples)
        return mean(percent) / 100 if percent else None


def known_utilisation(samples: Sequence[Sample]) -> list[float]:
    """GPUs' utilisation (%) in all samples; nothing where no reading is above 0, as NVML can't measure there."""
    gpus = [gpu for sample in samples for gpu in sample.get("gpu", [])]
    percent = [gpu["util"] for gpu in gpus if gpu.get("util") is not None]
    return percent if any(percent) else []


def gpus_of(samples: Sequence[Sample]) -> list[tuple[Json, ...]]:
    """The readings of each GPU, one a sample; {} where a sample has none of that GPU."""
    by_sample = [sample.get("gpu", []) for sample in samples]
    return list(zip_longest(*by_sample, fillvalue={}))
