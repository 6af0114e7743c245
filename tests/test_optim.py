"""Optimizer settings, schedules and the position of a resumed run in them."""

import math

import pytest
import torch
from torch import nn

from kd.optim import (
    GivenOptim,
    OptimSpec,
    Pace,
    _order_state_as_weights,
    build_optimizer,
    scaled_to_batch,
)
from tests._helpers import refuses


def test_a_resumed_run_keeps_its_optimizer() -> None:
    """What a checkpoint does not say is not compared; settings that a function of the user's own leaves aside neither."""
    no_decay = OptimSpec("adamw", weight_decay=0.0, layer_decay=0.7)
    own = GivenOptim(make=lambda parameters: torch.optim.SGD(parameters))
    other = GivenOptim(make=lambda parameters: torch.optim.Adam(parameters))
    for resumed, before in (
        (no_decay, no_decay.settings()),
        (no_decay, {}),
        (own, {}),
        (own, other.settings()),
    ):
        resumed.check_resumed(before)
    refused = (
        (own, no_decay, r"optim: .*\(adamw, given a function of the user's own\)"),
        (no_decay, own, r"optim.name: .*\(a function of the user's own, given adamw\)"),
        (OptimSpec("sgd"), no_decay, r"optim.name: .*\(adamw, given sgd\)"),
        (OptimSpec("adamw"), no_decay, "optim.weight_decay: can't be turned on or off"),
    )
    for resumed, earlier, message in refused:
        with refuses(message):
            resumed.check_resumed(earlier.settings())


@pytest.mark.parametrize("kwargs", [{}, {"eps": 1e-6}])
@pytest.mark.parametrize("name, needs", [("bnbadam", "bitsandbytes"), ("fusedsgd", "apex")])
def test_an_optimizer_that_needs_a_gpu_or_a_package_is_refused_in_a_line(
    name: str, needs: str, kwargs: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses(f"^optim.name: {name} .*CUDA required for (?i:{needs})"):
        build_optimizer([nn.Linear(4, 4)], OptimSpec(name, kwargs=kwargs))


def test_a_resumed_state_lies_in_memory_as_its_weight() -> None:
    weight = nn.Parameter(torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    momentum = torch.rand(2, 3, 4, 4)
    optimizer.state[weight]["momentum_buffer"] = momentum
    _order_state_as_weights(optimizer)
    found = optimizer.state[weight]["momentum_buffer"]
    assert found.stride() == weight.stride()
    assert torch.equal(found, momentum)


def test_scaled_to_batch() -> None:
    assert scaled_to_batch(OptimSpec("adamw", lr=0.001, lr_batch=256), 1024).lr == 0.002
    for name in ("sgd", "momentum", "sgdw"):
        assert scaled_to_batch(OptimSpec(name, lr=0.001, lr_batch=256), 1024).lr == 0.004


def test_a_step_that_kwargs_name_takes_the_fused_ones_place() -> None:
    """torch refuses both at once, and did so when the run had begun."""
    for name in ("adamw", "sgd"):
        optimizer = build_optimizer([nn.Linear(4, 4)], OptimSpec(name, kwargs={"foreach": True}))
        assert optimizer.defaults["foreach"] and not optimizer.defaults["fused"]


@pytest.mark.parametrize(
    ("steps", "of_an_epoch", "kept"),
    [(6, 6, 0), (12, 6, 1), (13, 6, None), (2, 2, 0), (1, 1, None), (6, math.inf, None)],
)
def test_a_warmup_that_is_the_whole_run_is_shortened_and_said(
    steps: int, of_an_epoch: float, kept: int | None
) -> None:
    note = OptimSpec(warmup_epochs=2).note(Pace(steps, of_an_epoch))
    said = f"2 would be all of the run's {steps} steps; the warm-up is shortened to {kept}"
    assert note == ("" if kept is None else f"optim.warmup_epochs: {said}")


def test_a_schedule_that_there_is_not_is_refused() -> None:
    """From Python too, where no reader of settings stands before it: it became a cosine."""
    with pytest.raises(ValueError, match="schedule must be one of .*, got 'linear'"):
        OptimSpec(schedule="linear")


class Halves:
    """A schedule of the user's own: half of the rate in the second half of the run."""

    def factor(self, progress: float) -> float:
        return 1.0 if progress < 0.5 else 0.5


def test_a_schedule_of_ones_own_follows_the_warm_up() -> None:
    spec = OptimSpec(lr=1.0, warmup_epochs=1, schedule=Halves())
    optimizer, schedule = spec.build([nn.Linear(2, 2)], Pace(10, 2))
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    assert spec.settings()["schedule"] == "Halves"
    with refuses(r"optim\.schedule: object needs the method factor\(progress"):
        OptimSpec(schedule=object())
