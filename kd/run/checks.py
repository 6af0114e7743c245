"""Checks of settings that the types can't make; each error names its key."""

import math
from typing import Any

import psutil

from kd.errors import UserError, cause_of_kind
from kd.run.files import flatten, leaves
from kd.run.trust import check_plain
from kd.settings import height_width

WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile
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
    _check_callbacks(config["trainer"])
    _check_strategy(config["trainer"]["strategy"], config["optim"]["name"])
    _check_sizes(config["data"])
    _check_overlap(config["model"])
    accumulated = config["trainer"]["accumulate_grad_batches"]
    for key, value in flatten(config).items():
        if key.endswith("student.compile") and value in WITH_CUDA_GRAPHS and accumulated > 1:
            raise UserError(
                f"{key}: {value} needs trainer.accumulate_grad_batches=1, got {accumulated}: its "
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
    needed_values = {"cache": "off", "placement": "same", "compile": "default"}
    for key, settings in teachers.items():
        for name, needed in needed_values.items():
            value = settings.get(name)
            is_default_compile = name == "compile" and value is True
            if value in (None, False, needed) or is_default_compile:
                continue
            shown = "on" if value is True else value
            raise UserError(f"{overlapping[0]}.overlap: needs {key}.{name}={needed}, got {shown}")


def _check_strategy(strategy: str | dict[str, Any], optimizer: str) -> None:
    """Refuses optimizers that need whole weights under DeepSpeed, whose shards are flat."""
    if "deepspeed.DeepSpeed" in str(strategy) and optimizer not in (
        "adamw",
        "adam",
        "sgd",
        "momentum",
    ):
        allowed = "adamw, adam, sgd or momentum with DeepSpeed, whose shards are flat (each optimizer has its own optim.lr)"
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


def _check_sizes(data: dict[str, Any]) -> None:
    """Pictures that the machine's memory can't hold are a slip of the keyboard."""
    height, width = height_width(data["img_size"])
    memory = psutil.virtual_memory().total
    batch = data["batch_size"]
    if 3 * height * width * (batch if isinstance(batch, int) else 1) > memory:
        raise UserError(
            f"data.img_size: a batch of {batch} pictures of {height}x{width} is larger than the memory"
        )
    if data["crop_ratio"] > 0 and 3 * (min(height, width) / data["crop_ratio"]) ** 2 > memory:
        raise UserError(
            f"data.crop_ratio: {data['crop_ratio']} makes pictures larger than the memory"
        )


def with_key(error: Exception, config: dict[str, Any]) -> Exception:
    """The user's mistake behind what was raised while settings became objects; any other error as it is."""
    mistake = cause_of_kind(error, UserError)
    if mistake is not None or not isinstance(error, ValueError):
        return mistake or error
    message = " ".join(str(error).split())
    flat = flatten(config)
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
