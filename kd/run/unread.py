"""Settings that nothing reads beside the others: given, they end a run before it begins."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kd.config.trees import flatten
from kd.errors import UserError
from kd.run import keys

RESOLVED = {"name", "resume", "rank_timeout_s"}
"""Keys that no recipe holds all of: a file that does is a run's ``config.yaml``, which holds every key."""

READERS: tuple[tuple[str, Callable[[Iterable[object]], bool], tuple[str, ...], str], ...] = (
    (r"model\.task\.(label_smoothing|class_weights)", all, ("model.student.head", "model.task_loss_weight"),
     "the loss on the labels reads it"),
    (r"model\.task_loss_weight", all, ("model.student.head",), "a student without a classifier has no such loss"),
    (r"model\.teacher\.weight", any, (), "it is a share among several model.teachers"),
    (r"(model\.teachers?\b.*)\.cache_\w+", any, (r"\1.cache",), "the cache reads it"),
    (r"model\.student\.inherit_pictures", any, ("model.student.inherit",), "a student that inherits layers reads it"),
    (r"data\.augment\.scale", lambda values: not any(values), ("data.augment.pad",), "a padded crop has no scale"),
    (r"optim\.min_lr_ratio", lambda values: not any(values), ("optim.milestones",), "steps end at no such share"),
    (r"optim\.decay_norm_and_bias", any, ("optim.weight_decay",), "there is no decay"),
    (r"data\.augment\.mix_probability", any, ("data.augment.mixup", "data.augment.cutmix"), "mixed pictures need it"),
    (r"data\.augment\.(repeat|before_resize)", any,
     tuple(f"data.augment.{name}" for name in ("hflip", "vflip", "rotation", "rand_augment", "color_jitter")),
     "it says how often, or when, these change a picture"),
    (r"monitor\.(?!enabled).*", any, ("monitor.enabled",), "nothing is monitored"),
    (r"monitor\.prometheus_host", any, ("monitor.prometheus_port",), "the Prometheus endpoint reads it"),
    (r"monitor\.send_every_s", any, ("monitor.otlp", "monitor.cloudwatch"), "what sends numbers elsewhere reads it"),
    (r"trainer\.gradient_clip_algorithm", any, ("trainer.gradient_clip_val",), "clipping reads it"),
    (r"trainer\.(limit_test_batches|limit_predict_batches)", any, (), "training neither tests nor predicts"),
    (r"trainer\.use_distributed_sampler", any, (), "kd's own sampler gives each process its share"),
    (r"trainer\.(default_root_dir|model_registry)", any, ("trainer.callbacks", "trainer.logger", "trainer.profiler"),
     "the run's files are in runs_dir; callbacks, loggers and profilers of your own read it"),
    (r"name", lambda values: not any(values), ("resume",), "a resumed run keeps its folder"),
)  # fmt: skip
"""Of each: a pattern of settings; ``enough``, whether what the deciding settings are (bool each: on or off) lets something
read them; the deciding settings, in which ``\\1`` is the pattern's group; and the reason that a message gives.

Without deciding settings ``any`` is false: then nothing ever reads the setting."""


def check_read(
    config: Mapping[str, Any], files: Sequence[Mapping[Any, Any]], overrides: Mapping[str, Any]
) -> None:
    """Refuses a setting of the recipe or command line that is idle; those of overlays and run folders may be.

    Idle is a setting (neither null, 0, false nor empty) that differs from its default and that nothing reads
    (:data:`READERS`).

    Args:
        config: all settings, resolved.
        files: the settings of the recipe, which is the first, and of overlays, in rising priority.
        overrides: those of the command line, by key.

    Raises:
        UserError: the first one, with the settings that switch it off.
    """
    layers = [_plain_keys(layer) for layer in (*files, overrides)]
    settings = _plain_keys(config)
    command_line = len(layers) - 1
    checked = {command_line}
    from_a_run = not files or set(files[0]) >= RESOLVED
    if not from_a_run:
        checked.add(0)  # the recipe is the first file
    patterns = [row[0] for row in READERS]
    for name, value in settings.items():
        if not value or value == _default(name):
            continue
        layer = _newest(layers, name)
        if layer not in checked:
            continue
        if any(re.fullmatch(pattern, name) for pattern in patterns):
            _check(name, value, layer, settings, layers)


def _plain_keys(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """Nested settings by dotted key, as ``--keys`` has the keys."""
    return {keys.plain(key): value for key, value in flatten(dict(tree)).items()}


def _check(
    name: str, value: object, source: int, whole: dict[str, Any], layers: list[dict[str, Any]]
) -> None:
    """Raises a user's error for a setting that nothing reads, unless what switches it off was set later.

    Args:
        name: the key.
        value: what it was set to.
        source: number of the layer that sets it.
        whole: all settings, by key.
        layers: all layers, by key, in rising priority.
    """
    for pattern, enough, switches, why in READERS:
        match = re.fullmatch(pattern, name)
        if not match:
            continue
        values: dict[str, Any] = {}  # of the settings that decide
        for switch in switches:
            key = match.expand(switch)
            has_keys_below = any(other.startswith(f"{key}.") for other in whole)
            values[key] = has_keys_below or whole.get(key, _default(key))
        are_on = [value not in (None, False, 0, "off") for value in values.values()]
        if enough(are_on):
            continue
        if not any(_newest(layers, key) > source for key in values):
            words = []
            for key, switch in values.items():
                text = "null" if switch is None else str(switch).lower()
                words.append(f"{key}={text}")
            where = f" with {', '.join(words)}" if words else ""
            raise UserError(f"{name}: {value} has no effect{where}: {why}")


def _newest(layers: list[dict[str, Any]], name: str) -> int:
    """The number of the last layer that gives a key, a key below it, or a whole group that it is in; -1 where none does."""
    givers = []
    for i, layer in enumerate(layers):
        for key in layer:
            if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}."):
                givers.append(i)
    return max(givers, default=-1)


def _default(name: str) -> object:
    """The default of a setting, by its plain key; None for one without a fixed name."""
    key = keys.schema().get(re.sub(r"^model\.teachers\.[^.]+", "model.teacher", name))
    return key.value if key else None
