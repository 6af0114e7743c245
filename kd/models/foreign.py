"""Weights of other libraries: transformers' and torchvision's ViTs under timm's names."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
)
from torch import Tensor

from kd.config.kinds import problem_in
from kd.storage.elsewhere import refused_file

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
        for old, new in NAMES[library]:
            renamed = re.sub(rf"^{old}", new, name)
            if renamed != name:
                name = renamed
                break
        if not UNUSED.match(name):
            named[name] = value
    # queries, keys and values, each (D, D), in one layer (3 D, D)
    for query in [name for name in named if ".attn.q." in name]:
        names = [query.replace(".attn.q.", f".attn.{kind}.") for kind in "qkv"]
        if all(name in named for name in names):
            of_layer = [named.pop(name) for name in names]
            named[query.replace(".attn.q.", ".attn.qkv.")] = torch.cat(of_layer)
    return named


STRICT = ConfigDict(strict=True, protected_namespaces=())
"""Values of a foreign file are each of the kind that the other program writes."""


class Pixels(BaseModel):
    """How pictures are prepared, of a ``preprocessor_config.json``."""

    model_config = STRICT
    image_mean: Annotated[list[float], Field(min_length=3, max_length=3)] | None = None
    """Of each channel, for values in 0..1."""
    image_std: Annotated[list[float], Field(min_length=3, max_length=3)] | None = None
    """Likewise."""

    @classmethod
    def said_in(cls, content: Mapping[str, Any], file: Path) -> Self:
        """The values in the content of a file; a RefusedFile for one of another kind."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise refused_file(file, ": ".join(problem_in(error))) from error


class Trained(BaseModel):
    """A training script's own arguments, as timm's ``train.py`` saves them beside the weights."""

    model_config = STRICT
    model: str
    """timm's name of the architecture."""
    model_kwargs: dict[str, Any] = {}
    """Arguments of ``timm.create_model``."""
    img_size: PositiveInt | None = None
    """Side of the input in pixels."""
    input_size: Annotated[list[PositiveInt], Field(min_length=3, max_length=3)] | None = None
    """Channels, height and width."""
    mean: Annotated[list[float], Field(min_length=3, max_length=3)] | None = None
    """Of each channel, for values in 0..1."""
    std: Annotated[list[float], Field(min_length=3, max_length=3)] | None = None
    """Likewise."""
    gp: str | None = None
    """How features are pooled."""

    @classmethod
    def said_in(cls, content: Mapping[str, Any]) -> Self | None:
        """The arguments in a mapping; None where they are not of timm's script."""
        try:
            return cls.model_validate(content)
        except ValidationError:
            return None
