"""Which of the teacher's classes are the data's."""

from collections.abc import Sequence
from pathlib import Path

import timm
import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor

from kd.errors import UserError
from kd.models import TeacherSpec, read_names
from kd.models.weights import about


def columns(spec: TeacherSpec, classes: Sequence[str], key: str) -> tuple[list[str], Tensor | None]:
    """The teacher's class names, and where the data's classes are among them; None where they are the same."""
    unknown = [name for name in spec.class_map if classes and name not in classes]
    if unknown:
        raise UserError(f"{key}.class_map: '{unknown[0]}' is no class of the data")
    names = _names(spec, classes, key)
    if not names or not classes or not spec.head:
        return names, None
    wanted = [spec.class_map.get(name, name) for name in classes]
    if names == wanted:
        return names, None
    twice = next((name for name in wanted if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{key}.classes: '{twice}' stands {names.count(twice)} times among the teacher's {len(names)} "
                        "names, so that it is open which of its answers is meant")  # fmt: skip
    places = {name: i for i, name in enumerate(names)}
    missing = [(own, name) for own, name in zip(classes, wanted, strict=True) if name not in places]
    if missing:
        own, name = missing[0]
        raise UserError(
            f"{key}.class_map: the teacher has no class '{name}'{f' (for {own})' if own != name else ''} among its "
            f"{len(names)}, {len(missing)} of the data's {len(classes)} are missing; name them: "
            f"{key}.class_map.{own}=NAME"
        )
    return names, torch.tensor([places[name] for name in wanted])


def _names(spec: TeacherSpec, classes: Sequence[str], key: str) -> list[str]:
    """From the settings, the checkpoint, or timm's list of ImageNet's classes."""
    if isinstance(spec.classes, str):
        return read_names(Path(spec.classes), f"{key}.classes")
    if spec.classes:
        return list(spec.classes)
    if spec.checkpoint:
        return about(spec.checkpoint).classes
    if spec.builder is not None:
        return list(getattr(spec.builder, "class_names", []))
    return _imagenet_names(spec, classes)


def _imagenet_names(spec: TeacherSpec, classes: Sequence[str]) -> list[str]:
    """timm's names (n01440764 ...) of a pre-trained model's classes, where they cover the data's."""
    config = timm.get_pretrained_cfg(spec.arch) if spec.pretrained else None
    subset = infer_imagenet_subset({"num_classes": config.num_classes}) if config else None
    if subset is None or config is None or config.num_classes == len(classes):
        return []
    names = list(ImageNetInfo(subset).label_names())
    return names if {spec.class_map.get(name, name) for name in classes} <= set(names) else []
