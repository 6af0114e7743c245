"""Other loggers beside ``metrics.csv`` (``trainer.logger``): they write below the run's folder, in its name."""

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import Logger, TensorBoardLogger

from kd.callbacks.context import RunContext
from kd.callbacks.tracked_runs import (
    log_settings,
    save_run_ids,
    with_run_ids,
)
from kd.lightning_internals import purge_from
from kd.storage.writing import file_for

RUN = "RUN"  # in a logger's arguments: the run's folder
LIGHTNINGS = "lightning_logs"  # the name that Lightning's loggers give where none is given
Tree = TypeVar("Tree")  # nested dicts and lists of plain values


def placed(spec: dict[str, Any], run: Path) -> dict[str, Any]:
    """A logger's class path and arguments; folders and names that were left at their defaults become those of the run.

    An argument that equals its default counts as left. A default folder (MLflow's ``mlruns``) lies in the run's folder; a
    CSVLogger and TensorBoard write to a folder called ``csv`` or ``tensorboard`` there. MLflow gets a database
    (:func:`_with_database`).

    Args:
        spec: ``class_path`` and ``init_args``; it stays as it is.
        run: the run's folder, ``.../<recipe>/<number>``; ``RUN`` in the arguments stands for it.

    Raises:
        RefusedFile: as of :func:`_with_database`.
    """
    module, _, name = spec["class_path"].rpartition(".")
    logger_class = getattr(import_module(module), name)
    defaults = {}
    for argument, parameter in inspect.signature(logger_class).parameters.items():
        defaults[argument] = parameter.default
    given = dict(spec.get("init_args") or {})
    kind = name.removesuffix("Logger").lower()
    ours: dict[str, Any] = {
        "run_name": f"{run.parent.name}-{run.name}",
        "project": run.parent.name,
        "experiment_name": run.parent.name,
    }
    ours |= {"save_dir": str(run), "root_dir": str(run)}
    # its name and version are folders, not a run's name
    in_folders = defaults.get("name") == LIGHTNINGS
    ours |= {"name": kind, "version": ""} if in_folders else {"name": ours["run_name"]}
    ours["flush_logs_every_n_steps"] = 1  # of the CSVLogger: a killed run loses no row
    if name == "MLFlowLogger":
        given = _with_database(given, defaults, run.parent.parent)
    for key, value in ours.items():
        if key not in defaults:
            continue
        default = defaults[key]
        if given.get(key, default) == default:
            folder = ""
            # else the default is None, or missing
            if key == "save_dir" and isinstance(default, str | Path):
                folder = Path(default).name
            given[key] = f"{value}/{folder}" if folder else value
    return {"class_path": spec["class_path"], "init_args": in_folder(given, run)}


def in_folder(tree: Tree, run: Path) -> Tree:
    """Nested settings with ``RUN`` and ``RUN/NAME`` replaced by places in a run's folder.

    >>> in_folder({"dirpath": "RUN/best", "filename": "RUNS"}, Path("/runs/food/000"))
    {'dirpath': '/runs/food/000/best', 'filename': 'RUNS'}
    """
    replaced: object = tree
    if isinstance(tree, dict):
        replaced = {key: in_folder(value, run) for key, value in tree.items()}
    elif isinstance(tree, list):
        replaced = [in_folder(value, run) for value in tree]
    elif isinstance(tree, str):
        first, slash, rest = tree.partition("/")
        if first == RUN:
            replaced = f"{run}{slash}{rest}"
    return cast(Tree, replaced)


def _with_database(given: dict[str, Any], defaults: dict[str, Any], runs: Path) -> dict[str, Any]:
    """MLflow's arguments with a database for all runs, unless they or ``MLFLOW_TRACKING_URI`` name a server.

    MLflow no longer writes plain files.

    Args:
        given: the arguments in the settings.
        defaults: the class's own, by name.
        runs: the folder of all runs, where the database ``mlflow.db`` lies, unless ``save_dir`` names another.

    Raises:
        RefusedFile: the database is a link, a folder or anything else but a regular file.
    """
    if given.get("tracking_uri") or defaults["tracking_uri"]:  # the default is MLFLOW_TRACKING_URI
        return given
    folder = given.get("save_dir") or defaults["save_dir"]
    if folder == defaults["save_dir"]:
        folder = str(runs)
    database = Path(folder, "mlflow.db")
    if os.path.lexists(database):  # it is opened by its name: no link
        file_for(database)
    ours = {
        "tracking_uri": f"sqlite:///{database}",
        "artifact_location": f"{folder}/mlflow",
    }
    return {**given, **{key: value for key, value in ours.items() if not given.get(key)}}


@dataclass
class Loggers(Callback):
    """Builds the loggers once the run has a folder, on every rank; rank 0 gives them all settings as hyper-parameters."""

    specs: Sequence[dict[str, Any]]
    """``class_path`` and ``init_args`` of each."""
    build: Callable[[list[dict[str, Any]]], list[Logger]]
    """Makes the loggers from specs."""
    settings: dict[str, Any]
    """The run's settings by dotted key."""

    def __post_init__(self) -> None:
        self._resumed_at: int | None = None  # optimizer steps that a resumed run has done before
        self._checkpoint_is_new = False
        self._boards: list[TensorBoardLogger] = []

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, int]
    ) -> None:
        """Keeps the step that a resumed run starts at, and makes the loggers where :meth:`on_fit_start` has left that to
        it.
        """
        self._resumed_at = checkpoint["global_step"]
        if trainer.strategy.restore_checkpoint_after_setup:
            self._make(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the loggers, unless the run resumes with a strategy that reads the checkpoint only after this (FSDP,
        DeepSpeed).
        """
        comes_later = trainer.strategy.restore_checkpoint_after_setup
        if not (RunContext.of(trainer).module.resumed and comes_later):
            self._make(trainer)

    def _make(self, trainer: Trainer) -> None:
        """Makes the loggers below the run's folder, on every rank, and gives them the settings.

        A killed run has logged steps after its last checkpoint, which the resumed run makes again: TensorBoard's events
        lose them; W&B, MLflow and Comet get them twice. A CSVLogger begins another file, in ``from_step_N``.

        Raises:
            UserError: MLflow does not have the run that is continued, or a database that :func:`placed` refuses.
        """
        folder = RunContext.of(trainer).folder.resolve()
        specs = [placed(spec, folder) for spec in self.specs]
        if self._resumed_at is not None:
            specs = with_run_ids(specs, folder)
            for spec in specs:
                version = spec["init_args"].get("version")
                if spec["class_path"].endswith(".CSVLogger") and version is not None:
                    spec["init_args"]["version"] = f"{version}/from_step_{self._resumed_at}".strip(
                        "/"
                    )
        loggers = self.build(specs)
        if trainer.is_global_zero:
            for logger in loggers:
                if self._resumed_at is not None and isinstance(logger, TensorBoardLogger):
                    purge_from(logger, self._resumed_at)
                # at once: TensorBoard's writes them to a file only once, before training starts
                log_settings(logger, self.settings)
            save_run_ids(specs, loggers, folder)
        self._boards = [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]
        trainer.loggers = [*loggers, *trainer.loggers]

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, int]
    ) -> None:
        """Notes that a run may resume here: what was logged before is written when the next batch begins."""
        self._checkpoint_is_new = True

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Writes what TensorBoard keeps in memory, up to two minutes of events, after each checkpoint."""
        if not self._checkpoint_is_new:
            return
        self._checkpoint_is_new = False
        if trainer.is_global_zero:
            for board in self._boards:
                board.experiment.flush()
