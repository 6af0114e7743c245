"""The monitor's keys, and what turns itself off."""

from types import SimpleNamespace

import pytest
import torch

from kd.errors import UserError
from kd.monitor.confusion import MOST_CLASSES, Confusion
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


@pytest.mark.parametrize(("classes", "one_class", "counts"), [
    (4, True, True), (4, False, False), (MOST_CLASSES + 1, True, False),
])  # fmt: skip
def test_mistakes_are_counted_for_one_label_of_not_too_many_classes(
    classes: int, one_class: bool, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = SimpleNamespace(data=SimpleNamespace(classes=["c"] * classes))
    run = SimpleNamespace(student=student, module=SimpleNamespace(task=SimpleNamespace(one_class=one_class)),
                          device=torch.device("cpu"))  # fmt: skip
    monkeypatch.setattr("kd.monitor.confusion.RunContext", SimpleNamespace(of=lambda trainer: run))
    callback = Confusion()
    callback.on_validation_epoch_start(SimpleNamespace(sanity_checking=False), None)  # type: ignore[arg-type]
    assert (callback._counts is not None) == counts
