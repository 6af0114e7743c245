"""Rules over gradients, weights, activations, pictures: pure functions that return a :class:`Finding` or ``None``."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kd.report.limits import Finding
from kd.report.records import percentile
from kd.report.step_facts import mean


def vanishing_gradient(norms: Sequence[float], least: float = 1e-7, share: float = 0.5) -> Finding | None:
    """The gradient's norm is below ``least`` in more than ``share`` of the readings."""
    small = [n for n in norms if n < least]
    if not norms or len(small) <= share * len(norms):
        return None
    text = f"the gradient's norm is below {least:g} in {len(small) / len(norms):.0%} of the readings"
    return Finding("VanishingGradient", text, "activations that saturate, loss weights near 0, a frozen part")


def exploding_tensor(norms: Sequence[float | None], factor: float = 100) -> Finding | None:
    """A gradient norm that is NaN or infinite, or ``factor`` times the median."""
    bad = [n for n in norms if n is None or not math.isfinite(n)]
    finite = [n for n in norms if n is not None and math.isfinite(n)]
    if bad:
        text = f"{len(bad)} of {len(norms)} gradient norms are not finite"
    elif len(finite) >= 5 and max(finite) > factor * percentile(finite, 50) > 0:
        text = f"the gradient's norm reached {max(finite):.3g} (median {percentile(finite, 50):.3g})"
    else:
        return None
    return Finding("ExplodingTensor", text, "a lower optim.lr, longer optim.warmup_epochs, trainer.gradient_clip_val")


def dead_relu(dead: Mapping[str, float], share: float = 0.5) -> Finding | None:
    """More than ``share`` of a layer's units never fire."""
    layers = {name: d for name, d in dead.items() if d > share}
    if not layers:
        return None
    worst = max(layers, key=lambda name: layers[name])
    text = f"{len(layers)} layer{'s' * (len(layers) > 1)} with dead units, {worst}: {layers[worst]:.0%} never fire"
    return Finding("DeadRelu", text, "a lower optim.lr or longer optim.warmup_epochs")


def poor_weight_initialization(spread: Mapping[str, float], factor: float = 1000) -> Finding | None:
    """At the first reading the activations' standard deviations differ by ``factor`` between layers."""
    values = {name: s for name, s in spread.items() if math.isfinite(s)}
    if len(values) < 2 or max(values.values()) <= factor * min(values.values()):
        return None
    low, high = min(values, key=lambda n: values[n]), max(values, key=lambda n: values[n])
    text = f"activations spread {values[low]:.2g} in {low} but {values[high]:.2g} in {high}"
    return Finding("PoorWeightInitialization", text, "the student's initial weights")


def saturated_activation(saturated: Mapping[str, float], share: float = 0.8) -> Finding | None:
    """More than ``share`` of a sigmoid's or tanh's outputs lie at its ends, where it has no gradient."""
    layers = {name: s for name, s in saturated.items() if s > share}
    if not layers:
        return None
    worst = max(layers, key=lambda name: layers[name])
    text = f"{len(layers)} saturated layer{'s' * (len(layers) > 1)}, {worst}: {layers[worst]:.0%} of its outputs"
    return Finding("SaturatedActivation", text, "a lower optim.lr, or smaller weights before it (optim.weight_decay)")


def weight_update_ratio(ratios: Sequence[float], low: float = 1e-8, high: float = 0.1) -> Finding | None:
    """The median step moves the weights by less than ``low`` or more than ``high`` of their size."""
    if len(ratios) < 3:
        return None
    middle = percentile(ratios, 50)
    if low <= middle <= high:
        return None
    text = f"a step moves the weights by {middle:.2g} of their size (median)"
    return Finding("WeightUpdateRatio", text, f"a {'higher' if middle < low else 'lower'} optim.lr")


def all_zero(zeros: Mapping[str, float], share: float = 1.0) -> Finding | None:
    """A layer's outputs are all 0."""
    layers = [name for name, z in zeros.items() if z >= share]
    if not layers:
        return None
    text = f"only zeros come out of {', '.join(layers[:3])}"
    return Finding("AllZero", text, "the layer's weights and input, the step before")


def unchanged_tensor(unchanged: Sequence[Sequence[str]], times: int = 3) -> Finding | None:
    """The same weights did not change in ``times`` readings one after another."""
    if len(unchanged) < times:
        return None
    names = set.intersection(*(set(names) for names in unchanged[-int(times) :]))
    if not names:
        return None
    text = f"{len(names)} weight{'s' * (len(names) > 1)} stay as they are, {min(names)}"
    return Finding("UnchangedTensor", text, "a part that gets no gradient (frozen, detached, unused), or a rate of 0")


def tensor_variance(spread: Mapping[str, float], low: float = 1e-10, high: float = 1e6) -> Finding | None:
    """A layer's outputs have a variance below ``low`` or above ``high``."""
    found = {name: s * s for name, s in spread.items() if not low <= s * s <= high}
    if not found:
        return None
    name = min(found)
    text = f"the variance of {name} is {found[name]:.2g}"
    return Finding("TensorVariance", text, "normalisation, the initial weights, a lower optim.lr")


def check_input_images(
    inputs: Sequence[Mapping[str, Any]], constant: float = 0.05, duplicated: float = 0.1
) -> Finding | None:
    """Training pictures of a single colour, the same picture several times in a batch, or values of a wrong range.

    A reading has the shares ``constant`` and ``duplicated`` of a batch, its ``low``est and ``high``est value, and
    ``bytes`` (whether pictures are uint8).
    """
    if not inputs:
        return None
    shares = {name: mean([i[name] for i in inputs]) for name in ("constant", "duplicated")}
    low, high = min(i["low"] for i in inputs), max(i["high"] for i in inputs)
    if inputs[0]["bytes"] and high <= 1:
        text = f"all values of the pictures lie in {low:g} to {high:g}: bytes go to 255"
    elif not inputs[0]["bytes"] and high > 20:
        text = f"the pictures are floats of {low:g} to {high:g}: they are not normalised"
    elif shares["constant"] > constant:
        text = f"{shares['constant']:.0%} of the training pictures have a single colour"
    elif shares["duplicated"] > duplicated:
        text = f"{shares['duplicated']:.0%} of a batch are pictures that are in it already"
    else:
        return None
    return Finding("CheckInputImages", text, "the data: its files, its decoding, data.augment")
