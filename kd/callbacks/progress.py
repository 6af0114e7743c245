"""Progress for people: one bar over the whole run in images, a line an epoch; without a terminal lines alone."""

import sys
import time
from collections.abc import Callable

from pytorch_lightning import LightningModule, Trainer
from tqdm import tqdm

from kd.callbacks.context import RunContext, is_trial_validation
from kd.callbacks.hooks import Closing
from kd.callbacks.host_copies import HostCopies
from kd.data.batch import Batch
from kd.data.datamodule import DistillationDataModule
from kd.progress import CALM, WholeItems, bar, drawn


def _batches_of_run(trainer: Trainer, data: DistillationDataModule) -> tuple[int, int]:
    """How many batches of the present size a process makes in the whole run (0: no bound), and how many of them are done.

    A resumed run may have batches of another size than before. So the batches that are done are computed from the samples
    seen, and those left until ``max_steps`` from the optimizer steps made.
    """
    per_epoch = int(trainer.num_training_batches)
    epoch, samples = data.resumed_at or (0, 0)
    done = epoch * per_epoch + data.batches_before(samples)
    left = []
    if trainer.max_epochs and trainer.max_epochs > 0:
        left.append(trainer.max_epochs * per_epoch - done)
    if trainer.max_steps > 0:
        steps = trainer.max_steps - trainer.global_step
        left.append(steps * trainer.accumulate_grad_batches)
    if not left:
        return 0, done
    return done + min(left), done


def shape_of_bar(terminal: bool, has_end: bool) -> str:
    """How the training's bar is drawn, as tqdm's ``bar_format``.

    Args:
        terminal: a bar is drawn, not words alone.
        has_end: the run's end is known: it shows the share of the whole run that is done, and the time that is left.
    """
    rate = "{rate_noinv_fmt}"
    if not has_end:
        return "{desc}, " + rate + "{postfix}"
    picture = "|{bar}| " if terminal else ", "
    return "{desc}, {percentage:.0f}% of the run" + picture + rate + ", {remaining} left{postfix}"


class Progress(Closing):
    """Shows epoch, images/s, time left, the loss, ``limit()`` (what limits the run), and metrics once an epoch.

    Args:
        limit: gives in a few words what limits the run at this moment, or ""; called when the bar shows a new loss.
        whose: begins each line: ``"teacher: "`` where the teacher of another run is trained.
    """

    def __init__(self, limit: Callable[[], str] | None = None, whose: str = "") -> None:
        """Stores the arguments, which are the class's; the bar appears with the training."""
        self._limit = limit or (lambda: "")
        self._whose = whose
        self._bar: tqdm | None = None
        self._validation: tqdm | None = None
        self._quiet_until = 0.0
        self._losses: HostCopies[None] = HostCopies()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the bar over the pictures of the whole run on rank 0, at the position of a resumed run."""
        run = RunContext.of(trainer)
        if not trainer.is_global_zero:
            return
        per_batch = run.data.batch_size * trainer.world_size
        batches, done = _batches_of_run(trainer, run.data)
        terminal = sys.stderr.isatty()
        self._bar = WholeItems(
            total=batches * per_batch or None,
            initial=done * per_batch,
            unit=" images",
            smoothing=0.1,
            dynamic_ncols=terminal,
            delay=0.0 if terminal else CALM,
            **drawn(),
            bar_format=shape_of_bar(terminal, has_end=bool(batches)),
        )

        self._name_epoch(trainer)  # a run that resumes in mid-epoch starts none

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the epoch's number, from 1, on the bar."""
        self._name_epoch(trainer)

    def _name_epoch(self, trainer: Trainer) -> None:
        """Puts ``epoch 3/10`` on the bar."""
        if self._bar is None:
            return
        of = ""
        if (trainer.max_epochs or 0) > 0:
            of = f"/{trainer.max_epochs}"
        number = trainer.current_epoch + 1
        description = f"{self._whose}epoch {number}{of}"
        self._bar.set_description_str(description, refresh=False)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Moves the bar; copies the loss to the host when the bar is about to be drawn, and shows it when copied."""
        run = RunContext.of(trainer)
        if self._bar is None:
            return
        is_quiet = time.monotonic() <= self._quiet_until
        if not is_quiet and "train/loss" in trainer.callback_metrics:
            self._quiet_until = time.monotonic() + self._bar.mininterval
            self._losses.add(None, trainer.callback_metrics["train/loss"])
        for _step, [loss] in self._losses.take():
            text = f"loss {loss:.3f}"
            limit = self._limit()
            if limit:
                text += f", {limit}"
            self._bar.set_postfix_str(text, refresh=False)
        pictures = run.data.batch_size * trainer.world_size
        self._bar.update(pictures)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens a bar over the validation pictures of all processes on rank 0; none for a trial of a few batches."""
        if not trainer.is_global_zero or is_trial_validation(trainer):
            return
        batches = RunContext.of(trainer).data.eval_batches("val")
        label = f"{self._named(trainer)}, validation"
        self._validation = bar(label=label, total=batches.pictures)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: Batch,
        *_: object,
    ) -> None:
        """Moves the bar over the validation pictures, for all processes at once; padding counts for nothing."""
        if self._validation is None:
            return
        of_all_processes = len(batch["image"]) * trainer.world_size
        left = self._validation.total - self._validation.n
        self._validation.update(min(of_all_processes, left))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes a line with the loss and the validation metrics to stderr, on rank 0; the IoU of each class is left out."""
        if self._validation is not None:
            self._validation.close()
            self._validation = None
        if not trainer.is_global_zero or is_trial_validation(trainer):
            return
        metrics = dict(
            sorted(trainer.callback_metrics.items(), key=lambda item: item[0].endswith("/kl"))
        )
        values = []
        for k, v in metrics.items():
            if "val/" in k and "/iou_" not in k:
                values.append(f"{k} {v:.3f}")
        loss = ""
        if "train/loss" in metrics:
            loss = f"train/loss {metrics['train/loss']:.3f}  "
        line = f"{self._named(trainer)}  {loss}{'  '.join(values)}"
        WholeItems.write(line, file=sys.stderr)

    def _named(self, trainer: Trainer) -> str:
        """The validation's place in the run, in words: the epoch, from 1, or the start before the first step."""
        if trainer.sanity_checking:
            return f"{self._whose}the start"
        return f"{self._whose}epoch {trainer.current_epoch + 1:>3}"

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints an epoch's line in a run without validation (``limit_val_batches=0``), where no terminal's bar shows it."""
        without_validation = trainer.limit_val_batches == 0
        if self._bar is None or not without_validation or sys.stderr.isatty():
            return
        text = f"{self._whose}epoch {trainer.current_epoch + 1:>3}"
        loss = trainer.callback_metrics.get("train/loss")
        if loss is not None:
            text += f"  train/loss {loss:.3f}"
        self._bar.write(text, file=sys.stderr)

    def close(self, trainer: Trainer) -> None:
        """Closes the bars; on a terminal the last state of the training's stays."""
        if self._validation is not None:
            self._validation.close()
            self._validation = None
        if self._bar is not None:
            self._bar.leave = sys.stderr.isatty()  # elsewhere the last epoch's line shows the same
            self._bar.close()
            self._bar = None
