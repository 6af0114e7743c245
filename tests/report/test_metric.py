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
    ("iou_sky", False, False), ("wall_s", True, True), ("latency_ms", True, True),
    ("val/mae_red", True, True), ("low/val/rmse", True, True), ("val/r2_red", False, True),
])  # fmt: skip
def test_metrics_have_a_direction_and_a_column_or_none(
    metric: str, less: bool, column: bool
) -> None:
    assert (less_is_better(metric), in_tables(metric)) == (less, column)


def test_accuracies_are_shares() -> None:
    assert is_share("acc1") and is_share("small/val/acc1")
    assert not is_share("rankme") and not is_share("small/val/rankme")


@pytest.mark.parametrize(("metric", "value", "text"), [
    ("knn1", 0.341, "34.1%"), ("feature_loss", 0.56, "0.5600"), ("rankme", 84.21, "84.2"),
    ("small/val/rankme", 84.21, "84.2"), ("mae_calories", 41.234, "41.23"), ("r2", 0.9, "0.900"),
])  # fmt: skip
def test_a_metric_is_written_in_its_unit(metric: str, value: float, text: str) -> None:
    assert format_metric(metric, value) == text


def test_numbers_are_short() -> None:
    assert [duration(s) for s in (80.0, 600.0, 9000.0)] == ["80.0 s", "10.0 min", "2.50 h"]
    assert [short(x) for x in (0.00123456, 12345.6, None)] == ["0.001235", "12,346", ""]
