"""Numbers of a run's steps and machines, see :mod:`kd.report.facts`."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

from kd.report.ratio import ratio, share
from kd.report.records import PHASES, RunRecords, Sample, Step, percentile


def step_ms(phases: Mapping[str, float]) -> float:
    """A step's length, without validation and profiling."""
    return sum(ms for name, ms in phases.items() if name in PHASES)


def part(phases: Mapping[str, float], name: str) -> float:
    """A phase's part of the step, 0 to 1."""
    return share(phases.get(name, 0.0), step_ms(phases))


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of no values."""
    return ratio(sum(values), len(values), otherwise=math.nan)


class StepFacts:
    """What steps and machines say. ``rank`` is the typical one: neither the straggler nor the one that waits most.

    Args:
        run: the records.
    """

    def __init__(self, run: RunRecords) -> None:
        self.run = run

    @cached_property
    def phases_by_rank(self) -> dict[int, dict[str, float]]:
        """Mean ms a step by phase, validation too; the first step of the process left out."""
        return {rank: _mean_phases(self.run, rank) for rank in (self.run.totals or self.run.steps)}

    @cached_property
    def compute_ms(self) -> dict[int, float]:
        """Milliseconds of a mean step of each rank, without communication."""
        return {r: step_ms(p) - p.get("communication", 0.0) for r, p in self.phases_by_rank.items()}

    @cached_property
    def rank(self) -> int:
        """The typical rank: that with the median computing time."""
        ranks = sorted(self.compute_ms, key=lambda r: self.compute_ms[r])
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
    def header(self) -> dict[str, Any]:
        """First line of the typical rank's records: machine and settings of its steps."""
        return self.run.headers.get(self.rank, {})

    @cached_property
    def total(self) -> dict[str, Any]:
        """Sums over all steps of the typical rank, also those that were not recorded one by one."""
        return self.run.totals.get(self.rank, {})

    @cached_property
    def steps(self) -> list[Step]:
        """The recorded steps of the typical rank."""
        return self.run.steps.get(self.rank, [])

    @cached_property
    def usual_steps(self) -> list[Step]:
        """Without those that start a loader."""
        return [s for s in self.steps if not s.get("first")]

    @cached_property
    def steps_ms(self) -> list[float]:
        """Milliseconds of each usual step."""
        return [s["ms"] for s in self.usual_steps]

    @cached_property
    def steps_counted(self) -> int:
        """How many steps the means are over."""
        return self.total.get("steps") or max(0, len(self.steps) - 1)

    def per_step(self, key: str) -> float:
        """One of the sums in :attr:`total`, divided by the number of steps."""
        return ratio(self.total.get(key, 0.0), max(1, self.total.get("steps", 1)))

    @cached_property
    def callbacks_ms(self) -> dict[str, float]:
        """Milliseconds a step by callback hook."""
        steps = max(1, self.total.get("steps", 1))
        return {name: ratio(ms, steps) for name, ms in self.total.get("callbacks", {}).items()}

    @cached_property
    def swings(self) -> dict[str, tuple[float, float, float]]:
        """p5, p50 and p95 (ms) of the computing phases that take a quarter of the step or more."""
        large = [
            n
            for n in ("teacher", "student", "loss", "backward", "optimizer")
            if part(self.phases, n) >= 0.25
        ]
        values = {name: [s["p"].get(name, 0.0) for s in self.usual_steps] for name in large}
        return {
            n: (percentile(v, 5), percentile(v, 50), percentile(v, 95))
            for n, v in values.items()
            if len(v) >= 20
        }

    # -- processes, cores and GPUs -------------------------------------------------------------------------------------
    @cached_property
    def cpu(self) -> bool:
        """Whether the run trains on CPUs."""
        return self.header.get("device", "cpu") == "cpu"

    @cached_property
    def cores(self) -> int:
        """Cores that the processes on one machine may use together, by affinity and by their container's quota."""
        here = [h for h in self.run.headers.values() if h.get("host") == self.header.get("host")]
        own = max(1, self.header.get("cores", 1))
        bound = {core for h in here for core in h.get("core_ids") or []}
        apart = len(bound) > len(
            self.header.get("core_ids") or bound
        )  # each rank has cores of its own
        return len(bound) if apart else own

    @cached_property
    def processes(self) -> int:
        """Training processes of each machine."""
        return max(1, self.header.get("processes", 1))

    @cached_property
    def threads(self) -> int:
        """Compute threads of each; beside a GPU the one that launches its work."""
        return self.header.get("threads", 1) if self.cpu else 1

    @cached_property
    def workers(self) -> int:
        """Loader processes of each training process."""
        return self.header.get("num_workers", 0)

    @cached_property
    def samples(self) -> list[Sample]:
        """The samples of all machines, one machine after the other."""
        return [s for samples in self.run.samples.values() for s in samples]

    @cached_property
    def core_use(self) -> list[list[float]]:
        """How busy each core was that the run may use, in %, a row for each sample."""
        rows = []
        for node, samples in self.run.samples.items():
            ids = self.run.nodes.get(node, {}).get("core_ids")
            rows += [
                s["cpu"] if ids is None else [s["cpu"][i] for i in ids if i < len(s["cpu"])]
                for s in samples
            ]
        return rows

    @cached_property
    def hot(self) -> str:
        """Which few cores are full while the others have time, in words; "" where that is not so."""
        return hot(self.core_use)

    @cached_property
    def loading_cores(self) -> float:
        """Cores that all loader processes of a machine use on average."""
        used = [sum(s["workers"]) / 100 for s in self.samples if "workers" in s]
        return mean(used) if used else 0.0

    @cached_property
    def loading_busy(self) -> float:
        """Share of the time that a loader works, in 0..1; without loader processes: of the training thread's wait
        for data.
        """
        if self.workers == 0:
            wait = self.total.get("p", {}).get("data", 0.0)
            return min(1.0, ratio(self.total.get("data_cpu_ms", 0.0), wait, otherwise=1.0))
        worker = [w / 100 for s in self.samples for w in s.get("workers", [])]
        return min(1.0, mean(worker)) if worker else 1.0

    @cached_property
    def other_cores(self) -> float:
        """What processes other than the run's use of the cores that it may use, on average."""
        pairs = [
            (cpu, s) for cpu, s in zip(self.core_use, self.samples, strict=True) if "main" in s
        ]
        used = [(sum(cpu) - s["main"] - sum(s["workers"])) / 100 for cpu, s in pairs]
        return max(0.0, mean(used)) if used else 0.0

    @cached_property
    def thread_wait(self) -> float | None:
        """Share of the time that the training's most delayed thread waits for a core; ``None``: not recorded."""
        read = [max(s["thread_wait"]) / 100 for s in self.samples if s.get("thread_wait")]
        return mean(read) if read else None

    @cached_property
    def delayed_thread(self) -> str:
        """The thread that was found waiting for a core most often; "" without any."""
        names = [s["thread"] for s in self.samples if s.get("thread")]
        return max(set(names), key=names.count) if names else ""

    @cached_property
    def loader_wait(self) -> float | None:
        """Share of the time that a loader process's threads waited for a core; ``None``: not recorded."""
        read = [w / 100 for s in self.samples for w in s.get("loader_wait", [])]
        return mean(read) if read else None

    @cached_property
    def queued_ms(self) -> float:
        """Ms of a step's wait for its batch in which the threads that make it waited for a core."""
        wait = self.phases.get("data", 0.0)
        if self.workers:
            return wait * min(1.0, self.loader_wait or 0.0)
        return min((1 - self.loading_busy) * wait, self.per_step("ready_ms"))

    @cached_property
    def crowded_out(self) -> bool:
        """Whether processes other than the job's have the cores that it lacks."""
        taken = self.processes * (self.workers + self.threads)
        beside = (
            self.loading_cores + (self.processes - 1) * self.threads if taken > self.cores else 0.0
        )
        return taken + self.other_cores > 0.75 * self.cores and self.other_cores > max(beside, 0.5)

    @cached_property
    def queued(self) -> float:
        """:attr:`queued_ms` where others' processes are the reason: the makers are not slow."""
        return self.queued_ms if self.crowded_out else 0.0

    @cached_property
    def hidden(self) -> bool:
        """Whether the GPU is the slower one: it has work while the host waits."""
        return not self.cpu and self.per_step("launch_ms") < 0.9 * self.step_ms

    @cached_property
    def ready_ms(self) -> float:
        """Ms a step that training waits for a core: its main thread, or a more delayed one."""
        if self.hidden:
            return 0.0
        if self.cpu and self.threads == 1:
            return self.per_step("ready_ms")
        return max(self.per_step("ready_ms"), (self.thread_wait or 0.0) * self.step_ms)

    @cached_property
    def ready_thread(self) -> str:
        """Whose delay :attr:`ready_ms` is, where it is not the main thread's."""
        return self.delayed_thread if self.ready_ms > self.per_step("ready_ms") else ""

    @cached_property
    def larger_batch(self) -> str:
        """How the batch could grow: by how many pictures, where the run has counted them; empty: by none."""
        room = self.run.headers.get(0, {})
        if "more_fit" not in room:
            return "a larger data.batch_size"
        ways = [(name, room.get(f"more_by_{name}", 0)) for name in ("zero", "fsdp")]
        freed = " and ".join(f"{count} by config={name}" for name, count in ways if count)
        if room["more_fit"]:
            size, beside = (
                self.header["batch_size"] + room["more_fit"],
                f", room for {freed}" if freed else "",
            )
            return f"data.batch_size={size} ({room['more_fit']} more fit{beside})"
        return f"a larger data.batch_size (room for {freed})" if freed else ""

    @cached_property
    def windows(self) -> list[dict[str, Any]]:
        """Profiled windows of the typical rank; of all where it has none."""
        return [k for k in self.run.kernels if k.get("rank") == self.rank] or self.run.kernels

    @cached_property
    def gpu_busy(self) -> float | None:
        """Share of the time that the GPUs compute: of the kernel profile where there is one, else NVML's.

        ``None``: not known. A training that runs keeps its GPU busy, so 0 % is what NVML reports where it can't
        measure (MIG slices, vGPUs).
        """
        if self.cpu:
            return None
        profiled = [k["busy"] for k in self.windows if k.get("busy") is not None]
        if profiled:
            return profiled[-1] or None
        used = known_utilisation(self.samples)
        return mean(used) / 100 if used else None


def _mean_phases(run: RunRecords, rank: int) -> dict[str, float]:
    total = run.totals.get(rank)
    if total and total["steps"]:
        return {name: ratio(ms, total["steps"]) for name, ms in total["p"].items()}
    steps = run.steps.get(rank, [])[1:]
    names = {name for step in steps for name in step["p"]}
    return {name: mean([step["p"].get(name, 0.0) for step in steps]) for name in names}


def known_utilisation(samples: Sequence[Sample]) -> list[float]:
    """GPUs' utilisation (%) in all samples; nothing where no reading is above 0, as NVML can't measure there."""
    readings = [g["util"] for s in samples for g in s.get("gpu", []) if g.get("util") is not None]
    return readings if any(readings) else []


def gpus_of(samples: Sequence[Sample]) -> list[tuple[dict[str, Any], ...]]:
    """The readings of each GPU, empty where a sample has none of it."""
    return list(zip_longest(*(s.get("gpu", []) for s in samples), fillvalue={}))


def hot(
    cores: Sequence[Sequence[float]],
    full: float = 95,
    low: float = 60,
    most: float = 0.25,
    skip: int = 20,
) -> str:
    """That a few cores are full (``full`` %) while the others have time; empty where it is not so.

    Args:
        cores: % of each core, a row a sample.
        full: a core counts from here.
        low: the mean of all is below this.
        most: share of the cores that is still a few.
        skip: samples of the start.
    """
    rows = [row for row in cores[skip:] if row]
    counts = sorted(sum(use >= full for use in row) for row in rows if mean(row) <= low)
    if len(counts) <= len(rows) / 2:
        return ""
    count, total = counts[len(counts) // 2], len(rows[0])
    text = f"{count} of {total} cores are full while all average {mean([mean(row) for row in rows]):.0f} %"
    return text if 0 < count <= most * total else ""
