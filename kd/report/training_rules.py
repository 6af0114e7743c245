"""Rules over what is learnt: pure functions that return a :class:`Finding` where they fire."""

import math
from collections.abc import Mapping, Sequence

from kd.report.finding import Finding
from kd.report.records import percentile
from kd.report.step_facts import mean


def loss_not_decreasing(loss: Sequence[float], percent: float = 0.1, least: int = 20) -> Finding | None:
    """The mean of the last fifth is not ``percent`` % below the first fifth's."""
    if len(loss) < least:
        return None
    fifth = max(1, len(loss) // 5)
    first, last = mean(loss[:fifth]), mean(loss[-fifth:])
    if last < first * (1 - percent / 100):
        return None
    text = f"train/loss went from {first:.3f} to {last:.3f}"
    return Finding("LossNotDecreasing", text, "the learning rate (optim.lr), the labels, the loss weights")


def overfit(
    train_loss: Sequence[float], val: Sequence[float], drop: float = 0.03, patience: int = 3, metric: str = "val/acc1"
) -> Finding | None:
    """Over ``patience`` epochs validation stays ``drop`` below its best while the training loss goes on falling."""
    if len(val) <= patience or len(train_loss) <= patience:
        return None
    best = max(val)
    if max(val[-patience:]) > best - drop or train_loss[-1] >= train_loss[-1 - patience]:
        return None
    text = f"{metric} fell from {best:.1%} to {val[-1]:.1%} while train/loss still falls"
    return Finding("Overfit", text, "stronger data.augment, fewer epochs; the best epoch is exported anyway")


def vanishing_gradient(norms: Sequence[float], least: float = 1e-7, share: float = 0.5) -> Finding | None:
    """The gradient's norm is below ``least`` in more than ``share`` of the readings."""
    small = [n for n in norms if n < least]
    if not norms or len(small) <= share * len(norms):
        return None
    text = f"the gradient's norm is below {least:g} in {len(small) / len(norms):.0%} of the readings"
    return Finding("VanishingGradient", text, "activations that saturate, loss weights near 0, a frozen part")


def exploding_tensor(norms: Sequence[float | None], factor: float = 100) -> Finding | None:
    """A gradient norm that is no number, or ``factor`` times the median."""
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


def class_imbalance(counts: Sequence[int], factor: float = 10) -> Finding | None:
    """The most frequent class has ``factor`` times the pictures of the rarest."""
    if len(counts) < 2 or max(counts) < factor * max(1, min(counts)):
        return None
    text = f"the most frequent class has {max(counts)} pictures, the rarest {min(counts)}"
    return Finding("ClassImbalance", text, "more pictures of the rare classes; read accuracy by class")


def teacher_near_chance(acc1: float, chance: float, val: int, sigma: float = 3) -> Finding | None:
    """The teacher is within ``sigma`` standard errors of always naming the most frequent class."""
    if acc1 > chance + sigma * math.sqrt(chance * (1 - chance) / max(1, val)):
        return None
    text = f"the teacher is right on {acc1:.1%} of the validation pictures, guessing gives {chance:.1%}"
    return Finding("TeacherNearChance", text, "its class order, its input size, its weights")


def student_ignores_teacher(
    agreement: Sequence[float],
    losses: Mapping[str, Sequence[float]],
    flat: float = 0.01,
    patience: int = 3,
    below: float = 0.8,
) -> Finding | None:
    """Over ``patience`` epochs agreement stayed within ``flat``, below ``below``, and no distillation loss has fallen.

    Args:
        agreement: by epoch.
        losses: each distillation loss by epoch, by name.
        flat: changes that count as none: of agreement, and of a loss in proportion.
        patience: epochs.
        below: a student that agrees more is fine.
    """
    known = {name: loss for name, loss in losses.items() if len(loss) > patience}
    if len(agreement) <= patience or not known:
        return None
    recent = agreement[-patience - 1 :]
    falling = any(loss[-1] < loss[-1 - patience] - flat * abs(loss[-1 - patience]) for loss in known.values())
    if falling or max(recent) - min(recent) > flat or recent[-1] >= below:
        return None
    text = (
        f"agreement with the teacher has stayed at {recent[-1]:.1%} for {patience} epochs and "
        f"{', '.join(known)} {'falls' if len(known) == 1 else 'fall'} no more"
    )
    return Finding("StudentIgnoresTeacher", text, "the weight of the distillation losses, the temperature")


def temperature(entropy: Sequence[float], high: float = 0.98, low: float = 0.02) -> Finding | None:
    """The softened teacher is near uniform, or near one-hot.

    Args:
        entropy: of the teacher's answers at the loss's temperature, over its maximum ``log(C)``: 0 to 1.
        high: fires above.
        low: fires below.
    """
    if not entropy:
        return None
    level = mean(entropy)
    if level > high:
        text = f"at this temperature the teacher's answers are nearly uniform (entropy {level:.1%} of its maximum)"
        return Finding("TemperatureTooHigh", text, "a lower temperature of the distillation loss")
    if level < low:
        text = f"at this temperature the teacher's answers are nearly one-hot (entropy {level:.1%} of its maximum)"
        return Finding("TemperatureTooLow", text, "a higher temperature of the distillation loss")
    return None


def loss_term_dominates(shares: Mapping[str, float], share: float = 0.95) -> Finding | None:
    """One of several weighted loss terms is more than ``share`` of the total."""
    if len(shares) < 2 or not sum(shares.values()) > 0:
        return None
    name = max(shares, key=lambda n: shares[n])
    part = shares[name] / sum(shares.values())
    if part <= share:
        return None
    return Finding("LossTermDominates", f"'{name}' is {part:.0%} of the loss", "the weights of the losses")
