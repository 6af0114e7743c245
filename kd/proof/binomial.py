"""Bounds of a share by counts, by scipy's binomial and beta distributions.

``scipy.stats`` is imported when it is first used: it takes half a second, and the options of commands read :mod:`kd.proof`.
"""

from functools import lru_cache

import scipy


def upper_bound(k: int, n: int, error: float) -> float:
    """The exact one-sided upper bound of a hit rate p, from k hits in n trials: the p with ``P(X <= k; p) = error`` (Clopper
    and Pearson, 1934). 1 where all trials hit, also where n is 0.

    Args:
        k: hits.
        n: trials.
        error: the chance, in 0..0.5, that the bound is below the true p.

    >>> round(upper_bound(0, 100, 0.05), 4)
    0.0295
    """
    if k >= n:
        return 1.0
    return float(scipy.stats.beta.ppf(1 - error, k + 1, n - k))


def lower_bound(k: int, n: int, error: float) -> float:
    """The exact one-sided lower bound of a hit rate p: the p with ``P(X >= k; p) = error``; 0 where none hits. Arguments as
    of :func:`upper_bound`.
    """
    return 1 - upper_bound(n - k, n, error)


@lru_cache(maxsize=4096)
def both_bounds(k: int, n: int, error: float) -> tuple[float, float]:
    """The exact two-sided interval of a hit rate p, from k hits in n trials: its ends. The true p is outside with a chance
    of at most ``error``, half of it on each side. Kept for equal arguments.
    """
    return lower_bound(k, n, error / 2), upper_bound(k, n, error / 2)
