"""Bounds of a share by counts, by scipy's binomial and beta distributions.

``scipy.stats`` is imported when it is first used: it takes half a second, and the options of commands read :mod:`kd.proof`.
"""

from functools import lru_cache

import scipy


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
    return float(scipy.stats.beta.ppf(1 - error, k + 1, n - k))


def lower_bound(k: int, n: int, error: float) -> float:
    """The smallest p that k hits of n do not exclude: ``P(X >= k; p) = error``; 0 where none hits."""
    return 1 - upper_bound(n - k, n, error)


@lru_cache(maxsize=4096)
def both_bounds(k: int, n: int, error: float) -> tuple[float, float]:
    """The interval of p that k hits of n do not exclude, with a chance of at most ``error / 2`` on each side."""
    return lower_bound(k, n, error / 2), upper_bound(k, n, error / 2)
