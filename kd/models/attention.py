"""Attention of a model that trains in bfloat16 on a CPU."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

LONGEST = 512
"""Tokens; with more of them float32 is no faster."""

# torch 2.10 lacks the function
_capabilities: Callable[[], Mapping[str, object]] = getattr(torch.cpu, "get_capabilities", dict)

MATRIX_INSTRUCTIONS = bool(_capabilities().get("amx_bf16"))
"""Whether this CPU multiplies matrices in bfloat16."""

_runs_once: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a model's forward is known not to run a second time in the backward pass."""


class InFloat32(TorchFunctionMode):
    """Attention's products in float32: without matrix instructions bfloat16's gradient takes three times as long."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[Tensor] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Calls ``func``; an attention of up to :data:`LONGEST` tokens in float32, its result in the dtype of its first
        argument. One whose tensors all have names is left alone: timm gives them by position.
        """
        named = kwargs or {}
        is_attention = func == scaled_dot_product_attention
        if not is_attention or not args:
            return func(*args, **named)
        tokens = args[0].shape[-2]
        if tokens > LONGEST:
            return func(*args, **named)
        attention: Callable[..., Tensor] = scaled_dot_product_attention
        wide_args = [_in_float32(value) for value in args]
        wide_named = {name: _in_float32(value) for name, value in named.items()}
        with torch.autocast("cpu", enabled=False):
            output = attention(*wide_args, **wide_named)
            return output.to(args[0].dtype)


def _in_float32(value: object) -> object:
    """A floating-point tensor in float32; anything else as it is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    return value


def training_attention(model: nn.Module, pictures: Tensor) -> AbstractContextManager[object]:
    """The context of a training step's forward: :class:`InFloat32` where that is faster, else an empty one.

    It is faster under bfloat16 autocast on a CPU without matrix instructions. A compiled or checkpointed model gets an
    empty one: its second forward, in the backward pass, would run outside of this context and compute in another dtype.
    So does a model that is not of timm. A model's first call under that autocast decides which it is.

    Args:
        model: of the forward.
        pictures: its input, ``(N, 3, H, W)``, whose device decides.
    """
    if pictures.device.type != "cpu" or MATRIX_INSTRUCTIONS or torch.compiler.is_compiling():
        return nullcontext()
    in_bfloat16 = (
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    )
    if not in_bfloat16:
        return nullcontext()
    if model not in _runs_once:
        _runs_once[model] = _is_plain_of_timm(model)
    if _runs_once[model]:
        return InFloat32()
    return nullcontext()


def _is_plain_of_timm(model: nn.Module) -> bool:
    """Whether a model is of timm, neither checkpointed nor compiled, so that its forward runs once a step.

    A model in which no layer has timm's ``grad_checkpointing`` counts as not of timm.
    """
    checkpointing = []
    for layer in model.modules():
        if hasattr(layer, "grad_checkpointing"):  # timm's models have it
            checkpointing.append(layer.grad_checkpointing)
    if not checkpointing or any(checkpointing):
        return False
    return getattr(model, "_compiled_call_impl", None) is None
