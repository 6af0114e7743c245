"""A classifier whose weights train in standard deviations and whose output is in the targets' units.

Plain weights in units of 500 kcal would need steps of 500 kcal; the scale is folded into what leaves the run.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

SCALE, OFFSET = "unit_scale", "unit_offset"


@torch.no_grad()
def scale_output(model: nn.Module, scales: Sequence[tuple[float, float]], in_units: bool) -> None:
    """Multiplies the classifier's output by the targets' deviations (``scales``: means, deviations), adds the means.

    ``in_units``: the weights give units already, and are divided so that the output stays as it is.
    """
    found = getattr(model, "get_classifier", lambda: None)()
    if not isinstance(found, nn.Linear) or found.bias is None:
        raise ValueError(
            f"numbers need a linear classifier with a bias, {type(model).__name__} has none"
        )
    scale, offset = found.weight.new_tensor(scales, dtype=torch.float32).T.flip(0).contiguous()
    if in_units:
        found.bias.copy_((found.bias - offset) / scale)
        found.weight.div_(scale[:, None])
    found.register_buffer(SCALE, scale)
    found.register_buffer(OFFSET, offset)
    found.register_forward_hook(_to_units)


def _to_units(classifier: nn.Module, _: object, output: Tensor) -> Tensor:
    return output.float() * classifier.get_buffer(SCALE) + classifier.get_buffer(OFFSET)


@torch.no_grad()
def set_in_units(classifier: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Sets a classifier that may be scaled to weights in the targets' units."""
    buffers = dict(classifier.named_buffers(recurse=False))
    if SCALE in buffers:
        weight, bias = weight / buffers[SCALE][:, None], (bias - buffers[OFFSET]) / buffers[SCALE]
    classifier.weight.copy_(weight)
    classifier.bias.copy_(bias)


def unit_output(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a model as a plain model has them: a scale is folded into its classifier."""
    found = dict(state)
    for key in [key for key in found if key.endswith(f".{SCALE}")]:
        name = key.removesuffix(f".{SCALE}")
        scale, offset = found.pop(key), found.pop(f"{name}.{OFFSET}")
        weight, bias = f"{name}.weight", f"{name}.bias"
        found[bias] = (found[bias].float() * scale + offset).to(found[bias].dtype)
        found[weight] = (found[weight].float() * scale[:, None]).to(found[weight].dtype)
    return found
