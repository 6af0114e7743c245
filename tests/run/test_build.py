"""Objects of resolved settings."""

from pathlib import Path

import pytest

from kd.config.parts import part
from kd.data.sources import ImageFolder
from kd.losses import HintLoss, MLPProjection
from kd.models import TeacherSpec
from kd.run.build import arguments_of, build, built
from kd.run.request import translate
from kd.run.resolve import resolve
from kd.run.run import Run
from kd.run.trust import Trust
from kd.settings import TeacherSettings, TrainerSettings
from tests._helpers import refuses


def test_a_group_becomes_its_object() -> None:
    spec = built(
        TeacherSettings | None, {"arch": "timm/resnet18", "cache": True}, "model.teacher", Trust()
    )
    assert spec == TeacherSpec("resnet18", cache="on")
    with refuses("model.teacher.std: must be > 0"):
        built(TeacherSettings, {"std": [1.0, 0.0, 1.0]}, "model.teacher", Trust())


def test_classes_within_classes() -> None:
    inner = {"class_path": "MLPProjection", "init_args": {}}
    value = {"kd": {"class_path": "HintLoss", "init_args": {"projection": inner}}}
    losses = built(dict[str, part("loss")], value, "model.distill_losses", Trust())
    assert isinstance(losses["kd"], HintLoss) and isinstance(losses["kd"].projection, MLPProjection)


def test_a_class_of_another_kind_is_refused() -> None:
    other = {"class_path": "kd.losses.KDLoss", "init_args": {}}
    with refuses("data.source takes a source, got the loss kd.losses.KDLoss"):
        built(part("source"), other, "data.source", Trust())
    with refuses("data.source: KDLoss is no Source"):
        built(part("source"), other, "data.source", Trust(["*"]))
    value = {"class_path": "ImageFolder", "init_args": {"root": "x"}}
    assert isinstance(built(part("source"), value, "data.source", Trust()), ImageFolder)


def test_a_text_that_is_taken_as_it_is_stays_text() -> None:
    """Lightning reads its own form of durations."""
    trainer = resolve([{"trainer.max_time": "00:12:00:00"}])["trainer"]
    assert arguments_of(TrainerSettings, trainer, "trainer", Trust())["max_time"] == "00:12:00:00"


def test_a_trainer_takes_one_plugin_as_well_as_a_list(recipe: Path, tmp_path: Path) -> None:
    words = [f"recipe={recipe}", f"runs_dir={tmp_path}", "trainer.plugins=LightningEnvironment"]
    run = Run.of(translate(words))
    build(run)
    assert run.trainer.world_size == 1


LAZY = """\
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from torch import nn
class Net:
    def build(self, num_classes: int, img_size: tuple[int, int] | None) -> nn.Module: ...
class NoNet:
    def build(self, num_classes: int) -> nn.Module: ...
"""


def test_a_builders_annotations_may_name_what_only_type_checkers_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_nets.py").write_text(LAZY)
    monkeypatch.syspath_prepend(tmp_path)
    key = "model.student.builder"
    net = built(
        part("builder"), {"class_path": "lazy_nets.Net", "init_args": {}}, key, Trust(["lazy_nets"])
    )
    assert type(net).__name__ == "Net"
    with refuses(f"{key}: NoNet is no Builder: it needs the method build"):
        built(
            part("builder"),
            {"class_path": "lazy_nets.NoNet", "init_args": {}},
            key,
            Trust(["lazy_nets"]),
        )
