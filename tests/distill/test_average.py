"""The moving average of weights in half precision, wherever they are."""

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.utils import model_ema
from torch import nn

from kd.distill.step import moving_average
from kd.tasks.features import half_of_each_class
from scripts import house


def test_it_rounds_by_a_generator_of_the_weights_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a run with ``trainer.precision=bf16-true`` on a GPU: the average is made on the CPU, then moved."""
    devices = []

    def made(device: torch.device) -> Any:
        generator = SimpleNamespace(device=device)
        generator.manual_seed = lambda _: generator
        return generator

    def rounded(values: list[torch.Tensor], *_: object, generator: Any) -> None:
        devices.append((values[0].device.type, generator.device.type))

    model = nn.Linear(3, 2)
    average = moving_average(model, 0.9)
    assert average is not None
    for module in (model, average):
        module.to("meta", torch.bfloat16)
    monkeypatch.setattr(torch, "Generator", made)
    monkeypatch.setattr(model_ema, "_lerp_stochastic_round_bf16_", rounded)
    average.update(model, step=3)
    assert devices == [("meta", "meta")]


def test_a_resumed_average_rounds_as_the_uninterrupted_one() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(40, 40).bfloat16() for _ in range(9)]
    whole, resumed = (moving_average(models[0], 0.99) for _ in range(2))
    assert whole is not None and resumed is not None
    for step, model in enumerate(models, 1):
        whole.update(model, step)
        if step == 5:
            resumed.load_state_dict(whole.state_dict())
        elif step > 5:
            resumed.update(model, step)
    assert torch.equal(whole.module.weight, resumed.module.weight)
    assert whole.module.weight.dtype == torch.bfloat16


def test_what_draws_by_a_generator_names_its_device() -> None:
    """Inside ``with device:`` torch makes new tensors there, for which a generator of the CPU can't draw."""
    draws = {"rand", "randn", "randint", "randperm", "normal"}
    unnamed = []
    for name, path in house.sources().items():
        for node in ast.walk(house.tree_of(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            keywords = {keyword.arg for keyword in node.keywords}
            if node.func.attr in draws and "generator" in keywords and "device" not in keywords:
                unnamed.append(f"{name}: {ast.unparse(node)}")
    assert unnamed == []


def test_a_draw_by_seed_inside_a_context_of_a_device() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    with torch.device("meta"):
        assert len(half_of_each_class(labels, seed=0)) == 2
