"""A student that can inherit: the teacher's own architecture in a quarter of its size, half as wide everywhere."""

from typing import Any

from torch import nn

from kd.distill.inherit.families import check_pair, family_of
from kd.distill.inherit.resnet import block_links, stages_of
from kd.models.segmenter import backbone_of


def relative_of(model: nn.Module) -> dict[str, Any]:
    """timm's arguments of a relative half as wide as a model, with heads of its size and as many blocks.

    Of an odd number of heads the larger half is kept.

    Returns:
        Arguments of ``timm.create_model`` beside the teacher's architecture: of a ConvNeXt ``dims``, of a ResNet
        ``channels`` (both a width for each stage), of a vision transformer ``embed_dim`` and ``num_heads``.

    Raises:
        ValueError: a model whose layers can't be inherited, or one of a single head; one line says why.
    """
    check_pair(model, model)
    family = family_of(model)
    assert family is not None
    backbone: Any = backbone_of(model)
    if family.name == "ConvNeXt":
        return {"dims": [stage.blocks[0].conv_dw.out_channels // 2 for stage in backbone.stages]}
    if family.name == "ResNet":
        widths = []
        for stage in stages_of(backbone):
            block: Any = stage[0]
            widths.append(block_links(block)[-1].layer.out_channels // block.expansion // 2)
        return {"channels": widths}
    attention = backbone.blocks[0].attn
    if attention.num_heads == 1:
        raise ValueError("the teacher has one head, which can't be halved")
    heads = (attention.num_heads + 1) // 2
    return {"embed_dim": heads * attention.head_dim, "num_heads": heads}
