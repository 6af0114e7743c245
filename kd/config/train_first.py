"""The teacher that a recipe names, trained before the run where no checkpoint is given."""

from pathlib import Path
from typing import Any

from kd._teachers import arguments, key_of, trained_teacher
from kd.config.parser import KDCLI, build_data
from kd.config.request import translate
from kd.launch.cluster import is_rank_zero


def teacher_checkpoint(config: dict[str, Any]) -> Path | None:
    """Trains the teacher that the recipe names, where the run has none."""
    teacher = config["model"]["teacher"]
    if not teacher or teacher["checkpoint"] or teacher["pretrained"] or not teacher.get("recipe"):
        return None
    items = arguments(config)
    own = KDCLI(translate(items).parser_args(), instantiate=False)
    key = key_of(own.as_dict(), build_data(config["data"]).source)
    return trained_teacher(items, key, teacher["recipe"], is_rank_zero())
