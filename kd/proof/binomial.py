"""Binomial probabilities and bounds, vectorised, for whole numbers. Errors are below 1e-9."""

from functools import lru_cache

import numpy as np

TINY = 1e-300
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
    """``P(X = k)`` of ``X ~ Bin(n, p)``; the arguments broadcast."""
    k, n, p = np.broadcast_arrays(k, n, p)
    inside = (k >= 0) & (k <= n)
    k = np.where(inside, k, 0)

    # log (n over k)
    largest = int(n.max(initial=0))
    table = log_factorials(largest)
    log_ways = table[n] - table[k] - table[n - k]

    # k log p + (n - k) log(1 - p), where 0 log 0 = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        hits = np.where(k > 0, k * np.log(p), 0.0)
        misses = np.where(n - k > 0, (n - k) * np.log1p(-p), 0.0)
    chance = np.exp(log_ways + hits + misses)
    return np.where(inside, chance, 0.0)


def at_least(k: np.ndarray | int, n: np.ndarray | int, p: np.ndarray | float) -> np.ndarray:
    """``P(X >= k)`` of ``X ~ Bin(n, p)``; the arguments broadcast.

    It is the regularised incomplete beta function ``I_p(k, n - k + 1)``, by its continued fraction (Press et al.,
    Numerical Recipes, 3rd edition, section 6.4), which converges fast for p below the mean ``(a + 1) / (a + b + 2)``;
    above it ``I_p(a, b) = 1 - I_{1-p}(b, a)``.

    >>> round(float(at_least(2, 3, 0.5)), 6)
    0.5
    """
    k, n, p = np.broadcast_arrays(
        np.asarray(k, np.int64), np.asarray(n, np.int64), np.asarray(p, np.float64)
    )
    certain = (k <= 0) | ((p >= 1) & (k <= n))
    impossible = ~certain & ((k > n) | (p <= 0))
    plain = ~certain & ~impossible
    result = np.where(certain, 1.0, 0.0)
    if plain.any():
        result[plain] = _incomplete_beta(k[plain], n[plain] - k[plain] + 1, p[plain])
    return result


def _incomplete_beta(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``I_x(a, b)`` of whole numbers >= 1 and 0 < x < 1, ``(M,)`` each."""
    # The fraction converges fast for x below the mean; above it I_x(a, b) = 1 - I_{1-x}(b, a).
    mean = (a + 1) / (a + b + 2)
    turned = x > mean
    first = np.where(turned, b, a)
    second = np.where(turned, a, b)
    share = np.where(turned, 1 - x, x)

    # log B(a, b) = log (a-1)! + log (b-1)! - log (a+b-1)!
    table = log_factorials(int((a + b).max()))
    log_beta = table[first - 1] + table[second - 1] - table[first + second - 1]

    # I = x^a (1-x)^b / (a B(a, b)) * fraction
    log_front = first * np.log(share) + second * np.log1p(-share) - log_beta
    fraction = _beta_fraction(first, second, share)
    value = np.exp(log_front) / first * fraction
    value = np.where(turned, 1 - value, value)
    return np.clip(value, 0.0, 1.0)


def _beta_fraction(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    a = a.astype(np.float64)
    b = b.astype(np.float64)
    numerator = np.ones_like(x)
    denominator = 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = denominator.copy()
    for m in range(1, 10_000):
        # Two terms of the fraction in each round.
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
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
    """The smallest p that k hits of n do not exclude: ``P(X >= k; p) = error``."""
    return 1 - upper_bound(n - k, n, error)


@lru_cache(maxsize=4096)
def both_bounds(k: int, n: int, error: float) -> tuple[float, float]:
    """The interval of p with at most ``error / 2`` on each side."""
    return lower_bound(k, n, error / 2), upper_bound(k, n, error / 2)
