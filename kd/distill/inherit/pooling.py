"""Attention pooling (SigLIP, Perception Encoder; timm's ``AttentionPoolLatent``), fitted like a block.

A learnt query, the latent, reads the tokens after the last norm; an MLP with a norm before it follows::

    p = proj(sum_t softmax(q . k_t / sqrt(S)) v_t)        one token a picture
    a = p + mlp(norm(p))                                  what the classifier reads

p and a are a residual stream of their own, so they get a projection P of their own, made as M is from p and a.
Keys and values are fitted to the teacher's on the student's tokens, the query is set to the teacher's of the same head,
``proj`` is fitted to ``P p``, and the MLP as a block's is. A query that is the same for all pictures reads one
direction of a head's keys, so heads of another size lose nothing of the pattern (:mod:`kd.distill.inherit.heads`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kd.distill.inherit.anatomy import Part, ViT, caught, reset_norm
from kd.distill.inherit.heads import Heads, map_heads
from kd.distill.inherit.layers import BlockTargets, fit_mlp, folded, strongest_columns
from kd.distill.inherit.measured import GUIDE, BlockActivations, MeasuredTeacher
from kd.distill.inherit.pair import inherits_head, kept_prefix, kept_tokens
from kd.distill.inherit.ridge import fit_linear
from kd.distill.inherit.stream import (
    logit_directions,
    moment_of,
    projection_from,
    seen_by_norms,
)


class PoolBlock:
    """The second half of a pooling by a block's names.

    Args:
        pool: timm's ``AttentionPoolLatent``.
    """

    def __init__(self, pool: Part) -> None:
        self.norm2 = pool.norm
        self.mlp = pool.mlp


def pooled_tokens(model: ViT, stream: Tensor) -> Tensor:
    """What the pooling reads of the stream after the last block, ``(N, L, D)``: normalised, of fewer tokens where it leaves
    out the prefix tokens.
    """
    tokens = model.norm(stream)
    leaves_prefix_out = not getattr(model, "pool_include_prefix", True)  # Eva's reads all tokens
    if leaves_prefix_out:
        return tokens[:, model.num_prefix_tokens :]
    return tokens


def inherit_pool(
    student: ViT, measured: MeasuredTeacher, streams: Sequence[Tensor], projection: Tensor
) -> Tensor:
    """Fits a student's attention pooling.

    Args:
        student: its blocks are fitted; its pooling is overwritten.
        measured: the teacher, which pools by attention, too.
        streams: the student's after the last block, ``(N, L, D)`` of each part of the sample.
        projection: M, ``(D_student, D_teacher)``.

    Returns:
        P, ``(D_student, D_teacher)``.
    """
    teacher = measured.model
    pool: Any = student.attn_pool
    teacher_pool: Any = teacher.attn_pool
    parts = []
    for number, stream in enumerate(measured.after_blocks()):
        guides = number < measured.guide_parts
        parts.append(_measure(student, teacher, stream, guides))
    guide = parts[: measured.guide_parts]
    pool_projection = _pool_projection(student, teacher, guide)

    # Query, keys and values, from chosen heads or from heads mapped to another size.
    reset_norm(pool.norm)
    targets = BlockTargets(parts, len(guide), pool_projection)
    tokens = [pooled_tokens(student, stream) for stream in streams]
    write = pool_projection @ teacher_pool.proj.weight
    qkv_map, student_write = _heads_map(pool, teacher_pool, targets, write)
    width = pool.num_heads * pool.head_dim
    teacher_width = qkv_map.shape[1] // 3
    query_map = qkv_map[:width]
    key_value_map = qkv_map[width:, teacher_width:]
    # The query is the same at every token; query_map is 0 for the keys and values beside it.
    _set_query(pool, query_map @ parts[0].qkv[0, 0])
    key_values = []
    for part in parts:
        of_teacher = part.qkv[..., teacher_width:].float()
        key_values.append(of_teacher @ key_value_map.T)
    teacher_kv = teacher_pool.kv.weight
    every_row = torch.arange(len(teacher_kv))
    start = key_value_map @ folded(teacher_kv, teacher.norm, projection, every_row)
    fit_linear(pool.kv, zip(tokens, key_values, strict=True), start)
    for norm in ("q_norm", "k_norm"):
        teacher_norm = getattr(teacher_pool, norm)
        getattr(pool, norm).load_state_dict(teacher_norm.state_dict())

    # The projection, then the MLP. There is one row a picture: where they are few, the start weighs more.
    heads = []
    for each in tokens:
        with caught([pool.proj]) as read:
            pool(each)
        heads.append(read[pool.proj])
    pooled = [part.middle @ pool_projection.T for part in parts]
    ridge = min(1.0, GUIDE / sum(map(len, pooled)))
    fit_linear(pool.proj, zip(heads, pooled, strict=True), student_write, ridge=ridge)
    fit_mlp(PoolBlock(pool), targets, [pool.proj(each) for each in heads])
    return pool_projection


def _pool_projection(student: ViT, teacher: ViT, guide: Sequence[BlockActivations]) -> Tensor:
    """P, ``(D_student, D_teacher)``: the leading directions of what is pooled, those that the classifier reads first.

    Args:
        student: its width and kind of norm.
        teacher: its classifier's directions come first, in at most half of the student's width, where it is inherited.
        guide: the teacher's pooling on the parts of the sample that decide.
    """
    middle = torch.cat([part.middle for part in guide])
    after = torch.cat([part.after for part in guide])
    moment = moment_of([middle, after], class_tokens=0)
    read = None
    if inherits_head(student, teacher):
        features = after[:, 0].double()
        reads = teacher.head.weight.double()
        read = logit_directions(features, reads, student.embed_dim // 2)
    return projection_from(moment, student, read)


def _measure(student: ViT, teacher: ViT, stream: Tensor, guides: bool) -> BlockActivations:
    """What the teacher's pooling computes on a part of the sample, under the names of a block's activations: ``middle`` is
    the pooled token before the MLP, ``after`` what the classifier reads.

    Args:
        student: which tokens it has.
        teacher: whose pooling.
        stream: the teacher's after its last block, ``(N, L, D)``.
        guides: whether this part decides which heads and units are kept.
    """
    pool: Any = teacher.attn_pool
    fc1, fc2 = pool.mlp.fc1, pool.mlp.fc2
    with caught([pool.proj, pool.norm, fc2]) as read, caught([pool.kv, fc1], output=True) as given:
        after = pool(pooled_tokens(teacher, stream))[:, None]
    keys_values = given[pool.kv]

    # The pooling may leave out the first tokens, which may be among those that the student has, too.
    tokens = stream.shape[1]
    left_out = tokens - keys_values.shape[1]
    not_pooled = sum(place < left_out for place in kept_prefix(student, teacher))
    kept = kept_tokens(student, teacher, tokens)
    kept = kept[not_pooled:] - left_out
    keys_values = keys_values[:, kept]

    query = pool.q(pool.latent)
    queries = query.expand(*keys_values.shape[:2], -1)
    heads = units = torch.empty(0)
    if guides:
        heads = read[pool.proj]
        units = read[fc2]
    return BlockActivations(
        block=PoolBlock(pool),
        qkv=torch.cat([queries, keys_values], -1),
        heads=heads,
        units=units,
        hidden=[given[fc1]],
        gate=None,
        middle=seen_by_norms(read[pool.norm], pool.norm),
        after=seen_by_norms(after, pool.norm),
    )


def _heads_map(
    pool: Part, teacher_pool: Part, targets: BlockTargets, write: Tensor
) -> tuple[Tensor, Tensor]:
    """Maps the teacher's queries, keys and values to the student's heads; heads of the teacher's size are chosen whole.

    Args:
        pool: the student's pooling, for its number and size of heads.
        teacher_pool: the teacher's, likewise.
        targets: of the teacher's pooling.
        write: what multiplies the teacher's heads' outputs in the student's pooled stream, ``(D_student, H * S)``.

    Returns:
        As :func:`kd.distill.inherit.heads.map_heads`: the map, ``(3 * H * S`` of the student, that of the teacher
        ``)``, and the student's start of the layer that reads the heads.
    """
    student_heads = Heads(pool.num_heads, pool.head_dim)
    teacher_heads = Heads(teacher_pool.num_heads, teacher_pool.head_dim)
    if student_heads.size != teacher_heads.size:
        qkv = torch.cat([part.qkv for part in targets.guide])
        outputs = torch.cat([part.heads for part in targets.guide])
        return map_heads(qkv, outputs, write, student_heads, teacher_heads)

    counts = teacher_heads.count, student_heads.count
    columns = strongest_columns(targets, "heads", write, *counts)
    every_column = torch.eye(write.shape[1])
    chosen = every_column[columns]
    qkv_map = torch.block_diag(chosen, chosen, chosen)
    return qkv_map, write[:, columns]


def _set_query(pool: Part, query: Tensor) -> None:
    """Makes a pooling give ``query``, ``(H * S,)``, for its latent token l: ``W l + b = q``; the same for every picture.

    Changed is the bias, without one the weight, and the latent itself where no layer comes after it.
    """
    layer = pool.q
    if isinstance(layer, nn.Identity):
        pool.latent.copy_(query[None, None])
        return
    latent = pool.latent[0, 0]
    error = query - layer.weight @ latent
    if layer.bias is not None:
        layer.bias.copy_(error)
    else:  # the least change of the weight that gives it: W + (q - W l) l' / |l|^2
        outer = error[:, None] * latent
        length = latent.square().sum()
        layer.weight.add_(outer / length)
