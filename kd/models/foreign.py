"""Weights of other libraries: transformers' and torchvision's ViTs under timm's names."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kd.errors import UserError
from kd.settings import height_width
from kd.storage.elsewhere import json_of, text_of

WHOLE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size")
"""Of a ViT's ``config.json``: whole numbers from 1 on."""
HUGGING_FACE = "kd.models.hugging_face.HuggingFaceBuilder"
TRANSFORMERS = "transformers"
ANCHORS = {
    "embeddings.patch_embeddings.projection.weight": "transformers",
    "conv_proj.weight": "torchvision",
}
"""By a tensor that each ViT of a library has, below any prefix: the library."""
NAMES = {  # by library: patterns of names and timm's names in their place; the first that matches
    "transformers": (
        (r"embeddings\.cls_token", "cls_token"), (r"embeddings\.position_embeddings", "pos_embed"),
        # the names of DINOv2's authors, by which timm's own filter recognises its layout
        (r"embeddings\.mask_token", "mask_token"), (r"embeddings\.register_tokens", "register_tokens"),
        (r"embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
        (r"(?:encoder\.layer|layers)\.(\d+)\.(?:layernorm_before|norm1)\.", r"blocks.\1.norm1."),
        (r"(?:encoder\.layer|layers)\.(\d+)\.(?:layernorm_after|norm2)\.", r"blocks.\1.norm2."),
        (r"(?:encoder\.layer|layers)\.(\d+)\.attention\.(?:attention\.)?([qkv])(?:uery|ey|alue|_proj)\.",
         r"blocks.\1.attn.\2."),
        (r"(?:encoder\.layer|layers)\.(\d+)\.attention\.(?:output\.dense|o_proj)\.", r"blocks.\1.attn.proj."),
        (r"(?:encoder\.layer|layers)\.(\d+)\.(?:intermediate\.dense|mlp\.fc1)\.", r"blocks.\1.mlp.fc1."),
        (r"(?:encoder\.layer|layers)\.(\d+)\.(?:output\.dense|mlp\.fc2)\.", r"blocks.\1.mlp.fc2."),
        (r"(?:encoder\.layer|layers)\.(\d+)\.layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
        (r"layernorm\.", "norm."), (r"classifier\.", "head."),
    ),
    "torchvision": (
        (r"class_token", "cls_token"), (r"conv_proj\.", "patch_embed.proj."), (r"encoder\.pos_embedding", "pos_embed"),
        (r"encoder\.layers\.encoder_layer_(\d+)\.ln_([12])\.", r"blocks.\1.norm\2."),
        (r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.in_proj_", r"blocks.\1.attn.qkv."),
        (r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.out_proj\.", r"blocks.\1.attn.proj."),
        (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:0|linear_1)\.", r"blocks.\1.mlp.fc1."),
        (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:3|linear_2)\.", r"blocks.\1.mlp.fc2."),
        (r"encoder\.ln\.", "norm."), (r"heads\.head\.", "head."),
    ),
}  # fmt: skip
UNUSED = re.compile(r"pooler\.")
"""Names of layers that timm's models do not have."""
SIZES = {
    (192, 12, 3): "tiny",
    (384, 12, 6): "small",
    (768, 12, 12): "base",
    (1024, 24, 16): "large",
}
"""timm's word for a ViT, by its width, its blocks and its heads."""


def foreign_models(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor], str]]:
    """Every ViT of another library in a file's tensors, under timm's names.

    Args:
        tensors: all of the file's, by dotted name.

    Yields:
        What is before the model's own names in the file (with the last dot, or ""), its tensors under timm's names, and
        the library (``transformers`` or ``torchvision``).
    """
    for key in tensors:
        for anchor, library in ANCHORS.items():
            if key == anchor or key.endswith(f".{anchor}"):
                prefix = key.removesuffix(anchor)
                yield prefix, _vit_renamed(tensors, prefix, library), library


def _vit_renamed(tensors: Mapping[str, Tensor], inner: str, library: str) -> dict[str, Tensor]:
    """The ViT of a file under timm's names, queries, keys and values in one layer.

    Args:
        tensors: of the file, by name.
        inner: the prefix that it is below, with the last dot; "": none.
        library: whose names it has, a key of :data:`NAMES`.
    """
    # transformers' classifier is beside the model.
    outer = inner[: inner.rstrip(".").rfind(".") + 1]
    named: dict[str, Tensor] = {}
    for key, value in tensors.items():
        if key.startswith(inner):
            name = key.removeprefix(inner)
        elif key.startswith(f"{outer}classifier."):
            name = key.removeprefix(outer)
        else:
            continue
        if not UNUSED.match(name):
            named[_timm_name(name, library)] = value
    # queries, keys and values, each (D, D), in one layer (3 D, D)
    for query in [name for name in named if ".attn.q." in name]:
        names = [query.replace(".attn.q.", f".attn.{kind}.") for kind in "qkv"]
        if all(name in named for name in names):
            tensors_of_layer = [named.pop(name) for name in names]
            named[query.replace(".attn.q.", ".attn.qkv.")] = torch.cat(tensors_of_layer)
    return named


def _timm_name(name: str, library: str) -> str:
    """A tensor's name by the first rule of the library that matches; else as it is."""
    for old, new in NAMES[library]:
        renamed, count = re.subn(rf"^{old}", new, name)
        if count:
            return renamed
    return name


class OddValue(UserError):
    """A value of a foreign file that no model has; the message names the file and the value's key."""


def _check(file: Path, values: Mapping[str, Any], name: str, fits: bool, allowed: str) -> None:
    """Raises an OddValue for the value of ``name`` in a file that has one, unless it fits; ``allowed``: what it must be."""
    if name in values and not fits:
        raise OddValue(f"{file}: {name} must be {allowed}, got {str(values.get(name))[:80]}")


def _is_whole(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_vit(config: Mapping[str, Any], file: Path) -> None:
    """Refuses a ViT's configuration with values of other kinds than transformers writes."""
    for name in WHOLE:
        _check(file, config, name, _is_whole(config.get(name)), "a whole number > 0")
    ratio = config.get("mlp_ratio")
    if ratio:
        _check(file, config, "mlp_ratio", _is_number(ratio) and ratio > 0, "a number > 0")
    else:
        inner = _is_whole(config.get("intermediate_size"))
        _check(file, config, "intermediate_size", inner, "a whole number > 0")
    registers = _is_whole(config.get("num_register_tokens", 0), 0)
    _check(file, config, "num_register_tokens", registers, "a whole number")
    side = config.get("image_size")
    sides = side if isinstance(side, list) and len(side) == 2 else [side]
    is_size = all(_is_whole(each) for each in sides)
    _check(file, config, "image_size", is_size, "a side, or height and width, in pixels")
    names = config.get("architectures") or []
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    _check(file, config, "architectures", are_names, "a list of names")


def check_pixels(pixels: Mapping[str, Any], file: Path) -> None:
    """Refuses a ``preprocessor_config.json`` whose mean and deviation are not three numbers.

    Args:
        pixels: its content.
        file: named in the message.

    Raises:
        OddValue: names the value.
    """
    for name in ("image_mean", "image_std"):
        values = pixels.get(name)
        fits = values is None or (
            isinstance(values, list) and len(values) == 3 and all(map(_is_number, values))
        )
        _check(file, pixels, name, fits, "three numbers")


def of_transformers(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What the ``config.json`` of ``save_pretrained`` says: fields of :class:`kd.models.weights.About`, by name.

    Args:
        config: its content.
        folder: it is in, with ``preprocessor_config.json`` where that was saved.

    Returns:
        ``builder`` alone for a model that timm does not have; else all that it says of timm's nearest one.

    Raises:
        OddValue: a value of another kind than transformers writes.
        KeyError: a value of the configuration is missing; callers report it.
    """
    families = ("vit", "dinov2", "dinov2_with_registers")
    if config["model_type"] not in families or config.get("use_swiglu_ffn"):
        return {"builder": TRANSFORMERS}
    _check_vit(config, folder / "config.json")
    width = config["hidden_size"]
    depth = config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    ratio = config.get("mlp_ratio") or config["intermediate_size"] / width
    patch = config["patch_size"]
    registers = config.get("num_register_tokens", 0)
    has_bias = config.get("qkv_bias", True)
    is_dino = config["model_type"].startswith("dinov2")

    # The architecture of timm; where none fits, the nearest with other arguments.
    size = SIZES.get((width, depth, heads))
    has_usual_patch = patch == 14 or not is_dino
    fits = size and ratio == 4 and has_bias and has_usual_patch and registers in (0, 4)
    kind = "16_224"
    if is_dino:
        kind = "14_reg4_dinov2" if registers else "14_dinov2"
    elif fits:
        kind = f"{patch}_224"
    kwargs = {}
    if not fits:
        size = "base"
        kwargs = {
            "patch_size": patch,
            "embed_dim": width,
            "depth": depth,
            "num_heads": heads,
            "mlp_ratio": ratio,
            "qkv_bias": has_bias,
        }
        if registers:
            kwargs["reg_tokens"] = registers

    pixels = {}
    file = folder / "preprocessor_config.json"
    if file.is_file():
        pixels = json_of(text_of(file))
        check_pixels(pixels, file)
    architectures = config.get("architectures") or []
    has_head = any(name.endswith("ForImageClassification") for name in architectures)
    return {
        "arch": f"vit_{size}_patch{kind}",
        "kwargs": kwargs,
        "img_size": height_width(config["image_size"]),
        "mean": pixels.get("image_mean"),
        "std": pixels.get("image_std"),  # else the architecture's own, as timm says
        "foreign": True,
        "two_token_head": has_head and is_dino,
    }
