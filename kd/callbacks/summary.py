"""``summary.json``: settings and results of the run, written at the end and on failure."""

import statistics
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import kd
from kd.callbacks.best import Best
from kd.callbacks.context import RunContext
from kd.callbacks.preemption import Preemption, RunStopped
from kd.callbacks.preflight import Preflight, rounded_metrics
from kd.callbacks.run_folder import RunFolder
from kd.distill.sharding import Sharding
from kd.distill.student import Student
from kd.fit_to_machine.memory import size_of
from kd.machine import peak_memory_mb
from kd.models import ModelSpec, count_parameters
from kd.models.sharding import own
from kd.module.resumed_state import check_form, check_numbers
from kd.processes import total
from kd.report.html import write_explained
from kd.storage.writing import write_json, write_text
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL


@dataclass
class Summary(Callback):
    """Times the steps and writes ``summary.json``.

    ``step_ms_median`` is the time from one batch's end to the next one's, so it includes the wait for data, and a step of
    accumulated batches takes several; ``images_per_s``, of all processes, follows from it, until the report writes
    pictures over the mean step in its place. The first batch of each epoch is left out.
    """

    folder: RunFolder
    """Where the run's folder is."""
    preflight: Preflight
    """What was measured of the teacher."""
    preemption: Preemption
    """Which errors are an interruption."""
    recipe: str
    """The recipe's name."""
    seed: int
    """Seed of the run."""
    best: Best
    """Which validation is the best."""
    content: dict[str, Any] = field(default_factory=dict)
    """What was written last; {} on other ranks than 0."""
    _steps_ms: list[float] = field(default_factory=list)
    _last_step: float | None = None
    """When the last batch ended, by ``time.perf_counter``; None before the first one of an epoch."""
    _started: float = field(default_factory=time.monotonic)
    """When the run began, by ``time.monotonic``; a resumed run's is set back by the time spent before."""
    _optimizer_state: dict[str, float] = field(default_factory=dict)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Has the epoch's first batch left out of the times: it includes the loader's start."""
        self._last_step = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Notes the ms from one batch's end to the next by the host's clock, without a wait for the device."""
        now = time.perf_counter()
        if self._last_step is not None:
            self._steps_ms.append(1000 * (now - self._last_step))
        self._last_step = now

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes how large the optimizer's state is; all ranks must call it."""
        self._optimizer_state = optimizer_state(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the summary of a run that has ended well."""
        self.write(trainer, RunContext.of(trainer), "done")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Writes ``summary.json`` of a run that failed or was stopped, with the reason.

        Of a failure the traceback goes to ``error.txt``, on other ranks than 0 to ``error.rank<r>.txt``. Nothing is written
        before the run has written to its folder.
        """
        run = RunContext.of(trainer)
        stopped = (
            # Ctrl-C, or an exit: Lightning's after a SIGTERM before the first step
            not isinstance(exception, Exception)
            or self.preemption.interruption(exception) is not None
        )
        ended = "interrupted"
        if isinstance(exception, RunStopped):
            ended = f"stopped: {exception.reason}"
        self.write(trainer, run, ended if stopped else "failed", exception)
        if self.folder.path is not None and self.folder.begun and not stopped:
            name = "error.txt"
            if not trainer.is_global_zero:
                name = f"error.rank{trainer.global_rank}.txt"
            with suppress(OSError):  # a full disk is one of the reasons
                write_text(self.folder.path / name, "".join(traceback.format_exception(exception)))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: of :class:`kd.callbacks.best.Best` the metrics of the best validation, of the newest
        (``final``) and of the start, and ``top``; and ``wall_s``, the seconds spent so far.
        """
        return {
            "best": self.best.best,
            "top": self.best.top,
            "start": self.best.start,
            "final": self.best.newest,
            "wall_s": self._wall_s(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives a checkpoint's metrics to :attr:`best`, and counts the time on from its ``wall_s``.

        Args:
            state_dict: as :meth:`state_dict` gives it; what is missing counts as empty, and as no time.

        Raises:
            UserError: metrics are no numbers by name, or the seconds are no finite number from 0 on.
        """
        for name in ("best", "final", "start"):
            check_numbers(state_dict.get(name, {}), f"resume: the checkpoint's {name} metrics")
        check_form(state_dict.get("top"), None, "resume: the checkpoint's top metric")
        seconds = state_dict.get("wall_s", 0.0)
        check_form(seconds, 0.0, "resume: the checkpoint's wall_s")
        self.best.best = state_dict.get("best", {})
        self.best.newest = state_dict.get("final", {})
        self.best.top = state_dict.get("top")
        self.best.start = state_dict.get("start", {})
        self._started = time.monotonic() - seconds

    def _wall_s(self) -> float:
        return round(time.monotonic() - self._started, 1)

    def write(
        self, trainer: Trainer, run: RunContext, status: str, error: BaseException | None = None
    ) -> None:
        """Writes ``summary.json`` on rank 0, then the report where there are records.

        Nothing before the run has written to its folder.

        Args:
            trainer: of the run.
            run: the run.
            status: ``done``, ``failed``, ``interrupted`` or ``stopped: REASON``.
            error: why it ended before its time; then a full disk is not reported again. None: it has not.
        """
        if not self.folder.begun or not trainer.is_global_zero:
            return
        assert self.folder.path is not None
        self.content = self._content(trainer, run, status)
        if error is not None:
            self.content["error"] = f"{type(error).__name__}: {error}"
        with suppress(OSError) if error else nullcontext():
            write_json(self.folder.path / "summary.json", self.content)
        if (self.folder.path / "records").is_dir():
            write_explained(self.folder.path, self.content)

    def _student(self, student: Student) -> dict[str, Any]:
        """The student's numbers: ``arch``, ``name`` (for people), ``params``, ``lr`` (its peak), ``start``, and the metrics
        of its newest validation (``val``), its best one and its start's.
        """
        spec = student.spec or ModelSpec(student.arch)
        return _model(spec, student.model, rounded_metrics(self.best.newest)) | {
            "best_val": rounded_metrics(self.best.best),
            "start_val": rounded_metrics(self.best.start),
            "lr": student.lr,
            "start": student.start,
        }

    def _teacher(self, teacher: RunTeacher | None) -> dict[str, Any] | None:
        """The teachers' metrics and sizes (of several each one's as ``members``); None without a teacher."""
        if teacher is None:
            return None
        whole = self.preflight.about_teacher(teacher)
        each = {
            name: _model(t.spec, t.model, self.preflight.members.get(name, {}))
            for name, t in teacher.members.items()
        }
        whole["name"] = " + ".join(model["name"] for model in each.values())
        if len(each) > 1:
            whole["members"] = each
        return whole

    def _content(self, trainer: Trainer, run: RunContext, status: str) -> dict[str, Any]:
        """The content of ``summary.json`` as far as the training has it; ``kd-report``, ``kd-runs`` and ``kd-tune`` read its
        keys.

        :meth:`write` adds ``error``, and :func:`kd.report.html.write_explained` verdict, findings and headline.
        ``wall_s`` is in seconds, ``step_ms_median`` in milliseconds, MB are of 2**20 bytes (in ``optimizer_state`` and
        ``cache`` of 10**6). ``batch_size`` is of one process. What is not known is None.
        """
        info = run.student.data
        data = run.data
        memory = run.module.memory
        caches = {name: cache.report() for name, cache in run.module.caches.items()}
        step_ms = None
        if self._steps_ms:
            step_ms = statistics.median(self._steps_ms)
        per_step = data.batch_size * trainer.world_size
        return {
            "status": status,
            "recipe": self.recipe,
            "kd_version": kd.__version__,
            "device": torch.cuda.get_device_name(run.device)
            if run.device.type == "cuda"
            else run.device.type,
            "precision": str(trainer.precision),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "strategy": type(trainer.strategy).__name__,
            "world_size": trainer.world_size,
            "epochs": trainer.current_epoch,
            "steps": trainer.global_step,
            "wall_s": self._wall_s(),
            "images_per_s": round(1000 * per_step / step_ms, 1) if step_ms else None,
            "step_ms_median": round(step_ms, 2) if step_ms else None,
            "peak_memory_mb": round(_peak_memory_mb(run.device)),
            "memory_mb": memory.report(data.batch_size, _state_bytes(trainer)) if memory else None,
            "batch_size": data.batch_size,
            "num_workers": data.num_workers,
            "cache": caches.get(ALL, caches or None),
            "optimizer_state": self._optimizer_state,
            "primary": run.module.task.primary,
            "teacher": self._teacher(run.module.teacher),
            "student": self._student(run.student),
            "data": {
                "source": data.source.describe(),
                "train": info.train,
                "val": info.val,
                "classes": len(info.classes),
                "unlabeled": info.unlabeled,
                "skipped": len(data.splits.skipped),
                "shared": len(data.splits.shared),
            },
            "seed": self.seed,
        }


def _state_bytes(trainer: Trainer) -> int:
    """Bytes of the optimizers' state on this rank; of one that is sharded, this rank's part."""
    tensors: list[torch.Tensor] = []
    for optimizer in trainer.optimizers:
        local = optimizer
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            local = optimizer.optim
        for state in local.state.values():
            tensors += [own(x) for x in state.values() if isinstance(x, torch.Tensor)]
    return size_of(tensors)


def optimizer_state(trainer: Trainer) -> dict[str, float]:
    """What the optimizers' state takes, in MB (10**6 bytes); all ranks must call it.

    Returns:
        For ``summary.json``: ``rank0_mb`` of this rank (the first one writes the file), ``whole_mb`` of all its parts
        together, and ``sharded_over``: the number of ranks that share one state, 1 where each has all of it.
    """
    in_parts = any(_is_in_shards(optimizer) for optimizer in trainer.optimizers)
    sharded = isinstance(trainer.strategy, Sharding) or in_parts
    mine = _state_bytes(trainer) / 1e6
    whole = mine
    if sharded:
        whole = total(trainer.strategy, mine)
    shards = trainer.world_size if sharded else 1
    return {"rank0_mb": round(mine, 3), "whole_mb": round(whole, 3), "sharded_over": shards}


def _is_in_shards(optimizer: Optimizer) -> bool:
    """Whether each rank has a part of an optimizer's state alone: ZeRO's, or one over parameters in shards."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return True
    return any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


def _model(spec: ModelSpec, model: torch.nn.Module, val: dict[str, float]) -> dict[str, Any]:
    """A model's entry in the summary: its names, number of parameters, and validation metrics."""
    names = {"arch": spec.arch, "name": spec.title}
    return {**names, "params": count_parameters(model), "val": val}


def _peak_memory_mb(device: torch.device) -> float:
    """Peak memory of this process in MB (2**20 bytes): the GPU's where it trains on one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return peak_memory_mb()
