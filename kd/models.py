"""Teacher and student models: any timm model by name, checkpoints of several kinds, each model's own input."""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import timm
import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as tvf

from kd.data.transforms import height_width
from kd.errors import UserError, plain
from kd.weights import about, load_checkpoint, say

__all__ = [
    "Images", "ModelSpec", "Preprocess", "StudentSpec", "TeacherSpec", "build_model", "check_arch", "completed",
    "count_parameters", "load_checkpoint", "preprocess_for", "read_names", "timm_model",
]  # fmt: skip

Images = Tensor  # uint8, (N, 3, H, W)


@dataclass
class ModelSpec:
    """A model: a timm architecture and where its weights come from.

    Attributes:
        arch: a timm model name; a teacher's is taken from its checkpoint where that names one.
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

    def __post_init__(self) -> None:
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
        head: the teacher has a classifier; without one it teaches by its features alone.
        weight: its share of the mean, among several teachers.
        classes: names of the classes it knows, in its order, or a file with one a line (or a JSON list), where they
            are not the data's; a checkpoint of ours and timm's ImageNet models bring their own.
        class_map: the teacher's name of a class of the data, where the two differ.
        cache: ``on`` keeps the teacher's answers (logits, and the features that losses look at) on disk and reads them
            when a view comes again; ``only`` never runs the teacher in training (``kd-cache`` has filled the cache);
            ``auto`` measures whether it pays.
        cache_dir: folder of the cache; default: one of its own in the user's cache folder.
        cache_views: views of a picture before they come again. Few save more, many overfit less.
        cache_topk: keep only so many logits and the mass of the rest; default: all.
        placement: ``same``: each process has it on the student's device; a device (``cpu``, ``cuda:1``); ``shard``: in
            shards over all processes (FSDP2), for one that fits no single device.
    """

    recipe: str | None = None
    head: bool = True
    weight: float = 1.0
    classes: list[str] | str | None = None
    class_map: dict[str, str] = field(default_factory=dict)
    cache: bool | Literal["off", "on", "auto", "only"] = "off"
    cache_dir: str | None = None
    cache_views: int = 4
    cache_topk: int | None = None
    placement: str = "same"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.cache, bool):  # YAML 1.1 reads a bare on and off as truth values
            self.cache = "on" if self.cache else "off"
        for name in ("cache_views", "cache_topk"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
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
        inherit: start from the teacher's own layers, cut down to the student's size (:mod:`kd.inherit`); ``auto``:
            where the pair allows and the student has no weights of its own.
        inherit_pictures: training pictures whose activations guide that: more changed nothing, fewer are noisier.
        grad_checkpointing: compute activations twice instead of keeping them (timm's ``set_grad_checkpointing``).
    """

    inherit: bool | Literal["auto"] = False
    inherit_pictures: int = 256
    grad_checkpointing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inherit_pictures < 1:
            raise ValueError(f"inherit_pictures must be >= 1, got {self.inherit_pictures}")


class Preprocess:
    """uint8 pictures -> one model's float input: resized to its size and normalised its way, on their device.

    Args:
        img_size: side of the square input in pixels, or height and width.
        mean: per channel, of values in 0..1.
        std: likewise.
        channels_last: the memory order of the output.
    """

    def __init__(
        self,
        img_size: int | Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
        channels_last: bool = False,
    ) -> None:
        self.size, self.channels_last = height_width(img_size), channels_last
        self.mean, self.std = tuple(mean), tuple(std)
        self.dtype = torch.float32  # of the output; that of the weights where a run trains in half precision throughout

    def __call__(self, images: Images) -> Tensor:
        """uint8 ``(N, 3, H, W)`` -> floats ``(N, 3, *size)``."""
        if images.shape[-2:] != self.size:
            images = tvf.resize(images, list(self.size), antialias=True)
        pictures = tvf.normalize(tvf.to_dtype(images, torch.float32, scale=True), self.mean, self.std)
        pictures = pictures.to(self.dtype)
        return pictures.contiguous(memory_format=torch.channels_last) if self.channels_last else pictures


def preprocess_for(
    model: nn.Module,
    img_size: int | Sequence[int] | None,
    channels_last: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Preprocess:
    """The input that ``model`` wants, by its timm configuration; what is given counts instead."""
    config = timm.data.resolve_model_data_config(model)
    size = img_size or config["input_size"][-2:]
    return Preprocess(size, mean or config["mean"], std or config["std"], channels_last)


Spec = TypeVar("Spec", bound=ModelSpec)


def completed(spec: Spec, key: str) -> Spec:
    """``spec`` with what it leaves open taken from what its checkpoint says of itself.

    A teacher's checkpoint that names another architecture than the settings is believed, in a line: it could not be
    loaded otherwise. A student stays what the settings say.
    """
    said = about(spec.checkpoint)
    if isinstance(spec, TeacherSpec) and said.arch and said.arch != spec.arch:
        size = said.img_size and (said.img_size[0] if said.img_size[0] == said.img_size[1] else said.img_size)
        before = f", not the settings' {spec.arch}" if spec.arch else ""
        say(f"{key}: {said.arch} at {size} px, as {spec.checkpoint} says{before}")
        spec = replace(spec, arch=said.arch, img_size=size, kwargs=said.kwargs, mean=spec.mean, std=spec.std)
    elif isinstance(spec, TeacherSpec) and said.arch:
        spec = replace(spec, img_size=spec.img_size or said.img_size, kwargs={**said.kwargs, **spec.kwargs})
    if said.arch not in ("", spec.arch):
        return spec
    return replace(spec, mean=spec.mean or _three(said.mean), std=spec.std or _three(said.std))


def _three(values: Sequence[float] | None) -> list[float] | None:
    return list(values) if values and len(values) == 3 else None


def build_model(
    spec: ModelSpec,
    num_classes: int,
    key: str,
    classes: Sequence[str] = (),
    head: bool = False,
    dense: bool = False,
) -> nn.Module:
    """Builds a timm model and loads its weights.

    Args:
        spec: what to build.
        num_classes: classes of the data; 0 for a model without a classifier.
        key: the configuration key of ``spec`` (``model.teacher``), named in errors.
        classes: names of the model's classes, compared with the checkpoint's where it has them.
        head: the checkpoint must hold a classifier too (a teacher's must; a student may bring a backbone alone).
        dense: a classifier for every pixel on top of the timm model (:class:`kd.dense.DenseModel`).

    Raises:
        UserError: an unknown architecture, an unusable argument, or a checkpoint that does not fit.
    """
    check_arch(spec.arch, key)
    if spec.pretrained and not spec.checkpoint and head and not dense:
        _check_pretrained_classes(spec, num_classes, key)
    model = _create(spec, 0 if dense else num_classes, key)
    if dense:
        from kd.dense import DenseModel  # it builds on this file's neighbours

        model = DenseModel(model, num_classes)
    if spec.checkpoint:
        load_checkpoint(model, Path(spec.checkpoint), f"{key}.checkpoint", classes, head)
    _check_forward(model, spec, key)
    return model.to(memory_format=torch.channels_last) if spec.channels_last else model


@torch.no_grad()
def _check_forward(model: nn.Module, spec: ModelSpec, key: str) -> None:
    """A forward without values (meta tensors) finds arguments that a model can be built with and not run with."""
    size, training = preprocess_for(model, spec.img_size).size, model.training
    model.eval()
    try:
        weights = {name: t.to("meta") for name, t in (*model.named_parameters(), *model.named_buffers())}
        torch.func.functional_call(model, weights, (torch.empty(1, 3, *size, device="meta"),))
    except Exception:  # some layers need values: the real forward decides
        try:
            model(torch.zeros(1, 3, *size))
        except Exception as error:
            reason = plain(error)
            raise UserError(f"{key}: {spec.arch} can't take pictures of {size[0]}x{size[1]}: {reason}") from error
    finally:
        model.train(training)


def _create(spec: ModelSpec, num_classes: int, key: str) -> nn.Module:
    kwargs = dict(spec.kwargs)
    if "checkpoint_path" in kwargs:
        raise UserError(f"{key}.kwargs.checkpoint_path: a file of weights is {key}.checkpoint")
    if spec.img_size is not None:
        kwargs["img_size"] = spec.img_size
    pretrained = spec.pretrained and not spec.checkpoint
    try:
        return timm_model(spec.arch, pretrained=pretrained, num_classes=num_classes, **kwargs)
    except OSError as error:
        raise UserError(f"{key}.pretrained: no weights for {spec.arch}: {plain(error)}") from error
    except Exception as error:  # whatever an architecture has against its arguments
        raise UserError(f"{key}: {spec.arch} can't be built{_with(spec.kwargs)}: {plain(error)}") from error


def _with(kwargs: dict[str, Any]) -> str:
    return f" with {', '.join(f'{name}={value}' for name, value in kwargs.items())}" if kwargs else ""


def timm_model(arch: str, **kwargs: Any) -> nn.Module:
    """``timm.create_model``; without ``img_size`` for models that take any size and no such argument.

    The arguments that it was made with are kept as ``made_with``.
    """
    try:
        model = timm.create_model(arch, **kwargs)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        kwargs.pop("img_size")
        model = timm.create_model(arch, **kwargs)
    object.__setattr__(model, "made_with", {k: v for k, v in kwargs.items() if k != "pretrained"})
    return model


def check_arch(arch: str, key: str) -> None:
    """Raises a UserError with the nearest name when timm has no model ``arch``."""
    if not arch:
        raise UserError(f"{key}.arch: which model? Give the name of one of timm's (timm.list_models())")
    if timm.is_model(arch):
        return
    near = difflib.get_close_matches(arch, timm.list_models(), 1, 0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise UserError(f"{key}.arch: timm has no model '{arch}'{hint}")


def _check_pretrained_classes(spec: ModelSpec, num_classes: int, key: str) -> None:
    config = timm.get_pretrained_cfg(spec.arch)
    own = config.num_classes if config else None
    if own is not None and own != num_classes:
        raise UserError(
            f"{key}.pretrained: timm's {spec.arch} names {own} classes, the data has {num_classes}; "
            f"fine-tune it first and give {key}.checkpoint"
        )


def read_names(file: Path, key: str) -> list[str]:
    """Class names from a file: a JSON list, or one a line.

    Raises:
        UserError: no such file, or no names in it.
    """
    try:
        text = file.read_text(encoding="utf-8")
        names = json.loads(text) if file.suffix == ".json" else [line.strip() for line in text.splitlines()]
        names = [str(name) for name in names if str(name)]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{key}: {file} can't be read as a list of names ({type(error).__name__})") from error
    if not names:
        raise UserError(f"{key}: {file} holds no names")
    return names


def count_parameters(model: nn.Module) -> int:
    """The number of parameters, trainable or not."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())  # DeepSpeed empties what is in shards
