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

from kd.errors import UserError


class MetricsCSV(CSVLogger):
    """``metrics.csv`` in the run folder; a resumed run appends to it (Lightning's own logger begins anew)."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(save_dir=run_dir, name="", version="", flush_logs_every_n_steps=20)

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
    """

    def __init__(
        self,
        runs_dir: Path,
        recipe: str,
        config: str,
        checkpoints: Sequence[ModelCheckpoint],
        resume: Path | None = None,
    ) -> None:
        self.parent, self.config, self.checkpoints, self.resume = runs_dir / recipe, config, checkpoints, resume
        self.path: Path | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Rank 0 makes the folder, all ranks learn its name."""
        problem = ""
        if trainer.is_global_zero:
            try:
                self.path = self.resume or self._claim()
                (self.path / "config.yaml").write_text(self.config)
                self._point_latest()
            except OSError as error:
                problem = f"runs_dir: {self.parent} can't be written: {error.strerror or error}"
        self.path, problem = trainer.strategy.broadcast((self.path, problem))
        if problem:
            raise UserError(problem)
        assert self.path is not None
        for checkpoint in self.checkpoints:  # their own setup has taken Lightning's default folder
            checkpoint.dirpath = os.path.realpath(self.path / "checkpoints")
        trainer.loggers = [*trainer.loggers, MetricsCSV(self.path)]
        for name in filter(None, pl_module.named_students()):
            trainer.loggers.append(StudentCSV(self.student_path(name), name))

    def student_path(self, name: str) -> Path:
        """The folder of one of several students; of a single one (no name) the run's own."""
        assert self.path is not None
        return self.path / "students" / name if name else self.path

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
