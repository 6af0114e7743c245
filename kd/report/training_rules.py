"""Rules over what is learnt: pure functions that return a :class:`Finding` where they fire.

Series are in order of epochs, steps or readings; a share is in [0, 1]; what is given by layer is a mapping from its
path. The first line of a rule's docstring is the text of its alert; thresholds are arguments with a default, which
``monitor.thresholds`` changes by name.
"""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from kd.proof.luck import CHANCE_SIGMAS, is_clearly_more, shows_a_bad_teacher
from kd.report.limits import Finding
from kd.report.metric import format_metric, less_is_better
from kd.report.ratio import ratio
from kd.report.records import percentile
from kd.report.step_facts import mean


def loss_not_decreasing(
    loss: Sequence[float], percent: float = 0.1, least: int = 20
) -> Finding | None:
    """The mean of the last fifth is not ``percent`` % below the first fifth's.

    Args:
        loss: the training loss, by logged step.
        percent: that it should have fallen.
        least: values, below which nothing is found.
    """
    if len(loss) < least:
        return None
    fifth = max(1, len(loss) // 5)
    first = mean(loss[:fifth])
    last = mean(loss[-fifth:])
    if last < first * (1 - percent / 100):
        return None
    text = f"train/loss went from {first:.3f} to {last:.3f}"
    lever = "the learning rate (optim.lr), the labels, the loss weights"
    return Finding("LossNotDecreasing", text, lever)


def loss_rising(
    loss: Sequence[float], factor: float = 3, first: int = 3, newest: int = 3
) -> Finding | None:
    """The median of the ``newest`` losses is ``factor`` times the median of the ``first``, or NaN or infinite.

    A loss of cross entropy and divergence starts near its largest sensible value: a multiple of it diverges.

    Args:
        loss: the training loss, by logged step.
        factor: multiple of the start's.
        first: values whose median is the start's.
        newest: values whose median is that of now.
    """
    if len(loss) < first + newest:
        return None
    start = percentile(loss[:first], 50)
    now = percentile(loss[-newest:], 50)
    finite = math.isfinite(now)
    if finite and not 0 < start * factor <= now:
        return None
    text = f"train/loss went from {start:.3g} to {now:.3g}"
    if finite:
        text += f", {ratio(now, start):.0f} times as much"
    lever = "a lower optim.lr (the usual reason), longer optim.warmup_epochs"
    return Finding("LossRising", text, lever)


def overfit(
    train_loss: Sequence[float],
    val: Sequence[float],
    drop: float = 0.03,
    patience: int = 3,
    metric: str = "val/acc1",
) -> Finding | None:
    """Over ``patience`` epochs validation stays ``drop`` below its best while the training loss still falls.

    Args:
        train_loss: by epoch.
        val: a metric that should rise, by epoch.
        drop: below its best, in the metric's unit (0.03: 3 points).
        patience: epochs.
        metric: name of ``val``.
    """
    if len(val) <= patience or len(train_loss) <= patience:
        return None
    best = max(val)
    has_recovered = max(val[-patience:]) > best - drop
    still_falls = train_loss[-1] < train_loss[-1 - patience]
    if has_recovered or not still_falls:
        return None
    before = format_metric(metric, best)
    now = format_metric(metric, val[-1])
    text = f"{metric} fell from {before} to {now} while train/loss still falls"
    lever = "stronger data.augment, fewer epochs; the best epoch is exported anyway"
    return Finding("Overfit", text, lever)


def class_imbalance(counts: Sequence[int], factor: float = 10) -> Finding | None:
    """The most frequent class has ``factor`` times the pictures of the rarest.

    Args:
        counts: training pictures of each class; one without any counts as one with one.
        factor: fires from here.
    """
    if len(counts) < 2:
        return None
    most = max(counts)
    least = min(counts)
    if most < factor * max(1, least):
        return None
    text = f"the most frequent class has {most} pictures, the rarest {least}"
    lever = "data.balance_classes=true, or more pictures of the rare classes"
    return Finding("ClassImbalance", text, lever)


def teacher_near_chance(
    acc1: float, chance: float, val: int, sigma: float = CHANCE_SIGMAS, remedy: str = ""
) -> Finding | None:
    """Luck explains the teacher's accuracy, and the pictures are enough to say so.

    Args:
        acc1: the teacher's accuracy, 0 to 1.
        chance: the share of the most frequent class.
        val: validation pictures that the teacher has seen.
        sigma: standard errors.
        remedy: the key that the preflight has found; empty where it found none.
    """
    right = round(acc1 * val)
    is_better = is_clearly_more(right, val, chance, sigma)
    if is_better or not shows_a_bad_teacher(right, val, chance):
        return None
    reached = format_metric("acc1", acc1)
    guessed = format_metric("acc1", chance)
    text = (
        f"the teacher is right on {right} of {val} validation pictures ({reached}), no better than always naming the "
        f"most frequent class ({guessed})"
    )
    lever = remedy or (
        "check that its classes are in the data's order (classes), that img_size is what it was trained with, and that "
        "checkpoint names the trained weights"
    )
    return Finding("TeacherNearChance", text, lever)


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
    long_enough = {name: loss for name, loss in losses.items() if len(loss) > patience}
    if len(agreement) <= patience or not long_enough:
        return None
    for loss in long_enough.values():
        before = loss[-1 - patience]
        now = loss[-1]
        if now < before - flat * abs(before):
            return None  # it falls
    recent = agreement[-patience - 1 :]
    if max(recent) - min(recent) > flat or recent[-1] >= below:
        return None
    text = (
        f"agreement with the teacher has stayed at {recent[-1]:.1%} for {patience} epochs and "
        f"{', '.join(long_enough)} no longer {'falls' if len(long_enough) == 1 else 'fall'}"
    )
    lever = "the weight of the distillation losses, the temperature"
    return Finding("StudentIgnoresTeacher", text, lever)


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
    """One of several weighted loss terms is more than ``share`` of the total; features may well be 96 % of it.

    Args:
        shares: of the newest reading: each weighted term by its name, in any common unit.
        share: in [0, 1]; fires above.
    """
    total = sum(shares.values())
    if len(shares) < 2 or not total > 0:
        return None
    name = max(shares, key=lambda term: shares[term])
    largest = ratio(shares[name], total)
    if largest <= share:
        return None
    text = f"'{name}' is {largest:.0%} of the loss"
    return Finding("LossTermDominates", text, "the weights of the losses")


def overtraining(
    val: Sequence[float],
    kl: Sequence[float] = (),
    patience: int = 10,
    delta: float = 0.001,
    metric: str = "val/acc1",
) -> Finding | None:
    """For ``patience`` epochs the validation metric has not risen by ``delta``, nor the divergence fallen by it.

    Args:
        val: a metric that should rise, by epoch.
        kl: the divergence from the teacher in nats, likewise; empty: unknown.
        patience: epochs.
        delta: in the metric's own units, and in nats of the divergence.
        metric: its name, for the message.
    """
    if len(val) <= patience:
        return None
    best_before = max(val[:-patience])
    best_since = max(val[-patience:])
    if best_since >= best_before + delta:
        return None
    text = f"{metric} has been no better than {format_metric(metric, best_before)} for {patience} epochs"
    if len(kl) > patience:
        least_before = min(kl[:-patience])
        least_since = min(kl[-patience:])
        if -least_since >= -least_before + delta:
            return None
        text += f", val/kl no lower than {least_before:.3f}"
    lever = "stop here: the best epoch is exported; or a lower optim.lr"
    return Finding("Overtraining", text, lever)


def worse_than_start(
    start: float | None,
    last: float | None,
    pictures: int,
    metric: str = "val/acc1",
    exported_epoch: int = 0,
    levers: Sequence[str] = (),
    drop: float = 0.02,
) -> Finding | None:
    """After the last epoch the student is worse than before the first step, by a share ``drop`` and more than an error.

    Args:
        start: the metric before the first step; None: it was not measured.
        last: after the last epoch.
        pictures: of the validation; the standard error of a share ``p`` of them is ``sqrt(p (1 - p) / pictures)``. It
            counts for ``acc1`` alone.
        metric: its name.
        exported_epoch: the epoch that is exported, from 1; 0: the start.
        levers: what to try, in order.
        drop: of the start's value.
    """
    if start is None or last is None or not math.isfinite(start + last):
        return None
    loss = start - last
    if less_is_better(metric):
        loss = last - start
    error = 0.0
    if metric.endswith("acc1") and pictures:
        error = math.sqrt(ratio(start * (1 - start), pictures))
    if loss <= max(drop * abs(start), error):
        return None
    kept = "the start itself is exported"
    if exported_epoch:
        kept = f"epoch {exported_epoch} is exported"
    text = (
        f"{metric} was {format_metric(metric, start)} before the first step and is {format_metric(metric, last)} after "
        f"the last epoch: training has undone part of what it began with; {kept}"
    )
    return Finding("WorseThanStart", text, f"try {', '.join(levers) or 'a lower optim.lr'}")


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
        gain: of the run's last epoch over the best one before the last part of the run.
        part: how much of the run that is, two epochs at least.
        below: a student that agrees more is fine.
        least: epochs of a run that is judged.
    """
    epochs = max(2, round(part * len(val)))
    if len(val) < max(least, epochs + 1):
        return None
    if not agreement or agreement[-1] >= below:
        return None
    best_before = max(val[:-epochs])
    best_since = max(val[-epochs:])
    last = val[-1]
    if last < best_before + gain:
        return None
    rise = f"{best_before:.1%} to {best_since:.1%} in the last {epochs} epochs"
    if last == best_since:
        rose = f"the run ended while {metric} still rose ({rise})"
    else:
        rose = f"{metric} rose from {rise}, with {last:.1%} in the last one"
    text = (
        f"{rose}, with {agreement[-1]:.1%} agreement with the teacher: the student is under-trained"
    )
    lever = "more trainer.max_epochs, a higher optim.lr"
    if start == "scratch":
        better = "model.student.inherit=auto or .pretrained=true (it started from random weights), "
        lever = better + lever
    return Finding("StudentUnderTrained", text, lever)


def stalled_training(silent_s: float, limit_s: float = 1800) -> Finding | None:
    """A run without an end in its summary has finished no step for ``limit_s`` seconds: it waits, or was killed."""
    if silent_s < limit_s:
        return None
    text = f"no step has ended for {silent_s / 60:.0f} min"
    lever = "a rank that waits for another, a disk or a store that does not answer, a process that is gone"
    return Finding("StalledTraining", text, lever)


def features_collapse(
    rank: Sequence[float], pictures: int, below: float = 10, least: int = 100
) -> Finding | None:
    """The features of at least ``least`` pictures vary in fewer than ``below`` directions, by RankMe.

    Args:
        rank: RankMe on the validation pictures, by epoch (Garrido et al., "RankMe", ICML 2023).
        pictures: validation pictures.
        below: fires below this number of directions.
        least: fewer pictures are not judged: they have no more directions themselves.
    """
    if not rank or pictures < least or rank[-1] >= below:
        return None
    text = (
        f"the student's features use {rank[-1]:.1f} directions (val/rankme of {pictures} pictures)"
    )
    lever = "model.student.inherit=true, more pictures, more epochs"
    return Finding("FeaturesCollapse", text, lever)


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
        near: difference that counts as none, as a share of the loss (of 1 for a smaller one).
    """
    for name, loss in others.items():
        common = [step for step in own if step in loss]
        if len(common) < least:
            continue
        are_alike = True
        for step in common:
            difference = abs(own[step] - loss[step])
            size = max(1.0, abs(own[step]))
            are_alike = are_alike and difference <= near * size
        if are_alike:
            text = f"train/loss is that of {name} in all {len(common)} steps that both have logged"
            lever = "the setting that differs has no effect, or nothing differs"
            return Finding("SimilarAcrossRuns", text, lever)
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
    frequent = []
    for true_class, called, count in pairs:
        pictures = counts.get(true_class, 0)
        if pictures < least:
            continue
        share_of_class = ratio(count, pictures)
        if share_of_class > share:
            frequent.append((share_of_class, true_class, called, count))
    if not frequent:
        return None
    largest, true_class, called, count = max(frequent)
    text = f"{largest:.0%} of '{true_class}' are taken for '{called}' ({count} of {counts[true_class]})"
    if len(frequent) > 1:
        text += f", and {len(frequent) - 1} more pairs above {share:.0%}"
    lever = "their labels, more pictures of both; the teacher may mix them up as well"
    return Finding("Confusion", text, lever)


# -- gradients, weights, activations, pictures -------------------------------------------------------------------------
def vanishing_gradient(
    norms: Sequence[float], least: float = 1e-7, share: float = 0.5
) -> Finding | None:
    """The gradient's norm is below ``least`` in more than ``share`` of the readings.

    Args:
        norms: L2 norm over all weights before clipping, a value a reading; those that were not finite are left out.
        least: norm.
        share: in [0, 1].
    """
    small = mean([norm < least for norm in norms])
    if not small > share:  # also of no readings, whose mean is NaN
        return None
    text = f"the gradient's norm is below {least:g} in {small:.0%} of the readings"
    lever = "activations that saturate, loss weights near 0, a frozen part"
    return Finding("VanishingGradient", text, lever)


def exploding_tensor(norms: Sequence[float | None], factor: float = 100) -> Finding | None:
    """A gradient norm that is NaN or infinite, or ``factor`` times the median.

    Args:
        norms: of the readings; None: it was NaN or infinite.
        factor: times the median, of five finite readings or more.
    """
    finite = [norm for norm in norms if norm is not None and math.isfinite(norm)]
    not_finite = len(norms) - len(finite)
    median = percentile(finite, 50)
    if not_finite:
        text = f"{not_finite} of {len(norms)} gradient norms are not finite"
    elif len(finite) >= 5 and max(finite) > factor * median > 0:
        text = f"the gradient's norm reached {max(finite):.3g} (median {median:.3g})"
    else:
        return None
    lever = "a lower optim.lr, longer optim.warmup_epochs, trainer.gradient_clip_val"
    return Finding("ExplodingTensor", text, lever)


def dead_relu(dead: Mapping[str, float], share: float = 0.5) -> Finding | None:
    """More than ``share`` of a layer's units never fire.

    Args:
        dead: the share of dead units, in [0, 1], by layer.
        share: above which a layer counts.
    """
    layers = _above(dead, share)
    if not layers:
        return None
    worst = max(layers, key=lambda name: layers[name])
    plural = "s" * (len(layers) > 1)
    text = f"{len(layers)} layer{plural} with dead units, {worst}: {layers[worst]:.0%} never fire"
    return Finding("DeadRelu", text, "a lower optim.lr or longer optim.warmup_epochs")


def _above(shares: Mapping[str, float], limit: float) -> dict[str, float]:
    """The layers whose share is above the limit."""
    return {name: share for name, share in shares.items() if share > limit}


def poor_weight_initialization(spread: Mapping[str, float], factor: float = 1000) -> Finding | None:
    """At the first reading the activations' standard deviations differ by ``factor`` between layers.

    Args:
        spread: standard deviation of the outputs, by layer.
        factor: the largest over the smallest of them.
    """
    finite = []
    for layer, deviation in spread.items():
        if math.isfinite(deviation):
            finite.append((deviation, layer))
    if len(finite) < 2:
        return None
    low, lowest = min(finite, key=itemgetter(0))
    high, highest = max(finite, key=itemgetter(0))
    if high <= factor * low:
        return None
    text = f"activations spread {low:.2g} in {lowest} but {high:.2g} in {highest}"
    return Finding("PoorWeightInitialization", text, "the student's initial weights")


def saturated_activation(saturated: Mapping[str, float], share: float = 0.8) -> Finding | None:
    """More than ``share`` of a sigmoid's or tanh's outputs lie at its ends, where it has no gradient.

    Args:
        saturated: the share of outputs at the ends in the newest reading, in [0, 1], by layer.
        share: above which a layer counts.
    """
    layers = _above(saturated, share)
    if not layers:
        return None
    worst = max(layers, key=lambda name: layers[name])
    plural = "s" * (len(layers) > 1)
    text = f"{len(layers)} saturated layer{plural}, {worst}: {layers[worst]:.0%} of its outputs"
    lever = "a lower optim.lr, or smaller weights before it (optim.weight_decay)"
    return Finding("SaturatedActivation", text, lever)


def weight_update_ratio(
    ratios: Sequence[float], low: float = 1e-8, high: float = 0.1
) -> Finding | None:
    """The median step moves the weights by less than ``low`` or more than ``high`` of their size.

    Args:
        ratios: norm of the update over the norm of the weights, a value a reading; fewer than three are not judged.
        low: fires below.
        high: fires above.
    """
    if len(ratios) < 3:
        return None
    median = percentile(ratios, 50)
    if low <= median <= high:
        return None
    text = f"a step moves the weights by {median:.2g} of their size (median)"
    lever = "a higher optim.lr" if median < low else "a lower optim.lr"
    return Finding("WeightUpdateRatio", text, lever)


def all_zero(zeros: Mapping[str, float], share: float = 1.0) -> Finding | None:
    """A layer's outputs are all 0.

    Args:
        zeros: the share of zeros among its outputs, in [0, 1], by layer.
        share: from which on a layer counts.
    """
    layers = [name for name, zero_share in zeros.items() if zero_share >= share]
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
    newest = [set(names) for names in unchanged[-times:]]
    names = set.intersection(*newest)
    if not names:
        return None
    text = f"{len(names)} weight{'s' * (len(names) > 1)} did not change, {min(names)} for one"
    lever = "a part that gets no gradient (frozen, detached, unused), or a rate of 0"
    return Finding("UnchangedTensor", text, lever)


def tensor_variance(
    spread: Mapping[str, float], low: float = 1e-10, high: float = 1e6
) -> Finding | None:
    """A layer's outputs have a variance below ``low`` or above ``high``.

    Args:
        spread: standard deviation of the outputs in the newest reading, by layer.
        low: variance.
        high: likewise.
    """
    variances = {}
    outside = []
    for layer, deviation in spread.items():
        variance = deviation * deviation
        variances[layer] = variance
        if not low <= variance <= high:
            outside.append(layer)
    if not outside:
        return None
    layer = min(outside)  # the first by name
    text = f"the variance of {layer} is {variances[layer]:.2g}"
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
    constant_share = mean([reading["constant"] for reading in inputs])
    duplicated_share = mean([reading["duplicated"] for reading in inputs])
    low = min(reading["low"] for reading in inputs)
    high = max(reading["high"] for reading in inputs)
    are_bytes = inputs[0]["bytes"]
    if are_bytes and high <= 1:
        text = f"all values of the pictures lie in {low:g} to {high:g}: bytes go to 255"
    elif not are_bytes and high > 20:
        text = f"the pictures are floats of {low:g} to {high:g}: they are not normalised"
    elif constant_share > constant:
        text = f"{constant_share:.0%} of the training pictures have a single colour"
    elif duplicated_share > duplicated:
        text = f"{duplicated_share:.0%} of a batch are duplicates within the batch"
    else:
        return None
    return Finding("CheckInputImages", text, "the data: its files, its decoding, data.augment")
