"""Checks that the settings' own types and groups can't make: by what is typed."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kd.config.kinds import as_tree
from kd.config.parts import plain_key
from kd.config.suggest import words as words_of_others
from kd.config.trees import flatten
from kd.errors import UserError
from kd.run.keys import schema
from kd.settings import MonitorSettings, height_width, teach, teachers_in

MONITOR = as_tree(MonitorSettings())
RESOLVED = {"name", "resume", "rank_timeout_s"}
"""Keys that no recipe holds all of: a file that does is a run's ``config.yaml``, which holds every key."""
ENOUGH: dict[str, Callable[[Iterable[object]], bool]] = {
    "any": any,
    "all": all,
    "none": lambda values: not any(values),
}
"""Which of the settings that decide whether another one is read have to be on."""


def check_values(config: dict[str, Any]) -> None:
    """Refuses monitor settings that its rules and prices don't take.

    Args:
        config: all settings, resolved.

    Raises:
        UserError: the first one, by its key.
    """
    if config["monitor"] != MONITOR:
        from kd.monitor.keys import MonitorSpec

        MonitorSpec(**config["monitor"])


def check_read(
    config: Mapping[str, Any], files: Sequence[Mapping[Any, Any]], typed: Mapping[str, Any]
) -> None:
    """Refuses a setting of the recipe or command line that is idle; those of overlays and run folders may be.

    Idle is a setting (neither null, 0, false nor empty) that differs from its default and that nothing reads
    (``idle`` in :data:`kd.config.suggest.FILE`), unless what switches it off was set later.

    Args:
        config: all settings, resolved.
        files: the settings of the recipe, which is the first, and of overlays, in rising priority.
        typed: those of the command line, by key.

    Raises:
        UserError: the first one, with the settings that switch it off.
    """
    layers = [_plain_keys(layer) for layer in (*files, typed)]
    values = _plain_keys(config)
    from_a_run = not files or set(files[0]) >= RESOLVED
    checked = {len(files)} if from_a_run else {len(files), 0}  # the recipe is the first file
    for idle in words_of_others()["idle"]:
        for name in filter(re.compile(idle["settings"]).fullmatch, values):
            value = values[name]
            layer = _newest(layers, name)
            if not value or value == _default(name) or layer not in checked:
                continue
            deciding = _deciding(idle, name, values)
            are_on = [switch not in (None, False, 0, "off") for switch in deciding.values()]
            enough = ENOUGH[idle["on"]]
            set_later = any(_newest(layers, key) > layer for key in deciding)
            if set_later or enough(are_on):
                continue
            words = []
            for key, switch in deciding.items():
                shown = "null" if switch is None else str(switch).lower()
                words.append(f"{key}={shown}")
            where = f" with {', '.join(words)}" if words else ""
            raise UserError(f"{name}: {value} has no effect{where}: {idle['why']}")


def _deciding(idle: Mapping[str, Any], name: str, values: Mapping[str, Any]) -> dict[str, object]:
    """The settings that decide whether a setting is read, with their values: a class's path, true where one has other keys
    below it.
    """
    found = {}
    for switch in idle["of"]:
        key = re.sub(f"^{idle['settings']}$", switch, name)
        has_keys_below = any(other.startswith(f"{key}.") for other in values)
        named = values.get(f"{key}.class_path")
        found[key] = named or has_keys_below or values.get(key, _default(key))
    return found


def _plain_keys(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """Nested settings by dotted key, as ``--keys`` has the keys."""
    return {plain_key(key): value for key, value in flatten(dict(tree)).items()}


def _newest(layers: list[dict[str, Any]], name: str) -> int:
    """The number of the last layer that gives a key, a key below it, or a whole group that it is in; -1 where none does."""
    givers = [
        number
        for number, layer in enumerate(layers)
        for key in layer
        if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.")
    ]
    return max(givers, default=-1)


def _default(name: str) -> object:
    """The default of a setting, by its plain key; None for one without a fixed name."""
    key = schema().get(re.sub(r"^model\.teachers\.[^.]+", "model.teacher", name))
    return key.value if key else None


def notes_on_patches(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each model whose input its patches do not divide: it does not see the rest at the edges.

    Args:
        models: settings of models, by key; the patch is that of ``kwargs.patch_size``, else of the architecture's name.
    """
    notes = []
    for key, spec in models.items():
        arguments = spec["kwargs"]
        named = re.search(r"patch(\d+)", spec["arch"])
        patch = arguments.get("patch_size")
        if patch is None and named is not None:
            patch = int(named[1])
        is_padded = arguments.get("dynamic_img_pad")
        if not isinstance(patch, int) or patch < 1 or is_padded:
            continue
        if not spec["img_size"] or spec["builder"]:
            continue
        sides = [side for side in height_width(spec["img_size"]) if side % patch]
        if sides:
            problem = f"{sides[0]} is no multiple of {patch}, the side of a patch"
            notes.append(f"{key}.img_size: {problem}: the model does not see the rest")
    return notes


def note_on_losses(model: Mapping[str, Any]) -> list[str]:
    """A line where there is a teacher and nothing is learnt from it.

    Args:
        model: the settings ``model``, resolved.
    """
    if teach(model["distill_losses"]) or not teachers_in(model):
        return []
    return ["model.distill_losses: none, so the student learns from labels, not from its teacher"]


def make_object(make: Callable[..., object], arguments: Mapping[str, Any], key: str) -> object:
    """Builds an object; a ValueError that begins with the name of a given argument becomes a user's error with that key.

    Args:
        make: the class or function.
        arguments: by name.
        key: of the object in the settings.

    Raises:
        UserError: such a ValueError, or one that ``make`` raises; other errors of ``make`` pass through too.
    """
    try:
        return make(**arguments)
    except ValueError as error:  # our constructors name their argument first
        first, _, rest = " ".join(str(error).split()).partition(" ")
        if isinstance(error, UserError) or first not in arguments:
            raise
        raise UserError(f"{key}.{first}: {rest}") from error
