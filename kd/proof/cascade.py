"""The cascade: the student answers where it is sure, else the teacher. Its threshold, chosen with a guarantee."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import scipy

from kd.proof.binomial import both_bounds, lower_bound
from kd.proof.paired import PairedCounts, loss_p_value

SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
"""Shares of pictures that the teacher is asked for, in the table."""
THRESHOLDS = tuple(1 / (1 + np.exp(-np.linspace(-8, 14, 111)))) + (1.01,)
"""Fixed before any picture is seen, as fixed-sequence testing needs; a score below one of them asks the teacher."""
SEED = 0
"""Of the draw that divides the pictures into the half that chooses and the half that checks."""


@dataclass
class Measured:
    """What student and teacher made of N pictures."""

    scores: np.ndarray
    """How sure the student is, ``(N,)`` in 0..1."""
    student_right: np.ndarray
    """bool ``(N,)``."""
    teacher_right: np.ndarray
    """bool ``(N,)``."""

    def part(self, chosen: np.ndarray) -> "Measured":
        """The same for some of the pictures.

        Args:
            chosen: their numbers, or bool ``(N,)``.
        """
        return Measured(self.scores[chosen], self.student_right[chosen], self.teacher_right[chosen])

    def right(self, threshold: float) -> np.ndarray:
        """Whether the cascade is right on each picture, bool ``(N,)``: the teacher answers where the score is below the
        threshold, else the student.
        """
        return np.where(self.scores < threshold, self.teacher_right, self.student_right)

    def asked(self, threshold: float) -> int:
        """How many pictures the teacher answers: those whose score is below ``threshold``."""
        return int((self.scores < threshold).sum())

    def at(self, threshold: float) -> dict[str, float]:
        """The cascade's results at a threshold.

        Returns:
            The ``threshold``; ``accuracy``, and the ``share`` of the pictures that the teacher is asked for, in 0..1.
        """
        count = len(self.scores)
        return {
            "threshold": threshold,
            "accuracy": float(self.right(threshold).mean()),
            "share": self.asked(threshold) / count,
        }


def threshold_of(scores: np.ndarray, share: float) -> float:
    """The threshold below which this share (0..1) of the scores ``(N,)`` lies; 1.01, above every score, for all.

    Where scores are equal fewer may lie below it.
    """
    count = round(share * len(scores))
    ordered = np.append(np.sort(scores), 1.01)
    return float(ordered[count])


def curve(measured: Measured) -> list[dict[str, float]]:
    """The cascade's accuracy by how often it asks the teacher: a row (:meth:`Measured.at`) for each share of :data:`SHARES`,
    at the threshold below which that share of the scores lies.
    """
    return [measured.at(threshold_of(measured.scores, share)) for share in SHARES]


# -- the threshold ---------------------------------------------------------------------------------------------------
@lru_cache(maxsize=65536)
def _paired_p_value(counts: PairedCounts, margin: float) -> float:
    """:func:`loss_p_value`, kept: many thresholds give the same counts."""
    return loss_p_value(counts, margin)


def first_to_last(goal: "Goal", measured: Measured, error: float, rising: bool) -> float | None:
    """Tests the goal at one threshold after another, and returns the last one before the first that the test rejects.

    The order is fixed beforehand, and each threshold is tested at the whole ``error``: a threshold that misses the goal is
    returned with a chance of at most ``error`` (fixed-sequence testing; Angelopoulos, Bates, Candes, Jordan and Lei,
    "Learn then Test", arXiv 2110.01052, section 4).

    Args:
        goal: tested at each threshold (:meth:`Goal.p_value`).
        measured: pictures that nothing else was chosen by, neither the student nor its score.
        error: 1 less the confidence.
        rising: whether to begin at 0, where the teacher is never asked; else at the top, where it is always asked.

    Returns:
        The threshold; None where the first one is rejected.
    """
    accepted = None
    for threshold in _sequence(rising):
        if goal.p_value(measured, threshold) > error:
            return accepted
        accepted = threshold
    return accepted


def _sequence(rising: bool) -> Iterator[float]:
    """0 and :data:`THRESHOLDS`: from 0 (the teacher is never asked) upwards, or from the last (always) downwards."""
    thresholds = [0.0, *(float(threshold) for threshold in THRESHOLDS)]
    yield from thresholds if rising else reversed(thresholds)


@dataclass(frozen=True)
class Goal:
    """What the cascade should reach: exactly one of its numbers is set."""

    accuracy: float | None = None
    """At least so accurate, in 0..1."""
    of_teacher: float | None = None
    """Worse than the teacher by less than this, in 0..1."""
    share_of_teacher: float | None = None
    """At least this share of the teacher's accuracy, in 0..1."""
    share: float | None = None
    """The teacher is asked for at most this share of the pictures, in 0..1."""

    def p_value(self, measured: Measured, threshold: float) -> float:
        """The p-value of the hypothesis that the cascade misses the goal at a threshold: a small one proves the goal.

        For :attr:`accuracy` ``P(X >= right)`` of ``X ~ Bin(n, accuracy)``, by how many of n pictures the cascade is right
        on. For :attr:`of_teacher` by the pictures on which only the cascade or only the teacher is right
        (:func:`kd.proof.paired.loss_p_value`). For :attr:`share` ``P(X <= asked)`` of ``X ~ Bin(n, share)``, by how many
        the teacher is asked; 0 for a share of 1. Not defined for :attr:`share_of_teacher`, which :meth:`choose` turns into
        :attr:`of_teacher` first.
        """
        right = measured.right(threshold)
        count = len(right)
        if self.accuracy is not None:
            hits = int(right.sum())
            return float(scipy.stats.binom.sf(hits - 1, count, self.accuracy))
        if self.of_teacher is not None:
            b = int((measured.teacher_right & ~right).sum())
            c = int((right & ~measured.teacher_right).sum())
            return _paired_p_value(PairedCounts(count, b, c), self.of_teacher)
        assert self.share is not None
        if self.share >= 1:
            return 0.0
        asked = measured.asked(threshold)
        return float(scipy.stats.binom.cdf(asked, count, self.share))

    def choose(self, measured: Measured, confidence: float) -> float | None:
        """The threshold that meets the goal on new pictures with ``confidence`` (one-sided, in 0.5..1), by
        :func:`first_to_last`: under a limit on the teacher's share the highest one found, for any other goal the lowest.

        None where these pictures prove it of no threshold.
        """
        goal = self
        error = 1 - confidence
        if self.share_of_teacher is not None:
            # A tenth of the error bounds the teacher's accuracy A from below: a loss of (1 - s) A is allowed.
            right = int(measured.teacher_right.sum())
            least = lower_bound(right, len(measured.teacher_right), error / 10)
            allowed_loss = (1 - self.share_of_teacher) * least
            goal = Goal(of_teacher=allowed_loss)
            error = 0.9 * error
        # A limit on the share holds where the teacher is never asked, the other goals where it always is: begin there.
        limits_share = self.share is not None
        return first_to_last(goal, measured, error, limits_share)


# -- all together ----------------------------------------------------------------------------------------------------
def sureness(probabilities: np.ndarray) -> np.ndarray:
    """The student's score of each picture, ``(N,)``: the largest of its probabilities ``(N, C)``; 0 where that is NaN."""
    return np.nan_to_num(probabilities.max(1), nan=0.0)


def choose_threshold(measured: Measured, goal: Goal, confidence: float) -> dict[str, Any]:
    """Chooses the threshold on a random half of the pictures (the same in each call) and measures it on the other half.

    The result is the content of ``cascade.json``, where ``kd-serve`` and ``kd-export`` read their rule
    (:func:`kd.ship.cascade_rule.read_rule`).

    Args:
        measured: the N pictures.
        goal: what the cascade should reach.
        confidence: one-sided, in 0.5..1, that it reaches it on new pictures.

    Returns:
        Always: ``threshold`` (None: no threshold is sure to meet the goal), ``confidence``, ``pictures`` (N) and
        ``chosen_on`` (how many of them chose), the accuracies of ``student`` and ``teacher`` on all, ``curve``
        (:func:`curve`), and ``scores``: the percentiles 0 to 100 of the scores of all.

        With a threshold also: ``chosen`` and ``checked``, :meth:`Measured.at` on the pictures that chose and on the second
        half (``checked`` also has its ``pictures`` and the accuracy of the ``teacher``); ``asked``, how many of all N
        pictures, and ``share_interval``, two-sided, of their share among new pictures.
    """
    count = len(measured.scores)
    order = np.random.default_rng(SEED).permutation(count)
    half = count // 2
    chooser = measured.part(order[:half])
    checker = measured.part(order[half:])
    threshold = goal.choose(chooser, confidence)
    percentiles = np.quantile(measured.scores, np.linspace(0, 1, 101))
    found: dict[str, Any] = {
        "confidence": confidence,
        "threshold": threshold,
        "pictures": count,
        "chosen_on": half,
        "student": float(measured.student_right.mean()),
        "teacher": float(measured.teacher_right.mean()),
        "curve": curve(measured),
        "scores": percentiles.tolist(),
    }
    if threshold is not None:
        checked_on = count - half
        asked = measured.asked(threshold)
        found["chosen"] = chooser.at(threshold)
        found["checked"] = {
            **checker.at(threshold),
            "pictures": checked_on,
            "teacher": float(checker.teacher_right.mean()),
        }
        found["asked"] = asked
        found["share_interval"] = both_bounds(asked, count, 1 - confidence)
    return found
