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

    >>> round(upper_bound(0, 100, 0.05), 9), round(1 - 0.05 ** (1 / 100), 9), upper_bound(5, 5, 0.05)
    (0.02951305, 0.02951305, 1.0)
    """
    if k >= n:
        return 1.0
    return float(scipy.stats.beta.ppf(1 - error, k + 1, n - k))


def lower_bound(k: int, n: int, error: float) -> float:
    """The exact one-sided lower bound of a hit rate p: the p with ``P(X >= k; p) = error``; 0 where none hits. Arguments as
    of :func:`upper_bound`.

    >>> round(lower_bound(100, 100, 0.05), 9), round(0.05 ** (1 / 100), 9)
    (0.97048695, 0.97048695)
    """
    return 1 - upper_bound(n - k, n, error)


@lru_cache(maxsize=4096)
def both_bounds(k: int, n: int, error: float) -> tuple[float, float]:
    """The exact two-sided interval of a hit rate p, from k hits in n trials: its ends. The true p is outside with a chance
    of at most ``error``, half of it on each side. Kept for equal arguments.

    The figures of statsmodels 0.15, ``proportion_confint(k, n, alpha=0.1, method="beta")``:

    >>> [[round(end, 8) for end in both_bounds(k, n, 0.1)] for k, n in ((8, 21), (22, 161))]
    [[0.2057499, 0.58280133], [0.09435419, 0.18934015]]
    >>> [[round(end, 8) for end in both_bounds(k, n, 0.1)] for k, n in ((27, 102), (2, 27))]
    [[0.1938868, 0.3460959], [0.01332299, 0.21529996]]
    """
    return lower_bound(k, n, error / 2), upper_bound(k, n, error / 2)
