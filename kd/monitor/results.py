"""What a training that is not kd's leaves beside its records: settings, metrics, summary and report."""

import sys
import time
from pathlib import Path

import torch
import yaml
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

import kd
from kd.callbacks.hooks import after_step
from kd.callbacks.host_copies import HostCopies
from kd.callbacks.metrics_csv import MetricsCSV
from kd.errors import UserError, first_line
from kd.monitor.stopping import Stopping
from kd.monitor.watched import device_of
from kd.processes import by_first
from kd.report.html import write_explained
from kd.report.records import is_run
from kd.storage.elsewhere import Json
from kd.storage.mirror import Mirror
from kd.storage.objects import is_url
from kd.storage.run_urls import on_disk
from kd.storage.shown import masked
from kd.storage.writing import guard, make_folder, write_json, write_text

FOLDER = "kd.Monitor: folder"
"""The argument that names the place, in messages: ``kd.Monitor("s3://bucket/name/run")``."""


def records_folder(place: str) -> Path:
    """Where a training's records lie on this disk.

    Args:
        place: a folder, or a URL: that of all runs, then two folders, the run's name and its number.

    Raises:
        UserError: a URL of fewer folders, or one that leads elsewhere.
    """
    _, _, runs = _runs_of(place).partition("://")
    if is_url(place) and not runs:
        raise UserError(f"{FOLDER}: must be a URL such as s3://BUCKET/NAME/RUN, got {place}")
    return on_disk(place, FOLDER)


def _runs_of(place: str) -> str:
    """The URL of all runs, two folders above a run's."""
    return place.rstrip("/").rpartition("/")[0].rpartition("/")[0]


class WatchedResults(Callback):
    """Writes ``config.yaml`` and ``metrics.csv`` while a training runs, ``summary.json`` and the report at its end.

    Args:
        place: the run's folder, or its URL in an object store, of which ``folder`` is then the copy on this disk.
        settings: of the monitor, those that are not the defaults.
        stopping: says which rule has stopped the training.
    """

    def __init__(self, place: str, settings: Json, stopping: Stopping) -> None:
        """Stores the settings, which are the class's; nothing is written before the training begins.

        Raises:
            UserError: as of :func:`records_folder`.
        """
        self.place = place
        self.settings = settings
        self.stopping = stopping
        self.folder = records_folder(place)
        self._mirror: Mirror | None = None
        self._started = time.monotonic()
        self._losses: HostCopies[dict[str, int]] = HostCopies()
        self._metrics: MetricsCSV | None = None
        self._began = False

    def begin(self, trainer: Trainer, module: LightningModule | None) -> None:
        """Makes the folder and writes the settings, before any part writes; every process must call it.

        A training that resumes (``trainer.ckpt_path``) may have a folder that holds records already.

        Raises:
            UserError: the folder holds another run, or can't be written.
        """
        by_first(trainer.strategy, lambda: self._begin(trainer, module))
        self._began = True
        metrics = MetricsCSV(self.folder)
        trainer.loggers = [*trainer.loggers, metrics]
        if trainer.is_global_zero:  # Lightning's rank_zero_only knows no ranks of a plain loop
            self._metrics = metrics

    def _begin(self, trainer: Trainer, module: LightningModule | None) -> None:
        """Makes the folder and its copy in a store, and writes ``config.yaml``.

        The first process alone calls it.

        Args:
            trainer: Lightning's, or the plain loop's.
            module: its hyper-parameters are written too; None in a plain loop.

        Raises:
            UserError: the folder holds another run, or can't be written.
        """
        resumes = trainer.ckpt_path is not None
        if self.folder.is_dir() and is_run(self.folder) and not resumes:
            raise UserError(
                f"{self.folder}: holds the records of an earlier training; give another folder"
            )
        content = {
            "trainer": {
                "max_epochs": trainer.max_epochs,
                "max_steps": trainer.max_steps,
                "precision": str(trainer.precision),
                "strategy": type(trainer.strategy).__name__,
                "devices": trainer.world_size,
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
            },
            "module": _settings_of(module),
            "monitor": self.settings,
        }
        try:
            guard(make_folder(self.folder), writes=True)
            self._follow(resumes)
            write_text(
                self.folder / "config.yaml", yaml.safe_dump(masked(content), sort_keys=False)
            )
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise UserError(f"{self.place}: can't be written: {reason}") from error

    def _follow(self, resumes: bool) -> None:
        """Begins to copy the folder to the object store, where the place is a URL.

        Raises:
            UserError: a run is there already and this one does not resume, or the store can't be used.
        """
        if not is_url(self.place):
            return
        self._mirror = Mirror(_runs_of(self.place), FOLDER)
        if not resumes:
            try:
                self._mirror.claim(self.folder.parent.name, self.folder.name)
            except FileExistsError as error:
                raise UserError(
                    f"{self.place}: holds the records of an earlier training; give another place"
                ) from error
        self._mirror.follow(self.folder)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drops the rows of ``metrics.csv`` that a training which resumes makes again, on rank 0."""
        resumes = trainer.ckpt_path is not None
        if resumes and self._metrics is not None:
            self._metrics.drop_from(trainer.global_step)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Copies the loss to the host at the steps that loggers take, and writes those that have arrived.

        A step of accumulated batches has the loss of its last batch.
        """
        steps_done = trainer.global_step
        every = max(1, getattr(trainer, "log_every_n_steps", 1))
        is_due = after_step(trainer, batch_idx) and steps_done % every == 0
        loss = outputs
        if isinstance(outputs, dict):
            loss = outputs.get("loss")
        if is_due and isinstance(loss, Tensor) and loss.numel() == 1:
            step = {"step": steps_done - 1, "epoch": trainer.current_epoch}
            # Lightning has divided it by the number of accumulated batches
            of_batch = loss.detach() * trainer.accumulate_grad_batches
            self._losses.add(step, of_batch)
        self._write_losses(wait=False)

    def _write_losses(self, wait: bool) -> None:
        """Writes the losses that have come from the device as rows of ``metrics.csv``; ``wait``: all of them."""
        for step, [loss] in self._losses.take(wait):
            if self._metrics is not None:
                row: dict[str, Tensor | float] = {
                    "epoch": float(step["epoch"]),
                    "train/loss": float(loss),
                }
                self._metrics.log_metrics(row, step["step"])

    def log_loss(self, trainer: Trainer, loss: Tensor) -> None:
        """Takes the loss of a plain loop's present step; it is copied to the host without a wait, and written later."""
        step = {"step": trainer.global_step, "epoch": trainer.current_epoch}
        self._losses.add(step, loss.detach())

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the summary of a training that has ended well, or was stopped by a rule."""
        reason = self.stopping.stopped
        self._end(trainer, f"stopped: {reason}" if reason else "done")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Writes the summary of a training that has failed, or was interrupted by a KeyboardInterrupt."""
        interrupted = isinstance(exception, KeyboardInterrupt)
        error = f"{type(exception).__name__}: {exception}"
        self._end(trainer, "interrupted" if interrupted else "failed", error)

    def _end(self, trainer: Trainer, status: str, error: str = "") -> None:
        """Writes ``summary.json`` and the report, once, on the first process; then the store gets what it lacks.

        Nothing before :meth:`begin`. What the disk refuses is reported, and raises nothing.

        Args:
            trainer: Lightning's, or the plain loop's.
            status: ``done``, ``stopped: RULE``, ``interrupted`` or ``failed``, as ``kd-runs`` and ``kd-report`` read
                it.
            error: kind and text of the error that ended the training; "" without one.
        """
        if not self._began or not trainer.is_global_zero:
            return
        self._began = False
        self._write_losses(wait=True)
        if self._metrics is not None:
            self._metrics.save()
        device = device_of(trainer)
        on_gpu = device.type == "cuda"
        summary: Json = {
            "status": status,
            "recipe": self.folder.absolute().parent.name,
            "kd_version": kd.__version__,
            "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
            "precision": str(trainer.precision),
            "strategy": type(trainer.strategy).__name__,
            "world_size": trainer.world_size,
            "epochs": trainer.current_epoch,
            "steps": trainer.global_step,
            "wall_s": round(time.monotonic() - self._started, 1),
        }
        if on_gpu:
            summary["peak_memory_mb"] = round(torch.cuda.max_memory_allocated(device) / 2**20)
        if error:
            summary["error"] = error
        try:
            write_json(self.folder / "summary.json", summary)
            write_explained(self.folder, summary)
        except OSError as problem:  # the training is worth more than its report
            print(f"kd.Monitor: {self.folder}: {first_line(problem)}", file=sys.stderr)
        else:
            self._say_where()
        if self._mirror is not None:
            self._mirror.close()

    def _say_where(self) -> None:
        """Prints on stderr where page and records are, and which command reads them."""
        page = ""
        if (self.folder / "report.html").is_file():
            page = "report.html and "
        print(
            f"kd.Monitor: {page}records are in {self.folder}; kd-report {self.place} --open shows them",
            file=sys.stderr,
        )


class BeginResults(Callback):
    """Begins :class:`WatchedResults` before the parts that write; results themselves come after the parts, whose files are
    closed then.
    """

    def __init__(self, results: WatchedResults) -> None:
        self.results = results

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Calls :meth:`WatchedResults.begin`."""
        self.results.begin(trainer, pl_module)


def _settings_of(module: LightningModule | None) -> dict[str, object]:
    """The hyper-parameters that a module has saved (``save_hyperparameters``); {} of a plain loop."""
    hparams = getattr(module, "hparams", {})
    return {str(name): _plain(value) for name, value in dict(hparams).items()}


def _plain(value: object) -> object:
    """A hyper-parameter as YAML takes it; of an object its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
