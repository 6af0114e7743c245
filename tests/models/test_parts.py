"""A model's settings and its input, without a run."""

import pytest
import timm
import torch
from torch import nn

from kd.errors import UserError
from kd.models.loading import has_new_classifier, load_checkpoint
from kd.models.preprocess import Given, Preprocess, input_of, preprocess_for
from kd.models.spec import ModelSpec, StudentSpec, TeacherSpec


@pytest.mark.parametrize(("kind", "settings", "message"), [
    (ModelSpec, {"mean": [0.5]}, "mean must be three numbers"), (ModelSpec, {"std": [0.5, 0.0, 0.5]}, "std must be"),
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


def test_pictures_are_scaled_and_normalised_and_floats_pass() -> None:
    prepare = Preprocess((4, 6), [0.5, 0.25, 0.0], [0.5, 0.5, 1.0])
    pictures = torch.full((2, 3, 8, 12), 255, dtype=torch.uint8)
    found = prepare(pictures)
    assert found.shape == (2, 3, 4, 6)
    assert torch.allclose(found[0, :, 0, 0], torch.tensor([1.0, 1.5, 1.0]))
    assert torch.equal(prepare(found), found)
    with pytest.raises(ValueError, match="std must not be 0"):
        Preprocess(4, [0.5] * 3, [0.5, 0.0, 0.5])


def test_a_models_own_input_is_timms_and_what_is_given_counts() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32)
    assert preprocess_for(model, None).mean == tuple(model.pretrained_cfg["mean"])
    assert preprocess_for(model, 48, mean=[0.1, 0.2, 0.3]).mean == (0.1, 0.2, 0.3)
    assert preprocess_for(model, 48).size == (48, 48)
    assert isinstance(input_of(nn.Flatten(), "student"), Given)
    with pytest.raises(TypeError, match="student_prepare: must be"):
        input_of(nn.Flatten(), "student", prepare=3, argument="student_prepare")  # type: ignore[arg-type]


def test_pictures_for_a_model_of_ones_own_need_a_function() -> None:
    given = input_of(nn.Flatten(), "student", argument="student_prepare")
    assert torch.equal(given(torch.ones(1, 3, 2, 2)), torch.ones(1, 3, 2, 2))
    with pytest.raises(UserError, match="student_prepare"):
        given(torch.zeros(1, 3, 2, 2, dtype=torch.uint8))


def test_a_checkpoint_fits_or_says_what_does_not(tmp_path) -> None:  # type: ignore[no-untyped-def]
    saved, file = nn.Sequential(nn.Linear(4, 3)), tmp_path / "w.pth"
    torch.save(saved.state_dict(), file)
    model = nn.Sequential(nn.Linear(4, 3))
    load_checkpoint(model, file, "model.student.checkpoint")
    assert torch.equal(model[0].weight, saved[0].weight)
    assert not has_new_classifier(nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"model.teacher.checkpoint: .*w.pth"):
        load_checkpoint(nn.Sequential(nn.Linear(5, 3)), file, "model.teacher.checkpoint", head=True)
    with pytest.raises(UserError, match="model.teacher.checkpoint"):
        load_checkpoint(model, tmp_path / "none.pth", "model.teacher.checkpoint")
