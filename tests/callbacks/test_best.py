"""The best validation is one, whoever tells of it: the exported weights, the summary, the page, the search."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pytorch_lightning import Callback, Trainer
from safetensors.torch import load_file

from kd.callbacks.best import Best
from kd.cli import train_main
from kd.fleet.tuning.plan import SearchObjective
from kd.report.facts import Facts
from kd.report.metric import format_metric, is_share, less_is_better
from kd.report.records import read_run
from tests._helpers import TINY


class Forget(Callback):
    """Damages the students once the first validation, in mid-epoch, is over."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 3:
            for student in pl_module.students.named().values():
                torch.nn.init.normal_(
                    student.model.head.weight, std=10, generator=torch.Generator().manual_seed(0)
                )


@pytest.mark.parametrize(("monitor", "mode"), [("val/acc1", "max"), ("val/loss", "min")])
def test_of_equal_validations_the_one_nearer_to_the_teacher_is_kept(
    monitor: str, mode: str
) -> None:
    """Ties are common: one of 296 pictures is 0.34 points."""
    best = Best(monitor, mode, {}, lambda *_: None)
    metric, better, worse = monitor[4:], *((0.9, 0.7) if mode == "max" else (0.7, 0.9))

    def kept(value: float, **more: float) -> bool:
        return keeps(best, {metric: value, **more}, 0)

    assert [kept(math.nan), kept(0.8), kept(0.8), kept(worse), kept(math.nan), kept(better)] == [
        0,
        1,
        0,
        0,
        0,
        1,
    ]
    assert [kept(better, agreement=a) for a in (0.5, 0.4, 0.5, 0.6)] == [1, 0, 0, 1]
    assert not kept(worse, agreement=0.9)


def keeps(best: Best, values: dict[str, float], pictures: int) -> bool:
    best.newest[""] = values
    if found := best._is_better("", pictures):
        best.best[""] = best.newest[""]
    return found


def test_accuracies_that_a_validation_cannot_tell_apart_are_equal() -> None:
    """`grocery_vit`, ten epochs: the fifth had one picture of 296 more than the tenth, and a KL a sixth higher."""
    best = Best("val/acc1", "max", {}, lambda *_: None)
    epochs = [
        (0.794, 0.834),
        (0.824, 0.872),
        (0.814, 0.892),
        (0.834, 0.905),
        (0.824, 0.895),
        (0.831, 0.912),
    ]
    assert [keeps(best, {"acc1": a, "agreement": g}, 296) for a, g in epochs] == [1, 1, 1, 1, 0, 1]
    assert not keeps(best, {"acc1": 0.812, "agreement": 0.95}, 296), (
        "more than an error (2.2 points) below the highest"
    )
    assert keeps(best, {"acc1": 0.86, "agreement": 0.8}, 296), (
        "what was kept is that far below it now"
    )
    exact = Best("val/acc1", "max", {}, lambda *_: None)
    assert [keeps(exact, {"acc1": a, "agreement": g}, 0) for a, g in epochs] == [
        1,
        1,
        0,
        1,
        0,
        0,
    ], "an unknown number"
    alone = Best("val/acc1", "max", {}, lambda *_: None)
    assert [keeps(alone, {"acc1": a}, 296) for a, _ in epochs] == [1, 1, 0, 1, 0, 0], (
        "no teacher to agree with"
    )
    other = Best("val/miou", "max", {}, lambda *_: None)
    assert [keeps(other, {"miou": a, "agreement": g}, 296) for a, g in epochs] == [
        1,
        1,
        0,
        1,
        0,
        0,
    ], "no such error"


def test_of_equal_accuracies_the_least_divergence_decides() -> None:
    """`grocery_vit`, thirty epochs, seed 1: the twelfth agreed on three pictures of 296 more than the thirtieth."""
    best = Best("val/acc1", "max", {}, lambda *_: None)
    epochs = [
        (0.858, 0.902, None),
        (0.845, 0.926, 0.0864),
        (0.841, 0.916, 0.0678),
        (0.842, 0.93, None),
    ]
    values = [{"acc1": a, "agreement": g} | ({"kl": kl} if kl else {}) for a, g, kl in epochs]
    assert [keeps(best, each, 296) for each in values] == [1, 1, 1, 1], (
        "without both numbers agreement decides"
    )
    best = Best("val/acc1", "max", {}, lambda *_: None)
    assert [keeps(best, each, 296) for each in reversed(values[1:3])] == [1, 0]
    assert not keeps(best, {"acc1": 0.8, "agreement": 1.0, "kl": 0.01}, 296), (
        "more than an error below the highest"
    )
    assert keeps(best, {"acc1": 0.842, "agreement": 0.93, "kl": math.nan}, 296), (
        "agreement decides again"
    )
    assert (format_metric("kl", 0.0678), less_is_better("val/kl"), is_share("kl")) == (
        "0.0678",
        True,
        False,
    )


@pytest.mark.parametrize("names", [[""], ["one", "two"]])
def test_a_best_validation_in_mid_epoch_is_the_one_exported_and_told_of(
    recipe: Path, teacher: Path, names: list[str]
) -> None:
    """The student begins as its teacher and learns nothing: all pictures agree until it is damaged."""
    config = yaml.safe_load(recipe.read_text())
    config["model"]["student"] |= {"kwargs": TINY, "checkpoint": str(teacher)}
    config["students"] = {name: {"optim": {"lr": 0.0}} for name in names if name} or None
    config["optim"]["lr"] = 0.0
    recipe.write_text(yaml.safe_dump(config))
    forget = json.dumps({"class_path": "tests.callbacks.test_best.Forget"})
    items = [
        "trainer.val_check_interval=0.34",
        "checkpoint.monitor=val/agreement",
        f"trainer.callbacks+={forget}",
    ]
    assert train_main([f"recipe={recipe}", *items]) == 0
    run = recipe.parent / "runs" / "tiny" / "000"
    for name in names:
        folder = run / "students" / name if name else run
        with (folder / "metrics.csv").open() as file:
            measured = [row for row in csv.DictReader(file) if row["val/agreement"]]
        assert [float(row["val/agreement"]) == 1 for row in measured] == [True, *[False] * 5]
        summary = json.loads((folder / "summary.json").read_text())
        best = summary["student"]["best_val"]
        assert (best["agreement"], best["epoch"], best["step"]) == (1, 1, 2)
        assert best["acc1"] == pytest.approx(float(measured[0]["val/acc1"]), abs=1e-6)
        faithful = json.loads((folder / "fidelity.json").read_text())
        assert (faithful["agreement"], round(faithful["kl"], 6)) == (1, best["kl"])
        assert summary["student"]["val"]["kl"] > best["kl"] + 0.1, "damaged since"
        assert Facts(read_run(run)).best_val(name) == best["acc1"]
        assert SearchObjective("val/agreement", True).value(folder) == 1
        exported, whole = load_file(folder / "student.safetensors"), load_file(teacher)
        assert all(torch.equal(value, whole[key]) for key, value in exported.items())
