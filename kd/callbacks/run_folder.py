"""The run's folder: ``<runs_dir>/<recipe>/<version>/`` with config, metrics and checkpoints."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from kd.callbacks.context import RunContext
from kd.callbacks.last_checkpoint import LastCheckpoint
from kd.callbacks.metrics_csv import MetricsCSV
from kd.errors import UserError, first_line
from kd.processes import by_first
from kd.storage.checkpoints import LAST, PREVIOUS, claim, lock_run
from kd.storage.mirror import Mirror
from kd.storage.writing import guard, remove, write_text


@dataclass
class RunFolder(Callback):
    """Claims the run's folder once the preflight has passed, and sends metrics and checkpoints there."""

    parent: Path
    """Folder of the recipe's runs."""
    config: str
    """The settings, YAML."""
    resume: Path | None = None
    """The folder of the run that is resumed."""
    marker: Path | None = None
    """A launcher's file, which gets the run's name as a line; None without a launcher."""
    name: str | None = None
    """Name of the run's folder; None: the next free number."""
    mirror: Mirror | None = None
    """The copy in an object store, where ``runs_dir`` is a URL."""
    path: Path | None = None
    """The run's folder, once it is claimed."""
    is_trial: bool = False
    """It has ``fast_dev_run``: ``latest`` stays as it is."""
    begun: bool = False
    """Whether this run has written to the folder, so that a failure is recorded there."""
    _lock: IO[str] | None = None

    def lock(self) -> None:
        """Keeps other runs out of the folder until :meth:`release`, or until this process ends in whatever way.

        The first process calls it before a resumed run trains; a new run's folder is locked when it is claimed.

        Raises:
            UserError: another process trains in it.
        """
        folder = self.resume or self.path
        assert folder is not None
        self._lock = lock_run(folder)

    def release(self) -> None:
        """Gives the folder's lock back, if this process has it; other runs may train in it then."""
        if self._lock is not None:
            with suppress(OSError):
                self._lock.close()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives checkpoint callbacks without a folder the run's ``checkpoints``, below :func:`unclaimed` until the run has a
        folder; one that was given is kept.

        Lightning calls it before the ``setup`` of all ModelCheckpoints, which choose a folder where none was given.
        """
        self.is_trial = bool(getattr(trainer, "fast_dev_run", False))
        for checkpoint in trainer.checkpoint_callbacks:
            if not isinstance(checkpoint, LastCheckpoint | ModelCheckpoint):
                continue
            if checkpoint.dirpath is None:
                checkpoint.dirpath = str(unclaimed(self.parent) / "checkpoints")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rank 0 makes the folder, all ranks learn its name and send there what is written from now on.

        That is: paths below :func:`unclaimed` in the trainer and its callbacks, and the CSV file of metrics. ``latest`` and
        the settings are written too (:meth:`_begin`).

        Raises:
            UserError: the folder can't be written, its name is taken, or it holds what :func:`guard` refuses.
        """
        run = RunContext.of(trainer)
        name = by_first(trainer.strategy, self._begin)
        folder = self.parent / name
        if self.resume:
            folder = self.resume
        self.path = guard(folder)
        run.module.folder = self.path
        self.begun = not self.resume
        _move_paths(trainer, unclaimed(self.parent), self.path)
        self.metrics = MetricsCSV(self.path)
        trainer.loggers = [*trainer.loggers, self.metrics]

    def _begin(self) -> str:
        """Claims and makes the folder, with the settings of a new run; returns its name. The first process alone calls it.

        Raises:
            UserError: the folder can't be written, or :attr:`name` is taken.
        """
        try:
            self.path = self.resume
            if self.path is None:
                in_store = self.mirror.claim if self.mirror else None
                self.path = claim(self.parent, self.name, in_store)
                self._lock = lock_run(self.path)
            # loggers, profilers and callbacks write there by themselves
            guard(self.path, writes=True)
            if not self.resume:
                self._write_settings()
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise UserError(f"runs_dir: {self.parent} can't be written: {reason}") from error
        return self.path.name

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Has the trainer's objects write to the resumed run's folder, and changes the paths in the checkpoint.

        Its states of ModelCheckpoints name files that Lightning may delete: they then name the same files in this run's own
        folders. Lightning calls it before it loads these states, with most strategies before :meth:`on_fit_start`.
        """
        assert self.resume is not None
        _move_paths(trainer, unclaimed(self.parent), self.resume)
        states = checkpoint.get("callbacks", {})
        for own in trainer.checkpoint_callbacks:
            if (
                isinstance(own, ModelCheckpoint)
                and own.state_key in states
                and own.dirpath is not None
            ):
                states[own.state_key] = _moved_state(states[own.state_key], Path(own.dirpath))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes that the run has begun. A resumed one writes its settings, and drops rows of steps that it makes again, on
        rank 0.
        """
        self.begun = True
        if self.resume and trainer.is_global_zero:
            self._write_settings()
            self.metrics.drop_from(trainer.global_step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """For a resumed run with nothing left to train: notes that it writes to the folder, and begins to mirror it.

        After a training both are done already, and nothing changes.
        """
        self.begun = True
        if trainer.is_global_zero:
            self.follow()

    def _write_settings(self) -> None:
        """Writes ``config.yaml`` and the launcher's :attr:`marker`, points ``latest`` at the run unless it is a trial, and
        begins to copy the folder to the :attr:`mirror`'s store. The first process alone calls it.
        """
        assert self.path is not None
        write_text(self.path / "config.yaml", self.config)
        if not self.is_trial:
            self._point_latest()
        if self.marker:
            write_text(self.marker, self.path.name + "\n")
        self.follow()

    def follow(self) -> None:
        """Begins to mirror the folder to the object store, where ``runs_dir`` is one; unless it has."""
        if self.mirror and self.path:
            self.mirror.follow(self.path, *([self.marker.name] if self.marker else []))

    def _point_latest(self) -> None:
        """Points ``latest``, beside the run's folder, at the run: a link, or a one-line file where links can't be made.

        An older ``latest`` is replaced in one step; where a folder has that name, the folder stays.
        """
        assert self.path is not None
        latest = self.path.parent / "latest"
        fresh = self.path.parent / f".latest-{os.getpid()}"
        try:
            fresh.symlink_to(self.path.name)
        except OSError:
            write_text(fresh, self.path.name + "\n")
        try:
            fresh.replace(latest)
        except OSError:
            remove(fresh)


def unclaimed(parent: Path) -> Path:
    """What stands for a run's folder in the objects of its trainer until the folder is claimed."""
    return Path(os.path.realpath(parent), ".RUN")


def _move_paths(trainer: Trainer, before: Path, run: Path) -> None:
    """Replaces ``before`` by the folder ``run`` in the paths below it that are attributes of the trainer, its callbacks,
    profiler and strategy, as text or Path. A second call changes nothing.
    """
    profiler = trainer.profiler  # type: ignore[attr-defined]
    run = Path(os.path.realpath(run))
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    for owner in (trainer, profiler, trainer.strategy, *callbacks):
        for name, value in list(vars(owner).items()):
            if not isinstance(value, str | Path):
                continue
            path = Path(value)
            if path.is_relative_to(before):
                moved = run / path.relative_to(before)
                setattr(owner, name, type(value)(moved))


def _moved_state(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A state of ModelCheckpoint whose files keep their names, but are in ``folder``; without those that every run has
    (``last.ckpt``, ``previous.ckpt``).

    >>> state = {"monitor": "val/acc1", "dirpath": "/b/0", "best_model_path": "s3://b/../victim", "best_k_models": {}}
    >>> _moved_state(state, Path("/a/0"))["best_model_path"], _moved_state(state, Path("/a/0"))["monitor"]
    ('/a/0/victim', 'val/acc1')
    """

    def own(path: object) -> str:
        """The same file below ``folder``; "" for a checkpoint that every run has."""
        name = str(path).rpartition("/")[2]
        if name not in ("", ".", "..", LAST, PREVIOUS):
            return str(folder / name)
        return ""

    models = {
        own(path): score for path, score in state.get("best_k_models", {}).items() if own(path)
    }
    files = {key: own(path) for key, path in state.items() if key.endswith("_model_path")}
    return {**state, **files, "dirpath": str(folder), "best_k_models": models}
