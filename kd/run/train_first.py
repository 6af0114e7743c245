"""The teacher that a recipe names, where no checkpoint is given: it ships with the recipe, or is trained first."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from kd.data.sources import Source
from kd.errors import UserError
from kd.launch.cluster import is_rank_zero
from kd.run.find import find
from kd.run.parser import KDCLI, build_data
from kd.run.request import translate
from kd.run.teacher_run import arguments, key_of, trained_teacher
from kd.storage.elsewhere import json_of

TRAIN = "train"
"""``model.teacher.checkpoint``: train the teacher even where one ships with its recipe."""


LEAST_STEPS = 8  # of an epoch, where a teacher is trained first: fewer and longer ones undo what its backbone learnt


def teacher_settings(config: dict[str, Any], typed: Iterable[str]) -> dict[str, Any]:
    """The settings by which a run takes the teacher that its recipe names, trained now if need be; none where it needs
    none. Few pictures lower a ``data.batch_size`` that was not ``typed``.

    Raises:
        UserError: a teacher without any weights, one to be trained without a recipe, or its training failed.
    """
    _refuse_random_weights(config)
    teacher = config["model"]["teacher"]
    if teacher and teacher["backbone"] and (not teacher["recipe"] or teacher["checkpoint"] not in (None, TRAIN)):
        why = "model.teacher.checkpoint is given" if teacher["checkpoint"] else "there is no model.teacher.recipe"
        raise UserError(f"model.teacher.backbone: begins the training of a teacher, and none is trained: {why}")
    if not teacher or teacher["checkpoint"] not in (None, TRAIN):
        return {}
    train = teacher["checkpoint"] == TRAIN
    if train and not teacher.get("recipe"):
        raise UserError("model.teacher.checkpoint: train needs the recipe to train, model.teacher.recipe=NAME")
    if not teacher.get("recipe") or (teacher["pretrained"] and not train):
        return {}
    source = build_data(config["data"]).source
    shipped = None if train else shipped_teacher(teacher, source)
    if shipped is not None:
        if is_rank_zero():
            print(f"teacher: {shipped} (ships with kd; model.teacher.checkpoint=train trains one)", flush=True)
        return {"model.teacher.checkpoint": str(shipped)}
    items = arguments(config, splits_itself=not source.has("val"))
    size, count = _batch(config), len(source.load("train").targets)
    if _batch_for(count) < size and not any(item.startswith("data.batch_size=") for item in typed):
        size = _batch_for(count)
        if is_rank_zero():
            print(f"data.batch_size: {size} in place of {_batch(config)}, for {count} training pictures", flush=True)
    if size < _batch(_parsed(items)):  # few pictures or little memory: that holds for the teacher too
        items.append(f"data.batch_size={size}")
    own = _parsed(items)
    trained = trained_teacher(items, key_of(own, source), own["recipe"], is_rank_zero())
    fewer = {"data.batch_size": size} if size < _batch(config) else {}
    return {**fewer, "model.teacher.checkpoint": str(trained), "model.teacher.backbone": None}  # it has done its part


def _parsed(items: list[str]) -> dict[str, Any]:
    return KDCLI(translate(items).parser_args(), instantiate=False).as_dict()


def _batch_for(pictures: int) -> int:
    # the largest power of two, from 4 on, that leaves an epoch its steps
    return 2 ** max(2, int(math.log2(max(1, pictures // LEAST_STEPS))))


def _batch(config: dict[str, Any]) -> float:
    """The batch size; infinite where it is measured."""
    size = config["data"]["batch_size"]
    return size if isinstance(size, int) else math.inf


def shipped_teacher(teacher: dict[str, Any], source: Source) -> Path | None:
    """The weights beside the teacher's recipe, where they are of this architecture, size and classes."""
    file = find("recipes", teacher["recipe"]).with_suffix(".safetensors")
    if not file.is_file():
        return None
    with safe_open(file, "pt") as opened:
        made = opened.metadata()
    wanted = {**teacher["kwargs"], "img_size": teacher["img_size"]}
    kwargs = {key: value for key, value in json_of(made["kwargs"]).items() if key != "num_classes"}
    if made["arch"] != teacher["arch"] or kwargs != wanted:
        return None
    source.load("train")  # only then its classes are known
    return file if json_of(made["classes"]) == list(source.classes) else None


def _refuse_random_weights(config: dict[str, Any]) -> None:
    """A teacher that nobody has trained is a forgotten key, and the preflight would take a minute to find out."""
    model = config["model"]
    specs = {"teacher": model["teacher"]} if model["teacher"] else {}
    specs |= {f"teachers.{name}": spec for name, spec in (model["teachers"] or {}).items()}
    for name, spec in specs.items():
        if (
            not any(spec[k] for k in ("checkpoint", "pretrained", "recipe", "builder"))
            and config["preflight"] == "stop"
        ):
            raise UserError(
                f"model.{name}.checkpoint: random weights: no checkpoint given; give a file, or "
                f"model.{name}.pretrained=true (preflight=warn distils from it all the same)"
            )
