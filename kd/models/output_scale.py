"""A classifier whose weights train in standard deviations and whose output is in the targets' units.

Plain weights in units of 500 kcal would need steps of 500 kcal; the scale is folded into what leaves the run.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from kd.errors import UserError
from kd.losses.base import Float32
from kd.models.taps import linear_classifier

UNITS = "units"
"""A part of a classifier, in float32 also where the classifier is in half precision (1,003 would be rounded to 1,004)."""
SCALE = f"{UNITS}.scale"
"""Its buffer ``(C,)``: outputs are multiplied by it."""
OFFSET = f"{UNITS}.offset"
"""Its buffer ``(C,)``: added after :data:`SCALE`."""


@torch.no_grad()
def scale_output(model: nn.Module, scales: Sequence[tuple[float, float]], in_units: bool) -> None:
    """Multiplies the classifier's output by the targets' deviations and adds their means, in a hook; once for a model.

    Args:
        model: with a linear classifier of C outputs, which gets the hook and :data:`UNITS`.
        scales: mean and standard deviation of each of the C targets.
        in_units: the weights give units already, and are divided so that the output stays as it is.

    Raises:
        UserError: the classifier is not linear, or has no bias.
    """
    classifier = linear_classifier(model)
    if classifier is None or classifier.bias is None:
        raise UserError(
            f"model.student.arch: numbers need a linear classifier with a bias, {type(model).__name__} has none"
        )
    if hasattr(classifier, UNITS):  # of an earlier run on a user's own model
        return
    means_and_deviations = classifier.weight.new_tensor(scales, dtype=torch.float32).T  # (2, C)
    scale_C, offset_C = means_and_deviations.flip(0).contiguous()
    units = Float32()
    units.register_buffer("scale", scale_C)
    units.register_buffer("offset", offset_C)
    classifier.add_module(UNITS, units)
    if in_units:
        set_in_units(classifier, classifier.weight, classifier.bias)
    classifier.register_forward_hook(_to_units)


def _to_units(classifier: nn.Module, _: object, output: Tensor) -> Tensor:
    """A forward hook: output ``(N, C)`` in deviations -> in the targets' units, float32."""
    return output.float() * classifier.get_buffer(SCALE) + classifier.get_buffer(OFFSET)


@torch.no_grad()
def set_in_units(classifier: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Sets a classifier, scaled or not, to ``weight`` ``(C, D)`` and ``bias`` ``(C,)``, where it has one, in the targets'
    units.

    A classifier that :func:`scale_output` has scaled holds them divided by the deviations, less the means.
    """
    if hasattr(classifier, UNITS):
        scale = classifier.get_buffer(SCALE)
        weight = weight / scale[:, None]
        bias = (bias - classifier.get_buffer(OFFSET)) / scale
    classifier.weight.copy_(weight)
    if classifier.bias is not None:
        classifier.bias.copy_(bias)


def unit_output(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a model as a plain model has them: a scale is folded into its classifier, which is then in float32.

    ``(W x + b) * scale + offset``, with scale and offset ``(C,)``, is ``(W * scale) x + (b * scale + offset)``.
    """
    folded = dict(state)
    for key in state:
        if not key.endswith(f".{SCALE}"):
            continue
        classifier = key.removesuffix(f".{SCALE}")
        scale_C = folded.pop(key)
        offset_C = folded.pop(f"{classifier}.{OFFSET}")
        folded[f"{classifier}.weight"] = folded[f"{classifier}.weight"] * scale_C[:, None]
        folded[f"{classifier}.bias"] = folded[f"{classifier}.bias"] * scale_C + offset_C
    return folded
