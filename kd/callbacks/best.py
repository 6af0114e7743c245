"""Which validation is a student's best so far: decided here alone, read by whatever keeps or reports it."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from kd.callbacks.context import RunContext, is_trial_validation
from kd.module.fits import why_trial
from kd.processes import all_processes, by_first, from_first
from kd.storage.writing import write_text

Metrics = dict[str, float]
"""A student's validation metrics by name."""


class Best(Callback):
    """Keeps the weights of the best validation so far.

    Accuracies within one standard error of the highest count as equal: where both the newest and the best so far are so
    near, the one whose answers diverge less from the teacher's is kept. One of 296 pictures decides nothing; the mean KL
    divergence varies far less.
    A student whose first weights answer already (its teacher's layers, a fitted classifier) is validated before the first
    step too: epoch 0. This start is the best only as long as each epoch is more than that error below it, and no such
    epoch is kept: training may cost nothing that the student began with.
    A single student's weights go to ``best.ckpt``; those of several to ``students/<name>``, beside a ``config.yaml``
    that repeats that student's run alone. Must precede the callbacks that read it.

    Args:
        monitor: the metric, as ``val/acc1``.
        mode: ``min`` or ``max``: which way it is better.
        configs: of several students, the text of each one's ``config.yaml``, by name; {} for a single one.
        save: writes a student to a file; called by the first process, of several students, after each validation that
            was the student's best.
    """

    def __init__(
        self, monitor: str, mode: str, configs: Mapping[str, str], save: Callable[[Any, Path], None]
    ) -> None:
        """Nothing is validated yet; arguments as of the class."""
        self.configs = configs
        self.save = save
        self.metric = monitor.removeprefix("val/")
        self.sign = -1 if mode == "min" else 1
        self.newest: dict[str, Metrics] = {}
        """By student ("" for a single one): the metrics of its newest validation, without ``val/``."""
        self.best: dict[str, Metrics] = {}
        """Likewise of its best one, with ``epoch`` (from 1; 0: the start) and ``step`` (optimizer steps done); a student is
        missing until an epoch of it was validated with a metric that is not NaN (with a start: with any)."""
        self.start: dict[str, Metrics] = {}
        """Likewise of the validation before the first step, where that may be the best."""
        self.top: Metrics = {}
        """By student: the highest value of the metric so far, negated where lower is better; the best may miss it by its
        error."""
        self.improved: set[str] = set()
        """The students for which the newest validation was the best."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Has a start that may be the best validated: makes Lightning's trial validation one of the whole set.

        Not in a resumed run, nor in a trial run. The first process decides for all, as it alone knows how the students
        start (:attr:`kd.distill.student.Student.answers_at_its_start`).
        """
        run = RunContext.of(trainer)
        measured = run.students.measured.values()
        begins_well = any(student.answers_at_its_start for student in measured)
        whole = not run.module.resumed and not why_trial(trainer)
        if from_first(trainer.strategy, begins_well and whole):
            trainer.num_sanity_val_steps = math.inf

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes each student's ``config.yaml`` on rank 0, where there are several."""
        for name, config in self.configs.items() if trainer.is_global_zero else ():
            write_text(RunContext.of(trainer).student_folder(name) / "config.yaml", config)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes each student's newest metrics, and writes its weights where they are its best; all ranks must call it.

        A validation is the best only where all ranks find so. A trial validation of a few batches is passed over.
        """
        self.improved = set()
        if is_trial_validation(trainer):
            return
        run = RunContext.of(trainer)
        # kl last, as summaries show metrics in this order
        logged = sorted(trainer.callback_metrics.items(), key=lambda item: item[0].endswith("/kl"))
        for name, student in run.students.named().items():
            place = f"{name}/val/" if name else "val/"
            now = {k.removeprefix(place): float(v) for k, v in logged if k.startswith(place)}
            if trainer.sanity_checking:
                answers = from_first(trainer.strategy, student.answers_at_its_start)
                is_better = answers and self._note_start(name, now)
            else:
                self.newest[name] = now
                if name in self.start and name not in self.best:
                    self.best[name] = {**self.start[name], "epoch": 0, "step": 0}
                seen = _pictures(run, student.data.val)
                is_better = self.metric in now and self._is_better(name, seen)
            if not all_processes(trainer.strategy, is_better):
                continue
            self.improved.add(name)
            if not trainer.sanity_checking:
                epoch = trainer.current_epoch + 1
                self.best[name] = {**now, "epoch": epoch, "step": trainer.global_step}
            if name:
                by_first(trainer.strategy, partial(self._write, run, name))
        if "" in self.improved:
            trainer.save_checkpoint(run.best_checkpoint, weights_only=True)

    def _write(self, run: RunContext, name: str) -> None:
        """Writes the file of one of several students; the first process alone calls it."""
        student = run.students.named()[name]
        self.save(student, run.student_folder(name) / "student.safetensors")

    def _note_start(self, name: str, metrics: Metrics) -> bool:
        """Keeps a student's metrics before the first step; False where the monitored one is missing or not finite.

        It becomes the best at the first validation of an epoch: without any the last weights are exported.
        """
        if not math.isfinite(metrics.get(self.metric, math.nan)):
            return False
        self.start[name] = metrics
        self.top[name] = self.sign * metrics[self.metric]
        return True

    def _is_better(self, name: str, pictures: int) -> bool:
        """Whether a student's newest metrics are better than its best ones; updates :attr:`top`.

        The first epoch is, unless its metric is NaN; of a start (``epoch`` 0) see the class. ``pictures`` were validated:
        the standard error is that of accuracy (``acc1``, in 0..1) on so many, 0 for any other metric.

        Within that error of the highest value the closeness to the teacher decides first, else the metric does. An epoch
        that is at most that error below the start replaces it, since training moves a student away from the start's answers.
        """
        newest = self.newest[name]
        best = self.best.get(name) or newest
        new = self.sign * newest[self.metric]
        old = self.sign * best[self.metric]
        if math.isnan(new):
            return False
        top = self.top[name] = max(new, self.top.get(name, old))
        if name not in self.best:
            return True

        # KL where both have it (lower is closer), else the share of equal answers
        if math.isfinite(newest.get("kl", math.nan)) and math.isfinite(best.get("kl", math.nan)):
            new_closeness = -newest["kl"]
            old_closeness = -best["kl"]
        else:
            new_closeness = newest.get("agreement", 0.0)
            old_closeness = best.get("agreement", 0.0)

        error = 0.0
        # a user's own task may give another number by this name, which has no such error
        if self.metric == "acc1" and pictures and 0 <= top <= 1:
            error = math.sqrt(top * (1 - top) / pictures)
        if name in self.start:
            of_start = self.sign * self.start[name][self.metric]
            if new < of_start - error:
                return False
            if best.get("epoch") == 0:
                return True
        if min(new, old) >= top - error:
            return (new_closeness, new) > (old_closeness, old)
        return (new, new_closeness) > (old, old_closeness)


def _pictures(run: RunContext, listed: int) -> int:
    """How many pictures a validation has seen: ``trainer.limit_val_batches`` may leave out most of those listed."""
    batches = run.data.eval_batches("val")
    return min(listed, batches.used * batches.batch_size * batches.world_size)
