"""Checks of settings that the types can't make; each error names its key."""

import copy
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from kd.callbacks.loggers import NEED_A_FOLDER, RUN
from kd.distill.objective import Objective
from kd.errors import UserError, causes
from kd.losses import LogitLoss
from kd.run import keys, typed
from kd.run.files import flatten, leaves, read
from kd.run.trust import check_plain
from kd.settings import height_width
from kd.storage.elsewhere import yaml_of

# settings that an empty text would turn off in silence
EMPTY = (
    "checkpoint.monitor",
    "data.unlabeled",
    "model.teacher.checkpoint",
    "model.student.checkpoint",
)


def check_values(config: dict[str, Any]) -> None:
    """Refuses values outside what is defined, in a resolved configuration.

    Raises:
        UserError: the first one, by its key.
    """
    check_plain(config)
    for key, value in leaves(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(
                f"{key.replace('.init_args', '')}: must be a finite number, got {value}"
            )
        if value == "" and key in EMPTY:
            raise UserError(f"{key}: must not be empty; null is none")
    typed.check_values(flatten(config).items(), keys.schema())
    for name in config["students"] or {}:
        if not isinstance(name, str):
            raise UserError(f"students: a name is text, got {name!r}")
    _check_callbacks(config["trainer"])
    _check_strategy(config["trainer"]["strategy"], config["optim"]["name"])
    _check_sizes(config["data"])
    _check_overlap(config["model"])
    accumulated = config["trainer"]["accumulate_grad_batches"]
    for key, value in flatten(config).items():
        if key.endswith("student.compile") and value == "reduce-overhead" and accumulated > 1:
            raise UserError(
                f"{key}: reduce-overhead needs trainer.accumulate_grad_batches=1, got {accumulated}: its "
                "CUDA graphs write a batch's gradients over those of the batch before"
            )


def _check_overlap(model: dict[str, Any]) -> None:
    """A stored answer leaves nothing to overlap; a teacher's shards and CUDA graphs can't run beside a step."""
    teachers: dict[str, dict[str, Any]] = {}
    for name, settings in (model.get("teachers") or {}).items():
        teachers[f"model.teachers.{name}"] = settings
    if not teachers:
        teachers["model.teacher"] = model.get("teacher") or {}
    overlapping = [key for key, settings in teachers.items() if settings.get("overlap")]
    if not overlapping:
        return
    for key, settings in teachers.items():
        for name, needed in (("cache", "off"), ("placement", "same"), ("compile", "default")):
            value = settings.get(name)
            if value in (None, False, needed) or (name, value) == ("compile", True):
                continue
            shown = "on" if value is True else value
            raise UserError(f"{overlapping[0]}.overlap: needs {key}.{name}={needed}, got {shown}")


def _check_strategy(strategy: str | dict[str, Any], optimizer: str) -> None:
    if "deepspeed.DeepSpeed" in str(strategy) and optimizer not in (
        "adamw",
        "adam",
        "sgd",
        "momentum",
    ):
        allowed = "adamw, adam, sgd or momentum with DeepSpeed, whose shards are flat (each has its own optim.lr)"
        raise UserError(f"optim.name: must be {allowed}, got {optimizer}")


def _check_callbacks(trainer: dict[str, Any]) -> None:
    callbacks = trainer["callbacks"] or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        name = callback["class_path"].rpartition(".")[2]
        if name.endswith("ProgressBar"):
            hides = "trainer.enable_progress_bar=false hides it"
            raise UserError(
                f"trainer.callbacks: {name} can't be added to the run's own progress bar ({hides})"
            )


def loggers_with_folders(items: Sequence[str]) -> str:
    """A list of loggers with the run's folder for those that can't be built without one; empty where it is no list."""
    loggers: object = None
    for item in items:
        key, _, value = item.partition("=")
        if key == "--trainer.logger":
            loggers = yaml_of(value)
        elif key == "--config":
            content = yaml_of(value) if "\n" in value else read(Path(value))
            loggers = (content.get("trainer") or {}).get("logger", loggers)
    if not isinstance(loggers, list):
        return ""
    specs: list[dict[str, Any]] = [
        {"class_path": logger} if isinstance(logger, str) else logger for logger in loggers
    ]
    for spec in specs:
        if spec["class_path"].rpartition(".")[2] in NEED_A_FOLDER:
            spec["init_args"] = {"save_dir": RUN, **(spec.get("init_args") or {})}
    return f"--trainer.logger={json.dumps(specs)}"


def check_student(name: str, own: dict[str, Any]) -> None:
    """Checks one entry of ``students``.

    Args:
        name: its name.
        own: its settings, nested; those of the student, its losses and its optimizer are allowed.

    Raises:
        UserError: another setting, or a name with other characters than letters, digits, ``_`` and ``-``.
    """
    foreign = [key for key in flatten(own) if key and not key.startswith(("model.", "optim."))]
    foreign += [
        key
        for key in flatten(own)
        if key.startswith(("model.teacher.", "model.teachers.", "model.task."))
    ]
    if foreign:
        raise UserError(
            f"students.{name}: may differ in model.student, its losses and optim, not in '{foreign[0]}'"
        )
    if not re.fullmatch(r"[\w-]+", name):
        raise UserError(f"students: a name is made of letters, digits, _ and -, got '{name}'")


def _check_sizes(data: dict[str, Any]) -> None:
    """Pictures that the machine's memory can't hold are a slip of the keyboard."""
    height, width = height_width(data["img_size"])
    memory, batch = psutil.virtual_memory().total, data["batch_size"]
    if 3 * height * width * (batch if isinstance(batch, int) else 1) > memory:
        raise UserError(
            f"data.img_size: a batch of {batch} pictures of {height}x{width} is larger than the memory"
        )
    if data["crop_ratio"] > 0 and 3 * (min(height, width) / data["crop_ratio"]) ** 2 > memory:
        raise UserError(
            f"data.crop_ratio: {data['crop_ratio']} makes pictures larger than the memory"
        )


def check_losses(objective: Objective, key: str, classes: int) -> None:
    """Rejects losses over logits that are NaN or infinite on four made-up answers."""
    trial = objective.task.trial(classes) if classes else None
    if trial is None:
        return
    shape, target = trial
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(shape, generator=generator) for _ in range(2))
    for name, loss in objective.losses.items():
        if not isinstance(loss, LogitLoss) or loss.needs_index:
            continue
        try:
            logits = student.clone().requires_grad_()
            value = copy.deepcopy(loss)(logits, teacher, target)
            value.backward()
        except Exception:
            continue
        if not (
            value.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
        ):
            given = ", ".join(f"{k}={v:g}" for k, v in vars(loss).items() if isinstance(v, float))
            raise UserError(
                f"{key}.distill_losses.{name}: is not finite on a trial batch ({given})"
            )


def told_by_key(error: Exception, config: dict[str, Any]) -> Exception:
    """The user's mistake behind what was raised while settings became objects; any other error as it is."""
    mistake = next((cause for cause in causes(error) if isinstance(cause, UserError)), None)
    if mistake is not None or not isinstance(error, ValueError):
        return mistake or error
    message, flat = " ".join(str(error).split()), flatten(config)
    name = message.split(" ", 1)[0]  # our constructors begin a ValueError with the argument's name
    keys = [k for k in flat if k.split(".")[-1] == name]
    found = [
        k
        for k in keys
        if message.endswith(f"got {flat[k]}") or message.endswith(f"got '{flat[k]}'")
    ] or keys
    return UserError(
        message.replace(name, found[0].replace(".init_args", "") + ":", 1) if found else message
    )
