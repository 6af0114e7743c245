"""The monitor's keys, and what turns itself off."""

from types import SimpleNamespace

from kd.monitor.keys import MonitorSpec
from kd.monitor.ring import Ring


def test_a_budget_with_a_price() -> None:
    assert MonitorSpec(budget=5, price_per_hour=2).budget == 5


def test_all_reduces_are_timed_between_processes_alone() -> None:
    Ring().on_train_start(SimpleNamespace(world_size=1), None)  # type: ignore[arg-type]
