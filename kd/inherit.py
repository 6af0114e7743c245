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

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from timm.layers import GluMlp, Mlp, PatchEmbed, RmsNorm, SwiGLU, resample_abs_pos_embed, resample_patch_embed
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn

from kd._bar import bar
from kd.dense import DenseModel
from kd.models import Images, Preprocess

ViT: TypeAlias = Any
"""A timm VisionTransformer: torch types its blocks as bare modules."""

FIRST_LAYERS = {Mlp: (("fc1", 1),), GluMlp: (("fc1", 2),), SwiGLU: (("fc1_g", 1), ("fc1_x", 1))}
"""Of each kind of MLP: the layers that make its hidden units, and how many of their outputs make one."""

EXACT = 0.9  # correlation below which a copy at full size was none; what is understood gives 0.98 and more
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
        ValueError: the pair does not fit (one line says what differs), or a copy at full size is none.
    """
    check_pair(student, teacher)
    modes = student.training, teacher.training
    student.eval(), teacher.eval()
    logits = torch.cat([teacher(teacher_input(part)) for part in pictures.split(64)])
    as_student = Preprocess(student_input.size, teacher_input.mean, teacher_input.std)
    streams = _teacher_streams(teacher, _embedded_as(student, teacher, as_student(pictures)))
    projection = _projection(streams, student, teacher.num_prefix_tokens)
    _reset_norms(student)
    _inherit_embedding(student, teacher, projection, student_input, teacher_input)
    stream = student._pos_embed(student.patch_embed(student_input(pictures)))
    pairs = list(zip(student.blocks, _chosen_blocks(student, teacher), strict=True))
    for block, number in _shown(pairs, "the student's blocks"):
        # a student of fewer blocks makes in one step what the teacher makes in several
        stream = _inherit_block(block, teacher.blocks[number], stream, streams[number], streams[number + 1], projection)
    _inherit_head(student, teacher, stream, projection, logits)
    if _copy_is_possible(student, teacher) and student_input.size == teacher_input.size:
        _check_copy(torch.cat([student(student_input(part)) for part in pictures.split(64)]), logits)
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


def check_pair(student: ViT, teacher: ViT) -> None:
    """Whether the student can start from the teacher; what the fit does not understand is refused.

    Raises:
        ValueError: the pair does not fit; one line says what differs.
    """
    for role, model in (("student", student), ("teacher", teacher)):
        if type(model) is not VisionTransformer:
            raise ValueError(f"the {role} must be a plain timm VisionTransformer, got {type(model).__name__}")
        problem = _not_understood(model)
        if problem:
            raise ValueError(f"the {role} has {problem}, which can't be inherited")
    ours, theirs = student.blocks[0], teacher.blocks[0]
    for name, a, b in (
        ("head size", ours.attn.head_dim, theirs.attn.head_dim),
        ("pooling", student.global_pool, teacher.global_pool),
        ("class token", student.cls_token is not None, teacher.cls_token is not None),
        ("kind of MLP", type(ours.mlp).__name__, type(theirs.mlp).__name__),
        ("qk_norm", _qk_norm(ours.attn), _qk_norm(theirs.attn)),
    ):
        if a != b:
            raise ValueError(f"student and teacher must have the same {name}, got {a} and {b}")
    if student.pos_embed is None and teacher.pos_embed is not None:
        raise ValueError("the student must have position embeddings, as the teacher has")
    for name, a, b in (
        ("width", student.embed_dim, teacher.embed_dim),
        ("depth", len(student.blocks), len(teacher.blocks)),
        ("heads", ours.attn.num_heads, theirs.attn.num_heads),
        ("hidden units", ours.mlp.fc2.in_features, theirs.mlp.fc2.in_features),
    ):
        if a > b:
            raise ValueError(f"the student must have no larger {name} than the teacher, got {a} and {b}")


def _not_understood(model: ViT) -> str:
    """What of a model the fit has no formula for; empty where it has all."""
    block = model.blocks[0]
    if any(type(b) is not Block or type(b.attn) is not Attention for b in model.blocks):
        return f"blocks of the kind {type(block).__name__} with {type(getattr(block, 'attn', None)).__name__}"
    norms = _norms(model)
    kinds = {type(norm).__name__ for norm in norms if _centres(norm) is None or _centres(norm) != _centres(norms[0])}
    has_head = isinstance(model.head, nn.Linear)
    checks = {
        "a patch embedding of its own (a hybrid)": type(model.patch_embed) is not PatchEmbed
        or not isinstance(model.patch_embed.norm, nn.Identity)
        or model.patch_embed.proj.in_channels != 3,
        "register tokens": model.reg_token is not None,
        "a norm before its blocks": not isinstance(model.norm_pre, nn.Identity),
        f"norms of the kind {', '.join(sorted(kinds))}": bool(kinds),
        f"an MLP of the kind {type(block.mlp).__name__}": type(block.mlp) not in FIRST_LAYERS,
        "a norm inside its MLP or before its attention's projection": any(
            not isinstance(norm, nn.Identity) for norm in (block.mlp.norm, getattr(block.attn, "norm", nn.Identity()))
        ),
        "gated attention": getattr(block.attn, "gate", None) is not None,
        "attention pooling": getattr(model, "attn_pool", None) is not None,
        f"pooling '{model.global_pool}'": has_head and model.global_pool not in ("token", "avg"),
        "no norm before its classifier": has_head and _final_norm(model) is None,
    }
    return next((what for what, found in checks.items() if found), "")


def _norms(model: ViT) -> list[nn.Module]:
    """The norms that read the residual stream."""
    final = _final_norm(model)
    return [n for block in model.blocks for n in (block.norm1, block.norm2)] + ([] if final is None else [final])


def _final_norm(model: ViT) -> nn.Module | None:
    """The norm before the classifier, where there is exactly one."""
    found = [norm for norm in (model.norm, model.fc_norm) if not isinstance(norm, nn.Identity)]
    return found[0] if len(found) == 1 else None


def _centres(norm: nn.Module) -> bool | None:
    """Whether a norm subtracts the mean; None for one of another kind."""
    if isinstance(norm, nn.LayerNorm):
        return True
    return False if isinstance(norm, (RmsNorm, nn.RMSNorm)) else None


def _qk_norm(attention: Any) -> str:
    return "none" if isinstance(attention.q_norm, nn.Identity) else type(attention.q_norm).__name__


# -- the residual stream --------


def _embedding(student: ViT, teacher: ViT) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """The teacher's patch weights and bias, class token, and the positions of it and of the student's patches."""
    patch = teacher.patch_embed.proj
    weight = resample_patch_embed(patch.weight, list(student.patch_embed.patch_size))
    nothing = weight.new_zeros(1, 0, len(weight))
    token = nothing if teacher.cls_token is None else teacher.cls_token
    if teacher.pos_embed is None:
        count = student.patch_embed.grid_size[0] * student.patch_embed.grid_size[1]
        return weight, patch.bias, token, torch.zeros_like(token), weight.new_zeros(1, count, len(weight))
    prefix = 0 if teacher.no_embed_class else teacher.num_prefix_tokens
    positions = resample_abs_pos_embed(
        teacher.pos_embed,
        new_size=list(student.patch_embed.grid_size),
        old_size=list(teacher.patch_embed.grid_size),
        num_prefix_tokens=prefix,
    )
    of_token = positions[:, :prefix] if prefix else torch.zeros_like(token)
    return weight, patch.bias, token, of_token, positions[:, prefix:]


def _embedded_as(student: ViT, teacher: ViT, images: Tensor) -> Tensor:
    """The teacher's stream before its first block, (N, L, D_teacher), with the student's number of tokens."""
    weight, bias, token, of_token, positions = _embedding(student, teacher)
    patches = nn.functional.conv2d(images, weight, bias, stride=weight.shape[-2:]).flatten(2).transpose(1, 2)
    return torch.cat([(token + of_token).expand(len(patches), -1, -1), patches + positions], 1)


def _seen(stream: Tensor, teacher: ViT) -> Tensor:
    """What of a stream the teacher's norms look at: its centred part, or all of it (RMSNorm)."""
    return stream - stream.mean(-1, keepdim=True) if _centres(teacher.blocks[0].norm1) else stream


def _teacher_streams(teacher: ViT, stream: Tensor) -> list[Tensor]:
    """What the norms see of the stream before each block and after the last, each (N, L, D_teacher)."""
    streams = [stream]
    for block in _shown(teacher.blocks, "the teacher's blocks"):
        streams.append(torch.cat([block(part) for part in streams[-1].split(64)]))
    return [_seen(s, teacher) for s in streams]


def _projection(streams: list[Tensor], student: ViT, prefix: int) -> Tensor:
    """``M``, (width, D_teacher): leading directions of the normalised stream over all layers.

    Every token counts by its direction alone, as a LayerNorm sees it; the class token as much as all patches
    together, since it alone is classified. A student with RMSNorm has room for one direction more.
    """
    teacher_width, width = streams[0].shape[-1], student.embed_dim
    room = width - 1 if _centres(student.blocks[0].norm1) else width
    moment = torch.zeros(teacher_width, teacher_width, dtype=torch.float64)
    for stream in streams:
        unit = nn.functional.normalize(stream.double(), dim=-1)
        for part in (unit[:, :prefix], unit[:, prefix:]):
            flat = part.reshape(-1, teacher_width)
            moment += flat.T @ flat / max(1, len(flat))
    directions = torch.linalg.eigh(moment).eigenvectors.flip(1)[:, :room]  # the teacher's all-ones direction comes last
    directions = directions * directions.sum(0).add(1e-12).sign()  # eigenvectors have no sign of their own
    start = torch.eye(width, dtype=torch.float64)
    if room < width:
        start[:, 0] = 1
        start = torch.linalg.qr(start).Q[:, 1:]  # orthonormal, and orthogonal to all-ones
    return (start @ directions.T).float()


def _reset_norms(student: ViT) -> None:
    """Norms of the stream become plain (their scale and shift go into the next layer), layer scales one."""
    norm: Any
    for norm in _norms(student):
        if norm.weight is not None:
            nn.init.ones_(norm.weight)
        if getattr(norm, "bias", None) is not None:
            nn.init.zeros_(norm.bias)
    module: Any
    for module in student.modules():
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
    weight, bias, token, of_token, positions = _embedding(student, teacher)
    # the two normalise pictures their own way: teacher's input = student's input * gain + shift, channel by channel
    ours, theirs = (torch.tensor([p.mean, p.std]) for p in (student_input, teacher_input))
    gain, shift = ours[1] / theirs[1], (ours[0] - theirs[0]) / theirs[1]
    bias = torch.einsum("tchw,c->t", weight, shift) + (bias if bias is not None else 0)
    weight = weight * gain[:, None, None]
    student.patch_embed.proj.weight.copy_(torch.einsum("st,tchw->schw", projection, weight))
    if student.patch_embed.proj.bias is not None:
        student.patch_embed.proj.bias.copy_(projection @ bias)
    has_own = student.pos_embed is not None and not student.no_embed_class  # a position for the class token
    if student.cls_token is not None:
        student.cls_token.copy_((token if has_own else token + of_token) @ projection.T)
    if student.pos_embed is not None:
        student.pos_embed.copy_((torch.cat([of_token, positions], 1) if has_own else positions) @ projection.T)


def _inherit_block(
    block: Any, teacher: Any, stream: Tensor, before: Tensor, after: Tensor, projection: Tensor
) -> Tensor:
    """Fits one block; returns the student's stream behind it.

    Args:
        block: the student's block.
        teacher: the teacher's block.
        stream: the student's stream before it, (N, L, D_student).
        before: what the teacher's norms see of the stream before its block, (N, L, D_teacher).
        after: what they see of the stream that the student's should equal afterwards.
        projection: ``M``.
    """
    first = FIRST_LAYERS[type(teacher.mlp)]
    layers = [getattr(teacher.mlp, name) for name, _ in first]
    with _caught(teacher.attn.qkv, teacher.attn.proj, teacher.mlp.fc2, *layers) as seen:
        middle = before + teacher.drop_path1(teacher.ls1(teacher.attn(teacher.norm1(before))))
        if _centres(teacher.norm1):
            middle = middle - middle.mean(-1, keepdim=True)
        teacher.mlp(teacher.norm2(middle))
    (_, qkv), (heads_out, _), (active, _), *hidden = seen

    heads, size = teacher.attn.num_heads, teacher.attn.head_dim
    write = projection @ (_gamma(teacher.ls1)[:, None] * teacher.attn.proj.weight)
    rows = _best(heads_out, write, heads, block.attn.num_heads, size)
    kept = torch.cat([rows + part * heads * size for part in range(3)])
    _fit(
        block.attn.qkv, block.norm1(stream), qkv[..., kept], _folded(teacher.attn.qkv, teacher.norm1, projection, kept)
    )
    for norm in ("q_norm", "k_norm"):
        getattr(block.attn, norm).load_state_dict(getattr(teacher.attn, norm).state_dict())
    with _caught(block.attn.proj) as seen:
        block.attn(block.norm1(stream))
    _fit(block.attn.proj, seen[0][0], middle @ projection.T - stream, write[:, rows])
    stream = stream + block.ls1(block.attn(block.norm1(stream)))

    write = projection @ (_gamma(teacher.ls2)[:, None] * teacher.mlp.fc2.weight)
    units = _best(active, write, active.shape[-1], block.mlp.fc2.in_features, 1)
    for (name, parts), layer, (_, out) in zip(first, layers, hidden, strict=True):
        rows = torch.cat([units + part * active.shape[-1] for part in range(parts)])
        start = _folded(layer, teacher.norm2, projection, rows)
        _fit(getattr(block.mlp, name), block.norm2(stream), out[..., rows], start)
    with _caught(block.mlp.fc2) as seen:
        block.mlp(block.norm2(stream))
    _fit(block.mlp.fc2, seen[0][0], after @ projection.T - stream, write[:, units])
    return stream + block.ls2(block.mlp(block.norm2(stream)))


def _inherit_head(
    student: ViT,
    teacher: ViT,
    stream: Tensor,
    projection: Tensor,
    logits: Tensor,
) -> None:
    if not isinstance(student.head, nn.Linear) or student.num_classes != teacher.num_classes:
        return
    start = _folded(teacher.head, _final_norm(teacher), projection, torch.arange(teacher.num_classes))
    features = student.forward_head(student.norm(stream), pre_logits=True)
    _fit(student.head, features, logits, start, ridge=1.0)  # one row a picture: few, so the start weighs more


def _copy_is_possible(student: ViT, teacher: ViT) -> bool:
    """Whether the two are classifiers of one architecture and size, up to layer scales."""
    if not isinstance(student.head, nn.Linear):
        return False
    shapes = [
        {name: value.shape for name, value in model.state_dict().items() if not name.endswith("gamma")}
        for model in (student, teacher)
    ]
    kinds = [[type(m) for m in model.modules() if not list(m.parameters())] for model in (student, teacher)]
    acts = [[kind for kind in of_one if kind not in (nn.Identity,)] for of_one in kinds]
    return shapes[0] == shapes[1] and acts[0] == acts[1]


def _check_copy(ours: Tensor, theirs: Tensor) -> None:
    """
    Raises:
        ValueError: answers that should be equal are not: something in these models is not understood.
    """
    ours, theirs = ours - ours.mean(0), theirs - theirs.mean(0)
    size = float(ours.norm() * theirs.norm())
    correlation = float((ours * theirs).sum()) / size if size else 1.0
    if correlation < EXACT:
        raise ValueError(
            f"a copy of this teacher should answer like it, and does not (correlation {correlation:.2f}): "
            "its architecture has a part that can't be inherited"
        )


def _gamma(layer_scale: nn.Module) -> Tensor:
    return getattr(layer_scale, "gamma", torch.ones(1))


def _folded(linear: nn.Linear, norm: Any, projection: Tensor, rows: Tensor) -> Tensor:
    """Rows of ``linear`` behind ``norm``, for the student's normalised stream: (rows, D_student).

    The teacher's LayerNorm scales to the root of its own width, the student's to the root of its.
    """
    scale = (projection.shape[1] / projection.shape[0]) ** 0.5
    gain = 1.0 if norm.weight is None else norm.weight
    return scale * (linear.weight[rows] * gain) @ projection.T


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
    mean = gram.diagonal().mean().clamp(min=1e-12)  # all units may be dead
    damping = ridge * mean * torch.eye(len(gram), dtype=torch.float64)
    missing = (x.T @ (y - x @ start.T) / len(x)).double()
    weight = start + torch.linalg.solve(gram + damping, missing).T.float()
    linear.weight.copy_(weight)
    if linear.bias is not None:
        linear.bias.copy_(mean_y - weight @ mean_x)


def _shown(blocks: Iterable[Any], label: str) -> Iterable[Any]:
    """The blocks, with a progress bar in the first process."""
    return bar(blocks, label=f"inherit: {label}", unit=" blocks", disable=getattr(rank_zero_only, "rank", 0) != 0)


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
