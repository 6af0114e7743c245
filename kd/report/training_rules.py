"""Rules over what is learnt: pure functions that return a :class:`Finding` where they fire."""

import math
from collections.abc import Mapping, Sequence

from kd.report.limits import Finding
from kd.report.metric import format_metric
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
    """Over ``patience`` epochs validation stays ``drop`` below its best while the training loss still falls."""
    if len(val) <= patience or len(train_loss) <= patience:
        return None
    best = max(val)
    if max(val[-patience:]) > best - drop or train_loss[-1] >= train_loss[-1 - patience]:
        return None
    before, now = format_metric(metric, best), format_metric(metric, val[-1])
    text = f"{metric} fell from {before} to {now} while train/loss still falls"
    return Finding("Overfit", text, "stronger data.augment, fewer epochs; the best epoch is exported anyway")


def class_imbalance(counts: Sequence[int], factor: float = 10) -> Finding | None:
    """The most frequent class has ``factor`` times the pictures of the rarest."""
    if len(counts) < 2 or max(counts) < factor * max(1, min(counts)):
        return None
    text = f"the most frequent class has {max(counts)} pictures, the rarest {min(counts)}"
    return Finding("ClassImbalance", text, "data.balance_classes=true, or more pictures of the rare classes")


def teacher_near_chance(acc1: float, chance: float, val: int, sigma: float = 3) -> Finding | None:
    """The teacher is within ``sigma`` standard errors of always naming the most frequent class, and is ever wrong."""
    if acc1 == 1 or acc1 > chance + sigma * math.sqrt(chance * (1 - chance) / max(1, val)):
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
    """Over ``patience`` epochs agreement stays below ``below`` and within ``flat``, and no distillation loss falls."""
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
    """The softened teacher's entropy is above ``high`` or below ``low`` of its maximum: near uniform, or one-hot."""
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


def overtraining(
    val: Sequence[float], patience: int = 10, delta: float = 0.001, metric: str = "val/acc1"
) -> Finding | None:
    """The validation metric has not improved by ``delta`` for ``patience`` epochs."""
    if len(val) <= patience:
        return None
    before, since = max(val[: -int(patience)]), max(val[-int(patience) :])
    if since >= before + delta:
        return None
    text = f"{metric} has been no better than {format_metric(metric, before)} for {patience:g} epochs"
    return Finding("Overtraining", text, "stop here: the best epoch is exported; or a lower optim.lr")


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
    """The metric rose by ``gain`` in the last ``part`` of the run, and agreement is below ``below``."""
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
    return Finding("StalledTraining", text, "a rank that waits for another, a disk or a store that does not answer")


def features_collapse(rank: Sequence[float], pictures: int, below: float = 10, least: int = 100) -> Finding | None:
    """The features of at least ``least`` pictures vary in fewer than ``below`` directions, by RankMe."""
    if not rank or pictures < least or rank[-1] >= below:
        return None
    text = f"the student's features use {rank[-1]:.1f} directions (val/rankme of {pictures} pictures)"
    return Finding("FeaturesCollapse", text, "model.student.inherit=true, more pictures, more epochs")


def similar_across_runs(
    own: Mapping[float, float], others: Mapping[str, Mapping[float, float]], least: int = 5, near: float = 1e-6
) -> Finding | None:
    """Another run has had the same losses at the same steps: what differs between the two has no effect."""
    for name, loss in others.items():
        common = [step for step in own if step in loss]
        if len(common) >= least and all(abs(own[s] - loss[s]) <= near * max(1.0, abs(own[s])) for s in common):
            text = f"train/loss is that of {name} in all {len(common)} steps that both have logged"
            return Finding("SimilarAcrossRuns", text, "the setting that differs has no effect, or nothing differs")
    return None


def confusion(
    pairs: Sequence[tuple[str, str, int]], counts: Mapping[str, int], share: float = 0.3, least: int = 10
) -> Finding | None:
    """More than ``share`` of a class's pictures (at least ``least``) are taken for one other class."""
    found = [(n / counts[true], true, given, n) for true, given, n in pairs if counts.get(true, 0) >= least]
    large = [pair for pair in found if pair[0] > share]
    if not large:
        return None
    part, true, given, n = max(large)
    text = f"{part:.0%} of '{true}' are taken for '{given}' ({n} of {counts[true]})"
    text += f", and {len(large) - 1} more pairs above {share:.0%}" if len(large) > 1 else ""
    return Finding("Confusion", text, "their labels, more pictures of both; the teacher may mix them up as well")
