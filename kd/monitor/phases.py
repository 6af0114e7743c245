"""Times the phases of every step: data wait, host to device, teacher, student, loss, backward, ..."""

import math
import os
import platform
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.profilers import PassThroughProfiler, Profiler
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from kd.callbacks.hooks import Recording
from kd.clock import REST, Clock, StepTimes, annotate, parts_of_the_start, run_clock, run_start
from kd.machine import core_ids, cores, has_efa, nccl_network, processor
from kd.monitor.health import is_compiled
from kd.monitor.watched import Watched, device_of
from kd.report.facts import Facts
from kd.report.records import PHASES, RunRecords, Writer
from kd.report.rules import NAMES, limits_of
from kd.report.step_facts import phase_share
from kd.storage.elsewhere import Json

TOTAL_EVERY_S = 5.0
"""Seconds from one record of the totals to the next."""
OF_STEP_TIMES = ("host_ms", "ready_ms", "data_ready_ms", "data_cpu_ms", "launch_ms")
"""Of :class:`kd.clock.StepTimes`, in a step's record and, added up, in the totals."""
RECENT = 50  # newest steps, for live displays

# Lightning names what it runs, "[Strategy]DDPStrategy.backward": the last part names the phase.
ACTIONS = {
    "train_dataloader_next": "data",
    "batch_to_device": "h2d",
    "backward": "backward",
    "optimizer_step": "optimizer",  # what is left of it without the step's closure
    "optimizer_zero_grad": "optimizer",
    "save_checkpoint": "checkpoint",
}


def phase_of(action: str, step: str = "loss") -> str | None:
    """The phase (:data:`kd.report.records.PHASES`) that a Lightning action belongs to; None for one that has none.

    ``step``: the phase of ``training_step``.

    >>> phase_of("[Strategy]SingleDeviceStrategy.backward")
    'backward'
    """
    owner, _, name = action.rpartition(".")
    if name == "training_step":
        # the module's own hook is inside the strategy's
        return step if owner.startswith("[Strategy]") else None
    if "ModelCheckpoint" in owner:
        return "checkpoint"
    return ACTIONS.get(name or action)


class PhaseProfiler(Profiler):
    """A Lightning profiler that passes names to a :class:`~kd.clock.Clock`, and on to the user's own profiler.

    Args:
        clock: takes the times.
        users: the trainer's profiler so far.
        on_fetch: called before each request for a training batch, and when an epoch begins: the step before ends.
        step: phase of what ``training_step`` takes without the phases inside it.
        rest: phase of what no other claims.
    """

    def __init__(
        self,
        clock: Clock,
        users: Profiler,
        on_fetch: Callable[[], None],
        step: str = "loss",
        rest: str = REST,
    ) -> None:
        """Stores the arguments, which are the class's; nothing is timed yet."""
        super().__init__()
        self.clock = clock
        self.users = users
        self._on_fetch = on_fetch
        self._step = step
        self._rest = rest
        self.callbacks_ms: dict[str, float] = {}
        """Milliseconds of the host in each callback's hooks so far, by Lightning's name of the hook."""
        self._silent = isinstance(users, PassThroughProfiler)
        self._phases: dict[str, str | None] = {}
        self._open: list[annotate] = []
        self._started: list[float] = []

    @contextmanager
    def profile(self, action_name: str) -> Iterator[None]:
        """Inside, times one of Lightning's actions, for the user's profiler too."""
        with (
            nullcontext() if self._silent else self.users.profile(action_name),
            super().profile(action_name),
        ):
            yield

    def start(self, action_name: str) -> None:
        """Enters the action's phase, if it has one, and times a callback's hook.

        A request for a training batch ends the step before. From the clearing of gradients before a validation until the
        strategy's ``on_validation_end`` all time counts as ``validation``.
        """
        if action_name not in self._phases:
            self._phases[action_name] = phase_of(action_name, self._step)
        phase = self._phases[action_name]
        if phase:
            if action_name.endswith("train_dataloader_next"):
                self._on_fetch()
            self._open.append(annotate(phase).__enter__())
        elif action_name.startswith("[Callback]"):
            self._started.append(time.perf_counter())
        elif action_name == "run_training_epoch":
            self._on_fetch()
            self.clock.turn("data")  # the loader's start
        elif action_name.endswith("on_validation_model_zero_grad"):
            self.clock.within("validation")

    def stop(self, action_name: str) -> None:
        """Leaves the action's phase, or adds up the hook's time.

        Once a batch has come, time counts as the phase ``rest``, an argument of the class; once a validation has ended, as
        the phase that was open before it.
        """
        if self._phases.get(action_name):
            self._open.pop().__exit__(None, None, None)
            if action_name.endswith("train_dataloader_next"):
                self.clock.turn(self._rest)
        elif action_name.startswith("[Callback]"):
            name = action_name.removeprefix("[Callback]")
            spent = 1000 * (time.perf_counter() - self._started.pop())
            self.callbacks_ms[name] = self.callbacks_ms.get(name, 0.0) + spent
        elif action_name.startswith("[Strategy]") and action_name.endswith(".on_validation_end"):
            self.clock.within(None)

    def summary(self) -> str:
        """That of the user's profiler."""
        return self.users.summary()

    def describe(self) -> None:
        """Prints what the user's profiler has found."""
        self.users.describe()

    def teardown(self, stage: str | None) -> None:
        """Ends the user's profiler."""
        self.users.teardown(stage)


class Phases(Recording):
    """Writes ``records/phases.rank<r>.jsonl``: a record a step, and exact totals every few seconds.

    A step lasts from the request for its batch to the request for the next one. A communication hook of the user's own
    leaves ``communication`` inside ``backward``, as ``monitor.communication=false`` does.
    """

    _process_is_used = (
        False  # whether a run in this process has counted the time since the process began
    )

    def __init__(
        self,
        watched: Watched,
        costs: Json | None = None,
        nvtx: bool = False,
        communication: bool = True,
    ) -> None:
        """Stores the settings; the profiler is set when the training begins.

        Args:
            watched: the training.
            costs: prices for the records' header, as :meth:`kd.monitor.keys.MonitorSpec.costs` gives them; None: no prices.
            nvtx: whether phases are ranges for Nsight Systems.
            communication: whether all-reduces between processes are timed.
        """
        self.watched = watched
        self.costs, self.nvtx = costs or {}, nvtx
        self._times_communication = communication
        self._built = run_start(Phases._process_is_used)
        Phases._process_is_used = True
        self.profiler: PhaseProfiler | None = None
        self.recent: deque[Json] = deque(maxlen=RECENT)
        """The newest steps' records, as :meth:`_write` makes them."""
        self.header: Json = {}
        """The header of this rank's file; {} before the training."""
        self._total: Json = {}
        self._callbacks_before: dict[str, float] = {}  # ms by hook, of the run's earlier starts
        self._last_total = 0.0  # Unix time at which the step ended after which totals were written
        self._step: Json | None = None  # what the record of the open step begins with
        self._epoch: int | None = None  # of the newest step
        self._is_trained = False  # the batch of the step that is open has been trained to its end
        self._fit_started = self._train_started = 0.0
        self._cuda = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the clock, and puts a profiler that drives it around the trainer's own; on every rank."""
        self._fit_started = time.time()
        self._cuda = device_of(trainer).type == "cuda"
        self.clock = Clock((lambda: torch.cuda.Event(enable_timing=True)) if self._cuda else None)
        lightning: Any = trainer  # its type has no profiler, the object does
        self.profiler = PhaseProfiler(
            self.clock,
            lightning.profiler,
            self._end_step,
            self.watched.step_phase,
            self.watched.rest_phase,
        )
        lightning.profiler = self.profiler
        self.name_ranges(self.nvtx)

    def name_ranges(self, on: bool) -> None:
        """Turns NVTX ranges for phases and :class:`kd.annotate` on or off."""
        self.clock.ranges = torch.cuda.nvtx if on else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the rank's file ``records/phases.rank<r>.jsonl``, writes its header, which reports read, and starts the
        clock.

        A resumed run continues from the totals of the file. The gradients' all-reduces of a DDP model are timed by a hook,
        unless it has one already.
        """
        watched_model = self.watched.model(trainer)
        self.header = {
            "of": "steps",
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": device_of(trainer).type,
            "device_name": torch.cuda.get_device_name() if self._cuda else processor(),
            "cores": cores(),
            "core_ids": core_ids(),
            "threads": torch.get_num_threads(),
            "processes": trainer.num_devices,
            "accumulate": trainer.accumulate_grad_batches,
            "t": time.time(),
            "max_epochs": trainer.max_epochs,
            "max_steps": trainer.max_steps,
            "precision": str(trainer.precision),
            "compiled": watched_model is not None and is_compiled(watched_model),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "torch": torch.__version__,
            **self.watched.header(trainer),
            **self.costs,
        }
        if math.isfinite(trainer.num_training_batches):
            self.header["batches_per_epoch"] = trainer.num_training_batches
        if trainer.num_nodes > 1 and has_efa():
            self.header["efa_network"] = nccl_network()
        name = f"phases.rank{trainer.global_rank}.jsonl"
        self._writer = Writer(self.watched.folder(trainer) / "records" / name, self.header)
        self._total = self._writer.last_total or _no_steps()
        self._callbacks_before = self._total.pop("callbacks", {})
        model = trainer.strategy.model
        timed = model if self._times_communication else None
        if isinstance(timed, DistributedDataParallel) and not timed._comm_hooks:
            timed.register_comm_hook(None, self._all_reduce)
        self._train_started = time.time()
        run_clock(self.clock)
        self.clock.restart()

    def _all_reduce(
        self, state: dist.ProcessGroup | None, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """DDP's hook: from the last bucket on, until backward ends, the time counts as communication."""
        if bucket.is_last():  # backward has nothing left to compute
            self.clock.turn("communication")
        return allreduce_hook(state, bucket)  # type: ignore[arg-type]  # None: all processes

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Notes step and epoch for the step's record; the first of an epoch is marked.

        Where the loader does not say how large its batches are, the first one shows it, and the header is written again.
        """
        if "batch_size" not in self.header and self._writer is not None:
            self.header["batch_size"] = self.watched.rows(batch)
            self._writer.write({"kind": "header", **self.header})
        self._step = {
            "step": trainer.fit_loop.epoch_loop.total_batch_idx,
            "epoch": trainer.current_epoch,
        }
        if self._epoch != trainer.current_epoch:
            self._step["first"] = True
        self._is_trained = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Notes that the batch was trained, and not skipped by the module's ``on_train_batch_start``."""
        self._is_trained = True
        self._epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drops a step whose batch was skipped: the module's ``on_train_batch_start`` returned -1, which ends the epoch.

        Its time, the wait for its batch included, is no step's.
        """
        if self._step is not None and not self._is_trained:
            self._step = None
            self.clock.restart()

    def _end_step(self) -> None:
        """Ends the step that is open, if one is, and writes the steps whose times have come from the device.

        The time that writing takes is added to the totals as ``own_ms``.
        """
        if self._step is None:
            return
        self.clock.cut(self._step)
        began = time.perf_counter()
        self._step = None
        for times in self.clock.take():
            self._write(times)
        self._total["own_ms"] = self._total.get("own_ms", 0.0) + 1000 * (
            time.perf_counter() - began
        )

    def _write(self, times: StepTimes) -> None:
        """Writes a step's record, times in ms, which ``kd-report`` reads, and adds it to :attr:`recent`.

        The process's first step is no part of the totals; with it the event ``startup`` is written. Every
        :data:`TOTAL_EVERY_S` seconds the totals are written too.
        """
        assert self._writer is not None and self.profiler is not None
        phases = {name: round(ms, 3) for name, ms in times.phases.items() if ms >= 0.0005}
        ms = sum(v for k, v in times.phases.items() if k in PHASES)
        record = {
            "kind": "step",
            **times.tag,
            "t": round(times.t, 3),
            "ms": round(ms, 3),
            "p": phases,
            **{name: round(getattr(times, name), 3) for name in OF_STEP_TIMES},
        }
        self._writer.write(record)
        if self.recent:
            _add(self._total, record)
        else:  # the first step warms up: no part of the totals
            self._write_startup(times)
        self.recent.append(record)
        if times.t > self._last_total + TOTAL_EVERY_S:
            self._last_total = times.t
            self._write_total()

    @property
    def images_per_step(self) -> int:
        """Pictures of a batch of all processes; 0 where that is not known."""
        return self.header.get("batch_size", 0) * self.header["world_size"]

    def so_far(self) -> str:
        """The share of the data wait and what limits the newest steps, for the progress bar; "" before half of
        :data:`RECENT` steps are recorded.
        """
        if len(self.recent) < self.recent.maxlen // 2:  # type: ignore[operator]
            return ""
        total = _no_steps()
        for record in list(self.recent)[1:]:  # the run's first step warms up
            _add(total, record)
        newest = RunRecords(Path(), headers={0: self.header}, totals={0: total})
        facts = Facts(newest)
        largest, *_ = limits_of(facts)
        wait = phase_share(facts.phases, "data")
        return f"data wait {wait:.0%}, {NAMES[largest.bound]}"

    def _write_total(self) -> None:
        """Writes the sums over all steps so far, in ms, with the eight hooks of callbacks that took the most time.

        Both are over all starts of the run; of earlier starts only the eight hooks count that were written then.
        """
        assert self._writer is not None and self.profiler is not None
        spent = dict(self._callbacks_before)
        for name, ms in self.profiler.callbacks_ms.items():
            written = name[:80]
            spent[written] = spent.get(written, 0.0) + ms
        costly = sorted(spent.items(), key=lambda item: -item[1])[:8]
        self._writer.write(
            {
                **self._total,
                "t": round(time.time(), 3),
                "callbacks": {name: round(ms, 1) for name, ms in costly},
            }
        )

    def _write_startup(self, first: StepTimes) -> None:
        """Writes the event ``startup``: seconds from the run's start (:func:`kd.clock.run_start`) to the end of its first
        step, by part.

        ``first``: times of that step.
        """
        assert self._writer is not None
        before = parts_of_the_start(self._built, self._fit_started)
        within = parts_of_the_start(self._fit_started, self._train_started)
        checks = self._train_started - self._fit_started
        parts = {
            "imports, models, data": max(
                0.0, self._fit_started - self._built - sum(before.values())
            ),
            **before,
            "checks before the first step": max(0.0, checks - sum(within.values())),
            **{name: before.get(name, 0.0) + s for name, s in within.items()},
            "first step": first.host_ms / 1000,
        }
        parts = {name: round(s, 2) for name, s in parts.items()}
        self._writer.write(
            {"kind": "event", "name": "startup", "s": round(sum(parts.values()), 2), "parts": parts}
        )

    def close(self, trainer: Trainer) -> None:
        """Writes the last steps and the totals, once the device has come so far; gives the trainer its own profiler back."""
        run_clock(None)
        if self.profiler is not None:
            trainer.profiler = self.profiler.users  # type: ignore[attr-defined]
        if self._writer is not None:
            self._end_step()
            for times in self.clock.take(wait=True):
                self._write(times)
            self._write_total()
            super().close(trainer)
        if self.profiler is not None:
            self.clock.close()


def _no_steps() -> Json:
    """The totals of no step, a record of kind ``total``."""
    return {"kind": "total", "steps": 0, "ms": 0.0, "max_ms": 0.0, "p": {}}


def _add(total: Json, record: Json) -> None:
    """Adds a step's record, times in ms, to the sums of all steps, in place."""
    total["steps"] += 1
    total["max_ms"] = max(total["max_ms"], record["ms"])
    for key in ("ms", *OF_STEP_TIMES):
        total[key] = total.get(key, 0.0) + record[key]
    phases = total["p"]
    for name, ms in record["p"].items():
        phases[name] = phases.get(name, 0.0) + ms
