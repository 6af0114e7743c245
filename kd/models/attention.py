"""Attention of a model that trains in bfloat16 on a CPU."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

LONGEST = 512  # tokens; of more, float32 is no faster
_capabilities: Callable[[], Mapping[str, object]] = getattr(
    torch.cpu, "get_capabilities", dict
)  # torch 2.10 has it
_runs_once: WeakKeyDictionary[nn.Module, bool] = (
    WeakKeyDictionary()
)  # its forward is known not to be run again
MATRIX_INSTRUCTIONS = bool(_capabilities().get("amx_bf16"))


class InFloat32(TorchFunctionMode):
    """Attention's products in float32: without matrix instructions bfloat16's gradient takes three times as long."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[Tensor] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Calls ``func``, an attention with its floating-point arguments in float32."""
        attends: Callable[..., Tensor] = scaled_dot_product_attention
        if func != attends or not args or args[0].shape[-2] > LONGEST:
            return func(*args, **(kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            named = {name: _wide(value) for name, value in (kwargs or {}).items()}
            return attends(*map(_wide, args), **named).to(args[0].dtype)


def _wide(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def training_attention(model: nn.Module, pictures: Tensor) -> AbstractContextManager[object]:
    """The context of a forward with gradients: :class:`InFloat32` where faster; none if compiled or checkpointed."""
    narrow = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    if (
        pictures.device.type != "cpu"
        or not narrow
        or torch.compiler.is_compiling()
        or MATRIX_INSTRUCTIONS
    ):
        return nullcontext()
    if model not in _runs_once:
        again = [
            part.grad_checkpointing
            for part in model.modules()
            if hasattr(part, "grad_checkpointing")
        ]  # timm's
        _runs_once[model] = (
            bool(again) and not any(again) and getattr(model, "_compiled_call_impl", None) is None
        )
    return InFloat32() if _runs_once[model] else nullcontext()
