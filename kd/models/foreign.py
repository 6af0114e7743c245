"""Weights of other libraries: transformers' and torchvision's ViTs and torchvision's MobileNets under timm's names."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kd.run.settings import height_width
from kd.storage.elsewhere import json_of, text_of

HUGGING_FACE, TRANSFORMERS = "kd.models.hugging_face.HuggingFace", "transformers"
ANCHORS = {"embeddings.patch_embeddings.projection.weight": "transformers", "conv_proj.weight": "torchvision"}
NAMES = {  # the first that matches
    "transformers": (
        (r"embeddings\.cls_token", "cls_token"), (r"embeddings\.position_embeddings", "pos_embed"),
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
UNUSED = re.compile(r"pooler\.|embeddings\.mask_token$")
MOBILENETS = {"features.1.conv.0.0.weight": 1e-5, "features.1.block.0.0.weight": 1e-3}  # V2's, V3's epsilon of norms
SIZES = {(192, 12, 3): "tiny", (384, 12, 6): "small", (768, 12, 12): "base", (1024, 24, 16): "large"}


def renamed(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """A ViT's state under timm's names, without the prefix of its own, and the library that it is from."""
    found = [(key, end) for key in state for end in ANCHORS if key == end or key.endswith(f".{end}")]
    if not found:
        return dict(state), ""
    key, end = found[0]
    library, inner = ANCHORS[end], key.removesuffix(end)
    outer = inner[: inner.rstrip(".").rfind(".") + 1]  # transformers' classifier is beside the model
    named: dict[str, Tensor] = {}
    for key, value in state.items():
        name = key.removeprefix(inner if key.startswith(inner) else outer)
        if not UNUSED.match(name):
            rules = ((re.subn(rf"^{old}", new, name)) for old, new in NAMES[library])
            named[next((now for now, count in rules if count), name)] = value
    for first in [name for name in named if ".attn.q." in name]:
        parts = [named.pop(first.replace(".attn.q.", f".attn.{kind}.")) for kind in "qkv"]
        named[first.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)
    return named, library


def of_mobilenet(state: Mapping[str, Tensor], model: nn.Module) -> tuple[dict[str, Tensor], str]:
    """:func:`renamed` for torchvision's MobileNets; the variances of V3's norms make up for another epsilon."""
    end = next((key for key in state for end in MOBILENETS if key == end or key.endswith(f".{end}")), "")
    ours = list(dict.fromkeys(key.rpartition(".")[0] for key in model.state_dict()))
    if not end or ours[0] != "conv_stem":
        return dict(state), ""
    before, _, name = end.rpartition("features.1.")
    parts = tuple(f"{before}{part}." for part in ("features", "classifier"))
    inner = {key.removeprefix(before): value for key, value in state.items() if key.startswith(parts)}
    names = dict(zip(sorted({key.rpartition(".")[0] for key in inner}, key=_in_order), ours, strict=False))
    eps = MOBILENETS[f"features.1.{name}"] - next(m.eps for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    named: dict[str, Tensor] = {}
    for key, value in inner.items():
        module, _, last = key.rpartition(".")
        if module in names:
            value = value[..., None, None] if names[module] == "conv_head" and value.ndim == 2 else value
            named[f"{names[module]}.{last}"] = value + eps if last == "running_var" else value
    return named, "torchvision"


def _in_order(module: str) -> tuple[bool, list[tuple[int, str]]]:
    """Sorts the layers of torchvision's MobileNets as pictures pass them."""
    parts = module.split(".")
    return parts[0] == "classifier", [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def of_transformers(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What the ``config.json`` of ``save_pretrained`` says: fields of :class:`kd.models.weights.About`."""
    if config["model_type"] not in ("vit", "dinov2") or config.get("use_swiglu_ffn"):
        return {"builder": TRANSFORMERS}
    width, depth, heads = (config[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    ratio = config.get("mlp_ratio") or config["intermediate_size"] / width
    patch = config["patch_size"]
    dino = config["model_type"] == "dinov2"
    size = SIZES.get((width, depth, heads), "")
    kind = "14_dinov2" if dino else f"{patch}_224"
    fits = size and ratio == 4 and config.get("qkv_bias", True) and (patch == 14 or not dino)
    kwargs = {"patch_size": patch, "embed_dim": width, "depth": depth, "num_heads": heads, "mlp_ratio": ratio,
              "qkv_bias": config.get("qkv_bias", True)}  # fmt: skip
    file = folder / "preprocessor_config.json"
    pixels = json_of(text_of(file)) if file.is_file() else {}
    return {
        "arch": f"vit_{size if fits else 'base'}_patch{kind if fits or dino else '16_224'}",
        "kwargs": {} if fits else kwargs,
        "img_size": height_width(config["image_size"]),
        "mean": pixels.get("image_mean") or [0.5] * 3, "std": pixels.get("image_std") or [0.5] * 3,
        "foreign": True,
    }  # fmt: skip
