"""Binomial probabilities and bounds, vectorised, for whole numbers.

Errors of probabilities are below 1e-9 up to 20,000 trials, and below 1e-6 up to a million.
"""

from functools import lru_cache

import numpy as np

TINY = 1e-300
"""What stands for 0 as a divisor."""
POINTS, ROUNDS = 64, 6  # a bracket is divided into 63 parts so often: to 1e-10


@lru_cache(maxsize=4)
def _log_factorials(largest: int) -> np.ndarray:
    """``log k!`` for k = 0 .. largest."""
    logs = np.log(np.arange(1, largest + 1, dtype=np.float64))
    return np.concatenate([[0.0], np.cumsum(logs)])


def log_factorials(largest: int) -> np.ndarray:
    """``log k!`` for k = 0 .. ``largest`` at least; the table grows in powers of two."""
    return _log_factorials(max(1024, 1 << int(largest).bit_length()))


def pmf(k: np.ndarray, n: np.ndarray | int, p: np.ndarray | float) -> np.ndarray:
    """``P(X = k) = n! / (k! (n - k)!) p^k (1 - p)^(n - k)`` of ``X ~ Bin(n, p)``; the arguments broadcast.

    Computed in logarithms, because factorials leave the range of floats at 171!. 0 outside of 0..n.
    """
    k, n, p = np.broadcast_arrays(k, n, p)
    possible = (k >= 0) & (k <= n)
    hits = np.where(possible, k, 0)
    misses = n - hits

    # log n! / (k! (n - k)!)
    table = log_factorials(int(n.max(initial=0)))
    log_orders = table[n] - table[hits]
    log_ways = log_orders - table[misses]

    # k log p and (n - k) log(1 - p), where 0 log 0 = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        log_hit = np.log(p)
        log_miss = np.log1p(-p)
        log_hits = np.where(hits > 0, hits * log_hit, 0.0)
        log_misses = np.where(misses > 0, misses * log_miss, 0.0)

    chance = np.exp(log_ways + log_hits + log_misses)
    return np.where(possible, chance, 0.0)


def at_least(k: np.ndarray | int, n: np.ndarray | int, p: np.ndarray | float) -> np.ndarray:
    """``P(X >= k)`` of ``X ~ Bin(n, p)``; the arguments broadcast.

    It is the regularised incomplete beta function ``I_p(a, b)`` of ``a = k`` and ``b = n - k + 1``, by its continued
    fraction (Press et al., Numerical Recipes, 3rd edition, section 6.4). That converges fast for p up to the threshold
    ``(a + 1) / (a + b + 2)``; above it ``I_p(a, b) = 1 - I_{1-p}(b, a)``.

    >>> round(float(at_least(2, 3, 0.5)), 6)
    0.5
    """
    k = np.asarray(k, np.int64)
    n = np.asarray(n, np.int64)
    p = np.asarray(p, np.float64)
    k, n, p = np.broadcast_arrays(k, n, p)

    always_hits = p >= 1
    never_hits = p <= 0
    certain = (k <= 0) | (always_hits & (k <= n))
    impossible = (k > n) | never_hits
    plain = ~certain & ~impossible
    result = np.where(certain, 1.0, 0.0)
    if plain.any():
        a = k[plain]
        b = n[plain] - a + 1
        result[plain] = _incomplete_beta(a, b, p[plain])
    return result


def _incomplete_beta(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``I_x(a, b)`` of whole numbers >= 1 and 0 < x < 1, ``(M,)`` each.

    ``I_x(a, b) = x^a (1 - x)^b / (a B(a, b)) F(a, b, x)`` with the continued fraction F of :func:`_beta_fraction` and
    ``B(a, b) = (a - 1)! (b - 1)! / (a + b - 1)!`` (Press et al., Numerical Recipes, 3rd edition, equation 6.4.5).
    """
    # Where x is above the threshold of at_least, I_x(a, b) = 1 - I_{1-x}(b, a) is computed: there F converges fast.
    trials = a + b
    mean = (a + 1) / (trials + 2)
    mirrored = x > mean
    first = np.where(mirrored, b, a)
    second = np.where(mirrored, a, b)
    share = np.where(mirrored, 1 - x, x)

    table = log_factorials(int(trials.max()))
    log_factors = table[first - 1] + table[second - 1]
    log_beta = log_factors - table[trials - 1]

    log_first = first * np.log(share)
    log_second = second * np.log1p(-share)
    log_front = log_first + log_second - log_beta
    front = np.exp(log_front) / first
    value = front * _beta_fraction(first, second, share)
    value = np.where(mirrored, 1 - value, value)
    return np.clip(value, 0.0, 1.0)


def _beta_fraction(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The continued fraction ``F = 1 / (1 + d_1 / (1 + d_2 / (1 + ...)))`` of the incomplete beta function, ``(M,)``.

    The arguments are ``(M,)`` each, those of :func:`_incomplete_beta` with x at most the threshold of :func:`at_least`.
    Terms are taken until the last changes no value by 1e-11 of it or more; at most some 20,000.

    ``d_{2m} = m (b - m) x / ((a + 2m - 1) (a + 2m))`` and ``d_{2m+1} = -(a + m) (a + b + m) x / ((a + 2m) (a + 2m + 1))``,
    by Lentz's method (Press et al., Numerical Recipes, 3rd edition, equation 6.4.6 and section 5.2).
    """
    a = a.astype(np.float64)
    b = b.astype(np.float64)
    numerator = np.ones_like(x)
    first = (a + b) * x / (a + 1)
    denominator = 1 / _away_from_zero(1 - first)
    value = denominator.copy()
    for m in range(1, 10_000):
        c = a + 2 * m
        even_divisor = (c - 1) * c
        odd_divisor = c * (c + 1)
        even = m * (b - m) * x / even_divisor
        odd = -(a + m) * (a + b + m) * x / odd_divisor
        for term in (even, odd):
            denominator = 1 / _away_from_zero(1 + term * denominator)
            numerator = _away_from_zero(1 + term / numerator)
            factor = denominator * numerator
            value *= factor
        if np.abs(factor - 1).max() < 1e-11:
            break
    return value


def _away_from_zero(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < TINY, TINY, values)


def upper_bound(k: int, n: int, error: float) -> float:
    """The largest p that k hits of n do not exclude: ``P(X <= k; p) = error`` (Clopper and Pearson, 1934).

    1 where all hit, also where n is 0.

    Args:
        k: hits.
        n: trials.
        error: the chance, in 0..0.5, of a p above the bound.

    >>> round(upper_bound(0, 100, 0.05), 4)
    0.0295
    """
    if k >= n:
        return 1.0
    low = k / n
    high = 1.0
    for _ in range(ROUNDS):
        shares = np.linspace(low, high, POINTS)
        excluded = at_least(k + 1, n, shares) >= 1 - error
        first = max(1, int(np.argmax(excluded)))
        low = float(shares[first - 1])
        high = float(shares[first])
    return high


def lower_bound(k: int, n: int, error: float) -> float:
    """The smallest p that k hits of n do not exclude: ``P(X >= k; p) = error``; 0 where none hits."""
    return 1 - upper_bound(n - k, n, error)


@lru_cache(maxsize=4096)
def both_bounds(k: int, n: int, error: float) -> tuple[float, float]:
    """The interval of p that k hits of n do not exclude, with a chance of at most ``error / 2`` on each side."""
    return lower_bound(k, n, error / 2), upper_bound(k, n, error / 2)
