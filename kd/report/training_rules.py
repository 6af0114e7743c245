"""Rules over what is learnt: pure functions that return a :class:`Finding` where they fire."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kd.report.limits import Finding
from kd.report.metric import format_metric
from kd.report.ratio import ratio
from kd.report.records import percentile
from kd.report.step_facts import mean


def loss_not_decreasing(
    loss: Sequence[float], percent: float = 0.1, least: int = 20
) -> Finding | None:
    """The mean of the last fifth is not ``percent`` % below the first fifth's."""
    if len(loss) < least:
        return None
    fifth = max(1, len(loss) // 5)
    first, last = mean(loss[:fifth]), mean(loss[-fifth:])
    if last < first * (1 - percent / 100):
        return None
    text = f"train/loss went from {first:.3f} to {last:.3f}"
    return Finding(
        "LossNotDecreasing", text, "the learning rate (optim.lr), the labels, the loss weights"
    )


def loss_rising(
    loss: Sequence[float], factor: float = 3, first: int = 3, newest: int = 3
) -> Finding | None:
    """The median of the ``newest`` losses is ``factor`` times the median of the ``first``, or NaN or infinite.

    A loss of cross entropy and divergence starts near its largest sensible value: a multiple of it diverges.
    """
    if len(loss) < first + newest:
        return None
    start, now = percentile(loss[:first], 50), percentile(loss[-newest:], 50)
    if math.isfinite(now) and not 0 < start * factor <= now:
        return None
    times = f", {ratio(now, start):.0f} times as much" if math.isfinite(now) else ""
    text = f"train/loss went from {start:.3g} to {now:.3g}{times}"
    return Finding(
        "LossRising", text, "a lower optim.lr (the usual reason), longer optim.warmup_epochs"
    )


def overfit(
    train_loss: Sequence[float],
    val: Sequence[float],
    drop: float = 0.03,
    patience: int = 3,
    metric: str = "val/acc1",
) -> Finding | None:
    """Over ``patience`` epochs validation stays ``drop`` below its best while the training loss still falls."""
    if len(val) <= patience or len(train_loss) <= patience:
        return None
    best = max(val)
    if max(val[-patience:]) > best - drop or train_loss[-1] >= train_loss[-1 - patience]:
        return None
    before, now = format_metric(metric, best), format_metric(metric, val[-1])
    text = f"{metric} fell from {before} to {now} while train/loss still falls"
    return Finding(
        "Overfit", text, "stronger data.augment, fewer epochs; the best epoch is exported anyway"
    )


def class_imbalance(counts: Sequence[int], factor: float = 10) -> Finding | None:
    """The most frequent class has ``factor`` times the pictures of the rarest."""
    if len(counts) < 2 or max(counts) < factor * max(1, min(counts)):
        return None
    text = f"the most frequent class has {max(counts)} pictures, the rarest {min(counts)}"
    return Finding(
        "ClassImbalance", text, "data.balance_classes=true, or more pictures of the rare classes"
    )


def teacher_near_chance(acc1: float, chance: float, val: int, sigma: float = 3) -> Finding | None:
    """The teacher is within ``sigma`` standard errors of always naming the most frequent class, and is ever wrong."""
    if acc1 == 1 or acc1 > chance + sigma * math.sqrt(ratio(chance * (1 - chance), max(1, val))):
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
    """Over ``patience`` epochs agreement stays below ``below`` and within ``flat``, and no distillation loss falls.

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
    falling = any(
        loss[-1] < loss[-1 - patience] - flat * abs(loss[-1 - patience]) for loss in known.values()
    )
    if falling or max(recent) - min(recent) > flat or recent[-1] >= below:
        return None
    text = (
        f"agreement with the teacher has stayed at {recent[-1]:.1%} for {patience} epochs and "
        f"{', '.join(known)} no longer {'falls' if len(known) == 1 else 'fall'}"
    )
    return Finding(
        "StudentIgnoresTeacher", text, "the weight of the distillation losses, the temperature"
    )


def temperature(entropy: Sequence[float], high: float = 0.98, low: float = 0.02) -> Finding | None:
    """The softened teacher's entropy is above ``high`` or below ``low`` of its maximum: near uniform, or one-hot.

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


def loss_term_dominates(shares: Mapping[str, float], share: float = 0.98) -> Finding | None:
    """One of several weighted loss terms is more than ``share`` of the total; features may well be 96 % of it."""
    if len(shares) < 2 or not sum(shares.values()) > 0:
        return None
    name = max(shares, key=lambda n: shares[n])
    part = ratio(shares[name], sum(shares.values()))
    if part <= share:
        return None
    return Finding(
        "LossTermDominates", f"'{name}' is {part:.0%} of the loss", "the weights of the losses"
    )


def overtraining(
    val: Sequence[float],
    kl: Sequence[float] = (),
    patience: int = 10,
    delta: float = 0.001,
    metric: str = "val/acc1",
) -> Finding | None:
    """For ``patience`` epochs the validation metric has not risen by ``delta``, nor the divergence fallen by it."""
    early, late = slice(None, -int(patience)), slice(-int(patience), None)
    known = [values for values in (val, [-x for x in kl]) if len(values) > patience]
    if len(val) <= patience or any(
        max(values[late]) >= max(values[early]) + delta for values in known
    ):
        return None
    text = f"{metric} has been no better than {format_metric(metric, max(val[early]))} for {patience:g} epochs"
    text += f", val/kl no lower than {min(kl[early]):.3f}" if len(kl) > patience else ""
    return Finding(
        "Overtraining", text, "stop here: the best epoch is exported; or a lower optim.lr"
    )


def student_under_trained(
    val: Sequence[float],
    agreement: Sequence[float],
    start: str = "",
    metric: str = "val/acc1",
    gain: float = 0.01,
    part: float = 0.2,
    below: float = 0.8,
    least: int = 5,
) -> Finding | None:
    """The metric rose by ``gain`` in the last ``part`` of the run, and agreement is below ``below``.

    Args:
        val: the metric by epoch.
        agreement: with the teacher, by epoch; empty without one.
        start: where the student's first weights came from (``scratch``, ``inherited``, ``pre-trained``).
        metric: its name.
        gain: of the best epoch in the last part of the run over the best one before.
        part: how much of the run that is, two epochs at least.
        below: a student that agrees more is fine.
        least: epochs of a run that is judged.
    """
    epochs = max(2, round(part * len(val)))
    if len(val) < max(least, epochs + 1) or not agreement or agreement[-1] >= below:
        return None
    before, since = max(val[:-epochs]), max(val[-epochs:])
    if since < before + gain:
        return None
    text = (
        f"the run ended while {metric} still rose ({before:.1%} to {since:.1%} in the last {epochs} epochs), with "
        f"{agreement[-1]:.1%} agreement with the teacher: the student is under-trained"
    )
    better = "model.student.inherit=auto or .pretrained=true (it started from random weights), "
    lever = f"{better if start == 'scratch' else ''}more trainer.max_epochs, a higher optim.lr"
    return Finding("StudentUnderTrained", text, lever)


def stalled_training(silent_s: float, limit_s: float = 1800) -> Finding | None:
    """A run that still trains has finished no step for ``limit_s`` seconds."""
    if silent_s < limit_s:
        return None
    text = f"no step has ended for {silent_s / 60:.0f} min"
    return Finding(
        "StalledTraining",
        text,
        "a rank that waits for another, a disk or a store that does not answer",
    )


def features_collapse(
    rank: Sequence[float], pictures: int, below: float = 10, least: int = 100
) -> Finding | None:
    """The features of at least ``least`` pictures vary in fewer than ``below`` directions, by RankMe.

    Args:
        rank: RankMe on the validation pictures, by epoch.
        pictures: there.
        below: fewer tell too few things apart.
        least: fewer pictures have no more directions themselves.
    """
    if not rank or pictures < least or rank[-1] >= below:
        return None
    text = (
        f"the student's features use {rank[-1]:.1f} directions (val/rankme of {pictures} pictures)"
    )
    return Finding(
        "FeaturesCollapse", text, "model.student.inherit=true, more pictures, more epochs"
    )


def similar_across_runs(
    own: Mapping[float, float],
    others: Mapping[str, Mapping[float, float]],
    least: int = 5,
    near: float = 1e-6,
) -> Finding | None:
    """Another run has had the same losses at the same steps: what differs between the two has no effect.

    Args:
        own: train/loss by step.
        others: of other runs, by name.
        least: steps in common.
        near: difference that counts as none.
    """
    for name, loss in others.items():
        common = [step for step in own if step in loss]
        if len(common) >= least and all(
            abs(own[s] - loss[s]) <= near * max(1.0, abs(own[s])) for s in common
        ):
            text = f"train/loss is that of {name} in all {len(common)} steps that both have logged"
            return Finding(
                "SimilarAcrossRuns",
                text,
                "the setting that differs has no effect, or nothing differs",
            )
    return None


def confusion(
    pairs: Sequence[tuple[str, str, int]],
    counts: Mapping[str, int],
    share: float = 0.3,
    least: int = 10,
) -> Finding | None:
    """More than ``share`` of a class's pictures (at least ``least``) are taken for one other class.

    Args:
        pairs: class, the class it is taken for, and how often.
        counts: validation pictures by class.
        share: fires above.
        least: pictures of a class: fewer say little.
    """
    found = [
        (ratio(n, counts[true]), true, given, n)
        for true, given, n in pairs
        if counts.get(true, 0) >= least
    ]
    large = [pair for pair in found if pair[0] > share]
    if not large:
        return None
    part, true, given, n = max(large)
    text = f"{part:.0%} of '{true}' are taken for '{given}' ({n} of {counts[true]})"
    text += f", and {len(large) - 1} more pairs above {share:.0%}" if len(large) > 1 else ""
    return Finding(
        "Confusion",
        text,
        "their labels, more pictures of both; the teacher may mix them up as well",
    )


# -- gradients, weights, activations, pictures -------------------------------------------------------------------------
def vanishing_gradient(
    norms: Sequence[float], least: float = 1e-7, share: float = 0.5
) -> Finding | None:
    """The gradient's norm is below ``least`` in more than ``share`` of the readings."""
    small = mean([n < least for n in norms])
    if not small > share:
        return None
    text = f"the gradient's norm is below {least:g} in {small:.0%} of the readings"
    return Finding(
        "VanishingGradient", text, "activations that saturate, loss weights near 0, a frozen part"
    )


def exploding_tensor(norms: Sequence[float | None], factor: float = 100) -> Finding | None:
    """A gradient norm that is NaN or infinite, or ``factor`` times the median."""
    bad = [n for n in norms if n is None or not math.isfinite(n)]
    finite = [n for n in norms if n is not None and math.isfinite(n)]
    if bad:
        text = f"{len(bad)} of {len(norms)} gradient norms are not finite"
    elif len(finite) >= 5 and max(finite) > factor * percentile(finite, 50) > 0:
        text = (
            f"the gradient's norm reached {max(finite):.3g} (median {percentile(finite, 50):.3g})"
        )
    else:
        return None
    return Finding(
        "ExplodingTensor",
        text,
        "a lower optim.lr, longer optim.warmup_epochs, trainer.gradient_clip_val",
    )


def dead_relu(dead: Mapping[str, float], share: float = 0.5) -> Finding | None:
    """More than ``share`` of a layer's units never fire."""
    text = "{} layer{} with dead units, {}: {:.0%} never fire"
    return _worst_layer(
        "DeadRelu", dead, share, text, "a lower optim.lr or longer optim.warmup_epochs"
    )


def _worst_layer(
    rule: str, shares: Mapping[str, float], limit: float, text: str, lever: str
) -> Finding | None:
    """``text`` counts the layers above ``limit`` and names the worst."""
    layers = {name: share for name, share in shares.items() if share > limit}
    worst = max(layers, key=layers.__getitem__, default="")
    found = text.format(len(layers), "s" * (len(layers) > 1), worst, layers.get(worst, 0.0))
    return Finding(rule, found, lever) if layers else None


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
    text, lever = (
        "{} saturated layer{}, {}: {:.0%} of its outputs",
        "a lower optim.lr, or smaller weights before it",
    )
    return _worst_layer(
        "SaturatedActivation", saturated, share, text, f"{lever} (optim.weight_decay)"
    )


def weight_update_ratio(
    ratios: Sequence[float], low: float = 1e-8, high: float = 0.1
) -> Finding | None:
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
    text = f"all outputs are 0: {', '.join(layers[:3])}"
    return Finding("AllZero", text, "the layer's weights and input, the step before")


def unchanged_tensor(unchanged: Sequence[Sequence[str]], times: int = 3) -> Finding | None:
    """The same weights did not change in ``times`` readings one after another.

    Args:
        unchanged: names of the weights that a step left as they were, a list a reading.
        times: readings.
    """
    if len(unchanged) < times:
        return None
    names = set.intersection(*(set(names) for names in unchanged[-int(times) :]))
    if not names:
        return None
    text = f"{len(names)} weight{'s' * (len(names) > 1)} did not change, {min(names)} for one"
    return Finding(
        "UnchangedTensor",
        text,
        "a part that gets no gradient (frozen, detached, unused), or a rate of 0",
    )


def tensor_variance(
    spread: Mapping[str, float], low: float = 1e-10, high: float = 1e6
) -> Finding | None:
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

    Args:
        inputs: of each reading ``constant`` and ``duplicated`` (shares of the batch), ``low`` and ``high`` (the
            smallest and the largest value), ``bytes`` (whether pictures come as uint8).
        constant: fires above this share.
        duplicated: fires above this share.
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
        text = f"{shares['duplicated']:.0%} of a batch are duplicates within the batch"
    else:
        return None
    return Finding("CheckInputImages", text, "the data: its files, its decoding, data.augment")
