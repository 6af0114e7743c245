"""Which pairs can inherit, and whether it worked."""

from typing import Any, TypeAlias

import torch
from timm.layers import GluMlp, Mlp, PatchEmbed, RmsNorm, SwiGLU
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn

from kd.models.segmenter import DenseModel, backbone_of

ViT: TypeAlias = Any  # A timm VisionTransformer: torch types its blocks as bare modules

FIRST_LAYERS = {Mlp: (("fc1", 1),), GluMlp: (("fc1", 2),), SwiGLU: (("fc1_g", 1), ("fc1_x", 1))}
"""Of each kind of MLP: the layers that make its hidden units, and how many of their outputs make one."""

NEAR = 3 / 4  # of its own patches' side: smaller ones would cost far more than its settings promise
EXACT = 0.9  # least correlation of a full-size copy with its teacher; supported models reach 0.98


def check_pair(student: ViT, teacher: ViT) -> None:
    """Whether the student can start from the teacher; what the fit does not understand is refused.

    Raises:
        ValueError: the pair does not fit; one line says what differs.
    """
    if isinstance(student, DenseModel):
        levels = len(student.indices), len(teacher.indices)
        if levels[0] != levels[1]:
            raise ValueError(
                f"student and teacher must have equally many levels of features, got {levels}"
            )
        return check_pair(student.backbone, teacher.backbone)
    for role, model in (("student", student), ("teacher", teacher)):
        if type(model) is not VisionTransformer:
            raise ValueError(
                f"the {role} must be a plain timm VisionTransformer, got {type(model).__name__}"
            )
        problem = _not_understood(model, model is student or inherits_head(student, teacher))
        if problem:
            raise ValueError(f"the {role} has {problem}, which can't be inherited")
    small, big = student.blocks[0], teacher.blocks[0]
    other_size, free = small.attn.head_dim != big.attn.head_dim, _qk_norm(small.attn) == "none"
    for name, a, b in (
        (
            "pooling",
            student.global_pool,
            teacher.global_pool if inherits_head(student, teacher) else None,
        ),
        ("kind of MLP", type(small.mlp).__name__, type(big.mlp).__name__),
        ("qk_norm", _qk_norm(small.attn), _qk_norm(big.attn)),
        ("head size beside qk_norm", small.attn.head_dim, None if free else big.attn.head_dim),
    ):
        if b is not None and a != b:
            raise ValueError(f"student and teacher must have the same {name}, got {a} and {b}")
    if student.cls_token is not None and teacher.cls_token is None:
        raise ValueError("the student must have no class token, as the teacher has none")
    if student.pos_embed is None and teacher.pos_embed is not None:
        raise ValueError("the student must have position embeddings, as the teacher has")
    for name, a, b in (
        ("width", student.embed_dim, teacher.embed_dim),
        ("depth", len(student.blocks), len(teacher.blocks)),
        ("heads", 0 if other_size else small.attn.num_heads, big.attn.num_heads),
        ("number of register tokens", student.num_reg_tokens, teacher.num_reg_tokens),
        ("hidden units", small.mlp.fc2.in_features, big.mlp.fc2.in_features),
    ):
        if a > b:
            raise ValueError(
                f"the student must have no larger {name} than the teacher, got {a} and {b}"
            )


def matching_patches(student: ViT, teacher: ViT) -> int | None:
    """The side in pixels of patches that give the student its teacher's number of them; None where it is no near one.

    A student whose patches are a little larger than its teacher's can't reproduce what the teacher sees: by patches
    of 16 pixels a DINOv2 of 14 itself differs from its own answers by a KL divergence of 0.09
    (scripts/bench/log/start.md).
    """
    small, big = backbone_of(student).patch_embed, backbone_of(teacher).patch_embed
    own, (height, width), (rows, columns) = small.patch_size, small.img_size, big.grid_size
    side = height // rows
    exact = (height, width) == (side * rows, side * columns)
    return side if exact and own[0] == own[1] and NEAR * own[0] <= side < own[0] else None


def _not_understood(model: ViT, to_its_end: bool) -> str:
    """What of a model, or of its blocks alone, the fit has no formula for; empty where it has all."""
    block = model.blocks[0]
    if any(type(b) is not Block or type(b.attn) is not Attention for b in model.blocks):
        return f"blocks of the kind {type(block).__name__} with {type(getattr(block, 'attn', None)).__name__}"
    norms = stream_norms(model)
    kinds = {
        type(norm).__name__
        for norm in norms
        if centres(norm) is None or centres(norm) != centres(norms[0])
    }
    has_head = to_its_end and isinstance(model.head, nn.Linear)
    checks = {
        "a patch embedding of its own (a hybrid)": type(model.patch_embed) is not PatchEmbed
        or not isinstance(model.patch_embed.norm, nn.Identity)
        or model.patch_embed.proj.in_channels != 3,
        "a norm before its blocks": not isinstance(model.norm_pre, nn.Identity),
        f"norms of the kind {', '.join(sorted(kinds))}": bool(kinds),
        f"an MLP of the kind {type(block.mlp).__name__}": type(block.mlp) not in FIRST_LAYERS,
        "a norm inside its MLP or before its attention's projection": any(
            not isinstance(norm, nn.Identity)
            for norm in (block.mlp.norm, getattr(block.attn, "norm", nn.Identity()))
        ),
        "gated attention": getattr(block.attn, "gate", None) is not None,
        "attention pooling": to_its_end and getattr(model, "attn_pool", None) is not None,
        f"pooling '{model.global_pool}'": has_head and model.global_pool not in ("token", "avg"),
        "no norm before its classifier": has_head and final_norm(model) is None,
    }
    return next((what for what, found in checks.items() if found), "")


def stream_norms(model: ViT) -> list[nn.Module]:
    """The norms that read the residual stream."""
    final = final_norm(model)
    return [n for block in model.blocks for n in (block.norm1, block.norm2)] + (
        [] if final is None else [final]
    )


def final_norm(model: ViT) -> nn.Module | None:
    """The norm before the classifier, where there is exactly one."""
    found = [norm for norm in (model.norm, model.fc_norm) if not isinstance(norm, nn.Identity)]
    return found[0] if len(found) == 1 else None


def centres(norm: nn.Module) -> bool | None:
    """Whether a norm subtracts the mean; None for one of another kind."""
    if isinstance(norm, nn.LayerNorm):
        return True
    return False if isinstance(norm, (RmsNorm, nn.RMSNorm)) else None


def _qk_norm(attention: Any) -> str:
    return "none" if isinstance(attention.q_norm, nn.Identity) else type(attention.q_norm).__name__


def inherits_head(student: ViT, teacher: ViT) -> bool:
    """Whether the classifier can be inherited: both are linear and have equally many classes."""
    linear = isinstance(student.head, nn.Linear) and isinstance(teacher.head, nn.Linear)
    return linear and student.num_classes == teacher.num_classes


def kept_prefix(student: ViT, teacher: ViT) -> list[int]:
    """The teacher's prefix tokens that the student has too: the class token, the first registers."""
    first = int(teacher.cls_token is not None)
    return [
        *([0] if student.cls_token is not None else []),
        *range(first, first + student.num_reg_tokens),
    ]


def kept_tokens(student: ViT, teacher: ViT, count: int) -> Tensor:
    """Of the teacher's ``count`` tokens those that the student has too, by place."""
    return torch.tensor([*kept_prefix(student, teacher), *range(teacher.num_prefix_tokens, count)])


def copy_is_possible(student: ViT, teacher: ViT) -> bool:
    """Whether the two are classifiers of one architecture and size, up to layer scales."""
    if (
        not inherits_head(student, teacher)
        or student.blocks[0].attn.head_dim != teacher.blocks[0].attn.head_dim
    ):
        return False
    shapes = [
        {
            name: value.shape
            for name, value in model.state_dict().items()
            if not name.endswith("gamma")
        }
        for model in (student, teacher)
    ]
    kinds = [
        [type(m) for m in model.modules() if not list(m.parameters())]
        for model in (student, teacher)
    ]
    acts = [[kind for kind in of_one if kind not in (nn.Identity,)] for of_one in kinds]
    return shapes[0] == shapes[1] and acts[0] == acts[1]


def check_copy(copy: Tensor, original: Tensor) -> None:
    """Refuses a copy at full size whose answers differ from the teacher's."""
    copy, original = copy - copy.mean(0), original - original.mean(0)
    size = float(copy.norm() * original.norm())
    correlation = float((copy * original).sum()) / size if size else 1.0
    if correlation < EXACT:
        gives = f"a copy of this teacher gives other outputs (correlation {correlation:.2f})"
        raise ValueError(f"{gives}: its architecture has a part that can't be inherited")
