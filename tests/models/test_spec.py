"""The settings of a model."""

import math

import pytest

from kd.models.spec import ModelSpec, StudentSpec, TeacherSpec


@pytest.mark.parametrize(("kind", "settings", "message"), [
    (ModelSpec, {"mean": [0.5]}, "mean must be a list of 3"), (ModelSpec, {"std": [0.5, 0.0, 0.5]}, "std must be"),
    (ModelSpec, {"mean": [0.5, math.nan, 0.5]}, "mean must be a list of 3"),
    (ModelSpec, {"std": [0.5, math.nan, 0.5]}, "std must be a list of 3"),
    (TeacherSpec, {"cache_views": 0}, "cache_views must be >= 1"), (TeacherSpec, {"weight": 0.0}, "weight must be > 0"),
    (TeacherSpec, {"placement": "moon"}, "placement must be"), (TeacherSpec, {"cache_topk": 0}, "cache_topk must be"),
    (TeacherSpec, {"cache_views": 20_000}, "cache_views must be >= 1 and <= 10000"),
    (StudentSpec, {"inherit_pictures": 0}, "inherit_pictures must be >= 1"),
    (StudentSpec, {"freeze": "backbone", "head": False}, "freeze must be null"),
])  # fmt: skip
def test_values_that_no_model_can_have(
    kind: type, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)


def test_names_and_truth_values_are_understood() -> None:
    assert ModelSpec("hf_hub:timm/resnet18").arch == ModelSpec("timm/resnet18").arch == "resnet18"
    assert (TeacherSpec(cache=True).cache, TeacherSpec(cache=False).cache) == ("on", "off")
