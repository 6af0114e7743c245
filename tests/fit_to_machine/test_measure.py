"""The cost of a step, with and without the teacher; how many loader processes are tried."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kd.fit_to_machine import measure
from kd.fit_to_machine.measure import StepCost


def test_step_ms() -> None:
    assert StepCost(60, 40, 100, num_workers=2).step_ms(teacher=False) == 50.0


def test_gain() -> None:
    assert round(StepCost(60, 40, 0, num_workers=1).gain(epochs=8, views=2), 2) == 1.82


def test_no_rank_tries_more_loader_processes_than_the_one_with_the_fewest_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks make each trial together: one that ends earlier would leave the others waiting."""
    tried = []

    def trial_ms(*_: object, num_workers: int, **__: object) -> float:
        tried.append(num_workers)
        return 1000 / (num_workers + 1)  # each more makes it faster

    monkeypatch.setattr(measure, "cores", lambda: 8)
    monkeypatch.setattr(measure, "of_all_processes", lambda mine: [mine, 2], raising=False)
    monkeypatch.setattr(measure, "_learner", lambda run, data: None)
    monkeypatch.setattr(measure, "_trial_ms", trial_ms)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    run: Any = SimpleNamespace(trainer=SimpleNamespace(num_devices=1, strategy=strategy))
    data: Any = None
    fewest, _ = measure.fastest_num_workers(run, data)
    assert (fewest, tried) == (2, [0, 1, 2])
