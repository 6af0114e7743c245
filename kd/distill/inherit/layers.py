"""The student's layers, each fitted so that it does what the teacher's does."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from kd.distill.inherit.heads import head_map
from kd.distill.inherit.pair import FIRST_LAYERS, ViT, final_norm, kept_prefix
from kd.distill.inherit.stream import embedding, seen_by_norms
from kd.losses import OrthogonalProjection, Projection
from kd.models.output_scale import set_in_units
from kd.models.preprocess import Preprocess

GUIDE = 512  # pictures of the sample's first part, and at most of each other
Made = TypeVar("Made")
Centred = tuple[Tensor, Tensor, Tensor]  # rows less their mean, the mean, each row's share
RIDGE = 1e-2  # of the mean squared activation: keeps directions that the sample hardly shows near their start


def inherit_embedding(
    student: ViT,
    teacher: ViT,
    projection: Tensor,
    student_input: Preprocess,
    teacher_input: Preprocess,
) -> None:
    """Maps the teacher's patches, class and register tokens and positions onto the student's stream."""
    weight, bias, token, of_token, positions = embedding(student, teacher)
    # the two normalise pictures their own way: teacher's input = student's input * gain + shift, channel by channel
    student_form, teacher_form = (
        torch.tensor([p.mean, p.std]) for p in (student_input, teacher_input)
    )
    gain, shift = (
        student_form[1] / teacher_form[1],
        (student_form[0] - teacher_form[0]) / teacher_form[1],
    )
    bias = torch.einsum("tchw,c->t", weight, shift) + (bias if bias is not None else 0)
    weight = weight * gain[:, None, None]
    student.patch_embed.proj.weight.copy_(torch.einsum("st,tchw->schw", projection, weight))
    if student.patch_embed.proj.bias is not None:
        student.patch_embed.proj.bias.copy_(projection @ bias)
    has_own = (
        student.pos_embed is not None and not student.no_embed_class
    )  # a position for the class token
    kept = kept_prefix(student, teacher)
    token, of_token = token[:, kept], of_token[:, kept]
    tokens = (token if has_own else token + of_token) @ projection.T
    classes = int(student.cls_token is not None)
    if classes:
        student.cls_token.copy_(tokens[:, :1])
    if student.reg_token is not None:
        student.reg_token.copy_(tokens[:, classes:])
    if student.pos_embed is not None:
        student.pos_embed.copy_(
            (torch.cat([of_token, positions], 1) if has_own else positions) @ projection.T
        )


@dataclass(frozen=True)
class BlockActivations:
    """What one block of the teacher computes on a part of the sample, of the tokens that the student has too."""

    block: Any
    qkv: Tensor
    """Queries, keys and values, ``(N, L, ...)``, like all of these."""
    heads: Tensor
    """Input of the attention's projection."""
    units: Tensor
    """Input of the MLP's second layer."""
    hidden: list[Tensor]
    """Outputs of the MLP's first layers."""
    middle: Tensor
    """The stream between attention and MLP, as the teacher's norms see it."""
    after: Tensor
    """The stream that the student's should equal after the block, likewise."""
    moments: dict[object, Tensor] = field(default_factory=dict)
    """Of heads and units, for students of all widths."""

    @classmethod
    def of(
        cls, block: Any, before: Tensor, kept: Tensor, guides: bool
    ) -> tuple["BlockActivations", Tensor]:
        """Runs a block on what the norms see of the stream before it; also returns that of all tokens after it."""
        first = [getattr(block.mlp, name) for name, _ in FIRST_LAYERS[type(block.mlp)]]
        layers = [block.attn.qkv, block.attn.proj, block.mlp.fc2, *first]
        with _caught(*layers) as seen:
            middle = seen_by_norms(
                before + block.drop_path1(block.ls1(block.attn(block.norm1(before)))), block.norm1
            )
            after = seen_by_norms(
                middle + block.drop_path2(block.ls2(block.mlp(block.norm2(middle)))), block.norm2
            )
        (_, qkv), (heads, _), (units, _), *hidden = [
            tuple(x[:, kept] for x in seen[layer]) for layer in layers
        ]
        large, ends = [qkv, *(out for _, out in hidden)], (middle[:, kept], after[:, kept])
        if not guides:  # what decides on heads and units is dropped, the largest of the rest halved
            large, heads, units = [x.bfloat16() for x in large], torch.empty(0), torch.empty(0)
        return cls(block, large[0], heads, units, large[1:], *ends), after


class Aim:
    """What the fits of one block aim at, for all students of one projection; kept where there are ``several``."""

    def __init__(
        self,
        found: Sequence[BlockActivations],
        projection: Tensor,
        shares: Tensor | None,
        several: bool,
    ):
        self.found, self.projection, self.shares, self.several = found, projection, shares, several
        self.guide, self.teacher = (
            found[0],
            found[0].block,
        )  # the guide decides which heads and units are kept
        self._known: dict[object, Any] = {}

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        """The value of ``make()``, remembered under ``key`` where several students use it."""
        if not self.several:
            return make()
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def outputs(
        self, layer: nn.Linear, key: object, of: Callable[[BlockActivations], Tensor]
    ) -> Iterator[Centred]:
        """What a student's layer is fitted to in each part, centred for :func:`fit`."""
        centre = layer.bias is not None
        for n, part in enumerate(self.found):
            yield self.once((key, centre, n), lambda: _centred(of(part), self.shares, centre))  # noqa: B023

    def missing(self, name: str, streams: Sequence[Tensor]) -> Iterator[Tensor]:
        """What a student's stream lacks of the teacher's."""
        for n, (part, x) in enumerate(zip(self.found, streams, strict=True)):
            yield self.once((name, n), lambda: getattr(part, name) @ self.projection.T) - x  # noqa: B023


def inherit_block(block: Any, aim: Aim, streams: Sequence[Tensor]) -> list[Tensor]:
    """Fits a block: the student's stream before it -> after it, (N, L, D) in parts."""
    teacher, small, shares = aim.teacher, block.mlp, aim.shares
    normed = [block.norm1(x) for x in streams]
    write = aim.once(
        "proj", lambda: aim.projection @ (_gamma(teacher.ls1)[:, None] * teacher.attn.proj.weight)
    )
    write = _fit_qkv(block, aim, normed, write)
    heads = [_input_of(block.attn, "proj", x) for x in normed]
    fit(block.attn.proj, zip(heads, aim.missing("middle", streams), strict=True), write, shares)
    streams = [x + block.ls1(block.attn.proj(part)) for x, part in zip(streams, heads, strict=True)]

    write = aim.once(
        "fc2", lambda: aim.projection @ (_gamma(teacher.ls2)[:, None] * teacher.mlp.fc2.weight)
    )
    count, keep = aim.guide.units.shape[-1], small.fc2.in_features
    units = aim.once(("units", keep), lambda: _best(aim.guide, "units", write, count, keep, shares))
    normed = [block.norm2(x) for x in streams]
    for i, (name, repeats) in enumerate(FIRST_LAYERS[type(teacher.mlp)]):
        rows = torch.cat([units + repeat * count for repeat in range(repeats)])
        folded = partial(_folded, getattr(teacher.mlp, name), teacher.norm2, aim.projection, rows)
        layer = getattr(small, name)
        outputs = aim.outputs(layer, (name, keep), lambda part: part.hidden[i][..., rows].float())  # noqa: B023
        fit(layer, zip(normed, outputs, strict=True), aim.once((name, keep), folded), shares)
    hidden = [_input_of(small, "fc2", x) for x in normed]
    fit(small.fc2, zip(hidden, aim.missing("after", streams), strict=True), write[:, units], shares)
    return [x + block.ls2(small.fc2(part)) for x, part in zip(streams, hidden, strict=True)]


def _fit_qkv(block: Any, aim: Aim, normed: Sequence[Tensor], write: Tensor) -> Tensor:
    """Fits queries, keys and values; returns the start of the attention's projection."""
    small, big, guide = block.attn, aim.teacher.attn, aim.guide
    folded = partial(
        _folded, big.qkv, aim.teacher.norm1, aim.projection, torch.arange(len(big.qkv.weight))
    )
    everything = aim.once("qkv", folded)
    key = small.num_heads, small.head_dim
    if small.head_dim != big.head_dim:
        sizes = (small.num_heads, big.num_heads), (small.head_dim, big.head_dim)
        mapped, start = aim.once(key, lambda: head_map(guide.qkv, guide.heads, write, *sizes))
        outputs = aim.outputs(small.qkv, key, lambda part: part.qkv.float() @ mapped.T)
        fit(small.qkv, zip(normed, outputs, strict=True), mapped @ everything, aim.shares)
        return start
    columns = aim.once(
        key, lambda: _best(guide, "heads", write, big.num_heads, small.num_heads, aim.shares)
    )
    rows = torch.cat([columns + part * big.num_heads * big.head_dim for part in range(3)])
    outputs = aim.outputs(small.qkv, key, lambda part: part.qkv[..., rows].float())
    fit(small.qkv, zip(normed, outputs, strict=True), everything[rows], aim.shares)
    for norm in ("q_norm", "k_norm"):
        getattr(small, norm).load_state_dict(getattr(big, norm).state_dict())
    return write[:, columns]


def inherit_head(
    student: ViT, teacher: ViT, streams: Sequence[Tensor], projection: Tensor, logits: Tensor
) -> None:
    """Fits the classifier to the teacher's logits by ridge regression, starting from the teacher's projected head.

    Args:
        student: its layers below are fitted already.
        teacher: whose head is the start.
        streams: the student's tokens after the last block, ``(n, T, D)`` a batch.
        projection: maps the teacher's width to the student's.
        logits: the teacher's, ``(N, C)``, one row a picture of all batches.
    """
    start = _folded(
        teacher.head, final_norm(teacher), projection, torch.arange(teacher.num_classes)
    )
    features = torch.cat([student.forward_head(student.norm(x), pre_logits=True) for x in streams])
    ridge = min(
        1.0, GUIDE / len(logits)
    )  # one row a picture: where they are few, the start weighs more
    fit(student.head, [(features, logits)], start, ridge=ridge)
    set_in_units(student.head, student.head.weight.clone(), student.head.bias.clone())


def _gamma(layer_scale: nn.Module) -> Tensor:
    return getattr(layer_scale, "gamma", torch.ones(1))


def _folded(linear: nn.Linear, norm: Any, projection: Tensor, rows: Tensor) -> Tensor:
    """Rows of ``linear`` after ``norm``, for the student's normalised stream: (rows, D_student)."""
    scale = (projection.shape[1] / projection.shape[0]) ** 0.5
    return (
        scale * (linear.weight[rows] * (1.0 if norm.weight is None else norm.weight)) @ projection.T
    )


def _best(
    found: BlockActivations, name: str, write: Tensor, groups: int, keep: int, shares: Tensor | None
) -> Tensor:
    """Input columns of the ``keep`` groups (heads, or units of size 1) that write most into the stream, in order."""
    size = write.shape[1] // groups
    key = name, shares is None
    if key not in found.moments:
        x, _, share = _centred(getattr(found, name), shares)
        found.moments[key] = (
            (share * x.square()).mean(0) if size == 1 else (share * x).T @ x / len(x)
        )
    seen = found.moments[key]
    if size == 1:
        power = seen * write.square().sum(0)
    else:
        gram = write.T @ write * seen
        power = torch.stack(
            [gram[g : g + size, g : g + size].sum() for g in range(0, groups * size, size)]
        )
    chosen = power.topk(keep).indices.sort().values
    return (chosen[:, None] * size + torch.arange(size)).flatten()


def _centred(x: Tensor, shares: Tensor | None, centre: bool = True) -> Centred:
    """Rows of ``(..., L, D)`` less their mean, the mean, and each row's share."""
    rows, share = x.flatten(0, -2), torch.ones(1)
    if shares is not None:
        share = (shares / shares.mean()).repeat(len(rows) // len(shares))[:, None]
    mean = (share * rows).mean(0) * centre
    return rows - mean, mean, share


def fit(
    linear: nn.Linear,
    parts: Iterable[tuple[Tensor, "Tensor | Centred"]],
    start: Tensor,
    shares: Tensor | None = None,
    ridge: float = RIDGE,
) -> None:
    """Sets ``linear`` to the ridge regression of outputs (..., D_out) on inputs (..., D_in), drawn towards ``start``.

    ``ridge`` is in units of the mean squared input, ``shares`` how much each token (..., L, D) counts.
    """
    # only moments of a part are kept, so that the sample may be large
    counts, moments = [], []
    for inputs, outputs in parts:
        x, mean_x, share = _centred(inputs, shares, linear.bias is not None)
        y, mean_y, _ = (
            outputs
            if isinstance(outputs, tuple)
            else _centred(outputs, shares, linear.bias is not None)
        )
        weighted = x if shares is None else share * x
        counts.append(len(x))
        moments.append((_symmetric(weighted, x) / len(x), weighted.T @ y / len(x), mean_x, mean_y))
    of = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    grams, crosses, means_x, means_y = (
        torch.stack(each).double() for each in zip(*moments, strict=True)
    )
    mean_x, mean_y = of @ means_x, of @ means_y
    gram, cross = grams[0], crosses[0]
    if len(counts) > 1:
        apart = of[:, None] * (means_x - mean_x)  # the parts' means from each other
        gram = torch.einsum("p,pij->ij", of, grams) + apart.T @ (means_x - mean_x)
        cross = torch.einsum("p,pij->ij", of, crosses) + apart.T @ (means_y - mean_y)
    missing = cross - gram @ start.T.double()
    gram.diagonal().add_(ridge * gram.diagonal().mean().clamp(min=1e-12))  # all units may be dead
    weight = start + torch.cholesky_solve(missing, torch.linalg.cholesky_ex(gram).L).T.float()
    linear.weight.copy_(weight)
    if linear.bias is not None:
        linear.bias.copy_(mean_y.float() - weight @ mean_x.float())


def _symmetric(a: Tensor, b: Tensor) -> Tensor:
    """``a.T @ b`` where that is symmetric: of large ones the upper part is copied."""
    half = a.shape[1] // 2
    if half < 128:
        return a.T @ b
    lower = a[:, half:].T @ b[:, :half]
    left, right = _symmetric(a[:, :half], b[:, :half]), _symmetric(a[:, half:], b[:, half:])
    return torch.cat([torch.cat([left, lower.T], 1), torch.cat([lower, right], 1)])


def fit_projection(projection: Projection, inputs: Tensor, outputs: Tensor) -> None:
    """Sets a linear layer or 1x1 convolution to a ridge regression, an orthogonal one to the nearest rotation.

    Args:
        projection: what maps the one to the other.
        inputs: (..., D_in).
        outputs: (..., D_out).
    """
    layer = projection.layers
    if isinstance(projection, OrthogonalProjection):
        projection.fit(inputs, outputs)
        return
    if not isinstance(layer, nn.Linear | nn.Conv2d) or (
        isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1)
    ):
        return
    linear = skip_init(
        nn.Linear, inputs.shape[-1], outputs.shape[-1], bias=layer.bias is not None
    )  # draws nothing
    fit(linear, [(inputs.cpu(), outputs.cpu())], torch.zeros(linear.weight.shape))
    layer.weight.copy_(linear.weight.view_as(layer.weight))
    if layer.bias is not None:
        layer.bias.copy_(linear.bias)


def _input_of(module: nn.Module, last: str, x: Tensor) -> Tensor:
    """What a module's last layer reads when the module runs."""
    layer = getattr(module, last)
    setattr(module, last, nn.Identity())
    try:
        return module(x)
    finally:
        setattr(module, last, layer)


@contextmanager
def _caught(*layers: nn.Module) -> Iterator[dict[nn.Module, tuple[Tensor, Tensor]]]:
    """Input and output of each layer's next forward."""
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    hooks = [
        layer.register_forward_hook(lambda one, x, out: seen.update({one: (x[0], out)}))
        for layer in layers
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
