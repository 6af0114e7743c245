"""What a student computes in under autocast: weights in half precision, cast together once a forward, where autocast would
cast them layer by layer; and, on CPUs whose bfloat16 attention is slow, attention in float32.

Autocast rounds the weights of each linear layer and convolution when it is called, and the gradient of each rounded weight
is cast back in the backward pass: two operations a weight and step, most of what a small model dispatches. On a GPU whose
time goes into launches these are the step. Here one operation rounds a group of weights and one casts their gradients back,
to the same bits:

    W16_i = round16(W32_i)    for all i of a group, before the forward       (torch._foreach_copy_)
    dL/dW32_i = float32(dL/dW16_i)                    after its backward       (torch._foreach_copy_)

While the model is called its layers hold the rounded weights in place of their own; optimizer, averages, checkpoints and
the gradients' exchange between processes see the float32 ones alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kd.models.preprocess import evaluating

Layer = tuple[nn.Module, str, nn.Parameter]
"""A layer, the name of its weight or bias, and the parameter itself."""

CAST_BY_AUTOCAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose weights autocast rounds when they are called, of exactly these classes: a subclass may compute otherwise."""
GROUP = 6_500_000
"""Numbers of a group, at most, but for one larger weight: a bucket of DDP (25 MiB of float32). The backward pass hands on a
group's gradients together, so that DDP exchanges one bucket while the next is computed."""

LONGEST = 512
"""Tokens; attention over more of them is no faster in float32."""
_capabilities: Callable[[], Mapping[str, object]] = getattr(
    torch.cpu, "get_capabilities", dict
)  # not in torch 2.10
MATRIX_INSTRUCTIONS = bool(_capabilities().get("amx_bf16"))
"""Whether this CPU multiplies matrices in bfloat16; without, attention's gradient takes three times as long as float32's."""


class AttentionInFloat32(TorchFunctionMode):
    """Inside, attention of up to :data:`LONGEST` tokens is computed in float32; its result has the type of its queries."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Calls ``func``; where it is an attention, in float32 and without autocast.

        An attention of more tokens, or whose tensors are given by name (timm gives them by position), is called as it is.
        """
        named = kwargs or {}
        is_attention = func == scaled_dot_product_attention and bool(args)
        if not is_attention or args[0].shape[-2] > LONGEST:
            return func(*args, **named)
        wide_args, wide_named = tree_map_only(
            Tensor, lambda x: x.float() if x.is_floating_point() else x, (tuple(args), dict(named))
        )
        with torch.autocast("cpu", enabled=False):
            output = func(*wide_args, **wide_named)
        return output.to(args[0].dtype)


class _Rounded(torch.autograd.Function):
    """``(dtype, *weights) -> the weights in dtype``, and the gradients back in float32."""

    @staticmethod
    def forward(ctx: FunctionCtx, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        """Rounds all weights in one operation."""
        # the gradient of a layer that no loss reads is None, as without this class, and not zeros
        ctx.set_materialize_grads(False)
        rounded = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(rounded, list(weights))
        return tuple(rounded)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Casts all gradients in one operation; that of ``dtype``, or of a layer that no loss reads, is None."""
        known = [gradient for gradient in gradients if gradient is not None]
        if torch.is_grad_enabled():  # a gradient of gradients is asked for
            cast = [gradient.float() for gradient in known]
        else:
            cast = [torch.empty_like(gradient, dtype=torch.float32) for gradient in known]
            torch._foreach_copy_(cast, known)
        rest = iter(cast)
        returned = [None if gradient is None else next(rest) for gradient in gradients]
        return (None, *returned)


class CastTogether:
    """Rounds a timm model's weights together while it is called under autocast; on a CPU without matrix instructions its
    attention is in float32 then (:class:`AttentionInFloat32`).

    Only where that gives what autocast gives: the first call compares the two, to the bit. Left to autocast are weights that
    do not train; and a model that differs, is not of timm, is compiled or sharded, or computes its layers anew in the
    backward pass: that pass would run outside of this, in other types.
    """

    def __init__(self, model: nn.Module) -> None:
        """Stores the model; its layers are found at the first call, when it is on its device and a strategy has it.

        Args:
            model: of the student.
        """
        self.model = model
        self._may_widen = False  # whether attention may be in float32: the first call sets it
        self._groups: list[list[Layer]] | None = None
        """The layers whose weights are rounded together; empty: none are. None until the first call has compared."""

    @contextmanager
    def __call__(self, images: Tensor) -> Iterator[None]:
        """Inside, the layers hold rounded weights, where the first call has found that this gives what autocast gives.

        Without autocast, and while torch compiles, it does nothing.

        Args:
            images: what the model is called with, ``(N, 3, H, W)``; the first call runs the model twice on the first two
                of them, without gradients, to compare.
        """
        device = images.device.type
        if torch.compiler.is_compiling() or not torch.is_autocast_enabled(device):
            yield
            return
        dtype = torch.get_autocast_dtype(device)
        if self._groups is None:
            self._groups = self._comparable_groups(images, dtype)
        is_slow = device == "cpu" and dtype == torch.bfloat16 and not MATRIX_INSTRUCTIONS
        widened = AttentionInFloat32() if is_slow and self._may_widen else nullcontext()
        with _holding_rounded(self._groups, dtype), widened:
            yield

    def _comparable_groups(self, images: Tensor, dtype: torch.dtype) -> list[list[Layer]]:
        """The groups of layers whose weights are rounded together; [] where that would not give what autocast gives.

        Compares both ways on the first two pictures. Also sets ``_may_widen``, which does not depend on the comparison.
        """
        parts = list(self.model.modules())
        recomputes = any(getattr(part, "grad_checkpointing", False) for part in parts)
        if recomputes or self.model._compiled_call_impl is not None:
            return []
        # timm's models have the attribute, also one inside another model
        self._may_widen = any(hasattr(part, "grad_checkpointing") for part in parts)
        is_sharded = any(hasattr(parameter, "ds_id") for parameter in self.model.parameters())
        if is_sharded or not type(self.model).__module__.startswith("timm."):
            return []
        groups = _grouped(parts)
        # Two pictures by both ways; in evaluation, which changes no statistics and draws no random numbers.
        two = images[:2]
        in_half = torch.autocast(images.device.type, dtype, cache_enabled=False)
        with torch.no_grad(), evaluating(self.model), in_half:
            by_autocast = tree_leaves(self.model(two))
            with _holding_rounded(groups, dtype):
                together = tree_leaves(self.model(two))
        pairs = zip(by_autocast, together, strict=True)
        return groups if all(torch.equal(*pair) for pair in pairs) else []


@contextmanager
def _holding_rounded(groups: list[list[Layer]], dtype: torch.dtype) -> Iterator[None]:
    """Inside, the layers hold rounded weights, as attributes: Python finds these before a parameter of the same name."""
    for group in groups:
        rounded = _Rounded.apply(dtype, *(parameter for _, _, parameter in group))
        for (module, name, _), half in zip(group, rounded, strict=True):
            module.__dict__[name] = half
    try:
        yield
    finally:
        for group in groups:
            for module, name, _ in group:
                module.__dict__.pop(name, None)


def _grouped(parts: list[nn.Module]) -> list[list[Layer]]:
    """The trained weights and biases that autocast would round, in the model's order, in groups of at most :data:`GROUP`
    numbers; a larger one is a group alone.
    """
    groups: list[list[Layer]] = []
    numbers = GROUP  # no group is open yet
    for part in parts:
        if type(part) not in CAST_BY_AUTOCAST or is_parametrized(part):
            continue
        for name, parameter in part.named_parameters(recurse=False):
            is_plain = type(parameter) is nn.Parameter and parameter.dtype == torch.float32
            if not is_plain or not parameter.requires_grad:
                continue
            numbers += parameter.numel()
            if numbers > GROUP:
                groups.append([])
                numbers = parameter.numel()
            groups[-1].append((part, name, parameter))
    return groups
