"""Starts a small vision transformer from the layers of a big one, in closed form, before any training.

Three published ideas meet here: a student may take a part of its teacher's weights (weight selection, Xu et al.,
arXiv 2311.18823); a transformer's residual stream can be rotated and cut to its leading directions, because a
LayerNorm only sees the direction of the centred stream (SliceGPT, Ashkboos et al., arXiv 2401.15024); and what was
cut is made good, layer by layer, by least squares against the teacher's own activations (as in FitNets' hints,
arXiv 1412.6550, but solved instead of trained).

How: ``M``, (student width, teacher width), maps the teacher's centred stream onto the student's. Its rows span the
stream's leading directions on sample pictures, and leave out the student's all-ones direction, which its LayerNorms
would subtract. Then, from the first block to the last, each linear layer of the student is fitted so that what it
computes *from the student's own activations* comes closest to the teacher's. Heads and hidden units that the student
has no room for are chosen by what they contribute.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from kd._bar import bar
from kd.dense import DenseModel
from kd.models import Images, Preprocess

ViT: TypeAlias = Any
"""A timm VisionTransformer: torch types its blocks as bare modules."""

RIDGE = 1e-2  # of the mean squared activation: keeps directions that the sample hardly shows near their start


@torch.no_grad()
def inherit(student: ViT, teacher: ViT, pictures: Images, student_input: Preprocess, teacher_input: Preprocess) -> None:
    """Overwrites the student's weights with what the teacher's layers become at the student's size.

    Deterministic. The classifier is taken over where both name the same number of classes.

    Args:
        student: a timm ``VisionTransformer``, changed in place.
        teacher: a timm ``VisionTransformer``, at least as wide and deep, with the same head size.
        pictures: a sample, uint8 (N, 3, H, W); some hundreds.
        student_input: the student's preprocessing.
        teacher_input: the teacher's preprocessing.

    Raises:
        ValueError: the pair does not fit; one line says what differs.
    """
    _check(student, teacher)
    modes = student.training, teacher.training
    student.eval(), teacher.eval()
    logits = torch.cat([teacher(teacher_input(part)) for part in pictures.split(64)])
    as_student = Preprocess(student_input.size, teacher_input.mean, teacher_input.std)
    streams = _teacher_streams(teacher, _embedded_as(student, teacher, as_student(pictures)))
    projection = _projection(streams, student.embed_dim, teacher.num_prefix_tokens)
    _reset_norms(student)
    _inherit_embedding(student, teacher, projection, student_input, teacher_input)
    stream = student._pos_embed(student.patch_embed(student_input(pictures)))
    pairs = list(zip(student.blocks, _chosen_blocks(student, teacher), strict=True))
    for block, number in bar(pairs, label="inherit: the student's blocks", unit=" blocks"):
        # a student of fewer blocks makes in one step what the teacher makes in several
        stream = _inherit_block(block, teacher.blocks[number], stream, streams[number], streams[number + 1], projection)
    _inherit_head(student, teacher, stream, streams[-1], projection, logits)
    student.train(modes[0]), teacher.train(modes[1])


@torch.no_grad()
def inherit_dense(
    student: DenseModel, teacher: DenseModel, pictures: Images, student_input: Preprocess, teacher_input: Preprocess
) -> None:
    """As :func:`inherit`, for dense models: the backbone, then each level's 1x1 convolution, fitted; the rest copied.

    Args:
        student: a dense model over a ViT, changed in place.
        teacher: likewise, with the same head width and classes.
        pictures: a sample, uint8 (N, 3, H, W).
        student_input: the student's preprocessing.
        teacher_input: the teacher's preprocessing.

    Raises:
        ValueError: the pair does not fit; one line says what differs.
    """
    inherit(student.backbone, teacher.backbone, pictures, student_input, teacher_input)
    training = student.training
    student.eval(), teacher.eval()
    ours = [student.levels(student_input(part)) for part in pictures.split(64)]
    theirs = [teacher.levels(teacher_input(part)) for part in pictures.split(64)]
    pairs = zip(student.head.levels, teacher.head.levels, strict=True)
    for i, (own, other) in enumerate(pairs):
        assert isinstance(own, nn.Conv2d)
        features = torch.cat([part[i] for part in ours])
        wanted = nn.functional.interpolate(
            torch.cat([other(part[i]) for part in theirs]), features.shape[2:], mode="bilinear"
        )
        linear = nn.Linear(own.in_channels, own.out_channels)
        _fit(linear, features.movedim(1, -1), wanted.movedim(1, -1), torch.zeros_like(linear.weight))
        own.weight.copy_(linear.weight[:, :, None, None])
        own.bias.copy_(linear.bias)  # type: ignore[union-attr]
    for name in ("fuse", "classifier"):
        getattr(student.head, name).load_state_dict(getattr(teacher.head, name).state_dict())
    student.train(training)


def _check(student: ViT, teacher: ViT) -> None:
    for role, model in (("student", student), ("teacher", teacher)):
        if not isinstance(model, VisionTransformer) or not hasattr(model.blocks[0].mlp, "fc1"):
            raise ValueError(f"the {role} must be a plain timm VisionTransformer, got {type(model).__name__}")
        if model.num_prefix_tokens != int(model.cls_token is not None) or not isinstance(model.norm_pre, nn.Identity):
            raise ValueError(f"the {role} must have no register tokens and no norm before its blocks")
    ours, theirs = student.blocks[0].attn, teacher.blocks[0].attn
    for name, a, b in (
        ("head size", ours.head_dim, theirs.head_dim),
        ("pooling", student.global_pool, teacher.global_pool),
        ("class token", student.cls_token is not None, teacher.cls_token is not None),
    ):
        if a != b:
            raise ValueError(f"student and teacher must have the same {name}, got {a} and {b}")
    for name, a, b in (
        ("width", student.embed_dim, teacher.embed_dim),
        ("depth", len(student.blocks), len(teacher.blocks)),
        ("heads", ours.num_heads, theirs.num_heads),
        ("hidden units", student.blocks[0].mlp.fc1.out_features, teacher.blocks[0].mlp.fc1.out_features),
    ):
        if a > b:
            raise ValueError(f"the student must have no larger {name} than the teacher, got {a} and {b}")


# -- the residual stream --------


def _embedding(student: ViT, teacher: ViT) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The teacher's patch weights, bias, position embedding and class token at the student's patch and grid."""
    patch = teacher.patch_embed.proj
    weight = resample_patch_embed(patch.weight, list(student.patch_embed.patch_size))
    positions = resample_abs_pos_embed(
        teacher.pos_embed,
        new_size=list(student.patch_embed.grid_size),
        old_size=list(teacher.patch_embed.grid_size),
        num_prefix_tokens=0 if teacher.no_embed_class else teacher.num_prefix_tokens,
    )
    token = teacher.cls_token if teacher.cls_token is not None else positions.new_zeros(1, 0, positions.shape[-1])
    return weight, patch.bias, positions, token


def _embedded_as(student: ViT, teacher: ViT, images: Tensor) -> Tensor:
    """The teacher's stream before its first block, (N, L, D_teacher), with the student's number of tokens."""
    weight, bias, positions, token = _embedding(student, teacher)
    patches = nn.functional.conv2d(images, weight, bias, stride=weight.shape[-2:]).flatten(2).transpose(1, 2)
    token = token.expand(len(patches), -1, -1)
    if teacher.no_embed_class:
        return torch.cat([token, patches + positions], 1)
    return torch.cat([token, patches], 1) + positions


def _centred(stream: Tensor) -> Tensor:
    return stream - stream.mean(-1, keepdim=True)


def _teacher_streams(teacher: ViT, stream: Tensor) -> list[Tensor]:
    """The centred stream before each block and after the last, each (N, L, D_teacher)."""
    streams = [stream]
    for block in bar(teacher.blocks, label="inherit: the teacher's blocks", unit=" blocks"):
        streams.append(torch.cat([block(part) for part in streams[-1].split(64)]))
    return [_centred(s) for s in streams]


def _projection(streams: list[Tensor], width: int, prefix: int) -> Tensor:
    """``M``, (width, D_teacher): leading directions of the normalised stream over all layers.

    Every token counts by its direction alone, as a LayerNorm sees it; the class token as much as all patches
    together, since it alone is classified.
    """
    teacher_width = streams[0].shape[-1]
    moment = torch.zeros(teacher_width, teacher_width, dtype=torch.float64)
    for stream in streams:
        unit = nn.functional.normalize(stream.double(), dim=-1)
        for part in (unit[:, :prefix], unit[:, prefix:]):
            flat = part.reshape(-1, teacher_width)
            moment += flat.T @ flat / max(1, len(flat))
    directions = torch.linalg.eigh(moment).eigenvectors.flip(1)[:, : width - 1]  # the all-ones direction comes last
    directions = directions * directions.sum(0).add(1e-12).sign()  # eigenvectors have no sign of their own
    start = torch.eye(width, dtype=torch.float64)
    start[:, 0] = 1
    basis = torch.linalg.qr(start).Q[:, 1:]  # orthonormal, and orthogonal to all-ones
    return (basis @ directions.T).float()


def _reset_norms(student: ViT) -> None:
    """Norms become plain (their scale and shift go into the next layer), layer scales one."""
    module: Any
    for module in student.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight), nn.init.zeros_(module.bias)
        if hasattr(module, "gamma"):
            nn.init.ones_(module.gamma)


def _chosen_blocks(student: ViT, teacher: ViT) -> list[int]:
    """Evenly spaced blocks of the teacher, the last one among them."""
    ours, theirs = len(student.blocks), len(teacher.blocks)
    return [(i + 1) * theirs // ours - 1 for i in range(ours)]


# -- layers --------


def _inherit_embedding(
    student: ViT,
    teacher: ViT,
    projection: Tensor,
    student_input: Preprocess,
    teacher_input: Preprocess,
) -> None:
    weight, bias, positions, token = _embedding(student, teacher)
    # the two normalise pictures their own way: teacher's input = student's input * gain + shift, channel by channel
    ours, theirs = (torch.tensor([p.mean, p.std]) for p in (student_input, teacher_input))
    gain, shift = ours[1] / theirs[1], (ours[0] - theirs[0]) / theirs[1]
    bias = torch.einsum("tchw,c->t", weight, shift) + (bias if bias is not None else 0)
    weight = weight * gain[:, None, None]
    student.patch_embed.proj.weight.copy_(torch.einsum("st,tchw->schw", projection, weight))
    if student.patch_embed.proj.bias is not None:
        student.patch_embed.proj.bias.copy_(projection @ bias)
    if student.cls_token is not None:
        student.cls_token.copy_(token @ projection.T)
    student.pos_embed.copy_(positions @ projection.T)


def _inherit_block(
    block: Any, teacher: Any, stream: Tensor, before: Tensor, after: Tensor, projection: Tensor
) -> Tensor:
    """Fits one block; returns the student's stream behind it.

    Args:
        block: the student's block.
        teacher: the teacher's block.
        stream: the student's stream before it, (N, L, D_student).
        before: the teacher's centred stream before its block, (N, L, D_teacher).
        after: the teacher's centred stream that the student's should equal afterwards.
        projection: ``M``.
    """
    with _caught(teacher.attn.qkv, teacher.attn.proj, teacher.mlp.fc1, teacher.mlp.fc2) as seen:
        middle = _centred(before + teacher.drop_path1(teacher.ls1(teacher.attn(teacher.norm1(before)))))
        teacher.mlp(teacher.norm2(middle))
    (_, qkv), (heads_out, _), (_, hidden), (active, _) = seen

    heads, size = teacher.attn.num_heads, teacher.attn.head_dim
    write = projection @ (_gamma(teacher.ls1)[:, None] * teacher.attn.proj.weight)
    rows = _best(heads_out, write, heads, block.attn.num_heads, size)
    kept = torch.cat([rows + part * heads * size for part in range(3)])
    _fit(
        block.attn.qkv, block.norm1(stream), qkv[..., kept], _folded(teacher.attn.qkv, teacher.norm1, projection, kept)
    )
    with _caught(block.attn.proj) as seen:
        block.attn(block.norm1(stream))
    _fit(block.attn.proj, seen[0][0], middle @ projection.T - stream, write[:, rows])
    stream = stream + block.ls1(block.attn(block.norm1(stream)))

    write = projection @ (_gamma(teacher.ls2)[:, None] * teacher.mlp.fc2.weight)
    units = _best(active, write, active.shape[-1], block.mlp.fc1.out_features, 1)
    _fit(
        block.mlp.fc1,
        block.norm2(stream),
        hidden[..., units],
        _folded(teacher.mlp.fc1, teacher.norm2, projection, units),
    )
    with _caught(block.mlp.fc2) as seen:
        block.mlp(block.norm2(stream))
    _fit(block.mlp.fc2, seen[0][0], after @ projection.T - stream, write[:, units])
    return stream + block.ls2(block.mlp(block.norm2(stream)))


def _inherit_head(
    student: ViT,
    teacher: ViT,
    stream: Tensor,
    teacher_stream: Tensor,
    projection: Tensor,
    logits: Tensor,
) -> None:
    if not isinstance(student.head, nn.Linear) or student.num_classes != teacher.num_classes:
        return
    norm = teacher.fc_norm if isinstance(teacher.fc_norm, nn.LayerNorm) else teacher.norm
    start = _folded(teacher.head, norm, projection, torch.arange(teacher.num_classes))
    features = student.forward_head(student.norm(stream), pre_logits=True)
    _fit(student.head, features, logits, start, ridge=1.0)  # one row a picture: few, so the start weighs more


def _gamma(layer_scale: nn.Module) -> Tensor:
    return getattr(layer_scale, "gamma", torch.ones(1))


def _folded(linear: nn.Linear, norm: Any, projection: Tensor, rows: Tensor) -> Tensor:
    """Rows of ``linear`` behind ``norm``, for the student's normalised stream: (rows, D_student).

    The teacher's LayerNorm scales to the root of its own width, the student's to the root of its.
    """
    scale = (projection.shape[1] / projection.shape[0]) ** 0.5
    return scale * (linear.weight[rows] * norm.weight) @ projection.T


def _best(activations: Tensor, write: Tensor, groups: int, keep: int, size: int) -> Tensor:
    """Input columns of the ``keep`` groups (heads, or units of size 1) that write most into the stream, in order."""
    flat = activations.reshape(-1, activations.shape[-1])
    covariance = torch.cov(flat.T) if size > 1 else None
    if covariance is None:
        power = flat.var(0) * write.square().sum(0)
    else:
        gram = write.T @ write * covariance
        power = torch.stack([gram[g : g + size, g : g + size].sum() for g in range(0, groups * size, size)])
    chosen = power.topk(keep).indices.sort().values
    return (chosen[:, None] * size + torch.arange(size)).flatten()


def _fit(linear: nn.Linear, inputs: Tensor, outputs: Tensor, start: Tensor, ridge: float = RIDGE) -> None:
    """Sets ``linear`` to the ridge regression of ``outputs`` on ``inputs``, drawn towards ``start``.

    Args:
        linear: the layer.
        inputs: (..., D_in).
        outputs: (..., D_out).
        start: (D_out, D_in).
        ridge: strength, in units of the mean squared input.
    """
    x, y = inputs.flatten(0, -2), outputs.flatten(0, -2)
    mean_x, mean_y = x.mean(0), y.mean(0)
    if linear.bias is None:
        mean_x, mean_y = torch.zeros_like(mean_x), torch.zeros_like(mean_y)
    x, y = x - mean_x, y - mean_y
    gram = (x.T @ x / len(x)).double()
    damping = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    missing = (x.T @ (y - x @ start.T) / len(x)).double()
    weight = start + torch.linalg.solve(gram + damping, missing).T.float()
    linear.weight.copy_(weight)
    if linear.bias is not None:
        linear.bias.copy_(mean_y - weight @ mean_x)


@contextmanager
def _caught(*layers: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Input and output of each layer's next forward, in the order given."""
    seen: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(layers)

    def note(i: int) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[i] = (inputs[0], output)

        return hook

    hooks = [layer.register_forward_hook(note(i)) for i, layer in enumerate(layers)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
