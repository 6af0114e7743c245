"""What a teacher's answers depend on, as the file of every cache says it, and what differs between two of them.

A fingerprint has four parts: ``teacher`` (:meth:`kd.teachers.base.RunTeacher.fingerprint`), ``transform`` (how views are
made), ``data`` (the pictures) and ``answers`` (what is kept of them, and how).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torchvision

from kd.data.datamodule import DistillationDataModule
from kd.data.own_transform import code_of, described
from kd.errors import UserError
from kd.storage.elsewhere import json_of

FINGERPRINT = "fingerprint.json"
"""The file of a cache that holds it."""
RECORDS = 2
"""Number of the format of records and files; a part of ``answers``."""
PIXELS = "pixels"
"""The format of stored views in ``answers``."""

Parts = dict[str, dict[str, Any]]
"""A fingerprint by part."""
PARTS = ("teacher", "transform", "data", "answers")
NAMED = {"transform": "transforms", "answers": "kinds of answers"}
"""Names of parts in messages, where they differ."""

OF_TEACHER = {"dtype": "trainer.precision", "weights": "{key}.checkpoint"}
OF_VIEWS = {
    "seed": "seed",
    "torch": "torch's version",
    "torchvision": "torchvision's version",
    "img_size": "data.img_size",
    "engine": "data.engine",
    "unlabeled_ratio": "data.unlabeled_ratio",
}
OF_ANSWERS = {
    "features": "model.taps",
    "format": "{key}.cache_topk",
    "temperatures": "{key}.cache_topk",
    "records": "kd's version",
}
"""The setting, or the version, that decides a value of a part; ``{key}`` is the teacher's configuration key."""


def views_of(data: DistillationDataModule) -> dict[str, Any]:
    """The part ``transform``: how the training views are made. A change here makes caches unreadable."""
    views: dict[str, Any] = {
        "img_size": list(data.size),
        "seed": data.seed,
        # ray makes the same views as torch, on other machines
        "engine": "torch" if data.engine == "ray" else data.engine,
        **asdict(replace(data.augment, transform=None)),
        "torch": torch.__version__.split("+")[0],
        "torchvision": torchvision.__version__.split("+")[0],
    }
    if data.augment.transform is None:
        del views["transform"]
    else:
        views["transform"] = described(data.augment.transform)
        views["transform_code"] = code_of(data.augment.transform)
    if (
        data.augment.mixes and data.given.unlabeled_ratio is not None
    ):  # which decides the mixed pairs
        views["unlabeled_ratio"] = data.given.unlabeled_ratio
    return views


def eval_view_of(data: DistillationDataModule) -> dict[str, Any]:
    """The part ``transform`` of pictures that have one view: how the centre crop of a validation is made."""
    names = ("img_size", "torch", "torchvision")
    views = views_of(data)
    return {"crop_ratio": data.given.crop_ratio, **{name: views[name] for name in names}}


def pictures_of(data: DistillationDataModule, split: str = "train") -> dict[str, Any]:
    """The part ``data`` of a split: how many pictures, and a digest of their keys; the pictures are checked once."""
    return {
        "pictures": len(data.split(split).targets),
        "content": data.splits.facts(split).content,
    }


def digest(content: object) -> str:
    """A hash of a text, or of any other value as JSON: the first 16 hexadecimal digits of its SHA-256."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parts_in(text: str) -> Parts:
    """The parts in the text of a cache's file; {} where it is not a fingerprint."""
    try:
        stored = json_of(text)
        return {part: dict(stored[part]) for part in PARTS}
    except (ValueError, KeyError, TypeError):
        return {}


def compare_fingerprints(
    text: str, fingerprint: Parts, folder: str, key: str, setting: str = "cache_dir"
) -> dict[str, Any]:
    """Compares the fingerprint that a cache holds with the run's.

    Args:
        text: content of the cache's file.
        fingerprint: the parts that must be equal; other parts of the file are not compared.
        folder: where it is, named in errors.
        key: the teacher's configuration key, likewise.
        setting: below it, that names the folder.

    Returns:
        The file's content.

    Raises:
        UserError: it is damaged, or the cache's answers depend on something else: the first difference is named.
    """
    try:
        stored = json_of(text)
        stored_parts = {name: dict(stored[name]) for name in fingerprint}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{key}.{setting}: {folder}/{FINGERPRINT} is damaged ({type(error).__name__})"
        ) from error
    for name, part in fingerprint.items():
        for difference in differences(stored_parts[name], part).values():
            raise UserError(
                f"{key}.{setting}: {folder} was filled with other {NAMED.get(name, name)}: {difference}"
            )
    return dict(stored)


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
    """What differs between a part of a cache's fingerprint (``there``) and the run's (``here``).

    Returns:
        A sentence by name, first the names of ``here``; a value that one of them lacks is None in it.
    """
    present = json_of(json.dumps(here))  # with lists for tuples, as in the file
    sentences = {}
    for name in dict.fromkeys([*present, *there]):
        stored = there.get(name)
        value = present.get(name)
        if stored != value:
            sentences[name] = f"{name} is {stored} there, {value} here"
    return sentences


def differing_settings(there: Parts, here: Parts, key: str) -> list[str]:
    """What differs between two fingerprints, a sentence each after the setting that decides it; [] where nothing does.

    Args:
        there: of a cache.
        here: that the run would write.
        key: the teacher's configuration key.
    """
    sentences = []
    for part in PARTS:
        for name, difference in differences(there[part], here[part]).items():
            setting = {
                "teacher": OF_TEACHER.get(name, f"{{key}}.{name}"),
                "transform": OF_VIEWS.get(name, f"data.augment.{name}"),
                "answers": OF_ANSWERS.get(name, "data.source"),
            }.get(part, "data.source")
            sentences.append(f"{setting.format(key=key)}: {difference}")
    return sentences
