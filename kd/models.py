"""Teacher and student models: any timm model by name, checkpoints of several kinds, each model's own input."""

import difflib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from safetensors import safe_open
from timm.models import load_state_dict as read_timm_state_dict
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as tvf

from kd.checkpoints import run_folder
from kd.data.transforms import height_width
from kd.errors import UserError

Images = Tensor  # uint8, (N, 3, H, W)


@dataclass
class ModelSpec:
    """A model: a timm architecture and where its weights come from.

    Attributes:
        arch: a timm model name.
        img_size: side of its square input in pixels, or height and width; default: the architecture's own.
        pretrained: load timm's pre-trained weights (downloads them).
        checkpoint: a safetensors, ``.pth`` or ``.ckpt`` file, or a run folder of ours.
        kwargs: further arguments of ``timm.create_model`` (``patch_size``, ``depth``, ``drop_path_rate``, ...).
        compile: a mode of ``torch.compile`` (true: ``default``; ``reduce-overhead`` uses CUDA graphs).
        channels_last: keep pictures and weights in channels-last order, which convolutions on a GPU like.
    """

    arch: str
    img_size: int | tuple[int, int] | None = None
    pretrained: bool = False
    checkpoint: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    compile: bool | Literal["default", "reduce-overhead", "max-autotune"] = False
    channels_last: bool = False

    def compile_in_place(self, model: nn.Module) -> None:
        """Compiles ``model`` where it is asked for; its parameters keep their names."""
        if self.compile:
            model.compile(mode="default" if self.compile is True else self.compile)


@dataclass
class TeacherSpec(ModelSpec):
    """The teacher's model.

    Attributes:
        recipe: without a checkpoint and not pre-trained: the recipe that trains this teacher first.
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
        inherit: start from the teacher's own layers, cut down to the student's size (:mod:`kd.inherit`).
        grad_checkpointing: compute activations twice instead of keeping them (timm's ``set_grad_checkpointing``).
    """

    inherit: bool = False
    grad_checkpointing: bool = False


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

    def __call__(self, images: Images) -> Tensor:
        """uint8 ``(N, 3, H, W)`` -> float32 ``(N, 3, *size)``."""
        if images.shape[-2:] != self.size:
            images = tvf.resize(images, list(self.size), antialias=True)
        pictures = tvf.normalize(tvf.to_dtype(images, torch.float32, scale=True), self.mean, self.std)
        return pictures.contiguous(memory_format=torch.channels_last) if self.channels_last else pictures


def preprocess_for(model: nn.Module, img_size: int | Sequence[int] | None, channels_last: bool = False) -> Preprocess:
    """The input that ``model`` wants, by its timm configuration, at ``img_size`` where given."""
    config = timm.data.resolve_model_data_config(model)
    return Preprocess(img_size or config["input_size"][-2:], config["mean"], config["std"], channels_last)


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
    return model.to(memory_format=torch.channels_last) if spec.channels_last else model


def _create(spec: ModelSpec, num_classes: int, key: str) -> nn.Module:
    kwargs = dict(spec.kwargs)
    if spec.img_size is not None:
        kwargs["img_size"] = spec.img_size
    pretrained = spec.pretrained and not spec.checkpoint
    try:
        return timm_model(spec.arch, pretrained=pretrained, num_classes=num_classes, **kwargs)
    except TypeError as error:
        raise UserError(f"{key}: {spec.arch} can't be built: {error}") from error
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"{key}: {spec.arch} can't be built: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise UserError(f"{key}.pretrained: no weights for {spec.arch}: {str(error).splitlines()[0]}") from error


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


def load_checkpoint(model: nn.Module, path: Path, key: str, classes: Sequence[str] = (), head: bool = False) -> None:
    """Loads weights into ``model``; position embeddings of another size are resampled by timm.

    Never executes code from the file (safetensors, or ``torch.load(weights_only=True)``).

    Raises:
        UserError: no such file, not a checkpoint, or tensors that do not fit (the first ones are named).
    """
    file, state, names = read_checkpoint(path, key)
    state = _without_the_classifier(_in_the_models_layout(state, model), model)
    expected = model.state_dict()
    classifiers = classifier_names(model)
    of_head = [k for k in expected if k.startswith(tuple(f"{name}." for name in classifiers))]
    weight = f"{classifiers[0]}.weight"
    if weight in state and weight in expected and len(state[weight]) != len(expected[weight]):
        raise UserError(f"{key}: {file} names {len(state[weight])} classes, the data has {len(expected[weight])}")
    if names and classes and list(names) != list(classes):
        i = next(
            (i for i, (a, b) in enumerate(zip(names, classes, strict=False)) if a != b),
            min(len(names), len(classes)),
        )
        raise UserError(
            f"{key}: {file} was trained on other classes: class {i} is {names[i]!r} there, {classes[i]!r} in the data"
        )
    wrong = [
        f"{k} is {tuple(state[k].shape)} there, {tuple(v.shape)} here"
        for k, v in expected.items()
        if k in state and state[k].shape != v.shape
    ]
    wrong += [f"{k} is missing" for k in expected if k not in state and (head or k not in of_head)]
    wrong += [f"{k} is not in the model" for k in state if k not in expected]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(f"{key}: {file} does not fit: {'; '.join(wrong[:3])}{more}")
    model.load_state_dict({k: v.to(expected[k].dtype) for k, v in state.items()}, strict=False)


def classifier_names(model: nn.Module) -> list[str]:
    """The module paths of a model's last layers (two for a model with a distillation token)."""
    found = getattr(model, "pretrained_cfg", {}).get("classifier") or "head"
    return [found] if isinstance(found, str) else list(found)


def _without_the_classifier(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A model that was built without a classifier takes the rest of a file that has one."""
    names = tuple(f"{name}." for name in classifier_names(model))
    if any(key.startswith(names) for key in model.state_dict()):
        return state
    return {k: v for k, v in state.items() if not k.startswith(names)}


def class_names_of(path: Path) -> list[str]:
    """The class names that a checkpoint (or run folder) of ours was trained on; empty where it does not say."""
    path = run_folder(path)
    file = path / "student.safetensors" if path.is_dir() else path
    try:
        return _class_names(file)
    except Exception:  # a missing or damaged file is told by the one who loads it
        return []


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


def read_checkpoint(path: Path, key: str) -> tuple[Path, dict[str, Tensor], list[str]]:
    """Reads a weights file or the student of a run folder.

    Returns:
        The file read, its state dict, and the class names it was trained on (empty where it does not say).

    Raises:
        UserError: no such file, or not a readable checkpoint.
    """
    path = run_folder(path)
    file = path / "student.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{key}: there is no {file}")
    try:
        state = read_timm_state_dict(str(file))
        names = _class_names(file)
    except Exception as error:  # whatever a damaged or foreign file makes the readers raise
        raise UserError(
            f"{key}: {file} is not a readable checkpoint ({type(error).__name__}: {_first_line(error)})"
        ) from error
    if not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise UserError(f"{key}: {file} holds no state dict of tensors")
    students = {k.removeprefix("student."): v for k, v in state.items() if k.startswith("student.")}
    return file, students or state, names  # a training checkpoint of ours holds more than the student


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:160]


def _class_names(file: Path) -> list[str]:
    if file.suffix != ".safetensors":
        return []
    with safe_open(file, framework="pt") as opened:
        return json.loads((opened.metadata() or {}).get("classes", "[]"))


def _in_the_models_layout(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Applies the architecture's own checkpoint filter; a plain timm file becomes a dense model's backbone."""
    backbone = getattr(model, "backbone", None)
    if backbone is None:
        return _filtered(state, model)
    inner = {k.removeprefix("backbone."): v for k, v in state.items() if k.startswith("backbone.")}
    if inner:
        rest = {k: v for k, v in state.items() if not k.startswith("backbone.")}
        return {**_prefixed(_filtered(inner, backbone)), **rest}
    wanted = backbone.state_dict()  # a file for classification holds more: layers behind the last level, a classifier
    return _prefixed({k: v for k, v in _filtered(state, backbone).items() if k in wanted})


def _prefixed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"backbone.{k}": v for k, v in state.items()}


def _filtered(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """timm keeps a filter for foreign layouts and other position embeddings beside the model class."""
    convert: Callable[..., dict[str, Tensor]] | None = getattr(
        sys.modules[type(model).__module__], "checkpoint_filter_fn", None
    )
    if convert is None or (
        state.keys() == model.state_dict().keys()
        and all(v.shape == state[k].shape for k, v in model.state_dict().items())
    ):
        return state
    try:
        return convert(state, model)
    except Exception:  # a file of another architecture: the comparison of keys and shapes says it better
        return state


def count_parameters(model: nn.Module) -> int:
    """The number of parameters, trainable or not."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())  # DeepSpeed empties what is in shards
