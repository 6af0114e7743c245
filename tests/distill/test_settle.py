"""What losses over features take from a sample before the first step."""

import pytest
import timm
import torch
from torch import Tensor

from kd.data.info import DataInfo
from kd.distill.objective import Objective
from kd.distill.settle import settle_losses
from kd.distill.student import Student
from kd.losses import MSELoss
from kd.losses.targets import Standardizer
from kd.settings import TapSpec
from kd.tasks import Classification
from kd.teachers.frozen import FrozenTeacher
from tests.distill.inherit._vits import OURS, THEIRS


def test_a_student_without_a_fit_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher's statistics need the size of the student's maps alone: they are equal to the bit."""
    sample = torch.randint(0, 256, (3 * 64, 3, 32, 32), dtype=torch.uint8)
    batches: list[int] = []
    buffers: list[dict[str, Tensor]] = []
    for start in ("inherited", "pre-trained", "scratch"):
        torch.manual_seed(0)
        model = timm.create_model("resnet18", num_classes=5, channels=(8, 12, 16, 20)).eval()
        big = timm.create_model("resnet18", num_classes=5, channels=(16, 24, 32, 40)).eval()
        teacher = FrozenTeacher(big, THEIRS, classes=5)
        losses = {"mse": MSELoss(standardize="variance")}
        taps = {"mse": TapSpec("layer2", "layer2")}
        objective = Objective(Classification(5), losses, 0.0, taps)
        data = DataInfo([str(i) for i in range(5)])
        student = Student(model, OURS, objective, data, teacher, start="inherited")
        monkeypatch.setattr(student, "start", start)
        model.register_forward_pre_hook(lambda _, inputs: batches.append(len(inputs[0])))
        settle_losses(student, teacher, lambda _: sample)
        parts = objective.modules()
        (standardizer,) = [part for part in parts if isinstance(part, Standardizer)]
        buffers.append(dict(standardizer.named_buffers()))
    assert batches == 7 * [64]  # three parts, three, then one
    assert buffers[0]["rows"] >= len(sample)
    torch.testing.assert_close(buffers[0], buffers[1], rtol=0, atol=0)
