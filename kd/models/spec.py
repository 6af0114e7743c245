"""What a recipe says of a model."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from kd.models.own import Builder


@dataclass
class ModelSpec:
    """A model: a timm architecture and where its weights come from.

    Attributes:
        builder: makes a model of one's own, by class path (:class:`kd.models.own.Builder`; for transformers'
            ``kd.models.hugging_face.HuggingFace``), in place of ``arch`` and ``kwargs``.
        arch: a timm model name (``timm/NAME`` and ``hf_hub:timm/NAME`` mean the same); a teacher's is taken from its
            checkpoint where that names one, a student's where the settings name none.
        img_size: side of its square input in pixels, or height and width; default: the architecture's own.
        mean: what its input was normalised with, of each channel, of values in 0..1; default: the checkpoint's, else
            the architecture's own.
        std: likewise.
        pretrained: load timm's pre-trained weights (downloads them).
        checkpoint: a safetensors, ``.pth`` or ``.ckpt`` file, a run folder of ours, or a folder of timm's
            (``config.json`` and weights).
        kwargs: further arguments of ``timm.create_model`` (``patch_size``, ``depth``, ``drop_path_rate``, ...).
        compile: a mode of ``torch.compile`` (true: ``default``; ``reduce-overhead`` uses CUDA graphs).
        channels_last: keep pictures and weights in channels-last order, which convolutions on a GPU like.
    """

    arch: str = ""
    img_size: int | tuple[int, int] | None = None
    pretrained: bool = False
    checkpoint: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    compile: bool | Literal["default", "reduce-overhead", "max-autotune"] = False
    channels_last: bool = False
    mean: list[float] | None = None
    std: list[float] | None = None
    builder: Builder | None = None

    def __post_init__(self) -> None:
        self.arch = re.sub(r"^(hf[-_]hub:)?timm/", "", self.arch)
        for name, low in (("mean", None), ("std", 0.0)):
            value = getattr(self, name)
            if value is not None and (len(value) != 3 or (low is not None and not min(value) > low)):
                raise ValueError(f"{name} must be three numbers{'' if low is None else ' > 0'}, got {value}")

    def compile_in_place(self, model: nn.Module) -> None:
        """Compiles ``model`` where it is asked for; its parameters keep their names."""
        if self.compile:
            model.compile(mode="default" if self.compile is True else self.compile)


@dataclass
class TeacherSpec(ModelSpec):
    """The teacher's model.

    Attributes:
        recipe: without a checkpoint and not pre-trained: this recipe's teacher, which ships with it or is trained first
            (``checkpoint=train`` trains it in any case).
        backbone: weights that the training of ``recipe`` begins with, in place of those that it names: a file, or a
            folder as of ``checkpoint``, with or without a classifier.
        head: the teacher has a classifier; without one it teaches by its features alone.
        weight: its share of the mean, among several teachers; where they have no classifiers, the factor of the losses
            that use it.
        classes: names of the classes it knows, in its order, or a file with one a line (or a JSON list), where they
            are not the data's; a checkpoint of ours and timm's ImageNet models bring their own.
        class_map: the teacher's name of a class of the data, where the two differ.
        cache: ``on`` keeps the teacher's answers (logits, and the features that losses read) on disk and reads them
            when a view comes again; ``only`` never runs the teacher in training (``kd-cache`` has filled the cache);
            ``auto`` measures whether it pays.
        cache_dir: folder of the cache; default: one of its own in the user's cache folder.
        cache_views: views of a picture before they come again. Few save more, many overfit less.
        cache_topk: keep only so many logits and the mass of the rest; default: all.
        cache_precision: of features in the cache: ``half``, or ``int8`` with a scale for each channel. What it costs
            is measured when a cache is begun, and said.
        placement: ``same``: each process has it on the student's device; a device (``cpu``, ``cuda:1``); ``shard``: in
            shards over all processes (FSDP2), for one that fits no single device.
    """

    recipe: str | None = None
    backbone: str | None = None
    head: bool = True
    weight: float = 1.0
    classes: list[str] | str | None = None
    class_map: dict[str, str] = field(default_factory=dict)
    cache: bool | Literal["off", "on", "auto", "only"] = "off"
    cache_dir: str | None = None
    cache_views: int = 4
    cache_topk: int | None = None
    cache_precision: Literal["half", "int8"] = "half"
    placement: str = "same"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.cache, bool):  # YAML 1.1 reads a bare on and off as truth values
            self.cache = "on" if self.cache else "off"
        for name in ("cache_views", "cache_topk"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.cache_views > 10_000:
            raise ValueError(f"cache_views must be <= 10000, got {self.cache_views}")
        if not self.weight > 0:
            raise ValueError(f"weight must be > 0, got {self.weight}")
        if self.placement not in ("same", "shard") and not _is_device(self.placement):
            raise ValueError(f"placement must be same, shard or a device (cpu, cuda:1), got '{self.placement}'")


def _is_device(name: str) -> bool:
    try:
        return torch.device(name).type != "meta"
    except RuntimeError:
        return False


@dataclass
class StudentSpec(ModelSpec):
    """The student's model.

    Attributes:
        inherit: start from the teacher's own layers, cut down to its size (:mod:`kd.distill.inherit`); ``auto``:
            where the pair allows and the student has no weights of its own.
        inherit_pictures: training pictures whose activations guide that: more changed nothing, fewer are noisier.
        grad_checkpointing: compute activations twice instead of keeping them (timm's ``set_grad_checkpointing``).
        head: the student has a classifier; without one it is its features, learnt from a teacher's, without labels.
        freeze: ``backbone`` trains the classifier alone, a linear probe; the rest keeps its weights, its statistics of
            norms, and computes as in evaluation.
    """

    inherit: bool | Literal["auto"] = False
    inherit_pictures: int = 256
    grad_checkpointing: bool = False
    head: bool = True
    freeze: Literal["backbone"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inherit_pictures < 1:
            raise ValueError(f"inherit_pictures must be >= 1, got {self.inherit_pictures}")
        if self.freeze and not self.head:
            raise ValueError(f"freeze must be null where head=false leaves nothing else, got {self.freeze}")
