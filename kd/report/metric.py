"""Validation metrics by name: which way is better, and how a person reads them."""

import math

from kd.report.ratio import Number

PROBE = ("knn1", "probe1")
"""Accuracy of features: of their 20 nearest neighbours, and of a ridge probe."""

COSTS = ("params", "step_ms_median", "peak_memory_mb", "wall_s", "latency_ms")
"""Numbers of a run other than its validation metrics of which less is better."""


def less_is_better(metric: str) -> bool:
    """Whether a smaller value of a metric is the better one.

    >>> {*map(less_is_better, ("feature_loss", "kd_loss", "val/mae_red", "low/val/rmse", "params", "wall_s", "latency_ms"))}
    {True}
    >>> {*map(less_is_better, ("acc1", "iou_sky", "val/r2_red"))}
    {False}
    """
    return metric.endswith("_loss") or metric in COSTS or in_units(metric)


def in_units(metric: str) -> bool:
    """Whether it is an error in the units of its target, or a divergence in nats."""
    return _kind(metric) in ("mae", "rmse", "kl")


def is_share(metric: str) -> bool:
    """Whether it is a share of 1, which people read in per cent.

    >>> [is_share(metric) for metric in ("acc1", "small/val/acc1", "rankme", "small/val/rankme")]
    [True, True, False, False]
    """
    return not (metric.endswith("_loss") or in_units(metric) or _kind(metric) in ("rankme", "r2"))


def format_metric(metric: str, value: Number) -> str:
    """A value for people: shares in per cent, losses, ranks and errors in units as they are; empty where not known.

    >>> format_metric("knn1", 0.341), format_metric("feature_loss", 0.56), format_metric("small/val/rankme", 84.21)
    ('34.1%', '0.5600', '84.2')
    >>> format_metric("rankme", 84.21), format_metric("mae_calories", 41.234), format_metric("r2", 0.9)
    ('84.2', '41.23', '0.900')
    """
    if value is None:
        return ""
    if _kind(metric) == "r2":
        return f"{value:.3f}"
    if in_units(metric):
        return f"{value:.4g}"
    if _kind(metric) == "rankme":
        return f"{value:.1f}"
    if metric.endswith("_loss"):
        return f"{value:.4f}"
    return f"{value:.1%}"


def duration(seconds: Number) -> str:
    """Seconds for people, as s, min or h; "" where they are not known.

    >>> duration(80.0), duration(600.0), duration(9000.0)
    ('80.0 s', '10.0 min', '2.50 h')
    """
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h"


def counted(count: int, one: str, several: str = "") -> str:
    """A number of things in words.

    >>> counted(1, "epoch"), counted(2, "epoch"), counted(2, "process", "processes")
    ('1 epoch', '2 epochs', '2 processes')
    """
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def short(value: Number) -> str:
    """Four digits of a number, from 1,000 on its whole part; empty where it is not known, NaN or infinite.

    >>> short(0.00123456), short(12345.6), short(None)
    ('0.001235', '12,346', '')
    """
    if value is None or not math.isfinite(value):
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def in_tables(metric: str) -> bool:
    """Whether a metric gets a column where there is little room: not one of a class or target, nor a loss.

    ``feature_loss`` gets one all the same.

    >>> {*map(in_tables, ("acc1", "feature_loss", "params", "wall_s", "latency_ms"))}
    {True}
    >>> {*map(in_tables, ("val/mae_red", "low/val/rmse", "val/r2_red"))}, {*map(in_tables, ("kd_loss", "iou_sky"))}
    ({True}, {False})
    """
    of_one = metric.startswith(("iou_", "r2_", "mae_", "rmse_"))
    return metric == "feature_loss" or (not of_one and not metric.endswith("_loss"))


def difference(metric: str, before: Number, after: Number) -> str:
    """The change of a metric from ``before`` to ``after`` with its sign: shares in points, else in its own units.

    "" where one of them is not known.

    >>> difference("acc1", 0.5, 0.75), difference("mae_calories", 30.0, 28.5)
    ('+25.0 points', '-1.5')
    """
    if before is None or after is None or not math.isfinite(before - after):
        return ""
    if is_share(metric):
        return f"{100 * (after - before):+.1f} points"
    return f"{after - before:+.4g}"


def _kind(metric: str) -> str:
    """A metric's name without its place and class: ``mae`` of ``small/val/mae_calories``."""
    return metric.rpartition("/")[2].partition("_")[0]
