"""Weights files of several kinds: read without running code from them, and brought into a model's own layout."""

import argparse
import functools
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from safetensors import safe_open
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from timm.models import clean_state_dict
from torch import Tensor, nn

from kd.checkpoints import run_folder
from kd.errors import UserError

STATES = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")  # where trainers keep the weights
NAMES = ("class_names", "classes", "label_names", "labels", "categories", "id2label", "idx_to_class", "class_to_idx")
TIMM_FILES = ("model.safetensors", "pytorch_model.bin")
NOT_PASSED_ON = ("num_classes", "img_size", "pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")


@dataclass
class About:
    """What a weights file, or the ``config.json`` beside it, says of its model; empty where it does not say.

    Attributes:
        arch: timm's name of the architecture.
        kwargs: arguments of ``timm.create_model``.
        img_size: height and width of the input.
        mean: of each channel.
        std: likewise.
        classes: names by class id.
    """

    arch: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    img_size: tuple[int, int] | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    classes: list[str] = field(default_factory=list)


@dataclass
class Weights:
    """A weights file, read.

    Attributes:
        file: the file.
        state: its state dict.
        about: what it says of its model.
    """

    file: Path
    state: dict[str, Tensor]
    about: About


@rank_zero_only
def say(line: str) -> None:
    """One line for the user, from the first process."""
    print(line, flush=True)


# -- reading --------


def read_weights(path: Path, key: str) -> Weights:
    """Reads a weights file, the student of a run folder, or timm's own folder (``config.json`` and weights).

    Never executes code from the file (safetensors, or ``torch.load(weights_only=True)``).

    Args:
        path: the file or folder.
        key: the configuration key that named it.

    Raises:
        UserError: no such file, or not a readable checkpoint.
    """
    file = weights_file(path, key)
    try:
        content = load_file(file) if file.suffix == ".safetensors" else _load_pickle(file)
        about = describe(file)
    except Exception as error:  # whatever a damaged or foreign file makes the readers raise
        raise UserError(f"{key}: {file} is not a readable checkpoint{_why(error)}") from error
    state = _state_in(content)
    if not state:
        raise UserError(f"{key}: {file} holds no state dict of tensors")
    return Weights(file, state, about)


def weights_file(path: Path, key: str) -> Path:
    """The file to read where ``path`` is a file, a run's folder, or timm's own.

    Raises:
        UserError: there is none.
    """
    path = run_folder(path)
    candidates = [path / name for name in ("student.safetensors", *TIMM_FILES)] if path.is_dir() else [path]
    for file in candidates:
        if file.is_file():
            return file
    raise UserError(f"{key}: there is no {candidates[0]}")


def describe(file: Path) -> About:
    """What the file says of its model.

    Raises:
        Exception: whatever a damaged file makes the readers raise.
    """
    config = file.with_name("config.json")
    if file.name in TIMM_FILES and config.is_file():
        content = json.loads(config.read_text(encoding="utf-8"))
        if "architecture" in content:
            return _from_timm(content)
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            return _from_metadata(opened.metadata() or {})
    return About(classes=_names_in(_load_pickle(file)))


def about(checkpoint: str | None) -> About:
    """What a checkpoint says of its model; nothing for a missing or damaged file, which its reader reports."""
    if not checkpoint:
        return About()
    try:
        return describe(weights_file(Path(checkpoint), ""))
    except Exception:
        return About()


def _from_metadata(meta: Mapping[str, str]) -> About:
    """Of a ``student.safetensors``; a segmentation student is no plain timm model, so its architecture stays unsaid."""
    said = {name: json.loads(meta[name]) for name in ("kwargs", "img_size", "mean", "std", "classes") if name in meta}
    size = said.get("img_size")
    return About(
        "" if "dense" in meta else meta.get("arch", ""),
        _arguments(said.get("kwargs", {})),
        None if size is None else (size, size) if isinstance(size, int) else tuple(size),
        said.get("mean"),
        said.get("std"),
        said.get("classes", []),
    )


def _from_timm(content: Mapping[str, Any]) -> About:
    own = content.get("pretrained_cfg", content)
    size = own.get("input_size")
    return About(
        content["architecture"],
        _arguments(content.get("model_args", {})),
        tuple(size[-2:]) if size else None,
        own.get("mean"),
        own.get("std"),
        _names_in({**own, **content}),
    )


def _arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in NOT_PASSED_ON}


def _load_pickle(file: Path) -> Any:
    _warn_of_old_torch()
    with torch.serialization.safe_globals([argparse.Namespace]):  # the settings in timm's training checkpoints
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))


@functools.cache
def _warn_of_old_torch() -> None:
    """Before 2.10 a crafted file corrupts memory although nothing but weights is loaded."""
    if torch.torch_version.TorchVersion(torch.__version__) < (2, 10):  # type: ignore[operator]
        say(
            f"warning: torch {torch.__version__} < 2.10: a .pth or .ckpt file made for it can run code "
            "(CVE-2026-24747); load only files that you trust, or safetensors"
        )


def _why(error: Exception) -> str:
    found = re.search(r"Unsupported (?:global|class): GLOBAL ([\w.]+)", str(error))
    if found or "TorchScript" in str(error):
        what = found[1] if found else "a TorchScript program"
        return f": it pickles {what}, not weights alone; save them with torch.save(model.state_dict(), FILE)"
    return f" ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]})"


def _state_in(content: Any) -> dict[str, Tensor]:
    """The state dict, where a training checkpoint keeps it; a checkpoint of ours holds more than the student."""
    if not isinstance(content, Mapping):
        return {}
    name = next((n for n in STATES if isinstance(content.get(n), Mapping)), None)
    state = content[name] if name else content
    state = clean_state_dict({k: v for k, v in state.items() if isinstance(v, Tensor)})
    students = {k.removeprefix("student."): v for k, v in state.items() if k.startswith("student.")}
    return students or state


def _names_in(content: Any) -> list[str]:
    """Class names beside the weights: a list, or a dict by or to the class id."""
    if not isinstance(content, Mapping):
        return []
    places = [content, *(content[k] for k in ("meta", "hyper_parameters") if isinstance(content.get(k), Mapping))]
    for place in places:
        for name in NAMES:
            found = _name_list(place.get(name))
            if found:
                return found
    return []


def _name_list(value: Any) -> list[str]:
    """
    >>> _name_list({"bread": 1, "apple": 0}), _name_list({"1": "bread", "0": "apple"}), _name_list([3, 4])
    (['apple', 'bread'], ['apple', 'bread'], [])
    """
    if isinstance(value, Mapping) and value:
        if all(type(v) is int for v in value.values()):
            value = sorted(value, key=value.get)  # type: ignore[arg-type]
        elif all(str(k).isdigit() for k in value):
            value = [value[k] for k in sorted(value, key=int)]
    if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
        return list(value)
    return []


# -- loading --------


def load_checkpoint(model: nn.Module, path: Path, key: str, classes: Sequence[str] = (), head: bool = False) -> None:
    """Loads weights into ``model``; position embeddings of another size are resampled.

    Args:
        model: to load into.
        path: see :func:`read_weights`.
        key: the configuration key that named the file.
        classes: names of the model's classes, compared with the file's where it has them.
        head: the file must hold the same classes (a teacher's must); else a file of other classes gives its backbone.

    Raises:
        UserError: no such file, not a checkpoint, or tensors that do not fit (the first ones are named).
    """
    found = read_weights(path, key)
    state = _in_the_models_layout(_without_prefix(found, model, key), model, found.about)
    state = _without_the_classifier(state, model)
    expected = model.state_dict()
    of_head = _below(expected, classifier_names(model))
    last = _below(of_head, ["head.classifier"]) or of_head  # a dense model's head is more than its classifier
    other = _other_classes(found.about.classes, classes, state, expected, last)
    if other and head:
        raise UserError(f"{key}: {found.file} {other}")
    if other:
        state = {k: v for k, v in state.items() if k not in last}
        say(f"{key}: {found.file} {other}: its backbone is taken, the classifier is new")
    wrong = [
        f"{k} is {tuple(state[k].shape)} there, {tuple(v.shape)} here"
        for k, v in expected.items()
        if k in state and state[k].shape != v.shape
    ]
    wrong += [f"{k} is missing" for k in expected if k not in state and (head or k not in of_head)]
    wrong += [f"{k} is not in the model" for k in state if k not in expected]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(f"{key}: {found.file} does not fit: {'; '.join(wrong[:3])}{more}")
    model.load_state_dict({k: v.to(expected[k].dtype) for k, v in state.items()}, strict=False)


def _other_classes(
    names: Sequence[str], classes: Sequence[str], state: Mapping[str, Tensor], expected: Mapping[str, Tensor],
    last: Sequence[str],
) -> str:  # fmt: skip
    """How the file's classes differ from the data's; empty where they don't, or nothing is known."""
    for k in last:
        theirs, ours = tuple(state[k].shape) if k in state else (), tuple(expected[k].shape)
        if theirs and theirs != ours and theirs[1:] == ours[1:]:
            return f"names {theirs[0]} classes, the data has {ours[0]}"
    if not names or not classes or list(names) == list(classes):
        return ""
    pairs = enumerate(zip(names, classes, strict=False))
    i = next((i for i, (a, b) in pairs if a != b), None)
    if i is None:
        return f"names {len(names)} classes, the data has {len(classes)}"
    return f"was trained on other classes: class {i} is {names[i]!r} there, {classes[i]!r} in the data"


def classifier_names(model: nn.Module) -> list[str]:
    """The module paths of a model's last layers (two for a model with a distillation token)."""
    found = getattr(model, "pretrained_cfg", {}).get("classifier") or "head"
    return [found] if isinstance(found, str) else list(found)


def _below(keys: Iterable[str], modules: Iterable[str]) -> list[str]:
    prefixes = tuple(f"{name}." for name in modules)
    return [key for key in keys if key.startswith(prefixes)]


def _without_the_classifier(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A model that was built without a classifier takes the rest of a file that has one."""
    names = classifier_names(model)
    if _below(model.state_dict(), names):
        return state
    dropped = set(_below(state, names))
    return {k: v for k, v in state.items() if k not in dropped}


def _without_prefix(found: Weights, model: nn.Module, key: str) -> dict[str, Tensor]:
    """The state without what a wrapper class (``self.model = ...``) has put before every name; said in a line."""
    state = found.state
    for part in (model, getattr(model, "backbone", None)):
        if not isinstance(part, nn.Module):
            continue
        expected = set(part.state_dict())
        prefix = _common_prefix(state, expected)
        if prefix is None:
            continue
        if not prefix or (part is not model and prefix == "backbone."):
            return state
        inner = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        rest = len(state) - len(inner)
        left = f", {rest} tensors beside it are left out" if rest else ""
        say(f"{key}: {found.file}: the weights below '{prefix[:-1]}' are taken{left}")
        return inner
    return state


def _common_prefix(state: Mapping[str, Tensor], expected: set[str]) -> str | None:
    """What stands before at least half of the expected names; None where nothing does."""
    if len(expected & state.keys()) * 2 >= len(expected):
        return ""
    anchor = max(expected, key=len, default="")
    candidates = {k[: -len(name)] for name in (anchor, *sorted(expected)[:8]) for k in state if k.endswith(f".{name}")}
    hits = {prefix: sum(prefix + name in state for name in expected) for prefix in sorted(candidates)}
    best = max(hits, key=lambda prefix: hits[prefix], default=None)
    return best if best is not None and hits[best] * 2 >= len(expected) else None


# -- the model's layout --------


def _in_the_models_layout(state: dict[str, Tensor], model: nn.Module, about: About) -> dict[str, Tensor]:
    """Applies the architecture's own checkpoint filter; a plain timm file becomes a dense model's backbone."""
    backbone = getattr(model, "backbone", None)
    if backbone is None:
        return _filtered(state, model, about)
    inner = {k.removeprefix("backbone."): v for k, v in state.items() if k.startswith("backbone.")}
    if inner:
        rest = {k: v for k, v in state.items() if not k.startswith("backbone.")}
        return {**_prefixed(_filtered(inner, backbone, about)), **rest}
    wanted = backbone.state_dict()  # a file for classification holds more: layers behind the last level, a classifier
    return _prefixed({k: v for k, v in _filtered(state, backbone, about).items() if k in wanted})


def _prefixed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"backbone.{k}": v for k, v in state.items()}


def _filtered(state: dict[str, Tensor], model: nn.Module, about: About) -> dict[str, Tensor]:
    """timm keeps a filter for foreign layouts and other position embeddings beside the model class."""
    state = _with_positions(state, model, about)
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


def _with_positions(state: dict[str, Tensor], model: nn.Module, about: About) -> dict[str, Tensor]:
    """Resamples position embeddings from the grid that the file names: their number alone can mean several grids."""
    new: Any = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    positions, patch = state.get("pos_embed"), state.get("patch_embed.proj.weight")
    if about.img_size is None or new is None or positions is None or patch is None or positions.ndim != 3:
        return state
    old = [side // step for side, step in zip(about.img_size, patch.shape[-2:], strict=True)]
    prefix = positions.shape[1] - old[0] * old[1]
    if old == list(new) or prefix not in (0, getattr(model, "num_prefix_tokens", 0)):
        return state
    resampled = resample_abs_pos_embed(positions, list(new), old, num_prefix_tokens=prefix)
    return {**state, "pos_embed": resampled}
