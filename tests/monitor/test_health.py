"""Training health against independent readings, and planted faults that the rules must name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from torch import nn

from kd.cli import train_main
from kd.monitor.health import _Reading
from kd.report.records import RunRecords
from kd.report.rules import Explained
from tests._runs import callback, newest_run


def trained(recipe: Path, *items: str) -> RunRecords:
    assert train_main([f"recipe={recipe}", "monitor.health_every=2", *items]) == 0
    return newest_run(recipe)


@pytest.mark.parametrize(("layers", "copied"), [
    (1, [0]),
    (8, list(range(8))),
    (15, [0, 2, 4, 6, 8, 10, 12, 14]),  # the first eight were taken
    (23, [0, 3, 6, 9, 12, 15, 18, 21]),
])  # fmt: skip
def test_the_copied_weights_lie_over_the_whole_model(layers: int, copied: list[int]) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    parameters = list(model.parameters())
    reading = _Reading(model, parameters, [])
    reading.before_step(parameters)
    reading.stop_listening()
    weights = [model[number].weight for number in range(layers)]
    numbers = [
        next(number for number, weight in enumerate(weights) if weight is before)
        for before, _ in reading._before
    ]
    assert numbers == copied


@pytest.mark.parametrize("layer", [nn.Sigmoid(), nn.Tanh(), nn.Hardsigmoid()])
def test_outputs_at_either_end_are_saturated(layer: nn.Module) -> None:
    reading = _Reading(layer, [], [("gate", layer)])
    layer(torch.tensor([-9.0, 0.0, 2.0, 9.0]))
    reading.stop_listening()
    assert reading._layers["saturated"] == {"gate": 0.5}


class Witness(Callback):
    """Measures the gradient and one weight's update by itself."""

    seen: dict[int, tuple[float, float]] = {}  # noqa: RUF012 (the test reads it)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        grads = [
            p.grad.flatten()
            for g in optimizer.param_groups
            for p in g["params"]
            if p.grad is not None
        ]
        self.norm = float(torch.cat(grads).norm())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen[trainer.fit_loop.epoch_loop.total_batch_idx] = (self.norm, float(outputs["loss"]))


def test_readings_are_what_they_say(recipe: Path) -> None:
    witness = callback("tests.monitor.test_health.Witness")
    run = trained(recipe, witness)
    from tests.monitor.test_health import Witness as Used

    assert [h["step"] for h in run.health] == list(range(0, 12, 2))
    for h in run.health:
        assert h["grad_norm"] == pytest.approx(Used.seen[h["step"]][0], rel=1e-4)
        assert 0 < h["update_ratio"] < 0.5
        assert 0 < h["teacher_entropy"] <= 1
        assert 0 <= h["agreement"] <= 1
        assert sum(h["loss_shares"].values()) == pytest.approx(1, abs=1e-3)
        assert len(h["spread"]) >= 4
    assert run.counts == {"train": [12] * 4, "val": [4] * 4}


def test_with_accumulated_gradients_batches_that_step_are_read(recipe: Path) -> None:
    """Of 6 batches an epoch every third steps: a reading is due at each second, and falls on the next that steps."""
    run = trained(recipe, "trainer.accumulate_grad_batches=3", "trainer.max_epochs=2")
    assert [h["step"] for h in run.health] == [2, 5, 8, 11]
    assert all(h["grad_norm"] > 0 and h["update_ratio"] > 0 for h in run.health)


def test_the_entropy_is_at_the_temperature_of_the_loss_over_logits(recipe: Path) -> None:
    """Not at CRD's, which softens something else, nor at that of a loss without weight."""
    alone = trained(recipe, "trainer.max_epochs=1")
    before = "{crd: {class_path: CRDLoss}, hot: {class_path: KDLoss, init_args: {temperature: 99, weight: 0}},"
    both = trained(recipe, "trainer.max_epochs=1", f"model.distill_losses={before} kd: {{class_path: KDLoss, "
                   "init_args: {temperature: 2}}}")  # fmt: skip
    for h, own in zip(both.health, alone.health, strict=True):
        assert h["teacher_entropy"] == pytest.approx(own["teacher_entropy"], rel=1e-4)


LONG = ["trainer.max_epochs=2", "data.batch_size=4"]  # 24 steps: rules are silent below 20


class Vanish(Callback):
    """Plants a vanishing gradient."""

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Any) -> None:
        loss.register_hook(lambda grad: grad * 1e-12)


class Explode(Callback):
    """Plants a gradient that overflows once."""

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Any) -> None:
        if trainer.global_step == 4:
            loss.register_hook(lambda grad: grad * 1e9)


@pytest.mark.parametrize(
    ("items", "rule"),
    [
        (
            ['trainer.callbacks+={"class_path":"tests.monitor.test_health.Vanish"}'],
            "VanishingGradient",
        ),
        (
            ['trainer.callbacks+={"class_path":"tests.monitor.test_health.Explode"}'],
            "ExplodingTensor",
        ),
        (["model.distill_losses.kd.temperature=1000"], "TemperatureTooHigh"),
        (["model.task_loss_weight=1000"], "LossTermDominates"),
    ],
)
def test_a_planted_fault_is_named(recipe: Path, items: list[str], rule: str) -> None:
    assert rule in {f.rule for f in Explained(trained(recipe, *items, *LONG)).findings}


def test_the_user_chooses_the_layers(recipe: Path) -> None:
    run = trained(recipe, 'monitor.activations=["blocks.*", "norm"]', "trainer.max_epochs=1")
    assert all(list(h["spread"]) == ["blocks.0", "norm"] for h in run.health)
    assert 0.2 < run.health[0]["spread"]["norm"] < 5  # a layer norm's output
    assert "Activations' standard deviation" in (run.folder / "report.html").read_text()


def test_a_cached_teacher_is_read_too(recipe: Path, tmp_path: Path) -> None:
    cache = [
        "model.teacher.cache=on",
        f"model.teacher.cache_dir={tmp_path / 'answers'}",
        "model.teacher.cache_views=1",
    ]
    filling, reading = trained(recipe, *cache), trained(recipe, *cache)
    assert reading.summary["cache"]["answers_computed"] == 0
    for asked, read in zip(filling.health, reading.health, strict=True):
        assert read["teacher_entropy"] == pytest.approx(asked["teacher_entropy"], rel=1e-3)
        assert read["agreement"] == asked["agreement"]
