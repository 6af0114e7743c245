"""The monitor's keys, and what turns itself off."""

from types import SimpleNamespace

import pytest

from kd.errors import UserError
from kd.monitor.keys import MonitorSpec
from kd.monitor.ring import Ring


def test_prices_and_budgets_need_each_other() -> None:
    assert MonitorSpec(budget=5, price_per_hour=2).budget == 5
    for given, message in (
        ({"budget": 5}, "monitor.budget: 5 needs monitor.price_per_hour"),
        ({"instances": ["a"]}, "monitor.prices, monitor.instances: must be given together"),
    ):
        with pytest.raises(UserError, match=message):
            MonitorSpec(**given)  # type: ignore[arg-type]


def test_all_reduces_are_timed_between_processes_alone() -> None:
    Ring().on_train_start(SimpleNamespace(world_size=1), None)  # type: ignore[arg-type]
