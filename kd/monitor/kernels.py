"""Profiles a window of steps: the operations that take the time, by named range."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch.profiler import ProfilerActivity

from kd.callbacks.hooks import Closing
from kd.clock import ASIDE, outside_of_the_step
from kd.monitor.watched import Watched, device_of
from kd.report.records import Writer
from kd.storage.elsewhere import Json
from kd.storage.writing import file_for

TOP = 15  # operations of a record
DEEPEST = 64  # ranges that may have begun since an open one
NO_RANGES = (
    "ProfilerStep",
    "Optimizer.",
    "DistributedDataParallel.",
    "autograd::",
    "aten::",
    "enumerate(",
)
"""How the names of annotations begin that torch makes by itself: they are no named ranges."""
GROUPS = {  # the first group whose word is in an operation's name
    "communication": ("nccl", "allreduce", "all_reduce", "allgather", "gloo", "c10d"),
    "attention": ("attention", "flash", "fmha"),
    "GEMM": ("mm", "linear", "gemm", "conv", "matmul", "cutlass"),
    "memory": ("copy", "memcpy", "memset", "cat", "clone", "contiguous", "fill"),
}


class Kernels(Closing):
    """Runs ``steps`` batches under torch.profiler, on every rank; one before them warms it up.

    Writes the top operations to ``records/kernels.rank<r>.jsonl`` and a trace for ``chrome://tracing`` or Perfetto to
    ``records/trace.rank<r>.json``; with ``memory``, also a snapshot of the GPU's allocations
    (``records/memory.rank<r>.pickle``, for pytorch.org/memory_viz).
    """

    def __init__(self, watched: Watched, at: int | None, steps: int, memory: bool) -> None:
        """Stores the settings.

        Args:
            watched: the training.
            at: the first batch that is profiled, counted from 0 over the whole run, so at least 1: the batch before it
                warms the profiler up. None: none, until the file ``monitor`` names one.
            steps: how many.
            memory: whether CUDA's memory is recorded too.
        """
        self.watched = watched
        self.at = at
        self.steps = steps
        self.memory = memory
        self._profile: Any = None
        self._trained = 0  # batches since the profiler was started, its warm-up included
        self._first = 0  # the window's first batch, counted as ``at``

    def begin(self, at: int, steps: int) -> None:
        """Sets the next window to profile, in a running job; its trace replaces the one before.

        Args:
            at: its first batch, counted from 0 over the whole run, at least two after the running one (else it never
                begins); ignored while a window is profiled.
            steps: its batches.
        """
        if self._profile is None:
            self.at = at
            self.steps = steps

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Starts the profiler one batch before the window, which is its warm-up; with ``memory`` CUDA's recording too."""
        if (
            self._profile is not None
            or self.at is None
            or trainer.fit_loop.epoch_loop.total_batch_idx != self.at - 1
        ):
            return
        cuda = device_of(trainer).type == "cuda"
        if cuda and self.memory:
            torch.cuda.memory._record_memory_history()
        self._profile = torch.profiler.profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self.steps, repeat=1),
            profile_memory=self.memory,
        )
        self._trained = 0
        with outside_of_the_step("profiling"):
            self._profile.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Counts the batch; after the window's last one stops the profiler, and writes the trace and the top operations.

        Only batches that are trained count: Lightning's own count has those that a module skipped, too.
        """
        if self._profile is None:
            return
        batch = trainer.fit_loop.epoch_loop.total_batch_idx
        self._trained += 1
        if self._trained == 2:  # the first one after the warm-up
            self._first = batch
        if self._trained <= self.steps:
            self._profile.step()
            return
        with outside_of_the_step("profiling"):
            self._profile.stop()
            self._save(trainer, self._first, batch)
        self._profile = None

    def _save(self, trainer: Trainer, first: int, last: int) -> None:
        """Writes the window to the run's ``records``: a Chrome trace, a summary that ``kd-report`` reads, a memory
        snapshot.

        Args:
            trainer: of this process; its rank is in the files' names.
            first: the window's first batch, counted from 0 over the whole run.
            last: its last one.
        """
        rank = trainer.global_rank
        place = self.watched.folder(trainer) / "records"
        cuda = device_of(trainer).type == "cuda"
        window = summarize(self._profile.events(), self.steps, cuda)
        trace = file_for(place / f"trace.rank{rank}.json")
        self._profile.export_chrome_trace(str(trace))
        if cuda and self.memory:
            snapshot = file_for(place / f"memory.rank{rank}.pickle")
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
        header = {"of": "kernels", "rank": rank}
        steps = {"first": first, "last": last}
        writer = Writer(place / f"kernels.rank{rank}.jsonl", header)
        writer.write({"kind": "kernels", **steps, "trace": trace.name, **window})
        writer.close()

    def close(self, trainer: Trainer) -> None:
        """Stops the profiler; an unfinished window is dropped. Safe to call again."""
        if self._profile:
            self._profile.stop()
        self._profile = None


def summarize(events: Iterable[Any], steps: int, cuda: bool) -> Json:
    """Which operations took the time of a profiled window, as ``records/kernels.rank<r>.jsonl`` has it.

    What ran outside of the steps (:data:`kd.clock.ASIDE`), such as a validation between two of them, does not count.

    Args:
        events: of ``torch.profiler.profile.events()``.
        steps: batches in the window.
        cuda: count device time; else CPU time.

    Returns:
        ``top``: up to :data:`TOP` operations (``name``, the ``range`` it ran in, ``ms`` and ``calls`` a step, ``share`` of
        all operations' time). ``groups``: the share of each of :data:`GROUPS` that occurs, and of ``other``. ``busy``: of
        :func:`_busy_share`; None on a CPU. Shares are in [0, 1].
    """
    events = list(events)
    named = [
        (e.time_range.start, e.time_range.end, e.name)
        for e in events
        if e.is_user_annotation and e.device_type == torch.autograd.DeviceType.CPU
    ]
    ranges = sorted(one for one in named if not one[2].startswith(NO_RANGES))
    asides = [(start, end) for start, end, name in named if name.startswith(ASIDE)]
    operations = [
        e
        for e in events
        if not e.is_user_annotation
        and not any(start <= e.time_range.start <= end for start, end in asides)
    ]
    starts = [start for start, _, _ in ranges]
    time_ms: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for event in operations:
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue
        spent = (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1000
        if spent > 0:
            key = event.name, _innermost(ranges, starts, event.time_range.start)
            time_ms[key] += spent
            calls[key] += 1
    total = sum(time_ms.values()) or 1.0
    groups: dict[str, float] = defaultdict(float)
    for (name, _), ms in time_ms.items():
        groups[kind_of_work(name)] += ms / total
    rows = [
        {
            "name": key[0][:100],
            "range": key[1],
            "ms": round(ms / steps, 4),
            "share": round(ms / total, 4),
            "calls": round(calls[key] / steps, 1),
        }
        for key, ms in time_ms.most_common(TOP)
    ]
    return {
        "top": rows,
        "groups": {k: round(v, 4) for k, v in groups.items()},
        "busy": _busy_share(operations, asides) if cuda else None,
    }


def _innermost(ranges: list[tuple[float, float, str]], starts: list[float], at: float) -> str:
    """The name of the range that was opened last of those that are open at a time; "" for none.

    Only the :data:`DEEPEST` ranges that began last are searched.

    Args:
        ranges: start, end (microseconds) and name, by start.
        starts: their starts.
        at: the time, in microseconds.
    """
    begun = bisect_right(starts, at)
    for _, end, name in reversed(ranges[max(0, begun - DEEPEST) : begun]):
        if at <= end:
            return name
    return ""


def kind_of_work(operation: str) -> str:
    """The kind of work that a profiled operation does, by its name: one of :data:`GROUPS`, or ``other``.

    >>> kind_of_work("aten::_scaled_dot_product_flash_attention"), kind_of_work("aten::gelu")
    ('attention', 'other')
    """
    name = operation.lower()
    return next(
        (group for group, words in GROUPS.items() if any(word in name for word in words)), "other"
    )


def _busy_share(operations: list[Any], asides: list[tuple[float, float]]) -> float | None:
    """The share of time, in [0, 1], in which a kernel or a copy runs on the GPU; None without CUDA events.

    The time is that from the first one's start to the last one's end, without the ``asides`` that begin in it (start and
    end of each, in microseconds). Those that overlap count once: their spans are joined in order of their start.
    """
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in operations
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    if not spans:
        return None
    covered = 0.0
    first, _ = spans[0]
    reached = first
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    aside = sum(end - start for start, end in asides if first < start < reached)
    return round(min(1.0, covered / max(1e-9, reached - first - aside)), 4)
