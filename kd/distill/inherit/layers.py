"""The student's layers, each fitted so that it does what the teacher's does.

In all formulas M, (D_student, D_teacher), maps the teacher's stream onto the student's; see the package.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kd.distill.inherit.heads import Heads, map_heads
from kd.distill.inherit.measured import GUIDE, BlockActivations
from kd.distill.inherit.pair import FIRST_LAYERS, ViT, final_norm, kept_prefix
from kd.distill.inherit.ridge import CentredRows, centred_rows, fit_linear
from kd.distill.inherit.stream import embedding
from kd.models.output_scale import set_in_units
from kd.models.preprocess import Preprocess

Value = TypeVar("Value")


def inherit_embedding(
    student: ViT,
    teacher: ViT,
    projection: Tensor,
    student_input: Preprocess,
    teacher_input: Preprocess,
) -> None:
    """Maps the teacher's patches, class and register tokens and positions onto the student's stream.

    Args:
        student: its embedding is overwritten.
        teacher: whose embedding.
        projection: M, ``(D_student, D_teacher)``.
        student_input: how the student's pictures are normalised.
        teacher_input: how the teacher's are.
    """
    weight, bias, tokens, prefix_positions, patch_positions = embedding(student, teacher)

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


class BlockTargets:
    """What the fits of one block aim at, for all students of one projection.

    Args:
        parts: the teacher's block on each part of the sample.
        projection: M, ``(D_student, D_teacher)``.
        shares: how much each of a picture's tokens counts, ``(L,)``; None: all alike.
        several: whether more than one student uses it: then what they have in common is kept.
    """

    def __init__(
        self,
        parts: Sequence[BlockActivations],
        projection: Tensor,
        shares: Tensor | None,
        several: bool,
    ) -> None:
        self.parts = parts
        self.projection = projection
        self.shares = shares
        self.several = several
        self.guide = parts[0]
        """The part that decides which heads and units are kept."""
        self.teacher = parts[0].block
        """The teacher's block."""
        self._values: dict[object, Any] = {}

    def once(self, key: object, compute: Callable[[], Value]) -> Value:
        """The value of ``compute()``, kept under ``key`` where several students use it."""
        if not self.several:
            return compute()
        if key not in self._values:
            self._values[key] = compute()
        return self._values[key]

    def outputs(
        self, layer: nn.Linear, key: object, select: Callable[[BlockActivations], Tensor]
    ) -> Iterator[CentredRows]:
        """The outputs that a student's layer is fitted to, part by part.

        Args:
            layer: the student's; without a bias outputs are not centred.
            key: of :meth:`once`: alike for students whose outputs are alike.
            select: takes the outputs, ``(N, L, D_out)``, from a part.
        """
        centre = layer.bias is not None

        def outputs_of(part: BlockActivations) -> CentredRows:
            return centred_rows(select(part), self.shares, centre)

        for number, part in enumerate(self.parts):
            yield self.once((key, centre, number), partial(outputs_of, part))

    def missing(self, name: str, streams: Sequence[Tensor]) -> Iterator[Tensor]:
        """What a student's stream lacks of the teacher's, ``M x_teacher - x_student``, part by part.

        Args:
            name: of the teacher's stream: ``middle`` or ``after``.
            streams: the student's, ``(N, L, D_student)`` each.
        """

        def projected(part: BlockActivations) -> Tensor:
            return getattr(part, name) @ self.projection.T

        for number, (part, stream) in enumerate(zip(self.parts, streams, strict=True)):
            yield self.once((name, number), partial(projected, part)) - stream


def inherit_block(block: Any, targets: BlockTargets, streams: Sequence[Tensor]) -> list[Tensor]:
    """Fits a block of the student, layer by layer: each to the teacher's, on what the fitted ones before it give.

    ``middle = before + attention(norm1(before))``, then ``after = middle + mlp(norm2(middle))``.

    Args:
        block: the student's; its weights are overwritten. Its norms and layer scales are plain
            (:func:`kd.distill.inherit.stream.reset_norms`).
        targets: of the teacher's block that it follows.
        streams: the student's stream before the block, ``(N, L, D)`` of each part of the sample.

    Returns:
        The student's stream after the block, likewise.
    """
    streams = _fit_attention(block, targets, streams)
    return _fit_mlp(block, targets, streams)


def _fit_attention(block: Any, targets: BlockTargets, streams: Sequence[Tensor]) -> list[Tensor]:
    """Fits queries, keys and values, then the projection; returns the stream between attention and MLP."""
    attention, teacher = block.attn, targets.teacher
    normed = [block.norm1(stream) for stream in streams]

    def teacher_write() -> Tensor:
        """What multiplies the teacher's heads' outputs, mapped onto the student's stream: ``M diag(gamma) W``."""
        return targets.projection @ (_gamma(teacher.ls1)[:, None] * teacher.attn.proj.weight)

    # Queries, keys and values: those of chosen heads, or of all heads mapped to another size.
    write = targets.once("proj", teacher_write)
    if attention.head_dim == teacher.attn.head_dim:
        write = _fit_chosen_heads(attention, targets, normed, write)
    else:
        write = _fit_mapped_heads(attention, targets, normed, write)

    # The projection: from what the fitted heads give to what the stream lacks of the teacher's after the attention.
    heads = [_input_of_last_layer(attention, "proj", tokens) for tokens in normed]
    pairs = zip(heads, targets.missing("middle", streams), strict=True)
    fit_linear(attention.proj, pairs, write, targets.shares)
    middle = []
    for stream, head_outputs in zip(streams, heads, strict=True):
        middle.append(stream + block.ls1(attention.proj(head_outputs)))
    return middle


def _fit_chosen_heads(
    attention: Any, targets: BlockTargets, normed: Sequence[Tensor], write: Tensor
) -> Tensor:
    """Fits queries, keys and values to those of the teacher's heads that write most into the stream.

    Args:
        attention: the student's, with heads of the teacher's size.
        targets: of the teacher's block.
        normed: the attention's input, ``(N, L, D)`` of each part.
        write: what multiplies all the teacher's heads' outputs, ``(D, D_teacher)``.

    Returns:
        What multiplies the chosen heads' outputs in the student's stream: the start of its projection.
    """
    teacher = targets.teacher.attn
    key = attention.num_heads, attention.head_dim

    def choose() -> Tensor:
        counts = teacher.num_heads, attention.num_heads
        return _strongest_columns(targets.guide, "heads", write, *counts, targets.shares)

    columns = targets.once(key, choose)
    teacher_width = teacher.num_heads * teacher.head_dim
    rows = torch.cat([columns, columns + teacher_width, columns + 2 * teacher_width])
    outputs = targets.outputs(attention.qkv, key, lambda part: part.qkv[..., rows].float())
    start = _folded_qkv(targets)[rows]
    fit_linear(attention.qkv, zip(normed, outputs, strict=True), start, targets.shares)
    for norm in ("q_norm", "k_norm"):
        getattr(attention, norm).load_state_dict(getattr(teacher, norm).state_dict())
    return write[:, columns]


def _fit_mapped_heads(
    attention: Any, targets: BlockTargets, normed: Sequence[Tensor], write: Tensor
) -> Tensor:
    """As :func:`_fit_chosen_heads`, of heads of another size, :func:`kd.distill.inherit.heads.map_heads`."""
    teacher, guide = targets.teacher.attn, targets.guide
    student_heads = Heads(attention.num_heads, attention.head_dim)
    teacher_heads = Heads(teacher.num_heads, teacher.head_dim)
    key = attention.num_heads, attention.head_dim

    def compute_map() -> tuple[Tensor, Tensor]:
        return map_heads(guide.qkv, guide.heads, write, student_heads, teacher_heads)

    qkv_map, student_write = targets.once(key, compute_map)
    outputs = targets.outputs(attention.qkv, key, lambda part: part.qkv.float() @ qkv_map.T)
    start = qkv_map @ _folded_qkv(targets)
    fit_linear(attention.qkv, zip(normed, outputs, strict=True), start, targets.shares)
    return student_write


def _folded_qkv(targets: BlockTargets) -> Tensor:
    """:func:`_folded` of the teacher's queries, keys and values, ``(3 * D_teacher, D_student)``."""
    block = targets.teacher

    def compute() -> Tensor:
        every_row = torch.arange(len(block.attn.qkv.weight))
        return _folded(block.attn.qkv, block.norm1, targets.projection, every_row)

    return targets.once("qkv", compute)


def _fit_mlp(block: Any, targets: BlockTargets, streams: Sequence[Tensor]) -> list[Tensor]:
    """Fits the MLP's first layers, then its second; returns the stream after the block."""
    mlp, teacher = block.mlp, targets.teacher
    shares = targets.shares
    teacher_count = targets.guide.units.shape[-1]
    student_count = mlp.fc2.in_features
    normed = [block.norm2(stream) for stream in streams]

    def teacher_write() -> Tensor:
        """What multiplies the teacher's hidden units, mapped onto the student's stream: ``M diag(gamma) W``."""
        return targets.projection @ (_gamma(teacher.ls2)[:, None] * teacher.mlp.fc2.weight)

    # The hidden units that write most into the stream.
    write = targets.once("fc2", teacher_write)

    def choose() -> Tensor:
        counts = teacher_count, student_count
        return _strongest_columns(targets.guide, "units", write, *counts, shares)

    units = targets.once(("units", student_count), choose)

    # The first layers: fitted to what the teacher's give for these units. A gated unit has two outputs.
    for index, (name, outputs_per_unit) in enumerate(FIRST_LAYERS[type(teacher.mlp)]):
        rows = torch.cat([units + output * teacher_count for output in range(outputs_per_unit)])
        _fit_first_layer(getattr(mlp, name), targets, normed, (name, student_count), index, rows)

    # The second: from what the fitted units give to what the stream lacks of the teacher's after the block.
    hidden = [_input_of_last_layer(mlp, "fc2", tokens) for tokens in normed]
    pairs = zip(hidden, targets.missing("after", streams), strict=True)
    fit_linear(mlp.fc2, pairs, write[:, units], shares)
    after = []
    for stream, hidden_units in zip(streams, hidden, strict=True):
        after.append(stream + block.ls2(mlp.fc2(hidden_units)))
    return after


def _fit_first_layer(
    layer: nn.Linear,
    targets: BlockTargets,
    normed: Sequence[Tensor],
    key: tuple[str, int],
    index: int,
    rows: Tensor,
) -> None:
    """Fits one of the MLP's first layers.

    Args:
        layer: the student's.
        targets: of the teacher's block.
        normed: its input, ``(N, L, D)`` of each part.
        key: the layer's name, and the student's number of hidden units.
        index: of the layer among :data:`FIRST_LAYERS`.
        rows: of the teacher's outputs, those that it is fitted to.
    """
    teacher = targets.teacher
    teacher_layer = getattr(teacher.mlp, key[0])

    def folded() -> Tensor:
        return _folded(teacher_layer, teacher.norm2, targets.projection, rows)

    outputs = targets.outputs(layer, key, lambda part: part.hidden[index][..., rows].float())
    pairs = zip(normed, outputs, strict=True)
    fit_linear(layer, pairs, targets.once(key, folded), targets.shares)


def inherit_head(
    student: ViT, teacher: ViT, streams: Sequence[Tensor], projection: Tensor, logits: Tensor
) -> None:
    """Fits the classifier to the teacher's logits by ridge regression, starting from the teacher's projected head.

    Args:
        student: its layers below are fitted already.
        teacher: whose head is the start.
        streams: the student's tokens after the last block, ``(N, L, D)`` of each part.
        projection: M, ``(D_student, D_teacher)``.
        logits: the teacher's, ``(N, C)``, one row a picture of all parts.
    """
    every_row = torch.arange(teacher.num_classes)
    start = _folded(teacher.head, final_norm(teacher), projection, every_row)
    features = []
    for stream in streams:
        features.append(student.forward_head(student.norm(stream), pre_logits=True))
    # There is one row a picture: where they are few, the start weighs more.
    ridge = min(1.0, GUIDE / len(logits))
    fit_linear(student.head, [(torch.cat(features), logits)], start, ridge=ridge)
    set_in_units(student.head, student.head.weight.clone(), student.head.bias.clone())


def _gamma(layer_scale: nn.Module) -> Tensor:
    """The factors of a layer scale, ``(D,)``; one where the block has none."""
    return getattr(layer_scale, "gamma", torch.ones(1))


def _folded(linear: nn.Linear, norm: Any, projection: Tensor, rows: Tensor) -> Tensor:
    """Rows of the teacher's ``linear`` and of the norm before it, for the student's normalised stream.

    The teacher computes ``W diag(g) x sqrt(D_t) / |x|`` of its centred stream x (g: the norm's scale). With ``M x`` the
    student's stream, ``x = M' (M x)`` and ``|x| = |M x|`` but for what is cut, and the student's plain norm gives
    ``M x sqrt(D_s) / |M x|``. So the student's weight is ``sqrt(D_t / D_s) W diag(g) M'``. Shifts go into the bias,
    which is fitted.

    Returns:
        ``(rows, D_student)``.
    """
    student_width, teacher_width = projection.shape
    scale = (teacher_width / student_width) ** 0.5
    weight = linear.weight[rows]
    if norm.weight is not None:
        weight = weight * norm.weight
    return scale * weight @ projection.T


def _strongest_columns(
    activations: BlockActivations,
    name: str,
    write: Tensor,
    teacher_count: int,
    student_count: int,
    shares: Tensor | None,
) -> Tensor:
    """The columns of ``write`` of those heads, or hidden units, that write most into the stream.

    A group of columns W with activations x writes W x, whose mean square about its mean is ``sum(W'W * Cov(x))``,
    entry by entry.

    Args:
        activations: the guide's.
        name: ``heads`` or ``units``: of which activations.
        write: what multiplies them, ``(D_student, groups * size)``.
        teacher_count: the teacher's number of groups: heads, or hidden units (size 1).
        student_count: how many are kept.
        shares: how much each token counts.

    Returns:
        ``(student_count * size,)``, in rising order.
    """
    size = write.shape[1] // teacher_count
    key = name, shares is None
    if key not in activations.moments:
        rows, _, row_shares = centred_rows(getattr(activations, name), shares)
        if size == 1:
            moment = (row_shares * rows.square()).mean(0)  # (columns,): variances alone are needed
        else:
            moment = (row_shares * rows).T @ rows / len(rows)  # (columns, columns)
        activations.moments[key] = moment
    moment = activations.moments[key]

    if size == 1:
        powers = moment * write.square().sum(0)
    else:
        products = write.T @ write * moment
        group_sums = []
        for first in range(0, teacher_count * size, size):
            group_sums.append(products[first : first + size, first : first + size].sum())
        powers = torch.stack(group_sums)
    groups = powers.topk(student_count).indices.sort().values
    return (groups[:, None] * size + torch.arange(size)).flatten()


def _input_of_last_layer(module: nn.Module, name: str, inputs: Tensor) -> Tensor:
    """What a module's last layer, called ``name``, reads when the module runs on ``inputs``."""
    layer = getattr(module, name)
    setattr(module, name, nn.Identity())
    try:
        return module(inputs)
    finally:
        setattr(module, name, layer)
