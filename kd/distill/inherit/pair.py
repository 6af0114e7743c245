"""Which pairs of student and teacher can inherit, and what they have in common."""

from collections.abc import Mapping

import torch
from timm.layers import AttentionPoolLatent, AttentionRope, GluMlp, Mlp, PatchEmbed, RmsNorm, SwiGLU
from timm.models.eva import Eva, EvaAttention, EvaBlock
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn

from kd.distill.inherit.anatomy import Part, ViT, kind_of_rotation, register_count
from kd.models.segmenter import DenseModel, backbone_of

FIRST_LAYERS = {Mlp: (("fc1", 1),), GluMlp: (("fc1", 2),), SwiGLU: (("fc1_g", 1), ("fc1_x", 1))}
"""Of each kind of MLP: the layers that make its hidden units, and how many of their outputs make one."""

BLOCKS: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {
    Block: (Attention,),
    EvaBlock: (EvaAttention, AttentionRope),
}
"""The kinds of blocks, and of their attention, that have formulas."""

NEAR = 3 / 4
"""Least side of :func:`matching_patches`, of the student's own patches: smaller ones cost far more than settings say."""


def check_vits(student: ViT, teacher: ViT) -> None:
    """Checks that the student can start from the teacher; what the fit has no formula for is refused.

    Args:
        student: a plain timm ViT, or a dense model on one.
        teacher: of the same kind.

    Raises:
        ValueError: the pair does not fit; one line says what differs.
    """
    if isinstance(student, DenseModel):
        levels = len(student.indices), len(teacher.indices)
        if levels[0] != levels[1]:
            raise ValueError(
                f"student and teacher must have equally many levels of features, got {levels}"
            )
        check_vits(student.backbone, teacher.backbone)
        return
    for role, model in (("student", student), ("teacher", teacher)):
        if type(model) not in (VisionTransformer, Eva):
            raise ValueError(
                f"the {role} must be a plain timm VisionTransformer or Eva, got {type(model).__name__}"
            )
        # Of a teacher whose classifier is not inherited, the blocks alone are read.
        reads_end = (
            model is student or inherits_head(student, teacher) or pools_by_attention(student)
        )
        must_be_understood(role, _not_understood(model, reads_end))
    _check_same_kind(student, teacher)
    both_pool = pools_by_attention(student)
    same_heads = student.blocks[0].attn.head_dim == teacher.blocks[0].attn.head_dim
    sizes = [_sizes(model, same_heads, both_pool) for model in (student, teacher)]
    if both_pool and student.attn_pool.head_dim == teacher.attn_pool.head_dim:
        for size, model in zip(sizes, (student, teacher), strict=True):
            size["heads of the attention pooling"] = model.attn_pool.num_heads
    must_not_be_larger(*sizes)


def must_be_understood(role: str, problem: str) -> None:
    """Raises a ValueError for a student or teacher (``role``) that has a part without a formula, named by ``problem``."""
    if problem:
        raise ValueError(f"the {role} has {problem}, which can't be inherited")


def must_be_equal(of_student: Mapping[str, object], of_teacher: Mapping[str, object]) -> None:
    """Raises a ValueError that names the first of some values of two models that differ."""
    for name, value in of_student.items():
        if value != of_teacher[name]:
            raise ValueError(
                f"student and teacher must have the same {name}, got {value} and {of_teacher[name]}"
            )


def must_not_be_larger(of_student: Mapping[str, int], of_teacher: Mapping[str, int]) -> None:
    """Raises a ValueError that names the first of some sizes of two models that is larger in the student."""
    for name, size in of_student.items():
        if size > of_teacher[name]:
            raise ValueError(
                f"the student must have no larger {name} than the teacher, got {size} and {of_teacher[name]}"
            )


def _check_same_kind(student: ViT, teacher: ViT) -> None:
    """Checks what the student must have as its teacher has it; raises a ValueError that names the first difference.

    Both are models for which :func:`_not_understood` has found nothing.
    """
    kinds = [_kinds(student), _kinds(teacher)]
    if inherits_head(student, teacher) and teacher.global_pool != "map":
        must_be_equal({"pooling": student.global_pool}, {"pooling": teacher.global_pool})
    if student.global_pool == "map":
        for kind, model in zip(kinds, (student, teacher), strict=True):
            kind["attention pooling"] = _kind_of_pool(getattr(model, "attn_pool", None))
    # what a head of another size can't have, as it would be mapped
    for name in OF_WHOLE_HEADS:
        if kinds[0][name] != "none":
            for kind, model in zip(kinds, (student, teacher), strict=True):
                kind[f"head size beside {name}"] = model.blocks[0].attn.head_dim
    must_be_equal(*kinds)
    if student.cls_token is not None and teacher.cls_token is None:
        raise ValueError("the student must have no class token, as the teacher has none")
    if student.pos_embed is None and teacher.pos_embed is not None:
        raise ValueError("the student must have position embeddings, as the teacher has")


OF_WHOLE_HEADS = {
    "qk_norm": "blocks.0.attn.q_norm",
    "rotary positions": "rope",
    "norm before the attention's projection": "blocks.0.attn.norm",
    "gate of the attention": "blocks.0.attn.gate",
}
"""What is made for heads of one size, and where: norms' scales, rotations that turn a head's dimensions in their order, a
norm or gate of the heads' outputs."""


def _kinds(model: ViT) -> dict[str, object]:
    """What two models must have alike, by name; "none" without."""
    kinds: dict[str, object] = {
        "kind of MLP": _kind(model, "blocks.0.mlp"),
        "norm before the blocks": _kind(model, "norm_pre"),
        "norm inside the MLP": _kind(model, "blocks.0.mlp.norm"),
    }
    for name, path in OF_WHOLE_HEADS.items():
        kinds[name] = kind_of_rotation(model) if path == "rope" else _kind(model, path)
    return kinds


def _kind(model: Part, path: str) -> str:
    """The class of a part of a model, ``none`` where it is missing or an identity."""
    part = model
    for name in path.split("."):
        part = part[int(name)] if name.isdecimal() else getattr(part, name, None)
    if part is None or isinstance(part, nn.Identity):
        return "none"
    return type(part).__name__


def _kind_of_pool(pool: Part) -> str:
    """What two attention poolings must have alike, in words for a message; "none" without a pooling."""
    if pool is None:
        return "none"
    norm = _kind(pool, "q_norm")
    size = ""
    if norm != "none":
        size = f" of {pool.head_dim}"
    return f"{_kind(pool, 'norm')} before the MLP, {norm} of queries{size}"


def _sizes(model: ViT, same_heads: bool, both_pool: bool) -> dict[str, int]:
    """What a student must not have more of than its teacher, by name.

    Args:
        model: student or teacher.
        same_heads: their heads are of one size; else they are mapped, and may be more.
        both_pool: both pool by attention.
    """
    first = model.blocks[0]
    sizes = {
        "width": model.embed_dim,
        "depth": len(model.blocks),
        "number of register tokens": register_count(model),
        "hidden units": first.mlp.fc2.in_features,
    }
    if same_heads:
        sizes["heads"] = first.attn.num_heads
    if both_pool:
        sizes["hidden units of the attention pooling"] = model.attn_pool.mlp.fc2.in_features
    return sizes


def matching_patches(student: ViT, teacher: ViT) -> int | None:
    """The side in pixels of patches that give the student its teacher's number of them.

    A student whose patches are a little larger than its teacher's can't reproduce what the teacher sees: by patches
    of 16 pixels a DINOv2 of 14 itself differs from its own answers by a KL divergence of 0.09
    (scripts/bench/log/start.md).

    Args:
        student: whose pictures' size in pixels counts.
        teacher: whose grid of patches.

    Returns:
        The side, smaller than that of the student's own patches; None where a model has no patches, where the student's
        are not square or its pictures no multiple of the side, or where the side is not smaller than that of its own
        patches, or below :data:`NEAR` of it.
    """
    student_patches = getattr(backbone_of(student), "patch_embed", None)
    teacher_patches = getattr(backbone_of(teacher), "patch_embed", None)
    if student_patches is None or teacher_patches is None:
        return None
    height, width = student_patches.img_size
    rows, columns = teacher_patches.grid_size
    side = height // rows
    if (height, width) != (side * rows, side * columns):
        return None
    own_side, own_width = student_patches.patch_size
    if own_side != own_width:
        return None
    if NEAR * own_side <= side < own_side:
        return side
    return None


def _not_understood(model: ViT, reads_end: bool) -> str:
    """A part of a model for which the fit has no formula, in words for a message; "" where all parts have one.

    Args:
        model: a timm VisionTransformer or Eva, whose blocks are alike but for their kind.
        reads_end: whether its pooling and norm after the last block matter, too.
    """
    for block in model.blocks:
        attention = getattr(block, "attn", None)
        if type(attention) not in BLOCKS.get(type(block), ()):
            return f"blocks of the kind {type(block).__name__} with {type(attention).__name__}"
    first = model.blocks[0]
    patches = model.patch_embed
    norms = stream_norms(model)
    odd = {type(norm).__name__ for norm in norms if centres(norm) in (None, not centres(norms[0]))}
    is_plain = type(patches) is PatchEmbed and isinstance(patches.norm, nn.Identity)
    problems = {
        "a patch embedding of its own (a hybrid)": not is_plain or patches.proj.in_channels != 3,
        # RoPE-Mixed, arXiv 2403.13298
        "rotary positions that are learnt": hasattr(getattr(model, "rope", None), "freqs"),
        f"norms of the kind {', '.join(sorted(odd))}": odd,
        f"an MLP of the kind {type(first.mlp).__name__}": type(first.mlp) not in FIRST_LAYERS,
        "grouped-query attention (fewer heads of keys than of queries)": (
            getattr(first.attn, "num_kv_groups", 1) > 1
        ),
    }
    found = next((problem for problem, is_there in problems.items() if is_there), "")
    if found or not reads_end:
        return found
    pool = getattr(model, "attn_pool", None)
    if pool is not None:
        is_known = (
            type(pool) is AttentionPoolLatent
            and isinstance(pool.mlp, Mlp)
            and (pool.latent_len, pool.pos_embed) == (1, None)
            and not isinstance(pool.norm, nn.Identity)
            and pool.proj.out_features == pool.kv.in_features
        )
        return "" if is_known else "attention pooling of another kind than SigLIP's"
    if not isinstance(model.head, nn.Linear):
        return ""
    if model.global_pool not in ("token", "avg"):
        return f"pooling '{model.global_pool}'"
    return "" if final_norm(model) is not None else "no norm before its classifier"


def stream_norms(model: ViT) -> list[nn.Module]:
    """The norms that read the residual stream: two of each block, that before the classifier or pooling if there is one."""
    norms = []
    for block in model.blocks:
        norms += [block.norm1, block.norm2]
    if pools_by_attention(model):
        final = model.norm
    else:
        final = final_norm(model)
    if final is not None and not isinstance(final, nn.Identity):
        norms.append(final)
    return norms


def pools_by_attention(model: ViT) -> bool:
    """Whether a latent query pools the tokens before the classifier (SigLIP, Perception Encoder)."""
    return getattr(model, "attn_pool", None) is not None


def final_norm(model: ViT) -> nn.Module | None:
    """The norm before the classifier, before or after pooling; None where there is not exactly one."""
    norms = []
    for norm in (model.norm, model.fc_norm):
        if not isinstance(norm, nn.Identity):
            norms.append(norm)
    if len(norms) == 1:
        return norms[0]
    return None


def centres(norm: nn.Module) -> bool | None:
    """Whether a norm subtracts the mean: True for LayerNorm, False for RMSNorm, None for another kind."""
    if isinstance(norm, nn.LayerNorm):
        return True
    if isinstance(norm, RmsNorm | nn.RMSNorm):
        return False
    return None


def inherits_head(student: ViT, teacher: ViT) -> bool:
    """Whether the classifier can be inherited: both are linear and have equally many classes."""
    both_linear = isinstance(student.head, nn.Linear) and isinstance(teacher.head, nn.Linear)
    return both_linear and student.num_classes == teacher.num_classes


def kept_prefix(student: ViT, teacher: ViT) -> list[int]:
    """Places, in the teacher's tokens (from 0), of the prefix tokens that the student has too: the class token, the first
    registers. A pair that :func:`check_vits` accepts has no more of either than the teacher.
    """
    places = []
    if student.cls_token is not None:
        places.append(0)
    first_register = int(teacher.cls_token is not None)
    places += range(first_register, first_register + register_count(student))
    return places


def kept_tokens(student: ViT, teacher: ViT, count: int) -> Tensor:
    """Places of the teacher's ``count`` tokens that the student has too, ``(L,)``: kept prefix tokens, all patches."""
    patches = range(teacher.num_prefix_tokens, count)
    return torch.tensor([*kept_prefix(student, teacher), *patches])
