"""Which validation is a student's best so far: decided here alone, read by whatever keeps or reports it."""

import math

from pytorch_lightning import Callback, LightningModule, Trainer

from kd.callbacks.context import RunContext, is_trial_validation
from kd.module.fits import why_trial
from kd.processes import all_processes, from_first

Metrics = dict[str, float]
"""Validation metrics by name."""


class Best(Callback):
    """Keeps the weights of the best validation so far.

    Accuracies within one standard error of the highest count as equal: where both the newest and the best so far are so
    near, the one whose answers diverge less from the teacher's is kept. One of 296 pictures decides nothing; the mean KL
    divergence varies far less.
    A student whose first weights answer already (its teacher's layers, a fitted classifier) is validated before the first
    step too: epoch 0. This start is the best only as long as each epoch is more than that error below it, and no such
    epoch is kept: training may cost nothing that the student began with.
    The weights go to ``best.ckpt``. Must precede the callbacks that read it.

    Args:
        monitor: the metric, as ``val/acc1``.
        mode: ``min`` or ``max``: which way it is better.
    """

    def __init__(self, monitor: str, mode: str) -> None:
        """Nothing is validated yet; arguments as of the class."""
        self.metric = monitor.removeprefix("val/")
        self.sign = -1 if mode == "min" else 1
        self.newest: Metrics = {}
        """The metrics of the newest validation, without ``val/``."""
        self.best: Metrics = {}
        """Likewise of the best one, with ``epoch`` (from 1; 0: the start) and ``step`` (optimizer steps done); {} until an
        epoch was validated with a metric that is not NaN (with a start: with any)."""
        self.start: Metrics = {}
        """Likewise of the validation before the first step, where that may be the best; else {}."""
        self.top: float | None = None
        """The highest value of the metric so far, negated where lower is better; the best may miss it by its error."""
        self.improved = False
        """Whether the newest validation was the best."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Has the student validated before the first step where its start may be the best: Lightning's trial validation then
        takes the whole set.

        Not in a resumed run, nor in a trial run. The first process decides for all, as it alone knows how the student
        starts (:attr:`kd.distill.student.Student.answers_at_its_start`).
        """
        run = RunContext.of(trainer)
        student = run.student
        begins_well = student.is_measured and student.answers_at_its_start
        whole = not run.module.resumed and not why_trial(trainer)
        counts = from_first(trainer.strategy, begins_well and whole)
        if counts:
            trainer.num_sanity_val_steps = math.inf

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the newest metrics, and writes ``best.ckpt`` where they are the best; all ranks must call it.

        A validation is the best only where all ranks find so; ``improved`` says it. A trial validation of a few batches is
        passed over.
        """
        self.improved = False
        if is_trial_validation(trainer):
            return
        run = RunContext.of(trainer)
        # kl last, as summaries show metrics in this order
        logged = sorted(trainer.callback_metrics.items(), key=lambda item: item[0].endswith("/kl"))
        now = {}
        for name, value in logged:
            if name.startswith("val/"):
                now[name.removeprefix("val/")] = float(value)
        if trainer.sanity_checking:
            answers = from_first(trainer.strategy, run.student.answers_at_its_start)
            is_better = answers and self._note_start(now)
        else:
            self.newest = now
            if self.start and not self.best:
                self.best = {**self.start, "epoch": 0, "step": 0}
            seen = _pictures(run, run.student.data.val)
            is_better = self.metric in now and self._is_better(seen)
        if not all_processes(trainer.strategy, is_better):
            return
        self.improved = True
        if not trainer.sanity_checking:
            epoch = trainer.current_epoch + 1
            self.best = {**now, "epoch": epoch, "step": trainer.global_step}
        trainer.save_checkpoint(run.best_checkpoint, weights_only=True)

    def _note_start(self, metrics: Metrics) -> bool:
        """Keeps the metrics before the first step, as :attr:`start` and :attr:`top`, and returns True; False where the
        monitored one is missing or not finite.

        They become :attr:`best` only at the first validation of an epoch: in a run without any, the last weights are
        exported, not these.
        """
        if not math.isfinite(metrics.get(self.metric, math.nan)):
            return False
        self.start = metrics
        self.top = self.sign * metrics[self.metric]
        return True

    def _is_better(self, pictures: int) -> bool:
        """Whether the newest metrics are better than the best ones; updates :attr:`top`.

        The first epoch is, unless its metric is NaN; of a start (``epoch`` 0) see the class. ``pictures`` were validated:
        the standard error is that of accuracy (``acc1``, in 0..1) on so many, 0 for any other metric.

        Within that error of the highest value the closeness to the teacher decides first, else the metric does. An epoch
        that is at most that error below the start replaces it, since training moves a student away from the start's answers.
        """
        newest = self.newest
        best = self.best or newest
        new = self.sign * newest[self.metric]
        old = self.sign * best[self.metric]
        if math.isnan(new):
            return False
        top = self.top = max(new, old if self.top is None else self.top)
        if not self.best:
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
        if self.start:
            of_start = self.sign * self.start[self.metric]
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
