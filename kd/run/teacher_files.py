"""What teachers' files say of themselves becomes a setting, so that a run's ``config.yaml`` records what was used."""

from collections.abc import Iterable
from typing import Any

from kd.errors import UserError
from kd.models import TeacherSpec, completed
from kd.models.weights import about


def what_files_say(config: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The settings, by key, where a teacher's checkpoint names another architecture than the settings.

    A recipe's architecture gives way to the file's; one that was typed does not.

    Args:
        config: the parsed settings.
        overrides: the command line's ``key=value`` items.

    Raises:
        UserError: an architecture on the command line that is not the file's.
    """
    typed = {item.partition("=")[0] for item in overrides}
    model: dict[str, Any] = config["model"]
    found: dict[str, Any] = {}
    specs = {"model.teacher": model["teacher"]} if model["teacher"] else {}
    specs |= {f"model.teachers.{name}": spec for name, spec in (model["teachers"] or {}).items()}
    for key, given in specs.items():
        said, arch = about(given["checkpoint"]), TeacherSpec(given["arch"]).arch
        if not said.arch or given["builder"] or _base(said.arch) == _base(arch):
            continue
        if f"{key}.arch" in typed:
            if said.foreign:  # timm may have several names for it
                continue
            raise UserError(f"{key}.arch: {given['checkpoint']} holds {said.arch}, got {arch}; leave it out, or give "
                            f"another {key}.checkpoint")  # fmt: skip
        spec = completed(TeacherSpec("" if said.foreign else arch, checkpoint=given["checkpoint"]), key)
        values = {name: getattr(spec, name) for name in ("arch", "img_size", "kwargs", "mean", "std")}
        for name, value in values.items():
            if not any(f"{item}.".startswith(f"{key}.{name}.") for item in typed) and value is not None:
                found[f"{key}.{name}"] = value
    return found


def _base(arch: str) -> str:
    """timm's name without the tag of its weights."""
    return arch.partition(".")[0]
