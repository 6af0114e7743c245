"""Weights files of several kinds, read without running code from them."""

import argparse
import functools
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from kd.errors import UserError
from kd.models.arguments import LOADS
from kd.models.foreign import of_transformers
from kd.models.output_scale import unit_output
from kd.settings import height_width
from kd.storage.checkpoints import models_in, run_folder
from kd.storage.elsewhere import RefusedFile, json_of, regular, text_of
from kd.storage.objects import fetched
from kd.storage.tensors import read_tensors

WRAPPERS = re.compile(
    r"\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)  # torch puts them into names
OUR_STUDENTS = re.compile(r"students\.[^.]+\.(?:model|average)\.")
NAMES = (
    "class_names",
    "classes",
    "label_names",
    "labels",
    "categories",
    "id2label",
    "idx_to_class",
    "class_to_idx",
)
FILES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".npz", ".pkl")
TIMM_FILES = ("model.safetensors", "pytorch_model.bin")
NOT_PASSED_ON = ("num_classes", "img_size", *LOADS)


@dataclass
class About:
    """What a weights file, or the ``config.json`` beside it, says of its model; empty where it does not say."""

    arch: str = ""
    """timm's name of the architecture."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``timm.create_model``."""
    img_size: tuple[int, int] | None = None
    """Height and width of the input."""
    mean: list[float] | None = None
    """Of each channel, for values in 0..1."""
    std: list[float] | None = None
    """Likewise."""
    classes: list[str] = field(default_factory=list)
    """Names by class id."""
    builder: str = ""
    """Class path of the builder that made it, where it was not timm."""
    foreign: bool = False
    """Whether it is another library's model, of which this is timm's nearest."""
    two_token_head: bool = False
    """Whether its classifier reads the class token and the mean of the patches, as none of timm's does."""


@rank_zero_only
def say(line: str) -> None:
    """One line for the user, from the first process."""
    print(line, flush=True)


def read_weights(path: Path, key: str) -> tuple[Path, dict[str, Tensor], About]:
    """The file, all of its tensors and the description of a weights file or folder; never executes code from the file.

    The tensors of nested mappings are under dotted names, see :func:`tensors_in`.

    Args:
        path: the file or folder.
        key: the configuration key that named it.

    Raises:
        UserError: no such file, or not a readable checkpoint.
    """
    file = weights_file(path, key)
    try:
        content = load_file(regular(file)) if file.suffix == ".safetensors" else _load_pickle(file)
        about = describe(file)
    except RefusedFile as error:
        raise UserError(f"{key}: {error}") from error
    except Exception as error:  # whatever a damaged or foreign file makes the readers raise
        raise UserError(f"{key}: {file} is not a readable checkpoint{_why(error)}") from error
    tensors = _of_our_students(content) or tensors_in(content)
    if not tensors:
        raise UserError(f"{key}: {file} holds no state dict of tensors")
    return file, tensors, about


def tensors_in(content: object) -> dict[str, Tensor]:
    """All tensors in nested mappings and lists by their dotted path, in the file's order.

    A mapping that is reached a second time is left out, so that a file which contains itself ends. What torch's
    wrappers put into names (``_orig_mod.`` of a compiled model) is removed.

    >>> list(tensors_in({"epoch": 3, "teacher": {"_orig_mod.head.bias": torch.zeros(1)}}))
    ['teacher.head.bias']
    """
    tensors: dict[str, Tensor] = {}
    entered: set[int] = set()
    waiting: list[tuple[str, object]] = [("", content)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Tensor):
            tensors[WRAPPERS.sub("", path)] = value
        if not isinstance(value, (Mapping, list, tuple)) or id(value) in entered:
            continue
        entered.add(id(value))
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        below = [(f"{path}.{name}" if path else str(name), inner) for name, inner in items]
        waiting.extend(reversed(below))  # the last is taken first
    return tensors


def _of_our_students(content: object) -> dict[str, Tensor]:
    """The students' weights in a checkpoint of a run of ours, ``NAME.`` before each of several; else nothing."""
    state = content.get("state_dict") if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping):
        return {}
    ours = {name: tensor for name, tensor in state.items() if OUR_STUDENTS.match(str(name))}
    students = models_in(ours)
    return {
        f"{student}.{name}" if len(students) > 1 else name: tensor
        for student, model in students.items()
        for name, tensor in unit_output(model).items()
    }


def weights_file(path: Path, key: str) -> Path:
    """The file to read where ``path`` is a file, a run's folder, timm's own, or the URL of a file or of a run."""
    url = re.match(r"([a-z][a-z0-9+]+):/+(.+)", str(path))  # a Path has one slash of the two
    if url and not path.exists():
        place = f"{url[1]}://{url[2]}" + ("" if path.suffix in FILES else "/student.safetensors")
        return fetched(place, key or "checkpoint")
    path = run_folder(path)
    candidates = (
        [path / name for name in ("student.safetensors", *TIMM_FILES)] if path.is_dir() else [path]
    )
    for file in candidates:
        if file.is_file():
            return file
    hub = re.fullmatch(r"(?:hf[-_]hub:)?timm/(\S+)", str(path))
    root = key.removesuffix(".checkpoint")
    meant = f"; timm's weights: {root}.arch={hub[1]} {root}.pretrained=true" if hub else ""
    raise UserError(f"{key}: there is no {candidates[0]}{meant}")


def describe(file: Path) -> About:
    """What a weights file, or the ``config.json`` beside it, says of its model: architecture, arguments, input,
    classes.

    Raises:
        Exception: whatever a damaged file makes the readers raise; callers report it.
    """
    config = file.with_name("config.json")
    if file.name in TIMM_FILES and config.is_file():
        content = json_of(text_of(config))
        if "architecture" in content:
            return _from_timm(content)
        if "model_type" in content:
            names = _names_in(content)
            unnamed = all(name == f"LABEL_{i}" for i, name in enumerate(names))
            return About(**of_transformers(content, file.parent), classes=[] if unnamed else names)
    if file.suffix == ".safetensors":
        with safe_open(regular(file), framework="pt") as opened:
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
    said = {
        name: json_of(meta[name])
        for name in ("kwargs", "img_size", "mean", "std", "classes")
        if name in meta
    }
    size = said.get("img_size")
    return About(
        "" if "dense" in meta or "builder" in meta else meta.get("arch", ""),
        _arguments(said.get("kwargs", {})),
        None if size is None else height_width(size),
        said.get("mean"),
        said.get("std"),
        said.get("classes", []),
        json_of(meta.get("builder", "{}")).get("class_path", ""),
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


def _load_pickle(file: Path) -> object:
    _warn_of_old_torch()
    with torch.serialization.safe_globals(
        [argparse.Namespace]
    ):  # the settings in timm's training checkpoints
        return read_tensors(file, mmap=zipfile.is_zipfile(file))


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


def _names_in(content: object) -> list[str]:
    """Class names beside the weights: a list, or a dict by or to the class id."""
    if not isinstance(content, Mapping):
        return []
    for place in [
        content,
        *(content[k] for k in ("meta", "hyper_parameters") if isinstance(content.get(k), Mapping)),
    ]:
        for name in NAMES:
            found = _name_list(place.get(name))
            if found:
                return found
    return []


def _name_list(value: object) -> list[str]:
    """The names of a mapping from or to numbers, or of a list; otherwise none."""
    if isinstance(value, Mapping) and value:
        if all(type(v) is int for v in value.values()):
            value = sorted(value, key=value.get)  # type: ignore[arg-type]
        elif all(str(k).isdigit() for k in value):
            value = [value[k] for k in sorted(value, key=int)]
    return (
        list(value)
        if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value)
        else []
    )


def read_names(file: Path, key: str) -> list[str]:
    """Class names from a file: a JSON list, or one a line.

    Raises:
        UserError: no such file, or no names in it.
    """
    try:
        text = text_of(file)
        names = (
            json_of(text)
            if file.suffix == ".json"
            else [line.strip() for line in text.splitlines()]
        )
        names = [str(name) for name in names if str(name)]
    except RefusedFile as error:
        raise UserError(f"{key}: {error}") from error
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{key}: {file} can't be read as a list of names ({type(error).__name__})"
        ) from error
    if not names:
        raise UserError(f"{key}: {file} holds no names")
    return names
