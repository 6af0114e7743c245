"""Paired accuracies: published figures, other libraries' figures, and how often a certificate is false."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from kd.proof import paired
from kd.proof.paired import PairedCounts

BENTUR, CAVO, EZRA = (1, 7, 21), (6, 16, 161), (25, 2, 102)
"""Numbers b and c of pairs that only one side of a study is positive on, and all pairs: airway hyper-responsiveness
(Bentur et al., 2009), complete response (Cavo et al., 2012), floppy eyelids (Ezra et al., 2010)."""


@pytest.mark.parametrize(
    ("example", "exact", "mid_p"),
    [
        # Fagerland, Lydersen and Laake, BMC Med Res Methodol 13:91 (2013), tables 1 and 2: asymptotic 0.034 and
        # 0.033, exact 0.070 and 0.052, mid-p 0.039 and 0.035. Six digits: R's contingencytables 3.0,
        # tests/testthat/test-ch8.R, and statsmodels 0.15, mcnemar(exact=True).
        (BENTUR, 0.0703125, 0.0390625),
        (CAVO, 0.052479, 0.034690),
        (EZRA, 5.6475e-06, 3.0324e-06),
        # statsmodels 0.15, mcnemar(exact=True) and 2 binom.cdf(35, 185, 0.5) - binom.pmf(35, 185, 0.5) of scipy 1.17
        ((150, 35, 1265), 3.6957e-18, 2.27177e-18),
    ],
)
def test_mcnemar_as_published(example: tuple[int, int, int], exact: float, mid_p: float) -> None:
    b, c, _ = example
    assert 2 * paired.worse_p_value(max(b, c), min(b, c)) == pytest.approx(exact, rel=1e-4, abs=0)
    assert paired.mcnemar_mid_p(b, c) == pytest.approx(mid_p, rel=1e-4, abs=0)
    assert paired.mcnemar_mid_p(c, b) == pytest.approx(paired.mcnemar_mid_p(b, c))


@pytest.mark.parametrize(
    ("example", "confidence", "low", "high"),
    [
        # of p_b - p_c. Bentur: R's ratesci, scorepair, as PropCIs, scoreci.mp(7, 1, 21, 0.95). Cavo: R's
        # contingencytables 3.0, tests/testthat/test-ch8.R. Equivalence of two ways to match 549 and 618 mentees, 90 %:
        # R's PropCIs, scoreci.mp
        (BENTUR, 0.95, -0.517, -0.026),
        (CAVO, 0.95, -0.1240, -0.0054),
        ((48, 41, 549), 0.9, -0.0157, 0.0414),
        ((28, 25, 618), 0.9, -0.0148, 0.0247),
    ],
)
def test_tangos_interval_as_published(
    example: tuple[int, int, int], confidence: float, low: float, high: float
) -> None:
    b, c, n = example
    interval = paired.tango_interval(PairedCounts(n, c, b), confidence)
    assert interval == pytest.approx((low, high), abs=5.1e-4 if example == BENTUR else 5.1e-5)


def test_tangos_margin_solves_its_equation() -> None:
    """The interval's ends are where the score is z; without differences they are z^2 / (n + z^2)."""
    z = 1.6448536269514722
    for b, c, n in (BENTUR, CAVO, EZRA, (0, 0, 50), (40, 33, 1265)):
        low, high = paired.tango_interval(PairedCounts(n, b, c), 0.9)
        assert float(paired.tango_score(n, b, c, -low)) == pytest.approx(z, abs=1e-6)
        assert float(paired.tango_score(n, c, b, high)) == pytest.approx(z, abs=1e-6)
    assert paired.tango_interval(PairedCounts(50, 0, 0), 0.9)[1] == pytest.approx(
        z**2 / (50 + z**2)
    )


def test_without_any_difference_the_bound_is_that_of_no_event() -> None:
    """``(1 - p)^n = 0.05``: a conditional test would exclude every loss here."""
    for n in (10, 50, 296):
        loss = paired.largest_loss(PairedCounts(n, 0, 0), 0.95)
        assert loss == pytest.approx(1 - 0.05 ** (1 / n), abs=2e-3 / math.sqrt(n))
        assert loss >= 1 - 0.05 ** (1 / n)


def test_the_bound_and_the_test_agree_and_are_ordered() -> None:
    before = -1.0
    for b in range(0, 60, 12):
        counts = PairedCounts(400, b, 10)
        loss = paired.largest_loss(counts, 0.95)
        assert loss > before > -1.1
        assert (
            paired.loss_p_value(counts, loss + 1e-3)
            <= 0.05
            <= paired.loss_p_value(counts, loss - 1e-3)
        )
        before = loss


def least_certified(
    n: int, margin: float, share: float, error: float
) -> tuple[np.ndarray, np.ndarray]:
    """For each likely number k of differing pictures, the smallest c that gets a certificate."""
    k = paired._likely_numbers(n, np.array([share]))
    least = []
    for number in k.tolist():
        low, high = 0, number + 1
        while low < high:
            middle = (low + high) // 2
            p_value = paired.loss_p_value(PairedCounts(n, number - middle, middle), margin)
            low, high = (low, middle) if p_value <= error else (middle + 1, high)
        least.append(high)
    return k, np.array(least)


@pytest.mark.parametrize(("n", "share"), [(50, 0.2), (100, 0.1)])
def test_at_the_margin_a_certificate_is_false_at_most_so_often(n: int, share: float) -> None:
    """Exactly, and by 10,000 draws; the whole table is in scripts/bench/certificate_cpu_2026-11-25.md."""
    margin, error = 0.05, 0.05
    k, least = least_certified(n, margin, share, error)
    theta = (share - margin) / 2 / share
    exactly = float((binom.pmf(k, n, share) * binom.sf(least - 1, k, theta)).sum())
    assert 0.02 < exactly <= error

    random = np.random.default_rng(0)
    drawn_k = random.binomial(n, share, 10_000)
    drawn_c = random.binomial(drawn_k, theta)
    drawn = (drawn_c >= least[drawn_k - k[0]]).mean()
    assert drawn == pytest.approx(exactly, abs=4 * math.sqrt(exactly / 10_000))


def test_holm_and_the_pictures_that_would_do() -> None:
    adjusted = paired.holm(np.array([0.04, 0.01, 0.5, 0.02]))
    np.testing.assert_allclose(adjusted, [0.08, 0.04, 0.5, 0.06])
    # statsmodels 0.15, multipletests(method="holm")
    adjusted = paired.holm(np.array([0.01, 0.04, 0.03, 0.2, 0.005]))
    np.testing.assert_allclose(adjusted, [0.04, 0.09, 0.09, 0.2, 0.025])
    assert paired.pictures_needed(PairedCounts(1000, 30, 10), 0.01, 0.95) is None
    needed = paired.pictures_needed(PairedCounts(1265, 40, 34), 0.01, 0.95)
    assert needed is not None
    scale = needed / 1265
    more = PairedCounts(needed, round(40 * scale), round(34 * scale))
    assert paired.largest_loss(more, 0.95) < 0.01
    assert paired.pictures_needed(PairedCounts(100, 0, 0), 0.01, 0.95) == 299
