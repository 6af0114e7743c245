"""Divisions of measured numbers: a record may hold 0, and no page may end with ZeroDivisionError.

``tests/report/test_zeros.py`` keeps all other files of limits, facts and sections free of divisions by a variable.
"""

import math

Number = float | None
"""None: it is not known."""
MOST = 100.0  # times: a remainder below 1 % of a step is not measured well enough to promise more


def ratio(value: float, over: float, otherwise: float = 0.0) -> float:
    """``value / over``; ``otherwise`` where ``over`` is 0 or the result is NaN or infinite.

    >>> ratio(3, 2), ratio(1, 0), ratio(0, 0), ratio(1, math.nan), ratio(math.inf, 2), ratio(1, 0, otherwise=1.0)
    (1.5, 0.0, 0.0, 0.0, 0.0, 1.0)
    """
    if over:
        quotient = value / over
    else:
        quotient = math.nan
    if math.isfinite(quotient):
        return quotient
    return otherwise


def known(value: Number) -> Number:
    """A value; None in the place of NaN."""
    return None if value is None or math.isnan(value) else value


def share(part: float, whole: float) -> float:
    """A part of a whole; 0 where there is no whole.

    >>> share(1, 4), share(1, 0), share(1, -1)
    (0.25, 0.0, 0.0)
    """
    if whole > 0:
        return ratio(part, whole)
    return 0.0


def speedup(before: float, after: float) -> float:
    """How many times as fast a step gets that takes ``after`` instead of ``before``, at most :data:`MOST`.

    >>> speedup(5, 5), speedup(0, 0), speedup(5, 0), speedup(5, -1)
    (1.0, 1.0, 100.0, 100.0)
    """
    return ratio(before, max(after, before / MOST), otherwise=1.0)


def without(part: float) -> float:
    """The speed-up where a part of the step (0 to 1) takes no time: ``1 / (1 - p)``, at most :data:`MOST`.

    >>> without(0), without(0.5), without(1), without(2)
    (1.0, 2.0, 100.0, 100.0)
    """
    return speedup(1.0, 1.0 - part)


def times(before: Number, after: Number) -> str:
    """``after / before`` for people (``1.50x``), the one direction of all comparisons; empty where ``before`` is 0, or one
    is not known or infinite.

    >>> times(2, 3), times(40, 1), times(3, 0), times(0, 3), times(None, 3)
    ('1.50x', '0.025x', '0x', '', '')
    """
    known = (
        before is not None and after is not None and math.isfinite(before) and math.isfinite(after)
    )
    if not known or not before:
        return ""
    quotient = ratio(after or 0.0, before)
    if abs(quotient) >= 0.1:
        return f"{quotient:.2f}x"
    return f"{quotient:.2g}x"
