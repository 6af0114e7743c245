"""The parts of timm's vision transformers by one name each: ``VisionTransformer`` and ``Eva`` call them differently.

``Eva`` is the class of EVA-02, DINOv3 and Perception Encoder. Its positions may be rotary (RoPE, Su et al., arXiv
2104.09864): queries and keys are turned by an angle of their place before they are compared. A rotation acts within a
head, on the dimensions in their order; so a student's head must be a whole head of its teacher.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

ViT: TypeAlias = Any  # timm's VisionTransformer or Eva: torch types their blocks as bare modules
CNN: TypeAlias = Any  # timm's ConvNeXt or ResNet, likewise
Part: TypeAlias = (
    Any  # a block, an attention, a norm: whatever of such a model has parts of its own
)

QKV_PARTS = 3
"""Queries, keys and values, in this order."""
SIZES = ("dim", "depth", "num_heads", "feat_shape", "training")
"""Attributes of timm's rotary positions that say how large a model is, not how it rotates."""
ONLY_IN_TRAINING = ("shift_coords", "jitter_coords", "rescale_coords", "aug_active")
"""Attributes that change the positions while a model trains, and at no other time."""


@contextmanager
def caught(
    layers: Iterable[nn.Module],
    output: bool = False,
    taken: Callable[[nn.Module, Tensor], Tensor] = lambda layer, tensor: tensor,
) -> Iterator[dict[nn.Module, Tensor]]:
    """Inside, catches the input (or the output) of each layer that runs.

    Args:
        layers: whose tensors are caught.
        output: True: catch what a layer returns; False: its first argument.
        taken: computes what is kept from the layer and its tensor; by default the tensor itself.

    Yields:
        Tensors by layer, which fill while a model runs; those of a layer's last run are kept.
    """
    tensors: dict[nn.Module, Tensor] = {}

    def catch_input(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        tensors[layer] = taken(layer, inputs[0])

    def catch_output(layer: nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> None:  # noqa: ARG001
        tensors[layer] = taken(layer, result)

    hooks: list[Any] = []
    for layer in layers:
        if output:
            hooks.append(layer.register_forward_hook(catch_output))
        else:
            hooks.append(layer.register_forward_pre_hook(catch_input))
    try:
        yield tensors
    finally:
        for hook in hooks:
            hook.remove()


def register_count(model: ViT) -> int:
    """How many register tokens a model has; also called storage tokens."""
    if model.reg_token is None:
        return 0
    return model.reg_token.shape[1]


def layer_scale(block: Part, branch: int) -> Tensor | None:
    """The factor, ``(D,)``, of what a branch of a block adds to the stream; None without one. ``branch``: 1 is the
    attention, 2 the MLP.
    """
    scale = getattr(block, f"gamma_{branch}", None)  # Eva
    if scale is not None:
        return scale
    return getattr(getattr(block, f"ls{branch}", None), "gamma", None)  # VisionTransformer


def scaled(block: Part, branch: int, written: Tensor) -> Tensor:
    """What a branch adds to the stream: what its last layer gives, times its layer scale.

    Args:
        block: of a transformer.
        branch: 1, the attention, or 2, the MLP.
        written: output of the branch's last layer, ``(N, L, D)``.
    """
    scale = layer_scale(block, branch)
    if scale is None:
        return written
    return written * scale


def reset_layer_scales(model: nn.Module) -> None:
    """Sets a model's layer scales to 1: the layers before them are fitted without."""
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in ("gamma", "gamma_1", "gamma_2"):
            nn.init.ones_(parameter)


def scale_stream(model: ViT, factor: float) -> None:
    """Multiplies the residual stream by a factor, in place: all weights that write into it.

    The norms that read the stream divide by its length, so the model answers as before.

    Args:
        model: a vision transformer.
        factor: > 0; a power of two changes no bit but by the small constant (``eps``) in the norms.
    """
    if isinstance(model.norm_pre, nn.Identity):
        patch = model.patch_embed.proj
        written = [patch.weight, patch.bias, model.cls_token, model.reg_token, model.pos_embed]
    else:
        written = [model.norm_pre.weight, model.norm_pre.bias]
    for block in model.blocks:
        for layer in (block.attn.proj, block.mlp.fc2):
            written += [layer.weight, layer.bias]
    for parameter in written:
        if parameter is not None:
            parameter.mul_(factor)


def reset_norm(norm: Part) -> None:
    """Sets a norm to scale 1 and shift 0, where it has them: the layer after it, which is fitted, has both."""
    if norm.weight is not None:
        nn.init.ones_(norm.weight)
    if getattr(norm, "bias", None) is not None:
        nn.init.zeros_(norm.bias)


def tokens_before_blocks(model: ViT, pictures: Tensor) -> Tensor:
    """Patches and prefix tokens with their positions, as they enter the first block, or the norm in front of it.

    Args:
        model: a vision transformer.
        pictures: prepared, ``(N, 3, H, W)``.

    Returns:
        ``(N, L, D)``.
    """
    tokens = model._pos_embed(model.patch_embed(pictures))
    # Eva: the rotary positions, too
    if isinstance(tokens, tuple):
        return tokens[0]
    return tokens


def rotation_of(student: ViT) -> Tensor | None:
    """Sines and cosines of a student's rotary positions on its grid of patches, ``(L, 2 * S)``; None: it has none.

    The teacher's blocks are run with them too: some of timm's modules hold the angles of their own grid alone.
    """
    rope = getattr(student, "rope", None)
    if rope is None:
        return None
    angles: Tensor = rope.get_embed(shape=list(student.patch_embed.grid_size))
    return angles


def kind_of_rotation(model: ViT) -> str:
    """The class and settings of a model's rotary positions, as text: equal texts, equal rotations. ``none``: it has none.

    Settings of the grid's size, and those that act in training only, are left out.
    """
    rope = getattr(model, "rope", None)
    if rope is None:
        return "none"
    settings = []
    for name, value in sorted(vars(rope).items()):
        is_setting = isinstance(value, bool | int | float | str | tuple | list)
        is_private = name.startswith("_")
        may_differ = name in SIZES + ONLY_IN_TRAINING
        if is_setting and not is_private and not may_differ:
            settings.append(f"{name}={value}")
    kind = type(rope).__name__
    return f"{kind}({', '.join(settings)})"


def attend(attention: Part, tokens: Tensor, rotation: Tensor | None) -> Tensor:
    """What an attention gives for normalised tokens, ``(N, L, D)`` -> ``(N, L, D)``; ``rotation`` None: without rotary
    positions.
    """
    if rotation is None:
        return attention(tokens)
    return attention(tokens, rope=rotation)


def run_block(block: Part, stream: Tensor, rotation: Tensor | None) -> Tensor:
    """The stream after a block, ``(N, L, D)`` -> ``(N, L, D)``; ``rotation`` None: without rotary positions."""
    if rotation is None:
        return block(stream)
    return block(stream, rope=rotation)


def qkv_layers(attention: Part) -> list[nn.Linear]:
    """The linear layers that make an attention's queries, keys and values: ``[one for all]``, or three in this order."""
    if attention.qkv is not None:
        return [attention.qkv]
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def qkv_weight(attention: Part) -> Tensor:
    """An attention's weights of queries, keys and values, ``(3 * H * S, D)``; of three layers a copy."""
    layers = qkv_layers(attention)
    if len(layers) == 1:
        return layers[0].weight
    return torch.cat([each.weight for each in layers])


def qkv_biases(attention: Part) -> list[Tensor | None]:
    """An attention's biases of queries, of keys and of values, ``(H * S,)`` each; None: they have none.

    They are the parameters themselves, or views of one: :func:`set_qkv` writes into them.
    """
    if getattr(attention, "q_bias", None) is not None:  # Eva's in one layer: keys have no bias
        return [attention.q_bias, None, attention.v_bias]
    layers = qkv_layers(attention)
    if len(layers) == QKV_PARTS:
        return [each.bias for each in layers]
    bias = layers[0].bias
    if bias is None:
        return [None] * QKV_PARTS
    return list(bias.chunk(QKV_PARTS))


def qkv_of(attention: Part, tokens: Tensor) -> Tensor:
    """Queries, keys and values of normalised tokens, ``(N, L, D)`` -> ``(N, L, 3 * H * S)``."""
    weight = qkv_weight(attention)
    biases = qkv_biases(attention)
    if all(bias is None for bias in biases):
        return nn.functional.linear(tokens, weight)
    width = len(weight) // QKV_PARTS
    zero = weight.new_zeros(width)
    filled = [zero if bias is None else bias for bias in biases]
    bias = torch.cat(filled)
    return nn.functional.linear(tokens, weight, bias)


def set_qkv(attention: Part, part: int, weight: Tensor, bias: Tensor | None) -> None:
    """Overwrites what makes queries (0), keys (1) or values (2).

    Args:
        attention: of any of timm's kinds.
        part: which.
        weight: ``(H * S, D)``.
        bias: ``(H * S,)``; None where that part has none.
    """
    layers = qkv_layers(attention)
    if len(layers) == QKV_PARTS:
        layers[part].weight.copy_(weight)
    else:
        layers[0].weight.chunk(QKV_PARTS)[part].copy_(weight)
    if bias is not None:
        place = qkv_biases(attention)[part]
        assert place is not None
        place.copy_(bias)


def has_layer_without_bias(block: Part, branch: int) -> bool:
    """Whether a layer that reads a block's first (1) or second (2) norm has no bias."""
    if branch == 1:
        biases = list(qkv_biases(block.attn))
        layers = [getattr(block.attn, "gate", None)]
    else:
        biases = []
        layers = [getattr(block.mlp, name, None) for name in ("fc1", "fc1_g", "fc1_x")]
    for layer in layers:
        if layer is not None:
            biases.append(layer.bias)
    return any(bias is None for bias in biases)


def take_inner_norm(norm: Part, of_teacher: Part, places: Tensor) -> None:
    """Copies a norm within an attention or MLP, of the heads' outputs or hidden units that the student keeps.

    Args:
        norm: the student's; of an identity, or None, nothing is copied.
        of_teacher: the teacher's, of the same kind.
        places: numbers of the teacher's channels that are kept, as many as the student's norm has.
    """
    for name in ("weight", "bias"):
        value = getattr(norm, name, None)
        if value is not None:
            value.copy_(getattr(of_teacher, name)[places])
