"""Metrics by name: which way is better, and how people read them."""

import pytest

from kd.report.metric import (
    duration,
    format_metric,
    in_tables,
    is_share,
    less_is_better,
    short,
)


@pytest.mark.parametrize(("metric", "less", "column"), [
    ("acc1", False, True), ("feature_loss", True, True), ("kd_loss", True, False), ("params", True, True),
    ("iou_sky", False, False), ("wall_s", True, True),
])  # fmt: skip
def test_metrics_have_a_direction_and_a_column_or_none(
    metric: str, less: bool, column: bool
) -> None:
    assert less_is_better(metric) is less
    assert in_tables(metric) is column


def test_less_is_better() -> None:
    assert less_is_better("feature_loss")
    assert not less_is_better("acc1")
    assert less_is_better("latency_ms")


def test_format_metric() -> None:
    assert format_metric("knn1", 0.341) == "34.1%"
    assert format_metric("feature_loss", 0.56) == "0.5600"
    assert format_metric("rankme", 84.21) == "84.2"
    assert format_metric("small/val/rankme", 84.21) == "84.2"
    assert format_metric("mae_calories", 41.234) == "41.23"
    assert format_metric("r2", 0.9) == "0.900"


def test_is_share() -> None:
    assert is_share("acc1") and is_share("small/val/acc1")
    assert not is_share("rankme") and not is_share("small/val/rankme")


def test_duration() -> None:
    assert duration(80.0) == "80.0 s"
    assert duration(600.0) == "10.0 min"
    assert duration(9000.0) == "2.50 h"


def test_short() -> None:
    assert short(0.00123456) == "0.001235"
    assert short(12345.6) == "12,346"
    assert short(None) == ""
