"""The run's folder: ``<runs_dir>/<recipe>/<version>/`` with config, metrics and checkpoints."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_fabric.loggers.csv_logs import _ExperimentWriter
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loggers.logger import rank_zero_experiment

from kd.callbacks.last_checkpoint import LastCheckpoint
from kd.errors import UserError


class MetricsCSV(CSVLogger):
    """``metrics.csv`` in the run folder; a resumed run appends to it (Lightning's own logger begins anew)."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(save_dir=run_dir, name="", version="", flush_logs_every_n_steps=1)  # a kill loses none

    @property
    @rank_zero_experiment
    def experiment(self) -> _ExperimentWriter:
        """The writer of the file."""
        if self._experiment is None:
            file = Path(self.log_dir, _ExperimentWriter.NAME_METRICS_FILE)
            earlier = file.read_text() if file.is_file() else ""
            file.unlink(missing_ok=True)
            self._experiment = _ExperimentWriter(log_dir=self.log_dir)
            if earlier:
                file.write_text(earlier)
                self._experiment.metrics_keys = earlier.splitlines()[0].split(",")
        return self._experiment

    def drop_from(self, step: int) -> None:
        """Drops the rows of ``step`` and later: a resumed run makes these steps again."""
        file = Path(self.log_dir, _ExperimentWriter.NAME_METRICS_FILE)
        if not file.is_file():
            return
        header, *rows = file.read_bytes().decode().splitlines(keepends=True)
        column = header.strip().split(",").index("step")
        kept = [row for row in rows if row.endswith("\n") and int(row.split(",")[column]) < step]
        file.write_bytes("".join([header, *kept]).encode())

    def log_hyperparams(self, params: object = None, *args: object, **kwargs: object) -> None:
        """Nothing: ``config.yaml`` holds the settings."""


class StudentCSV(MetricsCSV):
    """``metrics.csv`` of one of several students."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self._student = f"{name}/"

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Its own metrics, under the names that a single student's have."""
        own = {k.removeprefix(self._student): v for k, v in metrics.items() if k.startswith(self._student)}
        if own:
            super().log_metrics(own | ({"epoch": metrics["epoch"]} if "epoch" in metrics else {}), step)


class RunFolder(Callback):
    """Claims the run's folder once the preflight has passed, and sends metrics and checkpoints there.

    Args:
        runs_dir: folder of all runs.
        recipe: the recipe's name.
        config: the resolved configuration, YAML.
        checkpoints: the callbacks that write below it.
        resume: the folder of the run to go on with.
        marker: a file to write the folder's name into.
    """

    def __init__(
        self,
        runs_dir: Path,
        recipe: str,
        config: str,
        checkpoints: Sequence[ModelCheckpoint | LastCheckpoint],
        resume: Path | None = None,
        marker: Path | None = None,
    ) -> None:
        self.parent, self.config, self.checkpoints, self.resume = runs_dir / recipe, config, checkpoints, resume
        self.path: Path | None = None
        self.marker = marker

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Rank 0 makes the folder, all ranks learn its name."""
        problem = ""
        if trainer.is_global_zero:
            try:
                self.path = self.resume or self._claim()
                (self.path / "config.yaml").write_text(self.config)
                self._point_latest()
                if self.marker:
                    self.marker.write_text(self.path.name + "\n")
            except OSError as error:
                problem = f"runs_dir: {self.parent} can't be written: {error.strerror or error}"
        self.path, problem = trainer.strategy.broadcast((self.path, problem))
        if problem:
            raise UserError(problem)
        assert self.path is not None
        for checkpoint in self.checkpoints:  # their own setup has taken Lightning's default folder
            checkpoint.dirpath = os.path.realpath(self.path / "checkpoints")
        self.metrics = [MetricsCSV(self.path)]
        self.metrics += [StudentCSV(self.student_path(name), name) for name in pl_module.named_students() if name]
        trainer.loggers = [*trainer.loggers, *self.metrics]

    def student_path(self, name: str) -> Path:
        """The folder of one of several students; of a single one (no name) the run's own."""
        assert self.path is not None
        return self.path / "students" / name if name else self.path

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """A killed run has written down steps that its checkpoint does not know."""
        if self.resume and trainer.is_global_zero:
            for metrics in self.metrics:
                metrics.drop_from(trainer.global_step)

    def _claim(self) -> Path:
        """The next free number; ``mkdir`` decides between two runs that start at once."""
        self.parent.mkdir(parents=True, exist_ok=True)
        number = max((int(p.name) for p in self.parent.iterdir() if p.name.isdigit()), default=-1) + 1
        while True:
            path = self.parent / f"{number:03d}"
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1

    def _point_latest(self) -> None:
        """``latest`` names the newest run: a link, or a one-line file where links can't be made."""
        assert self.path is not None
        latest, fresh = self.path.parent / "latest", self.path.parent / f".latest-{os.getpid()}"
        try:
            fresh.symlink_to(self.path.name)
        except OSError:
            fresh.write_text(self.path.name + "\n")
        with suppress(OSError):
            fresh.replace(latest)
