"""Weights files of several kinds, read without running code from them."""

import argparse
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from kd.errors import UserError, plain
from kd.models.arguments import LOADS
from kd.models.foreign import TRANSFORMERS, Pixels, Trained, foreign_models
from kd.models.output_scale import unit_output
from kd.models.recognise import holds, recognise
from kd.settings import height_width
from kd.storage.checkpoints import student_weights_in
from kd.storage.elsewhere import RefusedFile, json_of, regular, text_of
from kd.storage.student_metadata import checked, is_student
from kd.storage.tensors import read_tensors
from kd.storage.weights_files import TIMM_FILES, weights_file

WRAPPERS = re.compile(r"\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Names that torch's wrappers put before a module's own."""

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
"""Keys below which files have class names."""

LONGEST_NAME = 1000
"""Characters of a tensor's dotted name in nested mappings."""
NOT_PASSED_ON = ("num_classes", "img_size", *LOADS)
"""Arguments of a file's model that are settings of their own, or that would load weights."""


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
    """Whether timm may have other names for it: another library's model, or one that its tensors alone describe."""
    others: tuple[str, ...] = ()
    """Further architectures of timm's with tensors of the same names and shapes."""
    two_token_head: bool = False
    """Whether its classifier reads the class token and the mean of the patches, as none of timm's does."""


@rank_zero_only
def say(line: str) -> None:
    """One line for the user, from the first process."""
    print(line, flush=True)


def read_weights(path: Path, key: str) -> tuple[Path, dict[str, Tensor], About]:
    """Reads a weights file or folder; never executes code from it.

    Args:
        path: the file or folder.
        key: the configuration key that named it, for messages.

    Returns:
        The file itself (of a folder the one that was chosen), its tensors by name on the CPU, and what it says of its
        model. Of a checkpoint of kd the tensors are the student's alone; of others all, those of nested mappings under
        dotted names (:func:`tensors_in`).

    Raises:
        UserError: no such file, not a readable checkpoint, or one without tensors.
    """
    file = weights_file(path, key)
    try:
        content: object
        if file.suffix == ".safetensors":
            content = load_file(regular(file))
        else:
            content = _load_pickle(file)
        about = describe(file)
        tensors = _of_our_student(content) or tensors_in(content)
    except RefusedFile as error:
        raise UserError(f"{key}: {error}") from error
    except Exception as error:  # whatever a damaged or foreign file makes the readers raise
        raise UserError(f"{key}: {file} is not a readable checkpoint{_why(error)}") from error
    if not tensors:
        raise UserError(f"{key}: {file} holds no state dict of tensors")
    return file, tensors, about


def tensors_in(content: object) -> dict[str, Tensor]:
    """All tensors in nested mappings and lists by their dotted path, in the file's order.

    A mapping or list that is reached a second time is left out, so that a file which contains itself ends. What torch's
    wrappers put into names (``_orig_mod.`` of a compiled model) is removed. A path of more than
    :data:`LONGEST_NAME` characters is a ValueError.

    >>> list(tensors_in({"epoch": 3, "teacher": {"_orig_mod.head.bias": torch.zeros(1)}}))
    ['teacher.head.bias']
    """
    tensors: dict[str, Tensor] = {}
    entered: set[int] = set()

    def enter(path: str, value: object) -> None:
        """Adds the tensors of a value at a path."""
        if len(path) > LONGEST_NAME:
            raise ValueError(f"a name in it has more than {LONGEST_NAME} characters")
        if isinstance(value, Tensor):
            tensors[WRAPPERS.sub("", path)] = value
        if not isinstance(value, Mapping | list | tuple) or id(value) in entered:
            return
        entered.add(id(value))
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, inner in items:
            enter(f"{path}.{name}" if path else str(name), inner)

    enter("", content)
    return tensors


def _of_our_student(content: object) -> dict[str, Tensor]:
    """The student's weights in a checkpoint of kd, the average's where it has one; empty for other files.

    Args:
        content: of the file.

    Returns:
        Tensors under the model's own names; a regression's classifier in the targets' units.
    """
    state = None
    if isinstance(content, Mapping):
        state = content.get("state_dict")
    if not isinstance(state, Mapping):
        return {}
    weights = student_weights_in(state)
    return dict(unit_output(weights)) if weights else {}


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
            return _of_transformers(content, file)
    if file.suffix == ".safetensors":
        meta, tensors = _outline(file)
        said = _from_metadata(meta)
        return said if is_student(meta) else _of_tensors(tensors, said)
    content = _load_pickle(file)
    said = About(classes=names_in(content))
    if _of_our_student(content):
        return said
    tensors = tensors_in(content)
    return _of_trainer(content, tensors, said) or _of_tensors(tensors, said)


def about(checkpoint: str | None) -> About:
    """What a checkpoint, a file or a folder, says of its model (:func:`describe`).

    An empty :class:`About` without a checkpoint, and of a missing or damaged one: :func:`read_weights` reports that.
    """
    if not checkpoint:
        return About()
    try:
        return describe(weights_file(Path(checkpoint), ""))
    except Exception:
        return About()


def _of_trainer(content: object, tensors: Mapping[str, Tensor], said: About) -> About | None:
    """``said`` completed from ``arch`` and ``args`` of a training's checkpoint, as timm's trainer writes them; None where
    these are missing, or name another model than the tensors are of.

    Args:
        content: of the file.
        tensors: the tensors in it, by dotted name.
        said: what the file says otherwise, without an architecture.
    """
    if not isinstance(content, Mapping):
        return None
    arguments = {"model": content.get("arch")}
    args = content.get("args")
    if isinstance(args, argparse.Namespace):
        args = vars(args)
    if isinstance(args, Mapping):
        arguments |= args
    trained = Trained.said_in(arguments)
    if trained is None:
        return None
    kwargs = _arguments(trained.model_kwargs)
    if trained.gp:
        kwargs["global_pool"] = trained.gp
    if not holds(tensors, trained.model, kwargs):
        return None
    size: Any = trained.img_size
    if trained.input_size:
        size = trained.input_size[1:]
    elif size is None:
        of_timm = recognise(tensors)
        size = None if of_timm is None else of_timm.img_size
    return replace(
        said,
        arch=trained.model,
        kwargs=kwargs,
        img_size=height_width(size) if size else None,
        mean=trained.mean,
        std=trained.std,
    )


def _of_transformers(config: Mapping[str, Any], file: Path) -> About:
    """What a folder of ``save_pretrained`` says of its model: a ViT of timm's by its tensors, or the builder's name.

    Args:
        config: the content of its ``config.json``.
        file: its weights, with ``preprocessor_config.json`` beside them where that was saved.

    Raises:
        UserError: a mean or a deviation that no model has.
    """
    if file.suffix == ".safetensors":
        _, tensors = _outline(file)
    else:
        tensors = tensors_in(_load_pickle(file))
    names = names_in(config)
    if not any(foreign_models(tensors)) or config.get("use_swiglu_ffn"):
        return About(builder=TRANSFORMERS, classes=names)
    pixels = Pixels()
    preprocessor = file.with_name("preprocessor_config.json")
    if preprocessor.is_file():
        pixels = Pixels.said_in(json_of(text_of(preprocessor)), preprocessor)
    is_dino = str(config["model_type"]).startswith("dinov2")
    said = About(
        mean=pixels.image_mean,
        std=pixels.image_std,  # else the architecture's own, as timm says
        classes=names,
        two_token_head=is_dino and "ForImageClassification" in str(config.get("architectures")),
    )
    return _of_tensors(tensors, said)


def _outline(file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata of a ``.safetensors`` file, and its tensors on the ``meta`` device, without their numbers."""
    tensors = {}
    with safe_open(regular(file), framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            shape = opened.get_slice(name).get_shape()
            tensors[name] = torch.empty(shape, device="meta")
        return opened.metadata() or {}, tensors


def _of_tensors(tensors: Mapping[str, Tensor], said: About) -> About:
    """``said`` completed by the architecture of timm's that has the tensors' names and shapes; without one as it is.

    Args:
        tensors: of the file, by dotted name.
        said: what the file says otherwise, without an architecture.
    """
    of_timm = recognise(tensors)
    if of_timm is None:
        return said
    return replace(
        said,
        arch=of_timm.arch,
        img_size=said.img_size or of_timm.img_size,
        foreign=True,
        others=of_timm.others,
    )


def _from_metadata(meta: Mapping[str, str]) -> About:
    """What the metadata ``meta`` of a ``.safetensors`` file say, as kd writes them with a student; empty for other files.

    A segmentation student, or one of a builder, is no plain timm model, so its architecture stays empty.

    Raises:
        Exception: values that are not as kd writes them; callers report it.
    """
    said = checked(meta)
    is_plain_timm = not said.has_own_form and said.builder is None
    return About(
        arch=said.arch if is_plain_timm else "",
        kwargs=_arguments(said.kwargs),
        img_size=None if said.img_size is None else height_width(said.img_size),
        mean=said.mean or None,
        std=said.std or None,
        classes=said.classes,
        builder=(said.builder or {}).get("class_path", ""),
    )


def _from_timm(content: Mapping[str, Any]) -> About:
    """What the ``config.json`` in a folder of timm's says of the model."""
    config = content.get("pretrained_cfg", content)
    size = config.get("input_size")
    built_with = content.get("model_args", {})
    img_size = tuple(size[-2:]) if size else None
    if "img_size" in built_with:
        img_size = height_width(built_with["img_size"])
    return About(
        arch=content["architecture"],
        kwargs=_arguments(built_with),
        img_size=img_size,
        mean=config.get("mean"),
        std=config.get("std"),
        classes=names_in({**config, **content}),
    )


def _arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``timm.create_model`` without what kd sets itself."""
    return {name: value for name, value in kwargs.items() if name not in NOT_PASSED_ON}


def _load_pickle(file: Path) -> object:
    """The content of a file of ``torch.save``: weights and plain values alone. Errors as of :func:`read_tensors`."""
    # timm's training checkpoints have their settings as a Namespace
    with torch.serialization.safe_globals([argparse.Namespace]):
        return read_tensors(file, mmap=zipfile.is_zipfile(file))


def _why(error: Exception) -> str:
    """The reason for which a file can't be read, as the end of a message."""
    text = str(error)
    pickled = re.search(r"Unsupported (?:global|class): GLOBAL ([\w.]+)", text)
    if pickled or "TorchScript" in text:
        what = pickled[1] if pickled else "a TorchScript program"
        return f": it pickles {what}, not weights alone; save them with torch.save(model.state_dict(), FILE)"
    if "Weights only load failed" in text:  # torch's advice is to run the file's code
        return ": torch has not saved it"
    return f" ({plain(error)})"


def names_in(content: object) -> list[str]:
    """Class names beside the weights, by class id: from a list, or a dict by or to the class id, below one of :data:`NAMES`
    at the top or in ``hyper_parameters``; [] without, and for transformers' ``LABEL_0`` and the like.
    """
    if not isinstance(content, Mapping):
        return []
    for place in (content, content.get("hyper_parameters")):
        if not isinstance(place, Mapping):
            continue
        for key in NAMES:
            names = _name_list(place.get(key))
            if names:
                return [] if names == [f"LABEL_{i}" for i in range(len(names))] else names
    return []


def _name_list(value: object) -> list[str]:
    """Names in the order of their numbers: the keys of a mapping to numbers, the values of one from numbers, or a list as
    it is; [] of anything else.

    >>> _name_list({"bread": 1, "apple": 0}), _name_list({"1": "bread", "0": "apple"}), _name_list([3, 4])
    (['apple', 'bread'], ['apple', 'bread'], [])
    """
    if isinstance(value, Mapping):
        are_numbers = all(type(number) is int for number in value.values())
        are_names_by_number = all(str(key).isdecimal() for key in value)
        if are_numbers:
            value = sorted(value, key=value.__getitem__)
        elif are_names_by_number:
            numbers = sorted(value, key=int)
            value = [value[number] for number in numbers]
    if not isinstance(value, list | tuple):
        return []
    if not all(isinstance(name, str) for name in value):
        return []
    return list(value)


def read_names(file: Path, key: str) -> list[str]:
    """Class names from a file, by class id: a JSON list (``.json``), or one a line; empty names and lines are left out.

    Args:
        file: of any size that :func:`kd.storage.elsewhere.text_of` reads.
        key: the setting that names it, for messages.

    Raises:
        UserError: no such file, no list, or no names in it.
    """
    try:
        text = text_of(file)
        lines = json_of(text) if file.suffix == ".json" else text.splitlines()
    except RefusedFile as error:
        raise UserError(f"{key}: {error}") from error
    except (OSError, ValueError) as error:
        reason = type(error).__name__
        raise UserError(f"{key}: {file} can't be read as a list of names ({reason})") from error
    if not isinstance(lines, list):
        raise UserError(f"{key}: {file} holds no JSON list of names")
    stripped = [str(name).strip() for name in lines]
    names = [name for name in stripped if name]
    if not names:
        raise UserError(f"{key}: {file} holds no names")
    return names
