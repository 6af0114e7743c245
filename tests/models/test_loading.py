"""What loading does to a model's weights."""

from pathlib import Path

import pytest
import torch
from torch import nn

from kd.models.loading import freeze_backbone, has_new_classifier, load_checkpoint
from tests._helpers import refuses, tiny_vit
from tests.distill.inherit._vits import small_vit as vit


def test_freezing_leaves_a_gradient_to_the_classifier_alone() -> None:
    model = vit()
    assert freeze_backbone(model) == ("head",)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        "head.weight",
        "head.bias",
    }


def test_a_checkpoint_fits_or_says_what_does_not(tmp_path: Path) -> None:
    saved, file = nn.Sequential(nn.Linear(4, 3)), tmp_path / "w.pth"
    torch.save(saved.state_dict(), file)
    model = nn.Sequential(nn.Linear(4, 3))
    load_checkpoint(model, file, "model.student.checkpoint")
    assert torch.equal(model[0].weight, saved[0].weight)
    assert not has_new_classifier(nn.Linear(2, 2))
    with refuses(r"model.teacher.checkpoint: .*w.pth"):
        load_checkpoint(nn.Sequential(nn.Linear(5, 3)), file, "model.teacher.checkpoint", head=True)
    with refuses("model.teacher.checkpoint"):
        load_checkpoint(model, tmp_path / "none.pth", "model.teacher.checkpoint")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("head", [True, False], ids=["teacher", "student"])
def test_weights_that_are_nan_or_infinite_are_refused(
    tmp_path: Path, value: float, head: bool
) -> None:
    """A run that had failed has written them: named with the file and the tensor, before anything is trained."""
    model = tiny_vit()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["blocks.1.mlp.fc1.weight"].view(-1)[3] = value
    torch.save(state, tmp_path / "failed.pth")
    with refuses(r"failed.pth holds NaN or infinite weights, 1 of blocks.1.mlp.fc1.weight"):
        load_checkpoint(tiny_vit(), tmp_path / "failed.pth", "model.teacher.checkpoint", (), head)
