"""A certificate: that a model is not worse than another by more than a margin, on the same pictures, and in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kd.proof.paired import (
    LARGEST_EXACT,
    PairedCounts,
    holm,
    largest_loss,
    loss_p_value,
    mcnemar_mid_p,
    pictures_needed,
    tango_interval,
    worse_p_value,
)
from kd.proof.resample import (
    FEWEST,
    Statistic,
    error_gain,
    iou_gain,
    mean_gain,
    precision_gain,
    smallest_gain,
)

Measure = Literal["accuracy", "mean IoU", "mean average precision", "mean absolute error"]
FEW_DIFFERENCES = 10
"""Groups of pictures that differ; below, a bootstrap can't tell how many differ elsewhere."""
NAMED = 5
"""Classes that are named in a line."""


@dataclass(frozen=True)
class ProofMargin:
    """What is to be shown."""

    margin: float
    """In 0..1: so much less of the measure is allowed, of an error so much more as a share of the reference's."""
    confidence: float = 0.95
    """One-sided, in 0.5..1."""


@dataclass
class Outcomes:
    """What a model made of each picture, and what the pictures are."""

    measure: Measure
    """What is computed from the values."""
    values: np.ndarray
    """A row for each picture: right or not ``(N,)``; right pixels and those in the union ``(N, 2, C)``; scores and labels
    ``(N, 2, C)``; absolute errors ``(N, T)``."""
    class_ids: np.ndarray | None = None
    """The class of each picture ``(N,)``, where it has one."""
    invalid: int = 0
    """Pictures whose answer has a NaN, of numbers also an infinite one: right or wrong can't be told from it."""


def certify(
    reference: Outcomes,
    candidate: Outcomes,
    wanted: ProofMargin,
    names: tuple[str, str],
    group: np.ndarray | None = None,
    classes: Sequence[str] = (),
) -> dict[str, Any]:
    """Tests whether the candidate is not worse than the reference by more than a margin, on the same pictures in the same
    order.

    The result is kept in ``eval_*.json`` and ``export/export.json``; the report and the model card show its ``text``.

    Args:
        reference: outcomes of the model that the other must not be worse than.
        candidate: outcomes of the other.
        wanted: the margin and the confidence.
        names: of reference and candidate, for the text.
        group: pictures of one number belong together, ``(N,)`` numbers from 0 on without gaps
            (:func:`kd.proof.resample.group_numbers`); None: each picture is by itself.
        classes: names by class id.

    Returns:
        The content of the certificate. Always: the names ``reference`` and ``candidate``, ``measure``, ``margin``,
        ``confidence``, ``pictures``, ``method``, ``shown`` (whether the candidate is proven not worse by more than the
        margin), ``pictures_needed`` (None: shown, or more would not help), ``text`` (lines for people). As shares,
        where 0.01 is a point, or a hundredth of the reference's error: ``difference`` (above 0: the candidate is better) and
        ``largest_loss`` (the bound; below 0: the candidate is proven better).

        Of an accuracy also the counts of :func:`_counts` and, where pictures have classes, ``classes`` (:func:`by_class`).
        Of the exact test ``p_value``, ``tango`` and ``mcnemar_mid_p``; of the bootstrap ``groups``.

    Raises:
        ValueError: no pictures, too few groups, or a model with :attr:`Outcomes.invalid` answers.
    """
    _refuse_unknown(reference, candidate, names)
    found: dict[str, Any] = {
        "reference": names[0],
        "candidate": names[1],
        "measure": reference.measure,
        "margin": wanted.margin,
        "confidence": wanted.confidence,
        "pictures": len(reference.values),
    }
    if reference.measure == "accuracy":
        found |= _counts(reference.values, candidate.values)
    if reference.measure == "accuracy" and group is None:
        found |= _exact(found, wanted)
    else:
        found |= _resampled(reference, candidate, wanted, group)
    if reference.class_ids is not None and reference.measure == "accuracy":
        found["classes"] = by_class(reference, candidate, wanted, classes)
    found["text"] = lines(found)
    return found


def _refuse_unknown(reference: Outcomes, candidate: Outcomes, names: tuple[str, str]) -> None:
    """Raises a ValueError where a model has :attr:`Outcomes.invalid` answers, or there are no pictures; ``names`` are the
    models'.
    """
    for name, outcomes in zip(names, (reference, candidate), strict=True):
        if outcomes.invalid:
            raise ValueError(f"{name} answers NaN or infinity on {outcomes.invalid:,} pictures")
    if not len(reference.values):
        raise ValueError("labelled pictures are needed, got none")


def _counts(reference: np.ndarray, candidate: np.ndarray) -> dict[str, int]:
    """How many pictures both models, only one or none of them is right on. The arguments are ``(N,)``, > 0 where right."""
    first = reference > 0
    second = candidate > 0
    return {
        "both_right": int((first & second).sum()),
        "only_reference": int((first & ~second).sum()),
        "only_candidate": int((~first & second).sum()),
        "both_wrong": int((~first & ~second).sum()),
    }


def _exact(found: dict[str, Any], wanted: ProofMargin) -> dict[str, Any]:
    """The keys of a certificate that come from the test of two accuracies (:func:`kd.proof.paired.loss_p_value`).

    The test is exact up to :data:`kd.proof.paired.LARGEST_EXACT` pictures. For comparison only it adds Tango's two-sided
    interval of the difference (``tango``, candidate less reference) and McNemar's mid-p.

    Args:
        found: the certificate so far, with its counts; not changed.
        wanted: margin and confidence.
    """
    b = found["only_reference"]
    c = found["only_candidate"]
    counts = PairedCounts(found["pictures"], b, c)
    p_value = loss_p_value(counts, wanted.margin)
    shown = p_value <= 1 - wanted.confidence
    loss = largest_loss(counts, wanted.confidence)

    # The bound is found by halving, so it may miss the margin by a little: it must not contradict the test.
    if shown:
        loss = min(loss, wanted.margin)
    else:
        loss = max(loss, wanted.margin)
    method = "exact test of paired accuracies, ordered by Tango's score"
    if counts.pictures > LARGEST_EXACT:
        method = "Tango's score test of paired accuracies, its score taken for normal"
    return {
        "method": method,
        "shown": shown,
        "p_value": p_value,
        "difference": counts.difference,
        "largest_loss": loss,
        "tango": tango_interval(counts, wanted.confidence),
        "mcnemar_mid_p": mcnemar_mid_p(b, c),
        "pictures_needed": None
        if shown
        else pictures_needed(counts, wanted.margin, wanted.confidence),
    }


def _resampled(
    reference: Outcomes, candidate: Outcomes, wanted: ProofMargin, group: np.ndarray | None
) -> dict[str, Any]:
    """The keys of a certificate that come from the paired bootstrap (:func:`kd.proof.resample.smallest_gain`), for measures
    other than the accuracy and for pictures in groups.

    Args:
        reference: outcomes by picture.
        candidate: likewise, of the same pictures.
        wanted: margin and confidence.
        group: number of each picture's group, ``(N,)``; None: each picture by itself.

    Raises:
        ValueError: fewer groups than :data:`FEWEST`.
    """
    what = "pictures"
    numbers = np.arange(len(reference.values))
    if group is not None:
        what = "groups of pictures"
        numbers = group
    groups = int(numbers.max()) + 1
    if groups < FEWEST:
        raise ValueError(f"a certificate needs {FEWEST} {what} or more, got {groups}")
    statistic = gain_of(reference, candidate, numbers)
    difference = float(statistic(np.ones((1, groups)))[0])
    loss = -smallest_gain(statistic, groups, wanted.confidence)
    differs_N = differs(reference, candidate)
    if len(np.unique(numbers[differs_N])) < FEW_DIFFERENCES:
        # Too few differ for a bootstrap. Even if none of the G groups differed, a share p of all may: (1 - p)^G = error.
        loss = max(loss, 1 - (1 - wanted.confidence) ** (1 / groups))
    return {
        "method": f"paired bootstrap over {what}",
        "groups": groups,
        "shown": loss < wanted.margin,
        "difference": difference,
        "largest_loss": loss,
        "pictures_needed": _needed(len(reference.values), difference, loss, wanted),
    }


def gain_of(reference: Outcomes, candidate: Outcomes, group: np.ndarray) -> Statistic:
    """The candidate's gain as a function of how often each group of pictures counts; above 0 it is better.

    Args:
        reference: its measure chooses the function.
        candidate: of the same pictures.
        group: number of each picture's group, ``(N,)``.
    """
    first = reference.values
    second = candidate.values
    if reference.measure == "mean IoU":
        return iou_gain(first, second, group)
    if reference.measure == "mean average precision":
        return precision_gain(first[:, 0], second[:, 0], first[:, 1], group)
    if reference.measure == "mean absolute error":
        return error_gain(first, second, group)
    return mean_gain(first, second, group)


def gain_interval(
    reference: Outcomes,
    candidate: Outcomes,
    names: tuple[str, str],
    confidence: float = 0.95,
) -> tuple[float, float, float]:
    """The candidate's gain over the reference on the same pictures, and the lower and upper end of its two-sided interval.

    All three are shares; the gain of an error is a share of the reference's error. An accuracy has Tango's interval, any
    other measure the bootstrap's over pictures, which is infinite on fewer than :data:`FEWEST`.

    Args:
        reference: what one model did.
        candidate: what the other did.
        names: of reference and candidate, for the errors.
        confidence: of the interval, in 0..1.

    Raises:
        ValueError: no pictures, or a model with :attr:`Outcomes.invalid` answers.
    """
    _refuse_unknown(reference, candidate, names)
    pictures = len(reference.values)
    if reference.measure == "accuracy":
        counts = _counts(reference.values, candidate.values)
        pair = PairedCounts(pictures, counts["only_reference"], counts["only_candidate"])
        return pair.difference, *tango_interval(pair, confidence)
    statistic = gain_of(reference, candidate, np.arange(pictures))
    gain = float(statistic(np.ones((1, pictures)))[0])
    if pictures < FEWEST:
        return gain, -math.inf, math.inf
    one_sided = (1 + confidence) / 2
    low = smallest_gain(statistic, pictures, one_sided)
    high = -smallest_gain(lambda weights: -statistic(weights), pictures, one_sided)
    return gain, low, high


def differs(reference: Outcomes, candidate: Outcomes) -> np.ndarray:
    """Whether the models differ on a picture by more than rounding, bool ``(N,)``.

    Scores (mean average precision) differ where a picture's rank among the scores of a label differs; errors where they
    differ by more than a ten-thousandth of the reference's mean error in the same number. The other measures' values are
    whole numbers, of which any difference counts.
    """
    first = reference.values
    second = candidate.values
    if reference.measure == "mean average precision":
        changed = _places(first[:, 0]) != _places(second[:, 0])
    elif reference.measure == "mean absolute error":
        rounding = 1e-4 * np.nanmean(first, axis=0, keepdims=True)
        changed = np.abs(second - first) > rounding
    else:
        changed = first != second
    return changed.reshape(len(first), -1).any(1)


def _places(scores: np.ndarray) -> np.ndarray:
    """How many pictures have a smaller score than each picture, by label: ``(N, C)`` from scores ``(N, C)``."""
    places = [np.searchsorted(np.sort(column), column) for column in scores.T]
    return np.column_stack(places)


def _needed(pictures: int, difference: float, loss: float, wanted: ProofMargin) -> int | None:
    """How many pictures would make the bound meet the margin, by an estimate: the distance from the measured loss to the
    bound, ``loss + difference``, is taken to fall with the root of their number.

    None where the bound meets the margin already, or where the candidate is worse by the margin on these pictures. The
    arguments are the certificate's ``pictures``, ``difference`` and ``largest_loss``.
    """
    if loss < wanted.margin or difference <= -wanted.margin:
        return None
    return math.ceil(pictures * ((loss + difference) / (wanted.margin + difference)) ** 2)


def by_class(
    reference: Outcomes, candidate: Outcomes, wanted: ProofMargin, names: Sequence[str]
) -> dict[str, Any]:
    """Which classes are proven worse, and how many have too few pictures to tell.

    Each class with pictures is tested by the exact conditional McNemar test, with Holm's correction over all of these.

    Args:
        reference: right or wrong by picture, with the pictures' classes.
        candidate: likewise, on the same pictures.
        wanted: the confidence counts.
        names: by class id.

    Returns:
        ``tested``, how many classes; ``worse``, a row for each that is proven worse, by p-value, with ``name``,
        ``pictures``, the accuracies ``reference`` and ``candidate``, ``p_value`` (Holm's) and ``least_p_value``
        (uncorrected, if the candidate lost all that the reference is right on); ``too_few``, how many others could not be
        proven worse even then.
    """
    assert reference.class_ids is not None
    rows: list[dict[str, Any]] = []
    for class_id in np.unique(reference.class_ids):
        chosen = reference.class_ids == class_id
        counts = _counts(reference.values[chosen], candidate.values[chosen])
        b = counts["only_reference"]
        c = counts["only_candidate"]
        of_reference = b + counts["both_right"]
        pictures = int(chosen.sum())
        row = {
            "name": names[class_id] if class_id < len(names) else str(class_id),
            "pictures": pictures,
            "reference": of_reference / pictures,
            "candidate": (c + counts["both_right"]) / pictures,
            "p_value": worse_p_value(b, c),
            # even if the candidate lost all that the reference is right on
            "least_p_value": 0.5**of_reference,
        }
        rows.append(row)
    adjusted = holm(np.array([row["p_value"] for row in rows]))
    error = 1 - wanted.confidence
    worse = []
    others = []
    for row, p_value in zip(rows, adjusted.tolist(), strict=True):
        if p_value <= error:
            worse.append({**row, "p_value": p_value})
        else:
            others.append(row["least_p_value"])
    # of a class that lost all, Holm's factor is the number of those that are not proven worse, itself included
    too_few = sum(least * len(others) > error for least in others)
    worse.sort(key=lambda row: row["p_value"])
    return {"tested": len(rows), "worse": worse, "too_few": too_few}


def in_points(share: float, measure: str, digits: int = 1) -> str:
    """A share as text: in points, for the mean absolute error in per cent of the reference's error.

    >>> in_points(0.01, "accuracy"), in_points(0.016, "accuracy"), in_points(0.05, "mean absolute error")
    ('1 point', '1.6 points', '5 %')

    Args:
        share: 1 is 100 points.
        measure: of the certificate.
        digits: after the decimal point, at most.
    """
    number = f"{100 * share:.{digits}f}".rstrip("0").rstrip(".")
    if measure == "mean absolute error":
        return f"{number} %"
    return f"{number} point{'' if number == '1' else 's'}"


def bound_in_points(loss: float, margin: float, shown: bool, measure: str) -> str:
    """The bound as text (:func:`in_points`), rounded to the side that claims less, with the fewest digits that set it apart
    from the margin's text.

    >>> bound_in_points(0.00141, 0.01, True, "accuracy"), bound_in_points(-0.00251, 0.01, True, "accuracy")
    ('0.2 points', '0.2 points')
    >>> bound_in_points(0.0109, 0.002, False, "accuracy"), bound_in_points(0.00204, 0.002, False, "accuracy")
    ('1 point', '0.204 points')

    Args:
        loss: the largest that can't be excluded, a share; below 0: a gain.
        margin: of the claim, a share.
        shown: whether the claim, a loss smaller than the margin, is shown.
        measure: of the certificate.

    Returns:
        The bound without its sign; the margin's own text where six digits don't distinguish them.
    """
    # a loss that is not exceeded is rounded up; a gain, and a loss that can't be excluded, down
    rounded = math.ceil if shown and loss > 0 else math.floor
    for digits in range(1, 7):
        unit = 10 ** -(digits + 2)
        bound = in_points(rounded(round(abs(loss) / unit, 6)) * unit, measure, digits)
        if bound != in_points(margin, measure, digits):
            return bound
    return in_points(margin, measure, digits=6)


def lines(found: dict[str, Any]) -> list[str]:
    """A certificate in words: a line for the claim and its result, then a line each for counts, groups and classes where the
    certificate has them.

    Args:
        found: of :func:`certify`, without its ``text``.
    """
    measure = found["measure"]
    loss = found["largest_loss"]
    claim = f"{found['candidate']} not worse than {found['reference']} by more than"
    margin = in_points(found["margin"], measure, digits=6)
    bound = bound_in_points(loss, found["margin"], found["shown"], measure)
    claim = f"{claim} {margin} of {measure}"
    sure = f"{100 * found['confidence']:.4g} % confidence"
    if found["shown"] and -0.001 < loss <= 0:  # better by less than a tenth of a point
        result = f"shown: it loses nothing ({sure})"
    elif found["shown"] and loss < 0:
        result = f"shown: it is better by {bound} or more ({sure})"
    elif found["shown"]:
        result = f"shown: it loses at most {bound} ({sure})"
    else:
        if bound == margin:  # at the margin itself the test decides
            bound = f"a little more than {bound}"
        result = f"not shown: a loss of {bound} can't be excluded ({sure})"
    text = [f"{claim}: {result}{_needed_in_words(found)}"]
    if "only_reference" in found:
        text.append(_counts_line(found))
    if "groups" in found and found["groups"] != found["pictures"]:
        text.append(
            f"{found['pictures']:,} pictures in {found['groups']:,} groups, resampled by group"
        )
    if "classes" in found:
        text.append(_class_line(found["classes"], found["reference"]))
    return text


def _needed_in_words(found: dict[str, Any]) -> str:
    """The end of a sentence: about how many pictures would show the claim, rounded up to two significant digits; or that
    more would not help.

    "" where the certificate ``found`` shows its claim already.
    """
    if found["shown"]:
        return ""
    needed = found["pictures_needed"]
    here = found["pictures"]
    if needed is None:
        return f"; it is worse by {in_points(-found['difference'], found['measure'])} here, more pictures would not help"
    digits = max(0, len(str(needed)) - 2)
    rounded = math.ceil(needed / 10**digits) * 10**digits
    return f"; about {rounded:,} pictures would do, {here:,} are here"


def _counts_line(found: dict[str, Any]) -> str:
    """A sentence: on how many pictures one model alone is right, and McNemar's test; ``found``: the certificate."""
    here = found["pictures"]
    text = (
        f"of {here:,} pictures {found['reference']} alone is right on {found['only_reference']:,}, "
        f"{found['candidate']} alone on {found['only_candidate']:,} "
        f"({100 * found['difference']:+.1f} points"
    )
    if "mcnemar_mid_p" in found:
        text += f"; McNemar's mid-p of equal accuracy {found['mcnemar_mid_p']:.3g}"
    return text + ")"


def _class_line(classes: dict[str, Any], reference: str) -> str:
    """A sentence: which classes are proven worse (the first :data:`NAMED` by p-value, with both accuracies), and of how many
    that can't be proven, as they have too few pictures.

    Args:
        classes: of :func:`by_class`.
        reference: the reference's name.
    """
    worse = classes["worse"]
    tested = classes["tested"]
    few = ""
    if classes["too_few"]:
        few = f"; {classes['too_few']} of {tested} can't be: {reference} is right on too few of their pictures"
    if not worse:
        return f"no class is proven worse{few}"
    named = []
    for row in worse[:NAMED]:
        named.append(f"{row['name']} {row['reference']:.0%} -> {row['candidate']:.0%}")
    more = ""
    if len(worse) > NAMED:
        more = f" and {len(worse) - NAMED} more"
    return f"classes proven worse (of {tested}, Holm): {', '.join(named)}{more}{few}"
