"""Helpers that are pure functions, one call each."""

from kd.report.metric import duration, format_metric, less_is_better, short
from kd.report.prices import input_machines
from kd.report.records import is_kept, percentile
from kd.report.rules import by_rule, thresholds_of
from kd.report.terminal import _paired, _short


def test_kept() -> None:
    assert abs(sum(is_kept(n, 0.25) for n in range(10000)) - 2500) < 5


def test_less_is_better() -> None:
    assert less_is_better("feature_loss")
    assert not less_is_better("acc1")
    assert less_is_better("latency_ms")


def test_format_metric() -> None:
    assert format_metric("knn1", 0.341) == "34.1%"
    assert format_metric("feature_loss", 0.56) == "0.5600"
    assert format_metric("rankme", 84.21) == "84.2"
    assert format_metric("mae_calories", 41.234) == "41.23"
    assert format_metric("r2", 0.9) == "0.900"


def test_duration() -> None:
    assert duration(80.0) == "80.0 s"
    assert duration(600.0) == "10.0 min"
    assert duration(9000.0) == "2.50 h"


def test_short() -> None:
    assert short(0.00123456) == "0.001235"
    assert short(12345.6) == "12,346"
    assert short(None) == ""


def test_input_machines() -> None:
    assert input_machines(
        {"gpu": {"on_demand": 37.688}, "cpu": {"on_demand": 3.672, "spot": 1.5, "vcpus": 72}}
    ) == {
        "cpu": {"price": 3.672, "vcpus": 72, "gpus": 0},
        "cpu:spot": {"price": 1.5, "vcpus": 72, "gpus": 0},
    }


def test_percentile() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2.5


def test_thresholds_of() -> None:
    assert thresholds_of("Overtraining") == {"patience": 10, "delta": 0.001}


def test_by_rule() -> None:
    assert by_rule({"Overfit.drop": 0.1, "Overfit": {"patience": 5}}) == {
        "Overfit": {"drop": 0.1, "patience": 5}
    }


def test_paired() -> None:
    assert (
        _paired("a", "b", (2, 6), 100)
        == "a alone is right on 2 of 100 pictures, b alone on 6: +4.0 ± 2.8 points (standard error, paired by picture)"
    )


def test_short_of_terminal() -> None:
    assert _short(["runs/food/000", "runs/food/001"]) == ["000", "001"]
    assert _short(["a/best", "b/best"]) == ["a/best", "b/best"]
