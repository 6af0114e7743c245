"""The cost of a step, with and without the teacher; how many loader processes are tried."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor, nn

from kd.fit_to_machine import measure
from kd.models.own import logits_of


def test_no_rank_tries_more_loader_processes_than_the_one_with_the_fewest_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks make each trial together: one that ends earlier would leave the others waiting."""
    tried = []

    def trial_ms(*_: object, num_workers: int, **__: object) -> float:
        tried.append(num_workers)
        return 1000 / (num_workers + 1)  # each more makes it faster

    monkeypatch.setattr(measure, "cores", lambda: 8)
    monkeypatch.setattr(measure, "cores_of_rank", lambda: 8)
    monkeypatch.setattr(measure, "of_all_processes", lambda mine: [mine, 2], raising=False)
    monkeypatch.setattr(measure, "_step_learner", lambda run, data: None)
    monkeypatch.setattr(measure, "_trial_ms", trial_ms)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    run: Any = SimpleNamespace(trainer=SimpleNamespace(num_devices=1, strategy=strategy))
    data: Any = None
    fewest, _ = measure.fastest_num_workers(run, data)
    assert (fewest, tried) == (2, [0, 1, 2])


class Wrapped(nn.Module):
    """A model of the user's own, whose output is not a tensor."""

    def __init__(self, wrap: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 8)
        self.wrap = wrap

    def forward(self, images: Tensor) -> object:
        return self.wrap(self.layer(images).flatten(1))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits: {"logits": logits, "loss": None},
        lambda logits: {"out": logits},
        lambda logits: [logits],
        lambda logits: (logits, {}),
        lambda logits: SimpleNamespace(logits=logits),
    ],
)
def test_a_step_is_measured_whatever_the_students_model_gives(
    wrap: Callable[[Tensor], object],
) -> None:
    student = SimpleNamespace(
        model=Wrapped(wrap),
        inputs=torch.Tensor.float,
        has_two_heads=False,
        output_in=logits_of,
    )
    run: Any = SimpleNamespace(
        student=student,
        trainer=SimpleNamespace(precision_plugin=Precision()),
    )
    learn = measure.learner(run, torch.device("cpu"))
    learn(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    assert student.model.layer.weight.grad is None
