"""Optimizer settings, schedules and the position of a resumed run in them."""

import pytest
from torch import nn

from kd.optim import (
    OptimSpec,
    as_optim,
    build_optimizer,
    scaled_to_batch,
    short_window,
    steps_done,
    warmup_cosine,
    warmup_then_steps,
)


def test_as_optim() -> None:
    assert as_optim({"name": "sgd", "lr": 0.1}).lr == 0.1


def test_scaled_to_batch() -> None:
    assert scaled_to_batch(OptimSpec("adamw", lr=0.001, lr_batch=256), 1024).lr == 0.002
    for name in ("sgd", "momentum", "sgdw"):
        assert scaled_to_batch(OptimSpec(name, lr=0.001, lr_batch=256), 1024).lr == 0.004


def test_a_step_that_kwargs_name_takes_the_fused_ones_place() -> None:
    """torch refuses both at once, and did so when the run had begun."""
    for name in ("adamw", "sgd"):
        optimizer = build_optimizer([nn.Linear(4, 4)], OptimSpec(name, kwargs={"foreach": True}))
        assert optimizer.defaults["foreach"] and not optimizer.defaults["fused"]


def test_steps_done() -> None:
    assert steps_done(12, 6, 12, -1)
    assert steps_done(12, 6, 100, 20) == 12


def test_short_window() -> None:
    assert [short_window(6, 4, b) for b in range(6)] == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]


def test_warmup_cosine() -> None:
    assert [round(warmup_cosine(s, 2, 6, 0.0), 3) for s in range(7)] == [
        0.5,
        1.0,
        1.0,
        0.854,
        0.5,
        0.146,
        0.0,
    ]


def test_warmup_then_steps() -> None:
    assert [round(warmup_then_steps(s, 2, [3, 5]), 3) for s in range(7)] == [
        0.5,
        1.0,
        1.0,
        0.1,
        0.1,
        0.01,
        0.01,
    ]


def test_a_schedule_that_there_is_not_is_refused() -> None:
    """From Python too, where no reader of settings stands before it: it became a cosine."""
    with pytest.raises(ValueError, match="schedule must be one of .*, got 'linear'"):
        OptimSpec(schedule="linear")  # type: ignore[arg-type]
