"""What few pictures can show: one rule for every conclusion that a run draws about its teacher.

A conclusion rests on counts: ``k`` of ``n`` pictures are right. Luck explains them as long as ``P(X >= k)`` of
``X ~ Bin(n, p)`` is not tiny, and a teacher counts as bad only where a fine one would hardly have done as badly.

Plain numbers, without NumPy: ``kd-report`` reads runs on machines that have none.
"""

import math
from statistics import NormalDist

SIGMAS = 3.5
"""Standard errors of what counts as found: one wrong alarm in some 4,000 teachers."""

CHANCE_SIGMAS = 3.0
"""Standard errors above guessing that a teacher must reach."""

ERROR = 0.01
"""How often a teacher that is halfway between guessing and perfect would do as badly as one that is refused."""

FEWEST_PICTURES = 10
"""Where a metric is no share of the pictures: so many coins all show heads with p < 0.00135."""


def p_value(sigmas: float) -> float:
    """The chance that a normal variable exceeds its mean by ``sigmas`` standard errors or more (one-sided).

    >>> round(p_value(3), 5)
    0.00135
    """
    return NormalDist().cdf(-sigmas)


def at_least(hits: int, trials: int, share: float) -> float:
    """The chance of ``hits`` or more in ``trials``, each a hit with the chance ``share`` (0..1): ``P(X >= hits)`` of
    ``X ~ Bin(trials, share)``.

    The sum of the terms ``n! / (k! (n - k)!) p^k (1 - p)^(n - k)``, each by its logarithm. SciPy would take half a second
    to import.

    >>> round(at_least(2, 3, 0.5), 6), at_least(0, 3, 0.5)
    (0.5, 1.0)
    """
    if hits <= 0 or (share == 1 and hits <= trials):
        return 1.0
    if share in (0, 1):
        return 0.0
    log_hit = math.log(share)
    log_miss = math.log1p(-share)
    log_orders = math.lgamma(trials + 1)
    terms = []
    for k in range(hits, trials + 1):
        misses = trials - k
        log_ways = log_orders - math.lgamma(k + 1) - math.lgamma(misses + 1)
        terms.append(math.exp(log_ways + k * log_hit + misses * log_miss))
    return min(1.0, math.fsum(terms))


def is_clearly_more(hits: int, trials: int, share: float, sigmas: float = SIGMAS) -> bool:
    """Whether there are more hits than luck explains: ``P(X >= hits) < p_value(sigmas)`` (:func:`at_least`), exactly.

    With ``share=0.5`` it is the sign test of two models: of the ``trials`` pictures on which they differ, one model alone is
    right on ``hits``.

    Args:
        hits: how many trials hit.
        trials: how many there are.
        share: the chance of a hit by luck, in 0..1.
        sigmas: how strict the test is, in standard errors of a normal variable.

    >>> is_clearly_more(11, 11, 0.5), is_clearly_more(13, 13, 0.5)
    (False, True)
    """
    return at_least(hits, trials, share) < p_value(sigmas)


def shows_a_bad_teacher(right: int, pictures: int, share: float) -> bool:
    """Whether a teacher's answers prove that it is bad: a teacher halfway between guessing and perfect would be wrong on as
    many pictures, or more, with a chance below :data:`ERROR`.

    Args:
        right: how many pictures the teacher is right on.
        pictures: how many it has answered.
        share: the share of the pictures that guessing gets right, in 0..1.

    >>> shows_a_bad_teacher(3, 4, 0.5), shows_a_bad_teacher(0, 10, 0.1), shows_a_bad_teacher(50, 100, 0.5)
    (False, True, True)
    """
    wrong = pictures - right
    wrong_share_of_halfway = (1 - share) / 2
    return at_least(wrong, pictures, wrong_share_of_halfway) < ERROR
