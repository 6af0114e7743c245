"""Objects of resolved settings."""

from datetime import timedelta
from pathlib import Path

import pytest

from kd.data.sources import ImageFolder
from kd.errors import UserError
from kd.losses import HintLoss, MLPProjection
from kd.models import TeacherSpec
from kd.run.build import arguments_of, build, built
from kd.run.request import translate
from kd.run.resolve import resolve
from kd.run.run import Run
from kd.settings import Class, TeacherSettings, TrainerSettings


def test_a_group_becomes_its_object() -> None:
    spec = built(TeacherSettings | None, {"arch": "timm/resnet18", "cache": True}, "model.teacher")
    assert spec == TeacherSpec("resnet18", cache="on")
    with pytest.raises(UserError, match="model.teacher.std: must be three numbers > 0"):
        built(TeacherSettings, {"std": [1.0, 0.0, 1.0]}, "model.teacher")


def test_classes_within_classes() -> None:
    inner = {"class_path": "MLPProjection", "init_args": {}}
    value = {"kd": {"class_path": "HintLoss", "init_args": {"projection": inner}}}
    losses = built(dict[str, Class], value, "model.distill_losses")
    assert isinstance(losses["kd"], HintLoss) and isinstance(losses["kd"].projection, MLPProjection)


def test_a_class_of_another_kind_is_refused() -> None:
    other = {"class_path": "kd.losses.KDLoss", "init_args": {}}
    with pytest.raises(
        UserError, match="data.source takes a source, got the loss kd.losses.KDLoss"
    ):
        built(Class, other, "data.source")
    with pytest.raises(UserError, match="data.source: KDLoss is no Source"):
        built(Class, other, "data.source", ["*"])
    value = {"class_path": "ImageFolder", "init_args": {"root": "x"}}
    assert isinstance(built(Class, value, "data.source"), ImageFolder)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("0:00:16", 16), ("0:30:00", 1800), (90, 90), ("90", 90), ("PT2M", 120)],
)
def test_a_duration_is_typed_once_and_built_where_it_is_needed(
    written: object, seconds: float
) -> None:
    value = {"class_path": "kd.strategies.ddp.DDP", "init_args": {"timeout": written}}
    config = resolve([{"trainer": {"strategy": value}}])
    kept = config["trainer"]["strategy"]
    assert kept["init_args"]["timeout"] == written  # as a run's config.yaml has it
    strategy = built(Class, kept, "trainer.strategy")
    assert strategy._timeout == timedelta(seconds=seconds)


def test_a_text_that_is_taken_as_it_is_stays_text() -> None:
    """Lightning reads its own form of durations."""
    trainer = resolve([{"trainer.max_time": "00:12:00:00"}])["trainer"]
    assert arguments_of(TrainerSettings, trainer, "trainer")["max_time"] == "00:12:00:00"


def test_what_is_no_duration_is_refused() -> None:
    value = {"class_path": "kd.strategies.ddp.DDP", "init_args": {"timeout": "soon"}}
    with pytest.raises(UserError, match=r"trainer.strategy.timeout: must be a duration \(0:30:00"):
        resolve([{"trainer": {"strategy": value}}])


def test_a_trainer_takes_one_plugin_as_well_as_a_list(recipe: Path, tmp_path: Path) -> None:
    words = [f"recipe={recipe}", f"runs_dir={tmp_path}", "trainer.plugins=LightningEnvironment"]
    run = Run.of(translate(words))
    build(run)
    assert run.trainer.world_size == 1
