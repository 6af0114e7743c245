"""The residual stream: the teacher's on sample pictures, and how it maps onto the student's.

Each block of a transformer adds to one stream of tokens, ``(N, L, D)``, that all norms read. A LayerNorm subtracts each
token's mean, so only the centred stream matters; neither sees a token's length. What is centred here is called "as the
norms see it".
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import Tensor, nn

from kd.distill.inherit.anatomy import (
    ViT,
    has_layer_without_bias,
    reset_layer_scales,
    reset_norm,
    run_block,
)
from kd.distill.inherit.pair import centres, final_norm, stream_norms

CLASSIFIED = 0.95
"""Share of the variance of the teacher's logits that the directions read by its classifier make."""
READ_FIRST = 1e4
"""Weight of these directions in the stream's moment: more than that of any other, which is two a stream at most."""


class Embedding(NamedTuple):
    """What a teacher makes of a picture before its first block, with a student's patches; D is the teacher's width."""

    patch_weight: Tensor
    """``(D, 3, h, w)`` of a patch of h x w pixels."""
    patch_bias: Tensor | None
    """``(D,)``."""
    prefix_tokens: Tensor
    """The class token, then the registers, ``(1, P, D)``."""
    prefix_positions: Tensor
    """What is added to these, ``(1, P, D)``; 0 where they have no positions."""
    patch_positions: Tensor
    """What is added to the student's patches, ``(1, L, D)``."""


def embedding(student: ViT, teacher: ViT) -> Embedding:
    """The teacher's embedding, resampled to the student's size of patches and grid.

    Patches by the pseudo-inverse of resizing (FlexiViT, Beyer et al., arXiv 2212.08013), positions bicubically.

    Args:
        student: its patch size in pixels and its grid of patches; its weights are not read.
        teacher: whose embedding; left as it is.
    """
    patch = teacher.patch_embed.proj
    weight = resample_patch_embed(patch.weight, list(student.patch_embed.patch_size))
    width = len(weight)
    there = [x for x in (teacher.cls_token, teacher.reg_token) if x is not None]
    tokens = torch.cat([weight.new_zeros(1, 0, width), *there], 1)

    rows, columns = student.patch_embed.grid_size
    if teacher.pos_embed is None:
        no_positions = weight.new_zeros(1, rows * columns, width)
        return Embedding(weight, patch.bias, tokens, torch.zeros_like(tokens), no_positions)
    prefix = 0 if teacher.no_embed_class else teacher.num_prefix_tokens
    positions = resample_abs_pos_embed(
        teacher.pos_embed,
        new_size=[rows, columns],
        old_size=list(teacher.patch_embed.grid_size),
        num_prefix_tokens=prefix,
    )
    prefix_positions = positions[:, :prefix] if prefix else torch.zeros_like(tokens)
    return Embedding(weight, patch.bias, tokens, prefix_positions, positions[:, prefix:])


def embedded_as(student: ViT, teacher: ViT, images: Tensor) -> Tensor:
    """The teacher's tokens before its first block (before the norm there, if it has one), with the student's patches.

    Args:
        student: whose size and grid of patches.
        teacher: whose embedding.
        images: prepared as the teacher takes them, at the student's size, ``(N, 3, H, W)``.

    Returns:
        ``(N, P + L, D_teacher)``.
    """
    parts = embedding(student, teacher)
    weight = parts.patch_weight
    patch_size = weight.shape[-2:]
    maps_NDhw = nn.functional.conv2d(images, weight, parts.patch_bias, stride=patch_size)
    patches_NLD = maps_NDhw.flatten(2).transpose(1, 2)
    patches_NLD = patches_NLD + parts.patch_positions

    prefix_1PD = parts.prefix_tokens + parts.prefix_positions
    prefix_NPD = prefix_1PD.expand(len(images), -1, -1)
    return torch.cat([prefix_NPD, patches_NLD], 1)


def seen_by_norms(stream: Tensor, norm: nn.Module) -> Tensor:
    """The part of a stream ``(..., D)`` that a norm reads: less its mean over D, or all of it (RMSNorm)."""
    if centres(norm):
        return stream - stream.mean(-1, keepdim=True)
    return stream


def teacher_streams(
    teacher: ViT,
    stream: Tensor,
    rotation: Tensor | None,
    passed: Callable[[], object] = lambda: None,
) -> list[Tensor]:
    """What the norms see of the teacher's stream before its first block (given) and after each.

    Args:
        teacher: whose blocks run.
        stream: before the first block, ``(N, L, D)``.
        rotation: of :func:`kd.distill.inherit.anatomy.rotation_of`.
        passed: called after each part of 64 pictures that has gone through a block.

    Returns:
        One tensor ``(N, L, D)`` more than there are blocks.
    """
    streams = [stream]
    for block in teacher.blocks:
        parts = []
        for part in streams[-1].split(64):
            parts.append(run_block(block, part, rotation))
            passed()
        streams.append(torch.cat(parts))
    return [seen_by_norms(each, teacher.blocks[0].norm1) for each in streams]


def read_by_classifier(teacher: ViT, last: Tensor, most: int) -> Tensor:
    """Directions of the last stream by which the teacher's classifier tells pictures apart.

    With f the pooled stream of a picture, each token divided by its root mean square before (also where the teacher
    normalises after pooling, which changes the choice of directions alone), and B the classifier's weights, which the
    final norm's scale multiplies, logits are ``B f``. The singular value decomposition ``U S V' = (f - mean f) B'`` over
    the sample orders combinations of classes by how much they vary; those that make :data:`CLASSIFIED` of the variance
    are kept, and read the directions ``V' B``. B is centred: over the classes, as softmax does not see what all logits
    have in common, and over the width, as the norm does not.

    Args:
        teacher: with a linear classifier of C classes, pooling ``token`` or ``avg``, and one norm before the classifier.
        last: its stream after the last block, as the norms see it, ``(N, L, D)``.
        most: how many directions may be kept.

    Returns:
        ``(D, R)`` with R <= ``most``, orthonormal, float64.
    """
    norm: Any = final_norm(teacher)
    reads_CD = teacher.head.weight.double()
    if norm.weight is not None:
        reads_CD = reads_CD * norm.weight.double()
    reads_CD = seen_by_norms(reads_CD - reads_CD.mean(0), teacher.blocks[0].norm1)

    if teacher.global_pool == "token":
        pooled_NLD = last[:, :1]
    else:
        pooled_NLD = last[:, teacher.num_prefix_tokens :]
    mean_square = pooled_NLD.square().mean(-1, keepdim=True)
    normalised_NLD = pooled_NLD * mean_square.clamp(min=1e-12).rsqrt()
    features_ND = normalised_NLD.mean(1).double()
    return logit_directions(features_ND, reads_CD, most)


def logit_directions(features_ND: Tensor, reads_CD: Tensor, most: int) -> Tensor:
    """Directions of features by which a classifier's weights tell pictures apart, :func:`read_by_classifier`.

    Args:
        features_ND: of the sample, float64.
        reads_CD: the weights, float64.
        most: how many directions may be kept.

    Returns:
        ``(D, R)`` with R <= ``most``, orthonormal.
    """
    centred_ND = features_ND - features_ND.mean(0)
    logits_NC = centred_ND @ reads_CD.T
    _, sizes, right = torch.linalg.svd(logits_NC, full_matrices=False)

    # as many of them as give CLASSIFIED of the logits' variance
    powers = sizes.square()
    shares = powers.cumsum(0) / powers.sum()
    enough = int((shares < CLASSIFIED).sum()) + 1
    count = min(enough, most)
    directions_RD = right[:count] @ reads_CD
    return torch.linalg.qr(directions_RD.T).Q


def moment_of(streams: list[Tensor], class_tokens: int) -> Tensor:
    """Sum over the streams of the second moment of their tokens' directions, ``u = x / |x|``.

    ``mean(u u')`` of the class token, which is classified, and of all other tokens count alike.

    Args:
        streams: ``(N, L, D)`` each, as the norms see them.
        class_tokens: how many of the L tokens are class tokens, which come first: 0 or 1.

    Returns:
        ``(D, D)``, float64.
    """
    width = streams[0].shape[-1]
    moment = torch.zeros(width, width, dtype=torch.float64)
    for stream in streams:
        directions_NLD = nn.functional.normalize(stream.double(), dim=-1)
        classified = directions_NLD[:, :class_tokens]
        others = directions_NLD[:, class_tokens:]
        for tokens in (classified, others):
            rows = tokens.reshape(-1, width)
            count = max(1, len(rows))
            moment += rows.T @ rows / count
    return moment


def projection_of(moment: Tensor, last: Tensor, student: ViT, teacher: ViT | None = None) -> Tensor:
    """``M``: how the teacher's stream maps onto the student's (SliceGPT, arXiv 2401.15024, section 3).

    ``M = S E'``: E, (D_teacher, room), are the leading eigenvectors of the stream's moment; S, (width, room), has
    orthonormal columns. A student whose norms subtract the mean has room for ``width - 1`` directions: its columns of S
    are orthogonal to all-ones, so the norms subtract nothing. With RMSNorm S is the identity.

    Args:
        moment: :func:`moment_of` the teacher's streams, ``(D_teacher, D_teacher)``.
        last: its stream after the last block, ``(N, L, D_teacher)``.
        student: its width and kind of norm.
        teacher: whose classifier's directions (:func:`read_by_classifier`) come first, in at most half of the room;
            None: the stream's leading directions alone.

    Returns:
        ``(D_student, D_teacher)``, float32.
    """
    room = _room(student)
    read = None if teacher is None else read_by_classifier(teacher, last, room // 2)
    return projection_from(moment, student, read)


def _room(student: ViT) -> int:
    """How many directions a student's stream has: less all-ones, where its norms subtract the mean."""
    return student.embed_dim - int(bool(centres(student.blocks[0].norm1)))


def projection_from(moment: Tensor, student: ViT, read: Tensor | None) -> Tensor:
    """:func:`projection_of` a stream, given the directions that are read first.

    Args:
        moment: of the stream's directions, ``(D_teacher, D_teacher)``, float64.
        student: its width and kind of norm.
        read: ``(D_teacher, R)``, orthonormal; None: the leading directions alone.

    Returns:
        ``(D_student, D_teacher)``, float32.
    """
    width = student.embed_dim
    room = _room(student)
    if read is not None:
        moment = moment + READ_FIRST * read @ read.T

    # From the largest eigenvalue down; that of the teacher's all-ones direction, which its norms subtract, is 0.
    eigenvectors = torch.linalg.eigh(moment).eigenvectors.flip(1)
    directions = eigenvectors[:, :room]
    directions = directions * directions.sum(0).add(1e-12).sign()  # v, not -v: the sum is positive
    start = torch.eye(width, dtype=torch.float64)
    if room < width:
        start[:, 0] = 1
        start = torch.linalg.qr(start).Q[:, 1:]  # orthonormal, and orthogonal to all-ones
    return (start @ directions.T).float()


def reset_norms(student: ViT) -> None:
    """Sets a student's norms of the stream to scale 1 and shift 0 (the next layer has both), layer scales to 1.

    A LayerNorm before a layer without a bias (keys of ``Eva``) is shifted by 1. What a LayerNorm gives is orthogonal to
    all-ones, so this shift is an input of its own, by which the layer has any bias: ``W (x + 1) = W x + W 1``.
    """
    for norm in stream_norms(student):
        reset_norm(norm)
    for block in student.blocks:
        for branch, norm in ((1, block.norm1), (2, block.norm2)):
            has_shift = getattr(norm, "bias", None) is not None
            if has_shift and centres(norm) and has_layer_without_bias(block, branch):
                nn.init.ones_(norm.bias)
    reset_layer_scales(student)


def factor_to_one(streams: list[Tensor], norm: nn.Module) -> float:
    """The power of two, at least 1, that brings a stream's root mean square nearest to 1; of a stream of 0 or NaN 1.

    Args:
        streams: ``(N, L, D)`` each.
        norm: reads the stream (:func:`seen_by_norms`).
    """
    mean_squares = [seen_by_norms(stream, norm).square().mean() for stream in streams]
    size = torch.stack(mean_squares).mean().sqrt().item()
    if not 0 < size < 1:
        return 1.0
    return 2.0 ** round(-math.log2(size))


def chosen_blocks(student: ViT, teacher: ViT) -> list[int]:
    """The teacher's blocks that the student's follow: evenly spaced, the last one among them, from 0."""
    student_depth = len(student.blocks)
    teacher_depth = len(teacher.blocks)
    numbers = []
    for place in range(1, student_depth + 1):
        numbers.append(place * teacher_depth // student_depth - 1)
    return numbers
