"""The teacher that a recipe names, trained before the run where no checkpoint is given."""

from pathlib import Path
from typing import Any

from kd._teachers import arguments, key_of, trained_teacher
from kd.config.parser import KDCLI, build_data
from kd.config.request import translate
from kd.errors import UserError
from kd.launch.cluster import is_rank_zero


def teacher_checkpoint(config: dict[str, Any]) -> Path | None:
    """Trains the teacher that the recipe names, where the run has none."""
    _refuse_random_weights(config)
    teacher = config["model"]["teacher"]
    if not teacher or teacher["checkpoint"] or teacher["pretrained"] or not teacher.get("recipe"):
        return None
    items = arguments(config)
    own = KDCLI(translate(items).parser_args(), instantiate=False)
    key = key_of(own.as_dict(), build_data(config["data"]).source)
    return trained_teacher(items, key, own.config.recipe, is_rank_zero())


def _refuse_random_weights(config: dict[str, Any]) -> None:
    """A teacher that nobody has trained is a forgotten key, and the preflight would take a minute to find out."""
    model = config["model"]
    specs = {"teacher": model["teacher"]} if model["teacher"] else {}
    specs |= {f"teachers.{name}": spec for name, spec in (model["teachers"] or {}).items()}
    for name, spec in specs.items():
        if not (spec["checkpoint"] or spec["pretrained"] or spec["recipe"]) and config["preflight"] == "stop":
            raise UserError(
                f"model.{name}.checkpoint: random weights: no checkpoint given; give a file, or "
                f"model.{name}.pretrained=true (preflight=warn distils from it all the same)"
            )
