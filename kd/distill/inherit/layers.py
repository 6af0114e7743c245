"""The student's layers, each fitted so that it does what the teacher's does.

In all formulas M, (D_student, D_teacher), maps the teacher's stream onto the student's; see the package.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kd.distill.inherit.anatomy import (
    QKV_PARTS,
    Part,
    ViT,
    attend,
    layer_scale,
    qkv_biases,
    qkv_weight,
    scaled,
    set_qkv,
    take_inner_norm,
)
from kd.distill.inherit.heads import Heads, map_heads
from kd.distill.inherit.measured import GUIDE, BlockActivations
from kd.distill.inherit.pair import (
    FIRST_LAYERS,
    centres,
    final_norm,
    kept_prefix,
    pools_by_attention,
)
from kd.distill.inherit.ridge import (
    RIDGE,
    centred_rows,
    fit_first_classifier,
    fit_linear,
    fit_scale_and_shift,
    layer_for,
)
from kd.distill.inherit.stream import embedding
from kd.models.preprocess import Preprocess


def inherit_embedding(
    student: ViT,
    teacher: ViT,
    projection: Tensor,
    student_input: Preprocess,
    teacher_input: Preprocess,
) -> None:
    """Maps the teacher's patches, class and register tokens and positions onto the student's stream; nothing is fitted.

    Args:
        student: its embedding is overwritten; its patches' size in pixels and its grid may differ from the teacher's.
        teacher: whose embedding.
        projection: M, ``(D_student, D_teacher)``.
        student_input: how the student's pictures are normalised.
        teacher_input: how the teacher's are.
    """
    weight, bias, tokens, prefix_positions, patch_positions = embedding(student, teacher)
    projection = _before_norm(teacher.norm_pre, projection)

    # A pixel v is (v - m) / s in a model's input: teacher's input = student's input * gain + shift, by channel,
    # with gain = s_student / s_teacher and shift = (m_student - m_teacher) / s_teacher. Both go into the patches.
    student_mean, student_deviation = torch.tensor([student_input.mean, student_input.std])
    teacher_mean, teacher_deviation = torch.tensor([teacher_input.mean, teacher_input.std])
    gain = student_deviation / teacher_deviation
    shift = (student_mean - teacher_mean) / teacher_deviation
    shifted_bias = torch.einsum("tchw,c->t", weight, shift)
    if bias is not None:
        shifted_bias = shifted_bias + bias
    weight = weight * gain[:, None, None]

    # t: teacher's width, s: student's width
    patch = student.patch_embed.proj
    patch.weight.copy_(torch.einsum("st,tchw->schw", projection, weight))
    if patch.bias is not None:
        patch.bias.copy_(projection @ shifted_bias)
    else:  # the student adds the teacher's bias with the positions
        patch_positions = patch_positions + shifted_bias

    # Prefix tokens: where the student's have no positions, the teacher's are added to the tokens themselves.
    kept = kept_prefix(student, teacher)
    tokens = tokens[:, kept]
    prefix_positions = prefix_positions[:, kept]
    prefix_has_positions = student.pos_embed is not None and not student.no_embed_class
    if not prefix_has_positions:
        tokens = tokens + prefix_positions
    student_tokens = tokens @ projection.T
    class_tokens = int(student.cls_token is not None)
    if class_tokens:
        student.cls_token.copy_(student_tokens[:, :1])
    if student.reg_token is not None:
        student.reg_token.copy_(student_tokens[:, class_tokens:])

    positions = patch_positions
    if prefix_has_positions:
        positions = torch.cat([prefix_positions, patch_positions], 1)
    if student.pos_embed is not None:
        student.pos_embed.copy_(positions @ projection.T)


def _before_norm(norm: Part, projection: Tensor) -> Tensor:
    """The map from the teacher's embedded tokens to the student's, ``(D_student, D_teacher)``, where a norm follows.

    The norm gives ``g x / |x|`` of its centred input x (g: its scale), which M maps onto the student's stream. So the
    student's input is ``M diag(g) x``, with each row's mean subtracted to centre x; its length is not that of x, and the
    student's norm, which divides by it, gets scale and shift from :func:`fit_norm_before_blocks`.

    Args:
        norm: the teacher's; an identity leaves M as it is.
        projection: M, ``(D_student, D_teacher)``.
    """
    if isinstance(norm, nn.Identity):
        return projection
    scaled_projection = projection
    if norm.weight is not None:
        scaled_projection = projection * norm.weight
    if not centres(norm):
        return scaled_projection
    return scaled_projection - scaled_projection.mean(1, keepdim=True)


def fit_norm_before_blocks(norm: Part, tokens: Tensor, target: Tensor) -> None:
    """Fits scale and shift of the student's norm before its blocks, channel by channel, by least squares.

    Args:
        norm: the student's.
        tokens: its input on the parts that guide, ``(N, L, D_student)``.
        target: what it should give, likewise.
    """
    has_shift = getattr(norm, "bias", None) is not None
    nn.init.ones_(norm.weight)
    if has_shift:
        nn.init.zeros_(norm.bias)
    fit_scale_and_shift(norm, norm(tokens).flatten(0, 1), target.flatten(0, 1))


@dataclass
class BlockTargets:
    """What the fits of one block aim at."""

    parts: Sequence[BlockActivations]
    """The teacher's block on each part of the sample."""
    guide_parts: int
    """How many of these decide which heads and units are kept."""
    projection: Tensor
    """M, ``(D_student, D_teacher)``; of an attention pooling P (:mod:`kd.distill.inherit.pooling`)."""
    shares: Tensor | None = None
    """How much each of a picture's tokens counts, ``(L,)``; None: all alike."""
    passed: Callable[[], object] = lambda: None
    """Called after each part of the sample that has gone through one of the last layers' fits."""
    spreads: dict[object, Tensor] = field(default_factory=dict)
    """Covariances of the guide's heads, variances of its hidden units; filled when read, for all students of the block."""

    @property
    def guide(self) -> Sequence[BlockActivations]:
        """The parts that decide which heads and units are kept."""
        return self.parts[: self.guide_parts]

    @property
    def teacher(self) -> Part:
        """The teacher's block."""
        return self.parts[0].block

    def missing(self, name: str, streams: Sequence[Tensor]) -> Iterator[Tensor]:
        """What a student's stream lacks of the teacher's, ``M x_teacher - x_student``, part by part.

        Args:
            name: of the teacher's stream: ``middle`` (before the MLP) or ``after`` (the block).
            streams: the student's before the layer that adds to them, ``(N, L, D_student)`` of each part.

        Yields:
            ``(N, L, D_student)`` of each part; :attr:`passed` is called after each.
        """
        for part, stream in zip(self.parts, streams, strict=True):
            yield getattr(part, name) @ self.projection.T - stream
            self.passed()


def inherit_block(
    block: Part,
    targets: BlockTargets,
    streams: Sequence[Tensor],
    rotation: Tensor | None = None,
) -> list[Tensor]:
    """Fits a block of the student, layer by layer: each to the teacher's, on what the fitted ones before it give.

    ``middle = before + attention(norm1(before))``, then ``after = middle + mlp(norm2(middle))``.

    Args:
        block: the student's; its weights are overwritten. Its norms and layer scales are plain
            (:func:`kd.distill.inherit.stream.reset_norms`).
        targets: of the teacher's block that it follows.
        streams: the student's stream before the block, ``(N, L, D)`` of each part of the sample.
        rotation: of :func:`kd.distill.inherit.anatomy.rotation_of`.

    Returns:
        The student's stream after the block, likewise.
    """
    streams = _fit_attention(block, targets, streams, rotation)
    return fit_mlp(block, targets, streams)


def _fit_attention(
    block: Part, targets: BlockTargets, streams: Sequence[Tensor], rotation: Tensor | None
) -> list[Tensor]:
    """Fits queries, keys and values, then the attention's last layer, ``proj``.

    Args:
        block: the student's, changed in place.
        targets: of the teacher's block.
        streams: the student's before the block, ``(N, L, D)`` of each part.
        rotation: of :func:`kd.distill.inherit.anatomy.rotation_of`.

    Returns:
        The student's stream between attention and MLP, likewise.
    """
    attention = block.attn
    teacher = targets.teacher
    normed = [block.norm1(stream) for stream in streams]

    # Queries, keys and values: those of chosen heads, or of chosen heads mapped to another size.
    write = targets.projection @ _last_weight(teacher, 1, teacher.attn.proj)
    if attention.head_dim == teacher.attn.head_dim:
        write = _fit_chosen_heads(attention, targets, normed, write)
    else:
        write = _fit_mapped_heads(attention, targets, normed, write)

    # The projection: from what the fitted heads give to what the stream lacks of the teacher's after the attention.
    heads = []
    for tokens in normed:
        with _without_last_layer(attention, "proj"):
            heads.append(attend(attention, tokens, rotation))
    pairs = zip(heads, targets.missing("middle", streams), strict=True)
    fit_linear(attention.proj, pairs, write, targets.shares)
    middle = []
    for stream, head_outputs in zip(streams, heads, strict=True):
        middle.append(stream + scaled(block, 1, attention.proj(head_outputs)))
    return middle


def _fit_chosen_heads(
    attention: Part, targets: BlockTargets, normed: Sequence[Tensor], write: Tensor
) -> Tensor:
    """Fits queries, keys and values to those of the teacher's heads that write most into the stream.

    A gate of the attention is fitted too; norms of queries, of keys and of the heads' outputs are copied.

    Args:
        attention: the student's, with heads of the teacher's size.
        targets: of the teacher's block.
        normed: the attention's input, ``(N, L, D)`` of each part.
        write: what multiplies all the teacher's heads' outputs in the student's stream, ``(D_student, H_t * S)``.

    Returns:
        The columns of ``write`` of the chosen heads, ``(D_student, H_s * S)``: the start of the student's ``proj``.
    """
    block = targets.teacher
    teacher = block.attn
    columns = strongest_columns(targets, "heads", write, teacher.num_heads, attention.num_heads)
    teacher_width = teacher.num_heads * teacher.head_dim
    rows = torch.cat([columns + part * teacher_width for part in range(QKV_PARTS)])
    start = _folded_qkv(targets)[rows]

    def select(part: BlockActivations) -> Tensor:
        return part.qkv[..., rows].float()

    _fit_qkv(attention, targets, normed, select, start)
    for norm in ("q_norm", "k_norm"):
        teacher_norm = getattr(teacher, norm)
        getattr(attention, norm).load_state_dict(teacher_norm.state_dict())

    # What an attention may have beside: a gate of each head's outputs, a norm of them.
    gate = getattr(attention, "gate", None)
    if gate is not None:
        gates = []
        for part in targets.parts:
            assert part.gate is not None
            gates.append(part.gate[..., columns].float())
        pairs = zip(normed, gates, strict=True)
        start = folded(teacher.gate.weight, block.norm1, targets.projection, columns)
        fit_linear(gate, pairs, start, targets.shares)
    take_inner_norm(getattr(attention, "norm", None), getattr(teacher, "norm", None), columns)
    return write[:, columns]


def _fit_qkv(
    attention: Part,
    targets: BlockTargets,
    normed: Sequence[Tensor],
    select: Callable[[BlockActivations], Tensor],
    start: Tensor,
) -> None:
    """Fits queries, keys and values; those without a bias (keys of ``Eva``) in a regression of their own.

    Args:
        attention: the student's.
        targets: of the teacher's block.
        normed: the attention's input, ``(N, L, D)`` of each part.
        select: takes what they are fitted to, ``(N, L, 3 * H * S)``, from a part.
        start: their weights' start, ``(3 * H * S, D_student)``.
    """
    width = len(start) // QKV_PARTS
    rows_of_part = torch.arange(len(start)).split(width)
    have_bias = [bias is not None for bias in qkv_biases(attention)]
    for has_bias in sorted(set(have_bias)):
        parts = [part for part in range(QKV_PARTS) if have_bias[part] == has_bias]
        rows = torch.cat([rows_of_part[part] for part in parts])
        rows_start = start[rows]
        linear = layer_for(rows_start, has_bias)
        outputs: Iterator[Tensor] = map(select, targets.parts)
        if len(parts) < QKV_PARTS:
            outputs = (select(part)[..., rows] for part in targets.parts)
        pairs = zip(normed, outputs, strict=True)
        fit_linear(linear, pairs, rows_start, targets.shares)
        weights = linear.weight.split(width)
        biases: Sequence[Tensor | None] = [None] * len(parts)
        if has_bias:
            biases = linear.bias.split(width)
        for part, weight, bias in zip(parts, weights, biases, strict=True):
            set_qkv(attention, part, weight, bias)


def _fit_mapped_heads(
    attention: Part, targets: BlockTargets, normed: Sequence[Tensor], write: Tensor
) -> Tensor:
    """Fits an attention whose heads have another size than the teacher's: see
    :func:`kd.distill.inherit.heads.map_heads`.

    Arguments are those of :func:`_fit_chosen_heads`; there are no rotary positions. The result, ``(D_student, H_s * S_s)``,
    is where the attention's last layer starts.
    """
    teacher = targets.teacher.attn
    student_heads = Heads(attention.num_heads, attention.head_dim)
    teacher_heads = Heads(teacher.num_heads, teacher.head_dim)
    qkv = torch.cat([part.qkv for part in targets.guide])
    outputs = torch.cat([part.heads for part in targets.guide])
    qkv_map, student_write = map_heads(qkv, outputs, write, student_heads, teacher_heads)
    start = qkv_map @ _folded_qkv(targets)

    def select(part: BlockActivations) -> Tensor:
        return part.qkv.float() @ qkv_map.T

    _fit_qkv(attention, targets, normed, select, start)
    return student_write


def _folded_qkv(targets: BlockTargets) -> Tensor:
    """:func:`folded` of the teacher's queries, keys and values, in this order: ``(3 * H * S, D_student)``."""
    block = targets.teacher
    weight = qkv_weight(block.attn)
    every_row = torch.arange(len(weight))
    return folded(weight, block.norm1, targets.projection, every_row)


def fit_mlp(block: Part, targets: BlockTargets, streams: Sequence[Tensor]) -> list[Tensor]:
    """Fits the MLP's first layers, then its second.

    Args:
        block: the student's, changed in place; of an attention pooling a
            :class:`~kd.distill.inherit.pooling.PoolBlock`.
        targets: of the teacher's block, or of its pooling.
        streams: the student's between attention and MLP, ``(N, L, D)`` of each part.

    Returns:
        The stream after the block, likewise.
    """
    mlp = block.mlp
    teacher = targets.teacher
    teacher_count = targets.parts[0].units.shape[-1]
    normed = [block.norm2(stream) for stream in streams]

    # The hidden units that write most into the stream.
    write = targets.projection @ _last_weight(teacher, 2, teacher.mlp.fc2)
    units = strongest_columns(targets, "units", write, teacher_count, mlp.fc2.in_features)

    # The first layers: fitted to what the teacher's give for these units. A gated unit has two outputs.
    first_layers = FIRST_LAYERS[type(teacher.mlp)]
    for index, (name, outputs_per_unit) in enumerate(first_layers):
        rows = torch.cat([units + output * teacher_count for output in range(outputs_per_unit)])
        teacher_weight = getattr(teacher.mlp, name).weight
        outputs = [part.hidden[index] for part in targets.parts]
        chosen = (values[..., rows].float() for values in outputs)
        layer = getattr(mlp, name)
        start = folded(teacher_weight, teacher.norm2, targets.projection, rows)
        pairs = zip(normed, chosen, strict=True)
        fit_linear(layer, pairs, start, targets.shares)

    take_inner_norm(mlp.norm, teacher.mlp.norm, units)

    # The second: from what the fitted units give to what the stream lacks of the teacher's after the block.
    with _without_last_layer(mlp, "fc2"):
        hidden = [mlp(tokens) for tokens in normed]
    pairs = zip(hidden, targets.missing("after", streams), strict=True)
    fit_linear(mlp.fc2, pairs, write[:, units], targets.shares)
    after = []
    for stream, hidden_units in zip(streams, hidden, strict=True):
        after.append(stream + scaled(block, 2, mlp.fc2(hidden_units)))
    return after


def inherit_head(
    student: ViT, teacher: ViT, streams: Sequence[Tensor], projection: Tensor, logits: Tensor
) -> None:
    """Fits the classifier to the teacher's logits by ridge regression, drawn to the teacher's projected head.

    Where the teacher alone pools by attention, its head reads another thing than the student's: the fit is drawn to 0.

    Args:
        student: its layers below are fitted already.
        teacher: whose head is the start, but where it alone pools by attention.
        streams: the student's tokens after the last block, ``(N, L, D)`` of each part.
        projection: M, ``(D_student, D_teacher)``; of two models that pool by attention: P of what is pooled; where the
            teacher alone does, not read.
        logits: the teacher's, ``(N, C)``, one row a picture of all parts; where targets are numbers, in their units.
    """
    # There is one row a picture: where they are few, the start weighs more; a start of 0 keeps RIDGE.
    ridge = min(1.0, GUIDE / len(logits))
    if not pools_by_attention(teacher):
        every_row = torch.arange(teacher.num_classes)
        start = folded(teacher.head.weight, final_norm(teacher), projection, every_row)
    elif pools_by_attention(student):
        start = teacher.head.weight @ projection.T
    else:  # the teacher's classifier reads what its pooling gives, the student's reads tokens
        start = torch.zeros_like(student.head.weight)
        ridge = RIDGE
    features = []
    for stream in streams:
        features.append(student.forward_head(student.norm(stream), pre_logits=True))
    fit_first_classifier(student.head, features, logits, start, ridge)


def _last_weight(block: Part, branch: int, layer: nn.Linear) -> Tensor:
    """The weight of a branch's last layer with the layer scale after it, ``diag(gamma) W``, ``(D, D_in)``.

    Args:
        block: of the teacher.
        branch: 1, the attention, or 2, the MLP.
        layer: the branch's last.
    """
    scale = layer_scale(block, branch)
    if scale is None:
        return layer.weight
    return scale[:, None] * layer.weight


def folded(weight: Tensor, norm: Part, projection: Tensor, rows: Tensor) -> Tensor:
    """Rows of a teacher's weight and of the norm before it, for the student's normalised stream.

    The teacher computes ``W diag(g) x sqrt(D_t) / |x|`` of its centred stream x (g: the norm's scale). With ``M x`` the
    student's stream, ``x = M' (M x)`` and ``|x| = |M x|`` but for what is cut, and the student's plain norm gives
    ``M x sqrt(D_s) / |M x|``. So the student's weight is ``sqrt(D_t / D_s) W diag(g) M'``. Shifts go into the bias,
    which is fitted.

    Args:
        weight: W, ``(D_out, D_teacher)``, of a layer of the teacher that reads the norm.
        norm: the teacher's, before that layer.
        projection: M, ``(D_student, D_teacher)``.
        rows: numbers of W's rows that the student has, ``(R,)``.

    Returns:
        ``(R, D_student)``: where the fit of the student's layer starts.
    """
    student_width, teacher_width = projection.shape
    scale = (teacher_width / student_width) ** 0.5
    weight = weight[rows]
    if norm.weight is not None:
        weight = weight * norm.weight
    return scale * weight @ projection.T


def strongest_columns(
    targets: BlockTargets,
    name: str,
    write: Tensor,
    teacher_count: int,
    student_count: int,
) -> Tensor:
    """The columns of ``write`` of those heads, or hidden units, that write most into the stream.

    A group of columns W with activations x writes W x, whose mean square about its mean is ``sum(W'W * Cov(x))``,
    entry by entry.

    Args:
        targets: of the block.
        name: ``heads`` or ``units``: of which of the teacher's activations (:class:`BlockActivations`).
        write: what multiplies them, ``(D_student, groups * size)``.
        teacher_count: the teacher's number of groups: heads, or hidden units (size 1).
        student_count: how many are kept.

    Returns:
        ``(student_count * size,)``, in rising order.
    """
    size = write.shape[1] // teacher_count
    key = name, targets.shares is None  # students with and without shares read the same targets
    if key not in targets.spreads:
        values = [getattr(part, name) for part in targets.guide]
        targets.spreads[key] = _spread(values, targets.shares, of_each_column=size == 1)
    moment = targets.spreads[key]

    if size == 1:
        powers = moment * write.square().sum(0)
    else:
        products = write.T @ write * moment
        group_sums = []
        for first in range(0, teacher_count * size, size):
            group = slice(first, first + size)
            group_sums.append(products[group, group].sum())
        powers = torch.stack(group_sums)
    groups = powers.topk(student_count).indices.sort().values
    columns = groups[:, None] * size + torch.arange(size)
    return columns.flatten()


def _spread(parts: Sequence[Tensor], shares: Tensor | None, of_each_column: bool) -> Tensor:
    """The covariance of activations over the parts of a sample, ``(D, D)``, or their variances, ``(D,)``, for D channels.

    By the law of total covariance, with f the share of each part: ``sum_p f_p (C_p + (m_p - m) (m_p - m)')``.

    Args:
        parts: ``(N, L, D)`` each.
        shares: how much each of the L tokens counts; None: all alike.
        of_each_column: variances alone.
    """
    moments = []
    means = []
    counts = []
    for values in parts:
        rows, mean, row_shares = centred_rows(values, shares)
        if of_each_column:
            moments.append((row_shares * rows.square()).mean(0))
        else:
            moments.append((row_shares * rows).T @ rows / len(rows))
        means.append(mean)
        counts.append(len(rows))
    if len(parts) == 1:
        return moments[0]
    fractions = torch.tensor(counts) / sum(counts)
    total = torch.einsum("p,p...->...", fractions, torch.stack(moments))
    offsets = torch.stack(means) - fractions @ torch.stack(means)
    if of_each_column:
        return total + fractions @ offsets.square()
    return total + (fractions[:, None] * offsets).T @ offsets


@contextmanager
def _without_last_layer(module: nn.Module, name: str) -> Iterator[None]:
    """Inside, a module returns the input of its last layer, the attribute ``name``; afterwards the layer is back."""
    layer = getattr(module, name)
    setattr(module, name, nn.Identity())
    try:
        yield
    finally:
        setattr(module, name, layer)
