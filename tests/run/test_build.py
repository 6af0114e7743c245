"""Objects of resolved settings."""

import pytest

from kd.data.sources import ImageFolder
from kd.errors import UserError
from kd.losses import HintLoss, MLPProjection
from kd.models import TeacherSpec
from kd.run.build import built
from kd.settings import Class, TeacherSettings


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
