"""The cascade: the student answers where it is sure, else the teacher. Its threshold, chosen with a guarantee."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from kd.proof.binomial import at_least, both_bounds, lower_bound
from kd.proof.paired import PairedCounts, loss_p_value

Score = Literal["probability", "margin", "entropy", "head"]
SCORES: tuple[Score, ...] = ("probability", "margin", "entropy", "head")
"""How sure a student is: its largest probability, the distance to the next one, 1 less the entropy over its maximum, or
what a small classifier makes of its largest probabilities and the entropy (:func:`fit_head`)."""
SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
"""Shares of pictures that the teacher is asked for, in the table."""
THRESHOLDS = tuple(1 / (1 + np.exp(-np.linspace(-8, 14, 111)))) + (1.01,)
"""Fixed before any picture is seen, as fixed-sequence testing needs; a score below one of them asks the teacher."""
TOP = 5
"""Probabilities that the head reads."""
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
        """Some of the pictures.

        Args:
            chosen: their numbers, or bool ``(N,)``.
        """
        return Measured(self.scores[chosen], self.student_right[chosen], self.teacher_right[chosen])

    def right(self, threshold: float) -> np.ndarray:
        """Whether the cascade is right, bool ``(N,)``."""
        return np.where(self.scores < threshold, self.teacher_right, self.student_right)

    def asked(self, threshold: float) -> int:
        """Pictures that the teacher is asked for."""
        return int((self.scores < threshold).sum())

    def at(self, threshold: float) -> dict[str, float]:
        """What the cascade reaches under a threshold.

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
    """:meth:`Measured.at` the thresholds that ask the teacher for the shares of :data:`SHARES`, one row each."""
    return [measured.at(threshold_of(measured.scores, share)) for share in SHARES]


def gain_area(measured: Measured) -> float:
    """What the cascade gains over asking for as many pictures at random, mean over all shares; a share of the pictures.

    Below 0 where the score is worse than chance. With k of N pictures asked, the least sure first, accuracy rises by
    ``(1/N) sum_{i<=k} (teacher_i - student_i)``; at random it rises by ``k/N`` of the whole.
    """
    least_sure_first = np.argsort(measured.scores, kind="stable")
    gain_N = measured.teacher_right.astype(float) - measured.student_right
    summed_N = gain_N[least_sure_first].cumsum()
    summed_K = np.concatenate([[0.0], summed_N])  # from none asked to all
    reached_K = summed_K / len(gain_N)
    at_random_K = np.linspace(0, reached_K[-1], len(reached_K))
    above_random_K = reached_K - at_random_K
    return float(above_random_K.mean())


# -- the threshold ---------------------------------------------------------------------------------------------------
Test = Callable[[Measured, float], float]
"""The p-value, at a threshold, of the cascade not being what it should be."""


@lru_cache(maxsize=65536)
def _paired_p_value(counts: PairedCounts, margin: float) -> float:
    """:func:`loss_p_value`, kept: many thresholds give the same counts."""
    return loss_p_value(counts, margin)


def near_teacher(margin: float) -> Test:
    """A test that excludes, where its p-value is small, that the cascade is worse than the teacher by ``margin`` or more.

    ``margin`` is a share of the pictures, in 0..1.
    """

    def p_value(measured: Measured, threshold: float) -> float:
        """The p-value at ``threshold``, by the pictures on which cascade and teacher differ."""
        right = measured.right(threshold)
        teacher = measured.teacher_right
        b = int((teacher & ~right).sum())
        c = int((right & ~teacher).sum())
        return _paired_p_value(PairedCounts(len(right), b, c), margin)

    return p_value


def at_least_accurate(accuracy: float) -> Test:
    """A test that excludes, where its p-value is small, that the cascade's accuracy is below ``accuracy``, in 0..1.

    The p-value is ``P(X >= right)`` of ``X ~ Bin(n, accuracy)``.
    """

    def p_value(measured: Measured, threshold: float) -> float:
        """The p-value at ``threshold``, by how many pictures the cascade gets right."""
        right = measured.right(threshold)
        return float(at_least(int(right.sum()), len(right), accuracy))

    return p_value


def at_most_asked(share: float) -> Test:
    """A test that excludes, where its p-value is small, that the teacher is asked for more than ``share`` of the pictures.

    ``share`` is in 0..1. The p-value is ``P(X <= asked)`` of ``X ~ Bin(n, share)``; 0 for a share of 1.
    """

    def p_value(measured: Measured, threshold: float) -> float:
        """The p-value at ``threshold``, by how many pictures the teacher is asked."""
        if share >= 1:
            return 0.0
        asked = measured.asked(threshold)
        more = at_least(asked + 1, len(measured.scores), share)
        return 1 - float(more)

    return p_value


def first_to_last(test: Test, measured: Measured, error: float, rising: bool) -> float | None:
    """The last threshold of a fixed sequence that the test accepts, before the first that it does not.

    The thresholds are tried in an order that was fixed before, each at the whole ``error``: one that does not hold is
    accepted with a chance of at most ``error`` (fixed-sequence testing; Angelopoulos, Bates, Candes, Jordan and Lei,
    "Learn then Test", arXiv 2110.01052, section 4).

    Args:
        test: the p-value of a threshold.
        measured: pictures by which nothing else was chosen: no student, no score.
        error: 1 less the confidence.
        rising: begins where the teacher is never asked, to ask it more and more; else where it is always asked.

    Returns:
        None where the first threshold is not accepted.
    """
    accepted = None
    for threshold in _sequence(rising):
        if test(measured, threshold) > error:
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

    @property
    def test(self) -> Test:
        """The test by which a threshold is chosen.

        Not defined for :attr:`share_of_teacher`, which :meth:`choose` turns into :attr:`of_teacher` first.
        """
        if self.accuracy is not None:
            return at_least_accurate(self.accuracy)
        if self.of_teacher is not None:
            return near_teacher(self.of_teacher)
        assert self.share is not None
        return at_most_asked(self.share)

    def choose(self, measured: Measured, confidence: float) -> float | None:
        """The threshold that meets the goal with ``confidence`` (one-sided, in 0.5..1).

        None where none is sure to meet it on so few pictures.
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
        # A limit on the share holds where the teacher is never asked: that sequence rises; others begin where it always is.
        limits_share = self.share is not None
        return first_to_last(goal.test, measured, error, limits_share)


# -- how sure --------------------------------------------------------------------------------------------------------
def features_of(probabilities: np.ndarray) -> np.ndarray:
    """What the scores are made of: of probabilities ``(N, C)`` the largest five and the entropy, ``(N, 6)``.

    The largest probability is the first; where C is below five, 0 stands for those that are missing. The entropy is over
    its maximum, in 0..1.
    """
    classes = probabilities.shape[1]
    falling = -np.sort(-probabilities, axis=1)
    top = falling[:, :TOP]
    missing = max(0, TOP - classes)
    top = np.pad(top, ((0, 0), (0, missing)))

    # the entropy over its maximum, log C
    clipped = np.clip(probabilities, 1e-12, 1)
    information = clipped * np.log(clipped)
    maximum = np.log(max(2, classes))
    entropy = -information.sum(1) / maximum
    return np.column_stack([top, entropy])


def score_of(features: np.ndarray, score: Score, head: list[float] | None = None) -> np.ndarray:
    """How sure the student is, ``(N,)`` in 0..1; 0 where all its probabilities are NaN: the teacher is asked.

    Args:
        features: of :func:`features_of`, ``(N, 6)``.
        score: which; ``head`` is 1 less the probability that the teacher alone is right.
        head: the seven weights of :func:`fit_head`; read for ``head`` alone.
    """
    if score == "probability":
        sureness = features[:, 0]
    elif score == "margin":
        sureness = features[:, 0] - features[:, 1]
    elif score == "entropy":
        sureness = np.clip(1 - features[:, TOP], 0, 1)
    else:
        assert head is not None
        sureness = 1 / (1 + np.exp(_inputs(features) @ np.asarray(head)))
    return np.nan_to_num(sureness, nan=0.0)


def _inputs(features: np.ndarray) -> np.ndarray:
    """The head's inputs, of :func:`features_of` ``(N, 6)``: 1, five log-probabilities (at least log 1e-6), the entropy.

    ``(N, 7)``.
    """
    ones = np.ones(len(features))
    top = features[:, :TOP]
    entropy = features[:, TOP]
    log_probabilities = np.log(np.clip(top, 1e-6, 1))
    return np.column_stack([ones, log_probabilities, entropy])


def fit_head(features: np.ndarray, student: np.ndarray, teacher: np.ndarray) -> list[float]:
    """A logistic regression of "the teacher is right and the student is wrong", by Newton's method.

    It minimises ``-sum_n [y_n log p_n + (1 - y_n) log(1 - p_n)] + |w|^2 / 2`` with ``p = 1 / (1 + exp(-X w))``.

    Args:
        features: of :func:`features_of`, ``(N, 6)``.
        student: whether it is right, bool ``(N,)``.
        teacher: likewise.

    Returns:
        The seven weights w, one for each of :func:`_inputs`.
    """
    x_ND = _inputs(features)
    teacher_alone = teacher & ~student
    y_N = teacher_alone.astype(float)
    weights = np.zeros(x_ND.shape[1])
    ridge = np.eye(len(weights))
    for _ in range(30):
        logits_N = np.clip(x_ND @ weights, -30, 30)
        p_N = 1 / (1 + np.exp(-logits_N))
        gradient = x_ND.T @ (p_N - y_N) + weights
        variance_N = p_N * (1 - p_N)
        weighted_ND = x_ND * variance_N[:, None]
        hessian = weighted_ND.T @ x_ND + ridge
        weights -= np.linalg.solve(hessian, gradient)
    return weights.tolist()


# -- all together ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class CascadePlan:
    """How a cascade is chosen."""

    goal: Goal
    """What it should reach."""
    confidence: float = 0.95
    """One-sided, in 0.5..1, that it reaches it on new pictures."""
    score: Score = "probability"
    """How sure a student is."""


def choose(
    features: np.ndarray, student: np.ndarray, teacher: np.ndarray, plan: CascadePlan
) -> dict[str, Any]:
    """Chooses the threshold on one half of the pictures and checks it on the other.

    ``cascade.json`` keeps what it returns; ``kd-serve`` and ``kd-export`` read their rule there
    (:func:`kd.ship.cascade_rule.read_rule`).

    The ``head`` is fitted to one quarter of the pictures in any case, to be compared; where it is the plan's score, only
    the other quarter of that half chooses.

    Args:
        features: of :func:`features_of`, ``(N, 6)``.
        student: whether it is right, bool ``(N,)``.
        teacher: likewise.
        plan: the goal, the confidence, and the score.

    Returns:
        Always: ``threshold`` (None: no threshold is sure to meet the goal), ``score`` and ``confidence`` of the plan,
        ``head`` (its weights; None for other scores), ``pictures`` (N) and ``chosen_on`` (how many of them chose), the
        accuracies of ``student`` and ``teacher`` on all, ``curve`` (:func:`curve`), ``compared`` (by score
        :func:`gain_area` on the second half), and ``scores``: the percentiles 0 to 100 of the plan's score on all.

        With a threshold also: ``chosen`` and ``checked``, :meth:`Measured.at` on the pictures that chose and on the second
        half (``checked`` also has its ``pictures``, the accuracy of the ``teacher``, and ``least_accuracy``, the lower bound
        of the cascade's); ``asked``, how many of all N pictures, and ``share_interval``, two-sided, of their share among
        new pictures.
    """
    order = np.random.default_rng(SEED).permutation(len(student))
    half = len(order) // 2
    first = order[:half]
    second = order[half:]
    fitted = first[: half // 2]  # the head learns from one quarter
    head = fit_head(features[fitted], student[fitted], teacher[fitted])
    if plan.score == "head":
        first = first[half // 2 :]
    everything = Measured(score_of(features, plan.score, head), student, teacher)
    chooser = everything.part(first)
    checker = everything.part(second)
    threshold = plan.goal.choose(chooser, plan.confidence)
    compared = {}
    for score in SCORES:
        scored = Measured(score_of(features, score, head), student, teacher).part(second)
        compared[score] = gain_area(scored)
    found: dict[str, Any] = {
        "score": plan.score,
        "head": head if plan.score == "head" else None,
        "confidence": plan.confidence,
        "threshold": threshold,
        "pictures": len(student),
        "chosen_on": len(first),
        "student": float(student.mean()),
        "teacher": float(teacher.mean()),
        "curve": curve(everything),
        "compared": compared,
        "scores": [float(q) for q in np.quantile(everything.scores, np.linspace(0, 1, 101))],
    }
    if threshold is not None:
        asked = everything.asked(threshold)
        found["chosen"] = chooser.at(threshold)
        found["checked"] = {
            **checker.at(threshold),
            "pictures": len(second),
            "teacher": float(checker.teacher_right.mean()),
            "least_accuracy": lower_bound(
                int(checker.right(threshold).sum()), len(second), 1 - plan.confidence
            ),
        }
        found["asked"] = asked
        found["share_interval"] = both_bounds(asked, len(student), 1 - plan.confidence)
    return found
