"""Helpers that are pure functions, one call each."""

from kd.commands.runs import _age
from kd.errors import did_you_mean, first_line, plain, reason
from kd.fit_to_machine.measure import StepCost
from kd.machine import signals_kept
from kd.optim import (
    OptimSpec,
    as_optim,
    scaled_to_batch,
    short_window,
    steps_done,
    warmup_cosine,
    warmup_then_steps,
)
from tests._helpers import error_in_a_thread


def test_age() -> None:
    assert _age(7300) == "2 h"


def test_did_you_mean() -> None:
    assert did_you_mean("onx", ["onnx", "hub"]) == "; did you mean 'onnx'?"


def test_first_line() -> None:
    assert first_line(KeyError()) == "KeyError"
    assert first_line(OSError("full\nsecond line")) == "full"


def test_reason() -> None:
    lost = RuntimeError(
        "[gloo/tcp/pair.cc:545] Read error [10.0.0.2]:485: Connection reset by peer. GLHF!"
    )
    assert reason(lost).startswith(
        "lost the connection to another process (killed, or its machine is gone): [10.0.0.2]"
    )
    assert reason(KeyError("a")) == "KeyError: 'a'"


def test_plain() -> None:
    assert (
        plain(OSError(36, "File name too long", "a" * 300))[:40]
        == "File name too long: aaaaaaaaaaaaaaaaaaaa"
    )


def test_step_ms() -> None:
    assert StepCost(60, 40, 100, num_workers=2).step_ms(teacher=False) == 50.0


def test_gain() -> None:
    assert round(StepCost(60, 40, 0, num_workers=1).gain(epochs=8, views=2), 2) == 1.82


def test_as_optim() -> None:
    assert as_optim({"name": "sgd", "lr": 0.1}).lr == 0.1


def test_scaled_to_batch() -> None:
    assert scaled_to_batch(OptimSpec("adamw", lr=0.001, lr_batch=256), 1024).lr == 0.002
    for name in ("sgd", "momentum", "sgdw"):
        assert scaled_to_batch(OptimSpec(name, lr=0.001, lr_batch=256), 1024).lr == 0.004


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


def test_signals_kept_in_another_thread() -> None:
    """``kd.train`` may run in any thread."""

    def inside() -> None:
        with signals_kept(lambda *_: None):
            pass

    assert error_in_a_thread(inside) is None
