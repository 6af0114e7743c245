"""Checks of settings that the types can't make; each error names its key."""

from collections.abc import Container, Mapping
from typing import Any

import psutil

from kd.config.kinds import as_tree
from kd.config.trees import flatten
from kd.errors import REFUSED_LOSSES, UserError, cause_of_kind
from kd.settings import MonitorSettings, height_width

MONITOR = as_tree(MonitorSettings())
WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile


def check_values(config: dict[str, Any]) -> None:
    """Refuses values outside what is defined, in a resolved configuration.

    Raises:
        UserError: the first one, by its key.
    """
    _check_callbacks(config["trainer"])
    _check_strategy(config["trainer"]["strategy"], config["optim"]["name"])
    _check_sizes(config["data"])
    check_losses_of_task(config)
    _check_weights(config)
    _check_teachers(config["model"])
    if config["monitor"] != MONITOR:
        from kd.monitor.keys import MonitorSpec

        MonitorSpec(**config["monitor"])
    accumulated = config["trainer"]["accumulate_grad_batches"]
    for key, value in flatten(config).items():
        if key.endswith("student.compile") and value in WITH_CUDA_GRAPHS and accumulated > 1:
            raise UserError(
                f"{key}: {value} needs trainer.accumulate_grad_batches=1, got {accumulated}: its "
                "CUDA graphs write a batch's gradients over those of the batch before"
            )


def _check_teachers(model: dict[str, Any]) -> None:
    """Refuses one teacher beside several; a recipe may have its teacher in either place."""
    one = model["teacher"]
    several = [*(model["teachers"] or {})]
    if one and several:
        names = " and ".join(f"model.teachers.{name}" for name in several)
        raise UserError(
            f"model.teachers: give model.teacher or model.teachers, not both: the settings have {names}, so give "
            f"model.teachers.{several[0]}.checkpoint=FILE, or model.teachers=null beside model.teacher"
        )


def _check_strategy(strategy: str | dict[str, Any], optimizer: str) -> None:
    """Refuses optimizers other than AdamW, Adam and SGD under DeepSpeed: in its flat shards those that need whole weights
    would go wrong.
    """
    if "deepspeed.DeepSpeed" in str(strategy) and optimizer not in (
        "adamw",
        "adam",
        "sgd",
        "momentum",
    ):
        allowed = "adamw, adam, sgd or momentum with DeepSpeed, whose shards are flat (each optimizer has its own optim.lr)"
        raise UserError(f"optim.name: must be {allowed}, got {optimizer}")


def _check_callbacks(trainer: dict[str, Any]) -> None:
    """Refuses a second progress bar among ``trainer.callbacks``."""
    callbacks = trainer["callbacks"] or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        name = callback["class_path"].rpartition(".")[2]
        if name.endswith("ProgressBar"):
            hides = "trainer.enable_progress_bar=false hides it"
            raise UserError(
                f"trainer.callbacks: {name} can't be added to the run's own progress bar ({hides})"
            )


def _check_sizes(data: dict[str, Any]) -> None:
    """Refuses pictures that the machine's memory can't hold, as uint8: they are a slip of the keyboard.

    ``batch_size=auto`` counts as one picture. With ``crop_ratio`` a picture is resized to ``img_size / crop_ratio`` first.
    """
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


OVER_LOGITS = (
    "BinaryKDLoss",
    "CWDLoss",
    "DISTLoss",
    "DKDLoss",
    "HardKDLoss",
    "KDLoss",
    "MLKDLoss",
    "NKDLoss",
    "PixelKDLoss",
    "RegressionKDLoss",
    "WSLDLoss",
)
"""kd's losses over logits, but for StandardizedLoss, where the loss inside decides."""
ALLOWED_LOSSES = {
    "MultiLabel": ("BinaryKDLoss", "CWDLoss", "DKDLoss", "NKDLoss", "PixelKDLoss", "RegressionKDLoss", "WSLDLoss"),
    "Segmentation": ("PixelKDLoss", "CWDLoss"),
    "Regression": ("RegressionKDLoss",),
}  # fmt: skip
"""By task those that :data:`kd.errors.REFUSED_LOSSES` is not said of, the likeliest first; other checks may refuse them."""


WITHOUT_MIXING = ("MultiLabel", "Regression")
"""Tasks whose pictures can't be mixed."""


def loss_refused_by(task: str, loss: str) -> bool:
    """Whether one of kd's losses over logits is not defined for a task; both by the short names of their classes.

    False for losses and tasks that :data:`OVER_LOGITS` and :data:`ALLOWED_LOSSES` do not name.
    """
    return loss in OVER_LOGITS and loss not in ALLOWED_LOSSES.get(task, OVER_LOGITS)


def check_losses_of_task(config: Mapping[str, Any]) -> None:
    """Refuses kd's losses over logits that are not defined for the task, where the settings alone show it.

    Args:
        config: the resolved settings.

    Raises:
        UserError: names the first loss, and the settings that put losses in the places of all that the task refuses;
            mixed pictures, which the task has no targets for, are switched off with them.
    """
    model = config["model"]
    if not model["student"]["head"]:
        return
    task = class_of(model["task"])
    refused = {}
    for name, loss in (model["distill_losses"] or {}).items():
        if loss_refused_by(task, class_of(loss)):
            refused[f"model.distill_losses.{name}"] = class_of(loss)
    if not refused:
        return
    first = next(iter(refused))
    remedy = [f"{key}={ALLOWED_LOSSES[task][0]}" for key in refused]
    augment = config["data"]["augment"] or {}
    if task in WITHOUT_MIXING:
        remedy += [f"data.augment.{name}=0" for name in ("mixup", "cutmix") if augment.get(name)]
    raise UserError(f"{first}: {refused[first]} {REFUSED_LOSSES[task]}: {' '.join(remedy)}")


HEADLESS_WITHOUT_LOSSES = (
    "model.student.head: false needs model.distill_losses over a teacher's features, got none"
)
"""Said of a student without a classifier and without losses over features."""


def _check_weights(config: Mapping[str, Any]) -> None:
    """Refuses losses whose weights are all 0."""
    model = config["model"]
    if model["task_loss_weight"]:
        return
    losses = (model["distill_losses"] or {}).values()
    if all((loss.get("init_args") or {}).get("weight", 1) == 0 for loss in losses):
        if not losses and not model["student"]["head"]:
            raise UserError(HEADLESS_WITHOUT_LOSSES)
        if losses:
            instead = "model.task_loss_weight=1 learns from labels"
        else:
            instead = "model.distill_losses.kd=KDLoss learns from the teacher, model.task_loss_weight=1 from labels"
        raise UserError(
            f"model.task_loss_weight: all loss weights are 0, there is nothing to learn from; {instead}"
        )


def class_of(node: object) -> str:
    """The short name of one of kd's classes in settings; "" for anything else."""
    path = ""
    if isinstance(node, dict):
        path = str(node.get("class_path"))
    if path.startswith("kd."):
        return path.rpartition(".")[2]
    return ""


def check_warmup(config: Mapping[str, Any], typed: Container[str]) -> None:
    """Refuses a typed warm-up that would be the whole run.

    One of the recipe, or of a trial run, is shortened (:func:`kd.optim.steps_of_warmup`).

    Args:
        config: resolved settings.
        typed: keys of the command line.

    Raises:
        UserError: names both settings.
    """
    trainer = config["trainer"]
    epochs = trainer["max_epochs"]
    warmup = config["optim"]["warmup_epochs"]
    is_limited = trainer["limit_train_batches"] is not None or trainer["overfit_batches"]
    is_trial = bool(trainer["fast_dev_run"] or is_limited)
    if "optim.warmup_epochs" not in typed or is_trial or not epochs or epochs < 0:
        return
    if warmup >= epochs:
        raise UserError(
            f"optim.warmup_epochs: must be < trainer.max_epochs={epochs}, as the whole run would be warm-up, got {warmup:g}"
        )


def with_key(error: Exception, config: dict[str, Any]) -> Exception:
    """The user's mistake behind what was raised while settings became objects; an error that is no ValueError as it is.

    Our constructors begin a ValueError with the argument's name; its key in the settings, the one with the value that
    the message ends with where several have the name, takes that place. Without such a name it keeps its text.

    Args:
        error: that was raised.
        config: all settings.
    """
    mistake = cause_of_kind(error, UserError)
    if mistake is not None or not isinstance(error, ValueError):
        return mistake or error
    message = " ".join(str(error).split())
    flat = flatten(config)
    name = message.split(" ", 1)[0]
    keys = [k for k in flat if k.split(".")[-1] == name]
    with_value = [
        k
        for k in keys
        if message.endswith(f"got {flat[k]}") or message.endswith(f"got '{flat[k]}'")
    ]
    likeliest = with_value or keys
    if not likeliest:
        return UserError(message)
    key = likeliest[0].replace(".init_args", "")
    return UserError(message.replace(name, f"{key}:", 1))
