"""Paired bootstrap: how far a difference of two models may be from the one that these pictures show."""

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import scipy

DRAWS = 4000
"""Samples of the groups of pictures, with replacement."""
CHUNK = 250
"""Samples, or groups left out in turn, that are computed at once."""
FEWEST = 20
"""Groups of pictures that a bootstrap needs; who calls it checks that."""
SEED = 0
"""Of the draws: the same pictures and answers always give the same bound."""

Statistic = Callable[[np.ndarray], np.ndarray]
"""How often each group of pictures counts, ``(R, G)`` -> the candidate's gain over the reference, ``(R,)``."""


def group_numbers(names: Sequence[str]) -> np.ndarray:
    """The number of each picture's group, ``(N,)``: pictures of one name are a group. Groups are numbered from 0 in the
    order of their names.

    >>> group_numbers(["b", "a", "b"]).tolist()
    [1, 0, 1]
    """
    return np.unique(np.asarray(names), return_inverse=True)[1].reshape(-1)


def smallest_gain(statistic: Statistic, groups: int, confidence: float) -> float:
    """The one-sided lower bound of a gain, in its unit, by the bias-corrected and accelerated bootstrap over groups of
    pictures (:func:`scipy.stats.bootstrap`; Efron, JASA 82:171-185, 1987). The draws are the same in each call.

    Where the gains of all samples lie on one side of the gain, the method's bias correction is not defined. The bound is
    then the smallest gain of a sample, or the gain where that is smaller.

    Args:
        statistic: computes gains from weights of groups.
        groups: how many there are, G.
        confidence: one-sided, in 0.5..1.
    """

    def gains_of(drawn_RG: np.ndarray, axis: int = -1) -> np.ndarray:
        """The gain of each sample, ``(R,)``. A sample is a list of groups' numbers, drawn with replacement: ``(R, G)``. Of
        one sample ``(G,)`` a single gain.
        """
        drawn = drawn_RG.shape[axis]
        rows_RG = drawn_RG.reshape(-1, drawn)
        samples = len(rows_RG)
        weights_RG = np.zeros((samples, groups))
        number_R1 = np.arange(samples)[:, None]
        np.add.at(weights_RG, (number_R1, rows_RG), 1)
        gains_R = statistic(weights_RG)
        shape = drawn_RG.shape[:-1]
        return gains_R.reshape(shape)

    everything = (np.arange(groups),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy's, where all samples are on one side
        found = scipy.stats.bootstrap(
            everything,
            gains_of,
            n_resamples=DRAWS,
            batch=CHUNK,
            vectorized=True,
            confidence_level=confidence,
            alternative="greater",
            method="BCa",
            rng=np.random.default_rng(SEED),
        )
    gain = float(gains_of(everything[0]))
    gains = found.bootstrap_distribution
    if gain < gains.min() or gain > gains.max() or np.isnan(found.confidence_interval.low):
        return min(gain, float(gains.min()))
    return float(found.confidence_interval.low)


def summed(rows: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Sums of rows ``(N, ...)`` by the group of each, ``(N,)`` numbers from 0 to G - 1: ``(G, ...)``."""
    sums = np.zeros((int(group.max()) + 1, *rows.shape[1:]))
    np.add.at(sums, group, rows)
    return sums


def mean_gain(reference: np.ndarray, candidate: np.ndarray, group: np.ndarray) -> Statistic:
    """The statistic for a score by picture: the candidate's mean score less the reference's, by the groups' weights.

    Args:
        reference: scores ``(N,)``, more is better.
        candidate: likewise.
        group: of each picture, ``(N,)``.
    """
    gain_G = summed(candidate - reference, group)
    count_G = summed(np.ones(len(group)), group)
    return lambda weights_RG: weights_RG @ gain_G / (weights_RG @ count_G)


def error_gain(reference: np.ndarray, candidate: np.ndarray, group: np.ndarray) -> Statistic:
    """The statistic for a regression: by how much less the candidate errs, as a share of the reference's mean absolute
    error; below 0 it errs more.

    The share is computed for each of the T numbers alone, then averaged over those that have targets among the pictures.

    Args:
        reference: absolute errors ``(N, T)`` in each number's unit, NaN where the target is missing.
        candidate: likewise.
        group: of each picture, ``(N,)``.
    """
    first_GT, second_GT = (summed(np.nan_to_num(e), group) for e in (reference, candidate))
    known_GT = summed(~np.isnan(reference) * 1.0, group)

    def gain(weights_RG: np.ndarray) -> np.ndarray:
        """Weights of the groups ``(R, G)`` -> the mean gain over the numbers that have targets, ``(R,)``."""
        first_RT = weights_RG @ first_GT
        second_RT = weights_RG @ second_GT
        gain_RT = (first_RT - second_RT) / np.maximum(first_RT, 1e-12)
        occurs_RT = weights_RG @ known_GT > 0
        sum_R = np.where(occurs_RT, gain_RT, 0.0).sum(1)
        occurring_R = occurs_RT.sum(1)
        return sum_R / np.maximum(occurring_R, 1)

    return gain


def iou_gain(reference: np.ndarray, candidate: np.ndarray, group: np.ndarray) -> Statistic:
    """The statistic for a segmentation: the gain in mean IoU, in -1..1. Each model's mean is over the classes that occur in
    the targets or in its own answers.

    Args:
        reference: pixels of each picture and class, ``(N, 2, C)``: right ones, and those in the union of target and
            answer.
        candidate: likewise.
        group: of each picture, ``(N,)``.
    """
    reference_G2C = summed(reference, group)
    candidate_G2C = summed(candidate, group)

    def gain(weights_RG: np.ndarray) -> np.ndarray:
        """Weights of the groups ``(R, G)`` -> the gain in mean IoU, ``(R,)``."""
        of_candidate = _mean_iou(weights_RG, candidate_G2C)
        return of_candidate - _mean_iou(weights_RG, reference_G2C)

    return gain


def _mean_iou(weights_RG: np.ndarray, counts_G2C: np.ndarray) -> np.ndarray:
    """Mean IoU under weights of the groups, ``(R,)``: right pixels / pixels of the union, averaged over the classes that
    occur.

    Args:
        weights_RG: how often each group counts, ``(R, G)``.
        counts_G2C: right pixels and those of the union, ``(G, 2, C)``.
    """
    right_GC = counts_G2C[:, 0]
    union_GC = counts_G2C[:, 1]
    right_RC = weights_RG @ right_GC
    union_RC = weights_RG @ union_GC
    occurs_RC = union_RC > 0
    iou_RC = right_RC / np.where(occurs_RC, union_RC, 1)
    occurring_R = occurs_RC.sum(1)
    return iou_RC.sum(1) / np.maximum(occurring_R, 1)


def precision_gain(
    reference: np.ndarray, candidate: np.ndarray, labels: np.ndarray, group: np.ndarray
) -> Statistic:
    """The statistic for several labels a picture: the gain in mean average precision over the labels that occur.

    Args:
        reference: scores ``(N, C)``, of which only the order within a label counts.
        candidate: likewise.
        labels: 0 and 1, ``(N, C)``.
        group: of each picture, ``(N,)``.
    """

    def gain(weights_RG: np.ndarray) -> np.ndarray:
        """Weights of the groups ``(R, G)`` -> the gain in mean average precision, ``(R,)``."""
        weights_RN = weights_RG[:, group]
        of_candidate = mean_precision(weights_RN, candidate, labels)
        return of_candidate - mean_precision(weights_RN, reference, labels)

    return gain


def mean_precision(weights_RN: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Mean average precision ``(R,)`` under weights of the pictures, over the labels that occur.

    Args:
        weights_RN: how often each picture counts, ``(R, N)``.
        scores: ``(N, C)``.
        labels: 0 and 1, ``(N, C)``.
    """
    total_R = np.zeros(len(weights_RN))
    occurring_R = np.zeros(len(weights_RN))
    for scores_N, labels_N in zip(scores.T, labels.T, strict=True):
        precision_R, occurs_R = _average_precision(weights_RN, scores_N, labels_N)
        total_R += precision_R
        occurring_R += occurs_R
    return total_R / np.maximum(occurring_R, 1)


def _average_precision(
    weights_RN: np.ndarray, scores_N: np.ndarray, labels_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The average precision of a label, ``(R,)``, and whether the label occurs, bool ``(R,)``.

    It is the mean over the label's pictures of the precision among pictures that score as high or higher.

    Args:
        weights_RN: how often each picture counts, ``(R, N)``.
        scores_N: ``(N,)``.
        labels_N: 0 and 1, ``(N,)``.
    """
    order = np.argsort(-scores_N, kind="stable")
    rising = -scores_N[order]
    last_of_equal = np.searchsorted(rising, rising, side="right") - 1

    weight_RN = weights_RN[:, order]
    hit_RN = weight_RN * labels_N[order]
    seen_RN = weight_RN.cumsum(1)[:, last_of_equal]
    hits_RN = hit_RN.cumsum(1)[:, last_of_equal]

    positives_R = hit_RN.sum(1)
    weighted_RN = hit_RN * hits_RN / np.maximum(seen_RN, 1e-12)
    precision_R = weighted_RN.sum(1) / np.maximum(positives_R, 1e-12)
    return precision_R, positives_R > 0
