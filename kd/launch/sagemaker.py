"""SageMaker's container: settings come in as hyperparameters, results end in the folders that SageMaker keeps."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kd.errors import UserError
from kd.launch.groups import base, job_folder, read_json
from kd.storage.elsewhere import json_of, text_of
from kd.storage.shown import without_secrets

CHANNEL = "channel:"
# what SageMaker's own tools put beside the settings
_NOT_OURS = re.compile(r"sagemaker_.*|_tuning_objective_metric")


@dataclass(frozen=True)
class Container:
    """A training job's container: its folders and hyperparameters."""

    base: Path
    """``/opt/ml``, or where :func:`kd.launch.groups.base` finds it."""
    settings: dict[str, str]
    """The job's hyperparameters: keys of ``kd-train`` and their values as text."""
    trial: str = ""
    """The job's name in a search, whose trials share a folder in S3; "" outside a search."""

    @property
    def runs_dir(self) -> Path:
        """The folder for runs: SageMaker copies it to S3 all the time, and back when it starts an interrupted job again."""
        return self.base / "checkpoints" / self.trial

    def deliver(self, run: Path) -> None:
        """Copies a finished run, without its checkpoints, to ``/opt/ml/model``, where SageMaker fetches models.

        The first process alone calls it, after a training with status 0.

        Args:
            run: its folder.
        """
        left_out = shutil.ignore_patterns("checkpoints", ".lock", "*.part")
        shutil.copytree(run, self.base / "model", ignore=left_out, dirs_exist_ok=True)


def container(env: Mapping[str, str] = os.environ) -> Container | None:
    """The container of the training job that this process belongs to; None elsewhere, and in a child that is no process of
    the job (:func:`kd.launch.child.start_kd_train`).

    The hyperparameters come from the variable ``SM_HPS``, which SageMaker's toolkit sets, else from SageMaker's file.

    Raises:
        UserError: hyperparameters that are not JSON, or no mapping.
    """
    config = job_folder(env)
    if config is None:
        return None
    file = config / "hyperparameters.json"
    text = env.get("SM_HPS") or (text_of(file) if file.is_file() else "{}")
    parameters = read_json(text, "SM_HPS" if env.get("SM_HPS") else str(file), dict)
    trial = ""
    if "_tuning_objective_metric" in parameters:
        trial = env.get("TRAINING_JOB_NAME", "")
    settings = {}
    for key, value in parameters.items():
        if not _NOT_OURS.fullmatch(key):
            settings[key] = _as_text(value)
    return Container(base(env), settings, trial)


def _as_text(value: object) -> str:
    """A hyperparameter as on a command line: SageMaker keeps text, which its SDK writes as JSON.

    What is not text is written as JSON.

    >>> _as_text('"adamw"'), _as_text("adamw"), _as_text("0.1"), _as_text("[1, 2]"), _as_text(0.1), _as_text({"a": True})
    ('adamw', 'adamw', '0.1', '[1, 2]', '0.1', '{"a": true}')
    """
    if not isinstance(value, str):
        return json.dumps(value)
    with suppress(ValueError):
        inner = json_of(value)
        if isinstance(inner, str):
            return inner
    return value


def channel_variable(name: str) -> str:
    """The variable that holds a channel's folder, as a shell takes it.

    >>> channel_variable("train-set")
    'SM_CHANNEL_TRAIN_SET'
    """
    return re.sub(r"\W", "_", f"SM_CHANNEL_{name.upper()}")


def channel_folder(value: str, env: Mapping[str, str] = os.environ) -> str:
    """The folder of ``channel:NAME`` or ``channel:NAME/PART``: a data root by its name in the job's request. Any other
    value stays as it is.

    Raises:
        UserError: the job has no such channel.

    >>> channel_folder("channel:train/photos", {"SM_CHANNEL_TRAIN": "/data"})
    '/data/photos'
    """
    if not value.startswith(CHANNEL):
        return value
    name, slash, part = value.removeprefix(CHANNEL).partition("/")
    data = base(env) / "input" / "data"
    on_disk = {}
    if data.is_dir():
        for path in sorted(data.iterdir()):
            if path.is_dir():
                on_disk[path.name] = str(path)
    variable = channel_variable(name)
    as_sagemaker_has_it = env.get(f"SM_CHANNEL_{name.upper()}")
    folder = on_disk.get(name) or env.get(variable) or as_sagemaker_has_it
    if folder is None:
        channels = list(on_disk)
        if not channels:
            variables = [key for key in env if key.startswith("SM_CHANNEL_")]
            channels = [key.removeprefix("SM_CHANNEL_").lower() for key in variables]
        names = ", ".join(channels) or "none"
        raise UserError(f"{value}: the job has no channel '{name}' ({variable}); it has {names}")
    return folder + slash + part


def endpoint_items(env: Mapping[str, str] = os.environ) -> list[str]:
    """The arguments of ``kd-serve`` in a container that SageMaker starts as an endpoint, for the command ``serve``.

    [] where the model that an endpoint has, ``/opt/ml/model/student/1/model.onnx``, is missing. ``env``: the process's
    environment.
    """
    model = base(env) / "model" / "student" / "1" / "model.onnx"
    port = env.get("SAGEMAKER_BIND_TO_PORT", "8080")
    if model.is_file():
        return [str(model), "host=0.0.0.0", f"port={port}", "hosts=*"]
    return []


def tell_failure(reason: str, env: Mapping[str, str] = os.environ) -> None:
    """Writes why a job failed to ``/opt/ml/output/failure``, where SageMaker reads it. Does nothing elsewhere, nor in a
    child that is no process of the job: what has started it tells its own reason.

    The first reason of a machine's processes stays. A disk that can't be written is passed over, as the failure itself is
    reported on stderr.

    Args:
        reason: one line; SageMaker shows 1,024 characters of it.
        env: the process's environment.
    """
    if job_folder(env) is None:
        return
    folder = base(env)
    with suppress(OSError):
        (folder / "output").mkdir(exist_ok=True)
        with (folder / "output" / "failure").open("x", encoding="utf-8") as file:
            file.write(without_secrets(reason)[:1024] + "\n")
