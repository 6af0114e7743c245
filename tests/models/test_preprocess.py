"""A model's input, without a run."""

import pytest
import timm
import torch
from torch import nn

from kd.models.preprocess import Given, Preprocess, evaluating, input_of, preprocess_for
from tests._helpers import refuses


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
    with refuses("student_prepare"):
        given(torch.zeros(1, 3, 2, 2, dtype=torch.uint8))


def test_a_part_that_computes_as_in_evaluation_still_does_after_a_trial() -> None:
    """A student whose backbone is frozen keeps its norms and dropout in evaluation while it trains."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5)).train()
    model[0].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True]
