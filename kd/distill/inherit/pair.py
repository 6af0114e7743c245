"""Which pairs of student and teacher can inherit, what they have in common, and whether a copy worked."""

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
EXACT = 0.9
"""Least correlation of a full-size copy's logits with its teacher's; supported models reach 0.98."""


def check_pair(student: ViT, teacher: ViT) -> None:
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
        check_pair(student.backbone, teacher.backbone)
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
        problem = _not_understood(model, reads_end)
        if problem:
            raise ValueError(f"the {role} has {problem}, which can't be inherited")
    _check_same_kind(student, teacher)
    _check_not_larger(student, teacher)


def _check_same_kind(student: ViT, teacher: ViT) -> None:
    """Checks what the student must have as its teacher has it; raises a ValueError that names the first difference.

    Both are models for which :func:`_not_understood` has found nothing.
    """
    small = student.blocks[0]
    big = teacher.blocks[0]
    values = {
        "kind of MLP": (type(small.mlp).__name__, type(big.mlp).__name__),
        "qk_norm": (_qk_norm(small.attn), _qk_norm(big.attn)),
        "rotary positions": (kind_of_rotation(student), kind_of_rotation(teacher)),
        "norm before the blocks": (_kind(student.norm_pre), _kind(teacher.norm_pre)),
        "norm inside the MLP": (_kind(small.mlp.norm), _kind(big.mlp.norm)),
        "norm before the attention's projection": (_inner_norm(small.attn), _inner_norm(big.attn)),
        "gate of the attention": (_is_gated(small.attn), _is_gated(big.attn)),
    }
    if inherits_head(student, teacher) and teacher.global_pool != "map":
        values = {"pooling": (student.global_pool, teacher.global_pool), **values}
    reason = _why_whole_heads(student)
    if reason:
        values[f"head size beside {reason}"] = (small.attn.head_dim, big.attn.head_dim)
    if student.global_pool == "map":
        pools = student.attn_pool, getattr(teacher, "attn_pool", None)
        values["attention pooling"] = (_kind_of_pool(pools[0]), _kind_of_pool(pools[1]))
    for name, (of_student, of_teacher) in values.items():
        if of_student != of_teacher:
            raise ValueError(
                f"student and teacher must have the same {name}, got {of_student} and {of_teacher}"
            )
    if student.cls_token is not None and teacher.cls_token is None:
        raise ValueError("the student must have no class token, as the teacher has none")
    if student.pos_embed is None and teacher.pos_embed is not None:
        raise ValueError("the student must have position embeddings, as the teacher has")


def _why_whole_heads(model: ViT) -> str:
    """What makes a head of another size impossible; "" where nothing does."""
    attention = model.blocks[0].attn
    if _qk_norm(attention) != "none":  # the norms' scales are of one head's size
        return "qk_norm"
    if kind_of_rotation(model) != "none":  # a rotation turns a head's dimensions in their order
        return "rotary positions"
    if _inner_norm(attention) != "none":
        return "a norm before the attention's projection"
    return "a gate of the attention" if _is_gated(attention) else ""


def _kind(module: nn.Module) -> str:
    """The kind of a module that may be missing, ``none`` then."""
    if isinstance(module, nn.Identity):
        return "none"
    return type(module).__name__


def _inner_norm(attention: Part) -> str:
    return _kind(getattr(attention, "norm", nn.Identity()))


def _is_gated(attention: Part) -> bool:
    return getattr(attention, "gate", None) is not None


def _kind_of_pool(pool: Part) -> str:
    """What two attention poolings must have alike, in words for a message; "none" without a pooling."""
    if pool is None:
        return "none"
    norm = _qk_norm(pool)
    size = ""
    if norm != "none":
        size = f" of {pool.head_dim}"
    return f"{_kind(pool.norm)} before the MLP, {norm} of queries{size}"


def _check_not_larger(student: ViT, teacher: ViT) -> None:
    """Checks what the student must not have more of than its teacher; raises a ValueError."""
    small = student.blocks[0]
    big = teacher.blocks[0]
    sizes = {
        "width": (student.embed_dim, teacher.embed_dim),
        "depth": (len(student.blocks), len(teacher.blocks)),
        "heads": (small.attn.num_heads, big.attn.num_heads),
        "number of register tokens": (register_count(student), register_count(teacher)),
        "hidden units": (small.mlp.fc2.in_features, big.mlp.fc2.in_features),
    }
    if small.attn.head_dim != big.attn.head_dim:  # then heads are mapped, and may be more
        del sizes["heads"]
    if pools_by_attention(student):
        pools = student.attn_pool, teacher.attn_pool
        units = [pool.mlp.fc2.in_features for pool in pools]
        sizes["hidden units of the attention pooling"] = (units[0], units[1])
        if pools[0].head_dim == pools[1].head_dim:
            sizes["heads of the attention pooling"] = (pools[0].num_heads, pools[1].num_heads)
    for name, (of_student, of_teacher) in sizes.items():
        if of_student > of_teacher:
            raise ValueError(
                f"the student must have no larger {name} than the teacher, got {of_student} and {of_teacher}"
            )


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
    """What of a model the fit has no formula for; "" where it has one for all.

    Args:
        model: a timm VisionTransformer or Eva, whose blocks are alike but for their kind.
        reads_end: whether its pooling and norm after the last block matter, too.
    """
    for block in model.blocks:
        kinds_of_attention = BLOCKS.get(type(block), ())
        if type(getattr(block, "attn", None)) not in kinds_of_attention:
            attention = type(getattr(block, "attn", None)).__name__
            return f"blocks of the kind {type(block).__name__} with {attention}"
    return (
        _embedding_not_understood(model)
        or _norms_not_understood(model)
        or _block_not_understood(model.blocks[0])
        or (_end_not_understood(model) if reads_end else "")
    )


def _embedding_not_understood(model: ViT) -> str:
    """What of a model's patch embedding and positions can't be inherited, in words for a message; "" where it is plain."""
    patches = model.patch_embed
    is_plain = type(patches) is PatchEmbed and isinstance(patches.norm, nn.Identity)
    if not is_plain or patches.proj.in_channels != 3:
        return "a patch embedding of its own (a hybrid)"
    if hasattr(getattr(model, "rope", None), "freqs"):  # RoPE-Mixed, arXiv 2403.13298
        return "rotary positions that are learnt"
    return ""


def _norms_not_understood(model: ViT) -> str:
    """Norms of the stream that are neither LayerNorm nor RMSNorm, or not all of one kind, in words for a message; "" where
    there are none.
    """
    norms = stream_norms(model)
    kinds = set()
    for norm in norms:
        if centres(norm) is None or centres(norm) != centres(norms[0]):
            kinds.add(type(norm).__name__)
    if kinds:
        return f"norms of the kind {', '.join(sorted(kinds))}"
    return ""


def _block_not_understood(block: Part) -> str:
    """What of a block can't be inherited, in words for a message; "" where it is understood."""
    if type(block.mlp) not in FIRST_LAYERS:
        return f"an MLP of the kind {type(block.mlp).__name__}"
    if getattr(block.attn, "num_kv_groups", 1) > 1:
        return "grouped-query attention (fewer heads of keys than of queries)"
    return ""


def _end_not_understood(model: ViT) -> str:
    """What of a model's pooling, last norm or classifier can't be inherited, in words for a message; "" for nothing."""
    pool = getattr(model, "attn_pool", None)
    if pool is not None:
        return _pool_not_understood(pool)
    if not isinstance(model.head, nn.Linear):
        return ""
    if model.global_pool not in ("token", "avg"):
        return f"pooling '{model.global_pool}'"
    if final_norm(model) is None:
        return "no norm before its classifier"
    return ""


def _pool_not_understood(pool: Part) -> str:
    """What of an attention pooling can't be inherited, in words for a message; "" where it is understood."""
    if type(pool) is not AttentionPoolLatent:
        return f"attention pooling of the kind {type(pool).__name__}"
    if pool.mlp is None or pool.latent_len != 1 or pool.pos_embed is not None:
        return "attention pooling without an MLP, with several latents or with positions"
    if isinstance(pool.norm, nn.Identity) or not isinstance(pool.mlp, Mlp):
        return "attention pooling without a norm before its MLP"
    if pool.proj.out_features != pool.kv.in_features:
        return "attention pooling to another width"
    return ""


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


def _qk_norm(attention: Part) -> str:
    """The kind of norm of an attention's queries and keys, or ``none``."""
    if isinstance(attention.q_norm, nn.Identity):
        return "none"
    return type(attention.q_norm).__name__


def inherits_head(student: ViT, teacher: ViT) -> bool:
    """Whether the classifier can be inherited: both are linear and have equally many classes."""
    both_linear = isinstance(student.head, nn.Linear) and isinstance(teacher.head, nn.Linear)
    return both_linear and student.num_classes == teacher.num_classes


def kept_prefix(student: ViT, teacher: ViT) -> list[int]:
    """Places, in the teacher's tokens (from 0), of the prefix tokens that the student has too: the class token, the first
    registers. A pair that :func:`check_pair` accepts has no more of either than the teacher.
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


def copy_is_possible(student: ViT, teacher: ViT) -> bool:
    """Whether the two are classifiers of one architecture and size, up to layer scales."""
    if not inherits_head(student, teacher):
        return False
    if student.blocks[0].attn.head_dim != teacher.blocks[0].attn.head_dim:
        return False
    same_shapes = _weight_shapes(student) == _weight_shapes(teacher)
    return same_shapes and _weightless_kinds(student) == _weightless_kinds(teacher)


def _weight_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Shapes by name of all weights and buffers except layer scales, which are folded into other layers."""
    shapes = {}
    for name, value in model.state_dict().items():
        if name.rpartition(".")[2] not in ("gamma", "gamma_1", "gamma_2"):
            shapes[name] = value.shape
    return shapes


def _weightless_kinds(model: nn.Module) -> list[type[nn.Module]]:
    """Classes of the modules without weights, in order: activations above all. Identities are left out."""
    kinds = []
    for module in model.modules():
        has_weights = bool(list(module.parameters()))
        if not has_weights and type(module) is not nn.Identity:
            kinds.append(type(module))
    return kinds


def check_copy(copy: Tensor, original: Tensor) -> None:
    """Refuses a copy at full size whose answers differ from the teacher's.

    Args:
        copy: the copy's logits of the sample, ``(N, C)``.
        original: the teacher's.

    Raises:
        ValueError: their correlation, each class's mean subtracted, is below :data:`EXACT`.
    """
    copy = copy - copy.mean(0)
    original = original - original.mean(0)
    norms = float(copy.norm() * original.norm())
    correlation = 1.0
    if norms:
        correlation = float((copy * original).sum()) / norms
    if correlation < EXACT:
        raise ValueError(
            f"a copy of this teacher gives other outputs (correlation {correlation:.2f}): its "
            "architecture has a part that can't be inherited"
        )
