"""A student of numbers begins with its teacher's answers, in their units, whatever its family."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from kd.data.info import DataInfo
from kd.distill.first_weights import give_first_weights
from kd.losses import RegressionKDLoss
from kd.models import StudentSpec, TeacherSpec
from kd.run.assemble import assemble
from kd.tasks import Regression

PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vit_tiny_patch16_224": (
        {"patch_size": 8, "depth": 2, "embed_dim": 64, "num_heads": 4},
        {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2},
    ),
    "convnext_atto": (
        {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48)},
        {"depths": (1, 1, 2, 1), "dims": (8, 12, 16, 24)},
    ),
    "resnet18": ({"channels": (16, 24, 32, 48)}, {"channels": (8, 12, 16, 24)}),
}
"""Arguments of the teacher and of the student, by timm's name."""


@pytest.mark.parametrize("arch", PAIRS)
def test_numbers_are_inherited_in_their_units(arch: str, tmp_path: Path) -> None:
    big, small = PAIRS[arch]
    sized = {"img_size": 32} if arch.startswith("vit") else {}
    torch.manual_seed(0)
    model = timm.create_model(arch, num_classes=1, **big, **sized)
    torch.nn.init.constant_(model.get_classifier().bias, 500.0)  # kcal
    save_file(model.state_dict(), tmp_path / "teacher.safetensors")
    module = assemble(
        DataInfo(["kcal"], 48, 16, kind="numbers", scales=[(500.0, 100.0)]),
        StudentSpec(arch, 32, kwargs=small, inherit=True, inherit_pictures=64),
        TeacherSpec(arch, 32, kwargs=big, checkpoint=str(tmp_path / "teacher.safetensors")),
        task=Regression(),
        distill_losses={"kd": RegressionKDLoss()},
    )
    pictures = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    give_first_weights([module.student], module.teacher, lambda count: pictures[:count])
    with torch.no_grad():
        answers = module.student.eval().logits(pictures)
    assert (answers - 500).abs().max() < 50  # it was 50,500 of the convolutional families
