"""A student that can inherit: the teacher's own architecture in a quarter of its size, half as wide everywhere."""

from typing import Any

from torch import nn

from kd.distill.inherit.families import family_of
from kd.distill.inherit.resnet import block_layers, stages_of
from kd.models.segmenter import backbone_of


def relative_of(model: nn.Module) -> dict[str, Any] | None:
    """timm's arguments of a relative half as wide as a model, with heads of its size and as many blocks.

    Returns:
        None for a model of no family, or one that can't be halved.
    """
    family = family_of(model)
    if family is None:
        return None
    backbone: Any = backbone_of(model)
    if family.name == "ConvNeXt":
        return {"dims": [stage.blocks[0].conv_dw.out_channels // 2 for stage in backbone.stages]}
    if family.name == "ResNet":
        widths = []
        for stage in stages_of(backbone):
            block: Any = stage[0]
            widths.append(block_layers(block)[-1][0].out_channels // block.expansion // 2)
        return {"channels": widths}
    attention = backbone.blocks[0].attn
    heads = attention.num_heads // 2
    if not heads:
        return None
    return {"embed_dim": heads * attention.head_dim, "num_heads": heads}
