"""Two models on the same pictures: how much worse one may be, by the pictures that only one of them is right on.

Of n pictures the reference alone is right on b and the candidate alone on c. With probabilities ``p_b`` and ``p_c`` of
these the candidate's accuracy is the reference's plus ``p_c - p_b``. Whether ``p_b - p_c`` reaches a margin m is tested
by Tango's score, whose distribution is computed exactly: a test that is conditional on b + c can't bound a difference
(with b + c = 0 it would exclude every loss), and the normal approximation fails where b and c are small.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import scipy

from kd.proof.binomial import both_bounds

NUISANCE = 1e-4
"""Chance that the true share of pictures on which the models differ is outside of the interval that is searched."""
GRID = 32
"""Shares of such pictures that are tried in this interval."""
NEGLIGIBLE = 1e-10
"""Chance of a number of such pictures that is left out."""
LARGEST_EXACT = 20_000
"""Pictures; above, the normal approximation of the score is used."""
POWER = 0.8
"""Chance of a certificate that :func:`pictures_needed` asks for."""


@dataclass(frozen=True)
class PairedCounts:
    """Pictures by which of two models is right."""

    pictures: int
    """n: of all kinds."""
    only_reference: int
    """b: the reference alone is right."""
    only_candidate: int
    """c: the candidate alone is right."""

    @property
    def difference(self) -> float:
        """Accuracy of the candidate less that of the reference, in -1..1."""
        return (self.only_candidate - self.only_reference) / self.pictures

    @property
    def discordant(self) -> int:
        """Pictures that one model alone is right on."""
        return self.only_reference + self.only_candidate

    @property
    def gap(self) -> dict[str, float]:
        """``pictures``, :attr:`difference`, and ``low`` and ``high``, the ends of its 95 % interval (Tango's)."""
        low, high = tango_interval(self, 0.95)
        return {
            "pictures": self.pictures,
            "difference": self.difference,
            "low": low,
            "high": high,
        }


def tango_score(n: int, b: np.ndarray | int, c: np.ndarray | int, margin: float) -> np.ndarray:
    """Tango's score of the hypothesis that the candidate is worse by exactly ``margin``, ``p_b - p_c = margin``: about
    standard normal where that holds, high where the candidate does better.

    ``T = (c - b + n m) / sqrt(n (2 q + m (1 - m)))`` where q is the likeliest ``p_c`` under the margin
    (Tango, Statistics in Medicine 17:891-908, 1998, equation 10).

    Args:
        n: pictures.
        b: the reference alone is right, any shape.
        c: the candidate alone is right, the same shape.
        margin: m, in -1..1.

    Returns:
        The score T, in the shape of the counts.
    """
    b = np.asarray(b, np.float64)
    c = np.asarray(c, np.float64)
    difference = c - b + n * margin
    q = _likeliest_share(n, b, c, margin)
    variance_of_one = 2 * q + margin * (1 - margin)
    variance = np.maximum(n * variance_of_one, 1e-12)
    deviation = np.sqrt(variance)
    return difference / deviation


def _likeliest_share(n: int, b: np.ndarray, c: np.ndarray, margin: float) -> np.ndarray:
    """The maximum-likelihood estimate of ``p_c`` from counts, given ``p_b - p_c = margin``, in the shape of the counts; at
    least ``max(0, -margin)``, as neither share is below 0.

    The larger root of ``A q^2 + B q + C``, with ``A = 2 n``, ``B = -b - c + (2 n - b + c) m``, ``C = -c m (1 - m)``
    (Tango, Statistics in Medicine 17:891-908, 1998, equations 11 and 12). Arguments as of :func:`tango_score`.
    """
    A = 2 * n
    B = -b - c + (A - b + c) * margin
    C = -c * margin * (1 - margin)
    discriminant = B**2 - 4 * A * C
    square_root = np.sqrt(np.maximum(discriminant, 0))
    root = (square_root - B) / (2 * A)
    least = max(0.0, -margin)
    return np.maximum(root, least)


def tango_interval(counts: PairedCounts, confidence: float) -> tuple[float, float]:
    """Tango's two-sided interval of ``p_c - p_b``, the candidate's accuracy less the reference's: its ends, in -1..1.

    It assumes that the score is normal, at any number of pictures; :func:`loss_p_value` is exact up to
    :data:`LARGEST_EXACT`. A certificate lists this interval, but rests on its own bound (:func:`largest_loss`).

    Args:
        counts: of the pictures.
        confidence: of the interval, in 0..1.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    swapped = PairedCounts(counts.pictures, counts.only_candidate, counts.only_reference)
    return -_tango_margin(counts, z), _tango_margin(swapped, z)


def _tango_margin(counts: PairedCounts, z: float) -> float:
    """The smallest margin, in -1..1, whose score reaches z > 0, by halving; the score rises with the margin.

    The search begins at the loss that the counts show, where the score is 0.
    """
    n = counts.pictures
    b = counts.only_reference
    c = counts.only_candidate
    low = -counts.difference
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if float(tango_score(n, b, c, middle)) < z:
            low = middle
        else:
            high = middle
    return high


def loss_p_value(counts: PairedCounts, margin: float) -> float:
    """The p-value of the hypothesis that the candidate is worse by ``margin`` or more: the largest chance of counts at least
    as good as these where it is worse by exactly ``margin``.

    Counts are ordered by :func:`tango_score`. With k = b + c of n pictures, ``k ~ Bin(n, pi)`` and
    ``c | k ~ Bin(k, (pi - m) / (2 pi))``; for each k the counts at least as good are those with c from some number
    upwards. The unknown share pi is searched in its interval of confidence ``1 - gamma``, and gamma
    (:data:`NUISANCE`) is added (Berger and Boos, JASA 89:1012-1016, 1994), so that a candidate that is worse by the
    margin or more gets a p-value <= x with a chance of at most x. Above :data:`LARGEST_EXACT` pictures the score is
    taken for normal.

    Args:
        counts: of the pictures.
        margin: m, in -1..1: by so much the candidate is worse.

    Returns:
        In 0..1; a small one excludes a loss of ``margin`` or more. Where m is below 0 and ``-m`` above all shares that are
        searched, it is gamma, which excludes m alone.
    """
    n = counts.pictures
    b = counts.only_reference
    c = counts.only_candidate
    score = float(tango_score(n, b, c, margin))
    if n > LARGEST_EXACT:
        return 1 - NormalDist().cdf(score)
    shares = _shares_to_search(counts, margin)
    if not len(shares):  # fewer pictures differ than the margin alone would make differ
        return NUISANCE
    k_K = _likely_numbers(n, shares)
    least_K = _least_candidate(n, k_K, margin, score)
    chance_of_k_SK = scipy.stats.binom.pmf(k_K[None, :], n, shares[:, None])
    theta_S = (shares - margin) / (2 * shares)

    # The tail of c is computed where k is not practically impossible.
    share, number = np.nonzero(chance_of_k_SK > NEGLIGIBLE)
    chance_of_c = scipy.stats.binom.sf(least_K[number] - 1, k_K[number], theta_S[share])
    weighted = chance_of_k_SK[share, number] * chance_of_c
    by_share_S = np.bincount(share, weighted, minlength=len(shares))
    return min(1.0, float(by_share_S.max()) + NUISANCE)


def _shares_to_search(counts: PairedCounts, margin: float) -> np.ndarray:
    """Values of the unknown share pi of pictures on which the models differ, for :func:`loss_p_value` to try: ``(GRID,)``
    over its confidence interval, in [0, 1]; empty where none of the interval is possible.

    Args:
        counts: of the pictures.
        margin: m, in -1..1; pi is at least ``|m|``, as the models' difference is.
    """
    low, high = both_bounds(counts.discordant, counts.pictures, NUISANCE)
    low = max(low, abs(margin))
    if high < low:
        return np.empty(0)
    return np.linspace(max(low, 1e-12), max(high, 1e-12), GRID)


def _likely_numbers(n: int, shares: np.ndarray) -> np.ndarray:
    """The numbers k in 0..n that ``k ~ Bin(n, share)`` may practically be under any of the shares, ``(K,)``: ascending,
    without gaps.

    They reach from the lowest to the highest ``n * share``, and 8 standard deviations and 20 further on both sides.

    Args:
        n: pictures.
        shares: in [0, 1], any shape.
    """
    means = n * shares
    deviations = np.sqrt(n * shares * (1 - shares))
    spreads = 8 * deviations + 20
    lowest = (means - spreads).min()
    highest = (means + spreads).max()
    first = max(0, math.floor(lowest))
    last = min(n, math.ceil(highest))
    return np.arange(first, last + 1)


def _least_candidate(n: int, k: np.ndarray, margin: float, score: float) -> np.ndarray:
    """For each k = b + c the smallest c whose score (:func:`tango_score`) is ``score`` or more, up to rounding; k + 1 where
    none is. By halving.

    Args:
        n: pictures.
        k: pictures on which one model alone is right, any shape.
        margin: m, in -1..1.
        score: to be reached.
    """
    wanted = score - 1e-9
    low = np.zeros_like(k)
    high = k + 1
    while (low < high).any():
        middle = (low + high) // 2
        reaches = tango_score(n, k - middle, middle, margin) >= wanted
        high = np.where((low < high) & reaches, middle, high)
        low = np.where((low < high) & ~reaches, middle + 1, low)
    return high


def largest_loss(counts: PairedCounts, confidence: float) -> float:
    """The upper bound of the candidate's loss: with ``confidence`` it is worse by less than this.

    It is the margin at which :func:`loss_p_value` falls to ``1 - confidence``, by halving from Tango's bound: at most a
    little too large.

    Args:
        counts: of the pictures.
        confidence: one-sided, in 0.5..1.

    Returns:
        In -1..1; negative where the candidate is proven better.
    """
    error = 1 - confidence
    guess = _tango_margin(counts, NormalDist().inv_cdf(confidence))
    width = 0.25 * (guess + counts.difference) + 1 / counts.pictures
    low = max(guess - width, -1.0)
    high = min(guess + width, 1.0)
    while low > -1 and loss_p_value(counts, low) <= error:
        low = max(-1.0, low - width)
    while high < 1 and loss_p_value(counts, high) > error:
        high = min(1.0, high + width)
    for _ in range(12):
        middle = (low + high) / 2
        if loss_p_value(counts, middle) > error:
            low = middle
        else:
            high = middle
    return high


def mcnemar_mid_p(b: int, c: int) -> float:
    """The p-value of the two-sided mid-p McNemar test: a small one shows that two accuracies differ.

    ``2 P(X <= min(b, c)) - P(X = b)`` with ``X ~ Bin(b + c, 1/2)``; ``1 - P(X = b) / 2`` where b = c (Fagerland,
    Lydersen and Laake, BMC Medical Research Methodology 13:91, 2013).

    Args:
        b: pictures that one model alone is right on.
        c: pictures that the other alone is right on.

    >>> round(mcnemar_mid_p(1, 7), 4)
    0.0391
    """
    differing = b + c
    point = float(scipy.stats.binom.pmf(b, differing, 0.5))
    if b == c:
        return 1 - point / 2
    # P(X <= min(b, c)) as P(X >= max(b, c)), which is as large: 1 - P(X > min(b, c)) has no digit left below 1e-16
    more, less = max(b, c), min(b, c)
    smaller_tail = worse_p_value(more, less)
    return min(1.0, 2 * smaller_tail - point)


def worse_p_value(b: int, c: int) -> float:
    """The p-value of the one-sided exact conditional McNemar test, ``P(X >= b)`` of ``X ~ Bin(b + c, 1/2)``: a small one
    shows that the candidate is worse.

    Args:
        b: pictures that the reference alone is right on.
        c: pictures that the candidate alone is right on.
    """
    return float(scipy.stats.binom.sf(b - 1, b + c, 0.5))


def holm(p_values: np.ndarray) -> np.ndarray:
    """P-values corrected for several tests by Holm's method, so that they hold for all tests together (Scandinavian Journal
    of Statistics 6:65-70, 1979).

    Args:
        p_values: of each test alone, ``(T,)``.

    Returns:
        ``(T,)``, in the same order.

    >>> holm(np.array([0.01, 0.04, 0.03])).tolist()
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values, kind="stable")
    tests = len(p_values)
    scaled = p_values[order] * (tests - np.arange(tests))
    adjusted = np.empty(tests)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted


def pictures_needed(counts: PairedCounts, margin: float, confidence: float) -> int | None:
    """How many pictures would give a certificate with a chance of :data:`POWER`, 80 %, if the models differ as often and as
    much as on these.

    ``n = ((z_error + z_power)^2 (pi - d^2)) / (m + d)^2`` for a difference d and a share pi of pictures on which the
    models differ (Nam, Biometrics 53:1422-1430, 1997); at least as many as are needed where the models never differ:
    ``(1 - m)^n = error``.

    Args:
        counts: of the pictures here.
        margin: m, > 0, in shares of the pictures.
        confidence: of the certificate, one-sided, in 0.5..1.

    Returns:
        The number; None where no number of pictures would: the candidate is worse by the margin or more here.
    """
    difference = counts.difference
    error = 1 - confidence
    if difference <= -margin:
        return None
    least = 1.0
    if margin < 1:
        least = math.log(error) / math.log1p(-margin)
    z = NormalDist().inv_cdf(confidence) + NormalDist().inv_cdf(POWER)
    variance = counts.discordant / counts.pictures - difference**2
    distance = margin + difference
    pictures = z**2 * variance / distance**2
    return math.ceil(max(least, pictures))
