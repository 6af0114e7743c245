"""Numbers of a run, each worked out once from its records. Limits, rules and pages read them; none reads records."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from kd.report.records import PHASES, Run, percentile

CACHE_VIEWS = 4  # of each picture, that a teacher's cache keeps unless told otherwise
OWN = ("student", "loss", "backward", "optimizer")  # phases of the student's own training


def step_ms(phases: Mapping[str, float]) -> float:
    """A step's length: validation and profiling stand beside it."""
    return sum(ms for name, ms in phases.items() if name in PHASES)


def part(phases: Mapping[str, float], name: str) -> float:
    """A phase's part of the step, 0 to 1."""
    step = step_ms(phases)
    return phases.get(name, 0.0) / step if step else 0.0


def mean(values: Sequence[float]) -> float:
    """``nan`` of nothing."""
    return sum(values) / len(values) if values else math.nan


class Facts:
    """What a run's records say. ``rank`` is the typical one: neither the straggler nor the one that waits most.

    Args:
        run: the records.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    # -- steps ---------------------------------------------------------------------------------------------------------

    @cached_property
    def phases_by_rank(self) -> dict[int, dict[str, float]]:
        """Mean ms a step by phase, validation too; the first step of the process left out."""
        return {rank: _mean_phases(self.run, rank) for rank in (self.run.totals or self.run.steps)}

    @cached_property
    def compute_ms(self) -> dict[int, float]:
        """Each rank's step without communication."""
        return {r: step_ms(p) - p.get("communication", 0.0) for r, p in self.phases_by_rank.items()}

    @cached_property
    def rank(self) -> int:
        """The rank with the median computing time."""
        ranks = sorted(self.compute_ms, key=lambda r: self.compute_ms[r])
        return ranks[(len(ranks) - 1) // 2] if ranks else 0

    @cached_property
    def phases(self) -> dict[str, float]:
        """The typical rank's mean ms a step by phase."""
        return self.phases_by_rank.get(self.rank, {})

    @cached_property
    def step_ms(self) -> float:
        """The typical rank's mean step."""
        return step_ms(self.phases)

    @cached_property
    def header(self) -> dict[str, Any]:
        """Of the typical rank's steps."""
        return self.run.headers.get(self.rank, {})

    @cached_property
    def total(self) -> dict[str, Any]:
        """Exact sums of the typical rank."""
        return self.run.totals.get(self.rank, {})

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The typical rank's recorded steps."""
        return self.run.steps.get(self.rank, [])

    @cached_property
    def usual_steps(self) -> list[dict[str, Any]]:
        """Without those that start a loader."""
        return [s for s in self.steps if not s.get("first")]

    @cached_property
    def steps_ms(self) -> list[float]:
        """Length of each usual step."""
        return [s["ms"] for s in self.usual_steps]

    @cached_property
    def steps_counted(self) -> int:
        """Steps that the means are of."""
        return self.total.get("steps") or max(0, len(self.steps) - 1)

    def per_step(self, key: str) -> float:
        """One of the sums, a step."""
        return self.total.get(key, 0.0) / max(1, self.total.get("steps", 1))

    @cached_property
    def callbacks_ms(self) -> dict[str, float]:
        """Ms a step by callback hook."""
        steps = max(1, self.total.get("steps", 1))
        return {name: ms / steps for name, ms in self.total.get("callbacks", {}).items()}

    @cached_property
    def swings(self) -> dict[str, tuple[float, float, float]]:
        """p5, p50 and p95 (ms) of the computing phases that take a quarter of the step or more."""
        large = [n for n in ("teacher", "student", "loss", "backward", "optimizer") if part(self.phases, n) >= 0.25]
        values = {name: [s["p"].get(name, 0.0) for s in self.usual_steps] for name in large}
        return {n: (percentile(v, 5), percentile(v, 50), percentile(v, 95)) for n, v in values.items() if len(v) >= 20}

    # -- processes and cores -------------------------------------------------------------------------------------------

    @cached_property
    def cpu(self) -> bool:
        """Whether it trains on a CPU."""
        return self.header.get("device", "cpu") == "cpu"

    @cached_property
    def cores(self) -> int:
        """Cores that the processes on one machine may use together, by affinity and by their container's quota."""
        here = [h for h in self.run.headers.values() if h.get("host") == self.header.get("host")]
        own = self.header.get("cores", 1)
        bound = {core for h in here for core in h.get("core_ids") or []}
        apart = len(bound) > len(self.header.get("core_ids") or bound)  # each rank has cores of its own
        return len(bound) if apart else own

    @cached_property
    def processes(self) -> int:
        """Training processes on the machine."""
        return self.header.get("processes", 1)

    @cached_property
    def threads(self) -> int:
        """Compute threads of each; beside a GPU the one that launches its work."""
        return self.header.get("threads", 1) if self.cpu else 1

    @cached_property
    def workers(self) -> int:
        """Loader processes of each training process."""
        return self.header.get("num_workers", 0)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Readings of all machines."""
        return [s for samples in self.run.samples.values() for s in samples]

    @cached_property
    def core_use(self) -> list[list[float]]:
        """% of each core that the run may use, a row a sample."""
        rows = []
        for node, samples in self.run.samples.items():
            ids = self.run.nodes.get(node, {}).get("core_ids")
            rows += [s["cpu"] if ids is None else [s["cpu"][i] for i in ids if i < len(s["cpu"])] for s in samples]
        return rows

    @cached_property
    def hot(self) -> str:
        """That a few cores are full while the others have time; empty where it is not so."""
        found = hot(self.core_use)
        return f"{found[0]} of {found[1]} cores are full while all average {found[2]:.0f} %" if found else ""

    @cached_property
    def loading_cores(self) -> float:
        """Cores that the loader processes of a machine use, on average."""
        used = [sum(s["workers"]) / 100 for s in self.samples if "workers" in s]
        return mean(used) if used else 0.0

    @cached_property
    def loading_busy(self) -> float:
        """Share of a core that making batches takes while it goes on."""
        if self.workers == 0:
            wait = self.total.get("p", {}).get("data", 0.0)
            return min(1.0, self.total.get("data_cpu_ms", 0.0) / wait) if wait else 1.0
        worker = [w / 100 for s in self.samples for w in s.get("workers", [])]
        return min(1.0, mean(worker)) if worker else 1.0

    @cached_property
    def other_cores(self) -> float:
        """What processes other than the run's use of the cores that it may use, on average."""
        pairs = [(cpu, s) for cpu, s in zip(self.core_use, self.samples, strict=True) if "main" in s]
        used = [(sum(cpu) - s["main"] - sum(s["workers"])) / 100 for cpu, s in pairs]
        return max(0.0, mean(used)) if used else 0.0

    @cached_property
    def thread_wait(self) -> float | None:
        """Share of the time that a training process's most delayed thread stood ready without a core.

        Of several processes the most delayed one's in each reading: the others wait for it. ``None``: not recorded.
        """
        read = [max(s["thread_wait"]) / 100 for s in self.samples if s.get("thread_wait")]
        return mean(read) if read else None

    @cached_property
    def delayed_thread(self) -> str:
        """The name of the thread that was most often the most delayed one."""
        names = [s["thread"] for s in self.samples if s.get("thread")]
        return max(set(names), key=names.count) if names else ""

    @cached_property
    def loader_wait(self) -> float | None:
        """Share of the time that a loader process's threads stood ready without a core; ``None``: not recorded."""
        read = [w / 100 for s in self.samples for w in s.get("loader_wait", [])]
        return mean(read) if read else None

    @cached_property
    def hidden(self) -> bool:
        """Whether the GPU is the slower one: it has work while the host waits."""
        return not self.cpu and self.per_step("launch_ms") < 0.9 * self.step_ms

    @cached_property
    def ready_ms(self) -> float:
        """Ms a step that training stood ready without a core: of the main thread, or of a more delayed one."""
        if self.hidden:
            return 0.0
        return max(self.per_step("ready_ms"), (self.thread_wait or 0.0) * self.step_ms)

    @cached_property
    def windows(self) -> list[dict[str, Any]]:
        """Profiled windows of the typical rank; of all where it has none."""
        return [k for k in self.run.kernels if k.get("rank") == self.rank] or self.run.kernels

    @cached_property
    def gpu_busy(self) -> float | None:
        """Share of the time that the GPUs compute: of the kernel profile where there is one, else NVML's."""
        if self.cpu:
            return None
        profiled = [k["busy"] for k in self.windows if k.get("busy") is not None]
        if profiled:
            return profiled[-1]
        used = [g["util"] for s in self.samples for g in s.get("gpu", [])]
        return mean(used) / 100 if used else None

    # -- the run's length ----------------------------------------------------------------------------------------------

    @cached_property
    def batches_per_epoch(self) -> float:
        """Of one process; infinite where the data set has no end."""
        return self.header.get("batches_per_epoch") or math.inf

    @cached_property
    def epochs(self) -> float:
        """Epochs that the run is to have; infinite where nothing says so."""
        told = (self.run.config.get("trainer") or {}).get("max_epochs")
        limits = [self.header.get("max_epochs", told), self._max_steps / self.batches_per_epoch]
        known = [n for n in limits if n is not None and n > 0]
        return min(known, default=math.inf)

    @property
    def _max_steps(self) -> float:
        steps = self.header.get("max_steps") or -1
        return steps * self.header.get("accumulate", 1) if steps > 0 else math.inf

    @cached_property
    def epochs_done(self) -> float | None:
        """Of a run that was stopped inside an epoch, its part too."""
        if self.steps and math.isfinite(self.batches_per_epoch):
            return (self.steps[-1]["step"] + 1) / self.batches_per_epoch
        return self.run.summary.get("epochs")

    @cached_property
    def startup(self) -> dict[str, Any]:
        """The newest start: seconds until the first step was done, and its parts."""
        return self.run.event("startup") or {"s": 0.0, "parts": {}}

    @cached_property
    def wall_s(self) -> float | None:
        """Seconds from the process's start to its newest record: the clock that start-up is measured by."""
        began = self.header.get("t")
        if began is None or not self.startup["s"]:
            return None
        first = self.startup["parts"].get("first step", 0.0)  # the header is written before it
        newest = max([s["t"] for s in self.steps[-1:]] + [self.total.get("t", began)])
        return self.startup["s"] + max(0.0, newest - began - first)

    @cached_property
    def epoch_s(self) -> float | None:
        """Seconds an epoch with its validation, from the mean step and the epoch's length."""
        whole = self.step_ms + self.phases.get("validation", 0.0)
        return whole * self.batches_per_epoch / 1000 if whole and math.isfinite(self.batches_per_epoch) else None

    @cached_property
    def planned_s(self) -> float | None:
        """Seconds of the whole run from the process's start: so far, or as planned where it still trains."""
        if "status" in self.run.summary or self.epoch_s is None or not math.isfinite(self.epochs):
            return self.wall_s
        return max(self.wall_s or 0.0, self.startup["s"] + self.epoch_s * self.epochs)

    @cached_property
    def left_s(self) -> float | None:
        """Seconds until the end, of a run that trains."""
        if "status" in self.run.summary or self.epoch_s is None or not math.isfinite(self.epochs):
            return None
        return max(0.0, self.epoch_s * (self.epochs - (self.epochs_done or 0.0)))

    @cached_property
    def images_per_s(self) -> float | None:
        """Of all processes, from the mean step; validation is left out."""
        if not self.header or not self.step_ms:
            return None
        return 1000 * self.header["batch_size"] * self.header["world_size"] / self.step_ms

    @cached_property
    def price(self) -> float | None:
        """Of an hour of the whole job."""
        return (self.run.config.get("monitor") or {}).get("price_per_hour")

    # -- the teacher ---------------------------------------------------------------------------------------------------

    @cached_property
    def _teacher(self) -> dict[str, Any]:
        return (self.run.config.get("model") or {}).get("teacher") or {}

    @cached_property
    def cached(self) -> bool:
        """Whether the run has a cache of the teacher's answers: as it found (``auto``), else as it was told."""
        told = self._teacher.get("cache") in (True, "on", "only")  # YAML 1.1 reads a bare on as a truth value
        return self.header.get("cached", told)

    @cached_property
    def views(self) -> int:
        """Views of each picture that a cache keeps."""
        return self._teacher.get("cache_views") or CACHE_VIEWS

    @cached_property
    def cache_bytes(self) -> float | None:
        """A checksum, the largest logit, all logits and features in half precision, for each view of each picture."""
        data = self.run.summary.get("data")
        if not data:
            return None
        kept = self._teacher.get("cache_topk")
        answer = 8 + (4 * kept if kept else 2 * data["classes"]) + self.header.get("feature_bytes", 0)
        return data["train"] * min(self.views, self.epochs) * answer

    # -- what was learnt -----------------------------------------------------------------------------------------------

    def best_val(self, student: str = "") -> float | None:
        """A student's best value of the task's main metric, in 0..1."""
        column = f"{student}/val/{self.run.primary}" if student else f"val/{self.run.primary}"
        known = [row[column] for row in self.run.metrics if column in row]
        return max(known) if known else None


def hot(
    cores: Sequence[Sequence[float]], full: float = 95, low: float = 60, most: float = 0.25, skip: int = 20
) -> tuple[int, int, float] | None:
    """How many cores are full, of how many, and their mean use, where a few are full and the others have time.

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
        return None
    count, total = counts[len(counts) // 2], len(rows[0])
    return (count, total, mean([mean(row) for row in rows])) if 0 < count <= most * total else None


def _mean_phases(run: Run, rank: int) -> dict[str, float]:
    total = run.totals.get(rank)
    if total and total["steps"]:
        return {name: ms / total["steps"] for name, ms in total["p"].items()}
    steps = run.steps.get(rank, [])[1:]
    names = {name for step in steps for name in step["p"]}
    return {name: sum(step["p"].get(name, 0.0) for step in steps) / len(steps) for name in names}
