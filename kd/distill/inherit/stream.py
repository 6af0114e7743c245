"""The residual stream: the teacher's on sample pictures, and how it maps onto the student's."""

from collections.abc import Iterable
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import Tensor, nn

from kd.distill.inherit.pair import ViT, centres, final_norm, stream_norms
from kd.progress import bar

CLASSIFIED = 0.95  # of the variance of the logits
FIRST = 1e4  # more than any direction's share of the streams, which is two for each of them at most


def embedding(student: ViT, teacher: ViT) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """The patch weights and bias, the prefix tokens, and the positions of them and of the student's patches."""
    patch = teacher.patch_embed.proj
    weight = resample_patch_embed(patch.weight, list(student.patch_embed.patch_size))
    nothing = weight.new_zeros(1, 0, len(weight))
    token = torch.cat(
        [nothing if t is None else t for t in (teacher.cls_token, teacher.reg_token)], 1
    )
    if teacher.pos_embed is None:
        count = student.patch_embed.grid_size[0] * student.patch_embed.grid_size[1]
        return (
            weight,
            patch.bias,
            token,
            torch.zeros_like(token),
            weight.new_zeros(1, count, len(weight)),
        )
    prefix = 0 if teacher.no_embed_class else teacher.num_prefix_tokens
    positions = resample_abs_pos_embed(
        teacher.pos_embed,
        new_size=list(student.patch_embed.grid_size),
        old_size=list(teacher.patch_embed.grid_size),
        num_prefix_tokens=prefix,
    )
    of_token = positions[:, :prefix] if prefix else torch.zeros_like(token)
    return weight, patch.bias, token, of_token, positions[:, prefix:]


def embedded_as(student: ViT, teacher: ViT, images: Tensor) -> Tensor:
    """The teacher's stream before its first block, (N, L, D_teacher), with the student's number of patches."""
    weight, bias, token, of_token, positions = embedding(student, teacher)
    patches = (
        nn.functional.conv2d(images, weight, bias, stride=weight.shape[-2:])
        .flatten(2)
        .transpose(1, 2)
    )
    return torch.cat([(token + of_token).expand(len(patches), -1, -1), patches + positions], 1)


def seen_by_norms(stream: Tensor, norm: nn.Module) -> Tensor:
    """The part of a stream that a norm reads: its centred part, or all of it (RMSNorm)."""
    return stream - stream.mean(-1, keepdim=True) if centres(norm) else stream


def teacher_streams(teacher: ViT, stream: Tensor) -> list[Tensor]:
    """What the norms see of the stream before each block and after the last, each (N, L, D_teacher)."""
    streams = [stream]
    for block in shown(teacher.blocks, "the teacher's blocks"):
        streams.append(torch.cat([block(part) for part in streams[-1].split(64)]))
    return [seen_by_norms(s, teacher.blocks[0].norm1) for s in streams]


def read_by_classifier(teacher: ViT, last: Tensor, most: int) -> Tensor:
    """Orthonormal directions of the last stream, (D_teacher, R <= most), that make :data:`CLASSIFIED` of what
    distinguishes pictures in the teacher's logits."""
    norm: Any = final_norm(teacher)
    reads = teacher.head.weight.double() * (1.0 if norm.weight is None else norm.weight.double())
    reads = seen_by_norms(reads - reads.mean(0), teacher.blocks[0].norm1)
    tokens = last[:, :1] if teacher.global_pool == "token" else last[:, teacher.num_prefix_tokens :]
    features = (
        (tokens * tokens.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()).mean(1).double()
    )
    _, size, right = torch.linalg.svd((features - features.mean(0)) @ reads.T, full_matrices=False)
    made = size.square().cumsum(0) / size.square().sum()
    count = min(int((made < CLASSIFIED).sum()) + 1, most)
    return torch.linalg.qr((right[:count] @ reads).T).Q


def moment_of(streams: list[Tensor], classes: int) -> Tensor:
    """Second moment (D, D) of the normalised streams; the class token, which is classified, counts as all patches."""
    width = streams[0].shape[-1]
    moment = torch.zeros(width, width, dtype=torch.float64)
    for stream in streams:
        unit = nn.functional.normalize(stream.double(), dim=-1)
        for part in (unit[:, :classes], unit[:, classes:]):
            flat = part.reshape(-1, width)
            moment += flat.T @ flat / max(1, len(flat))
    return moment


def projection_of(moment: Tensor, last: Tensor, student: ViT, teacher: ViT | None = None) -> Tensor:
    """``M``, (width, D_teacher): the leading directions of the stream; a student with RMSNorm has room for one more.

    The first ones, half of them at most, are those of the ``last`` stream that the classifier of ``teacher`` reads.
    """
    width = student.embed_dim
    room = width - 1 if centres(student.blocks[0].norm1) else width
    if teacher is not None:
        read = read_by_classifier(teacher, last, room // 2)
        moment = moment + FIRST * read @ read.T
    directions = torch.linalg.eigh(moment).eigenvectors.flip(1)[
        :, :room
    ]  # the teacher's all-ones direction comes last
    directions = (
        directions * directions.sum(0).add(1e-12).sign()
    )  # eigenvectors have no sign of their own
    start = torch.eye(width, dtype=torch.float64)
    if room < width:
        start[:, 0] = 1
        start = torch.linalg.qr(start).Q[:, 1:]  # orthonormal, and orthogonal to all-ones
    return (start @ directions.T).float()


def reset_norms(student: ViT) -> None:
    """Norms of the stream become plain (their scale and shift go into the next layer), layer scales one."""
    norm: Any
    for norm in stream_norms(student):
        if norm.weight is not None:
            nn.init.ones_(norm.weight)
        if getattr(norm, "bias", None) is not None:
            nn.init.zeros_(norm.bias)
    module: Any
    for module in student.modules():
        if hasattr(module, "gamma"):
            nn.init.ones_(module.gamma)


def chosen_blocks(student: ViT, teacher: ViT) -> list[int]:
    """Evenly spaced blocks of the teacher, the last one among them."""
    blocks_student, blocks_teacher = len(student.blocks), len(teacher.blocks)
    return [(i + 1) * blocks_teacher // blocks_student - 1 for i in range(blocks_student)]


def shown(blocks: Iterable[Any], label: str) -> Iterable[Any]:
    """The blocks, with a progress bar in the first process."""
    return bar(
        blocks,
        label=f"inherit: {label}",
        unit=" blocks",
        disable=getattr(rank_zero_only, "rank", 0) != 0,
    )
