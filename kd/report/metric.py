"""Validation metrics by name: which way is better, and how a person reads them."""

import math
from collections.abc import Iterable
from typing import Any

PROBE = ("knn1", "probe1")
"""Accuracy of features: of their 20 nearest neighbours, and of a ridge probe."""

COSTS = ("params", "step_ms_median", "peak_memory_mb", "wall_s", "latency_ms")
"""Numbers of a run other than its validation metrics of which less is better."""


def less_is_better(metric: str) -> bool:
    """Whether a smaller value of a metric is the better one.

    >>> less_is_better("feature_loss"), less_is_better("acc1")
    (True, False)
    """
    return metric.endswith("_loss") or metric in COSTS or in_units(metric)


def in_units(metric: str) -> bool:
    """Whether it is an error in the units of its target, or a divergence in nats."""
    return _kind(metric) in ("mae", "rmse", "kl")


def is_share(metric: str) -> bool:
    """Whether it is a share of 1, which people read in per cent."""
    return not (
        metric.endswith("_loss") or metric == "rankme" or in_units(metric) or _kind(metric) == "r2"
    )


def format_metric(metric: str, value: float | None) -> str:
    """A value for people: shares in per cent, losses, ranks and errors in units as they are; empty where not known."""
    if value is None:
        return ""
    if _kind(metric) == "r2":
        return f"{value:.3f}"
    if in_units(metric):
        return f"{value:.4g}"
    if metric == "rankme":
        return f"{value:.1f}"
    return f"{value:.4f}" if metric.endswith("_loss") else f"{value:.1%}"


def duration(seconds: float | None) -> str:
    """Seconds for people; empty where they are not known."""
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def short(value: float | None) -> str:
    """Four digits of a number; empty where it is not known."""
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def in_tables(metric: str) -> bool:
    """Whether it has a column of its own where there is little room: not each class, not each loss."""
    of_one = metric.startswith(("iou_", "r2_", "mae_", "rmse_"))
    return metric == "feature_loss" or (not of_one and not metric.endswith("_loss"))


def lost_classes(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of ``fidelity.json`` whose student is worse than the teacher, those that lost most first."""
    lost = [row for row in rows if row.get("teacher", 0) > row["student"]]
    return sorted(lost, key=lambda row: row["student"] - row["teacher"])


def _kind(metric: str) -> str:
    return metric.rpartition("/")[2].partition("_")[0]
