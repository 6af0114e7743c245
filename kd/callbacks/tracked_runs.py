"""Runs of W&B, MLflow and Comet: a resumed training continues the run that its first process began."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, MLFlowLogger

from kd.errors import UserError, first_line
from kd.storage.elsewhere import mapping_of
from kd.storage.writing import write_json

FILE = "loggers.json"  # in the run's folder: the id of each logger's run
ID_ARGUMENTS = {
    "WandbLogger": "id",
    "MLFlowLogger": "run_id",
    "CometLogger": "experiment_key",
}
"""The argument by which a logger continues a run."""
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What the id of a run of W&B, MLflow or Comet may be; another text in the file is not passed on."""


def with_run_ids(specs: Sequence[dict[str, Any]], run: Path) -> list[dict[str, Any]]:
    """Loggers with the ids that an earlier process of this run has left (:func:`save_run_ids`).

    Args:
        specs: ``class_path`` and ``init_args`` of each logger; an id (or ``version``) among the arguments counts before
            the file's.
        run: the run's folder.

    Returns:
        The same loggers in the same order, of which some have an id more; none has without the file ``loggers.json``.
    """
    saved_ids = mapping_of(run / FILE)
    continued = []
    for name, spec in zip(_names(specs), specs, strict=True):
        argument = ID_ARGUMENTS.get(_class_name(spec), "")
        arguments = dict(spec.get("init_args") or {})
        run_id = saved_ids.get(name)
        is_named = arguments.get(argument) or arguments.get("version")
        if argument and not is_named and isinstance(run_id, str) and ID.fullmatch(run_id):
            arguments[argument] = run_id
        continued.append({**spec, "init_args": arguments})
    return continued


def save_run_ids(specs: Sequence[dict[str, Any]], loggers: Sequence[Logger], run: Path) -> None:
    """Writes the ids of the loggers' runs into the run's folder; nothing where no logger has one.

    Args:
        specs: the loggers' settings.
        loggers: built from them, in the same order.
        run: its folder.
    """
    ids = {}
    for name, spec, logger in zip(_names(specs), specs, loggers, strict=True):
        has_id = _class_name(spec) in ID_ARGUMENTS
        if has_id and logger.version:
            ids[name] = logger.version
    if ids:
        file = run / FILE
        earlier = mapping_of(file)
        write_json(file, {**earlier, **ids})


def log_settings(logger: Logger, settings: Mapping[str, Any]) -> None:
    """Gives a logger the run's settings, by dotted key, as hyper-parameters.

    MLflow refuses another value for a parameter that a run has: one that a resumed training changes keeps its first.

    Raises:
        UserError: MLflow does not have the run that the run's folder names.
    """
    new = dict(settings)
    if isinstance(logger, MLFlowLogger):
        for key in _mlflow_parameters(logger):
            new.pop(key, None)
    logger.log_hyperparams(new)


def _mlflow_parameters(logger: MLFlowLogger) -> Mapping[str, str]:
    """The parameters, as texts by name, that MLflow has of the logger's run; a UserError where it does not have the run."""
    from mlflow.exceptions import MlflowException

    try:
        parameters: Mapping[str, str] = logger.experiment.get_run(logger.run_id).data.params
    except MlflowException as error:
        raise UserError(
            f"trainer.logger: {first_line(error)} ({FILE} in the run's folder names the run that "
            "is continued; without this file MLflow begins another)"
        ) from error
    return parameters


def _class_name(spec: Mapping[str, Any]) -> str:
    return str(spec["class_path"]).rpartition(".")[2]


def _names(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each logger: ``WandbLogger``, and ``WandbLogger-2`` for the second of a class."""
    names: list[str] = []
    for spec in specs:
        name = _class_name(spec)
        earlier = sum(other.partition("-")[0] == name for other in names)
        names.append(f"{name}-{earlier + 1}" if earlier else name)
    return names
