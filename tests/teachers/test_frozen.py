"""Frozen teachers: precision and classifier."""

import pytest
import torch

from kd.errors import UserError
from kd.models import Preprocess
from kd.teachers.frozen import FrozenTeacher, dtype_for


def test_a_teacher_stays_in_the_precision_of_the_training() -> None:
    assert [dtype_for(p) for p in ("bf16-mixed", "16-mixed", "32-true")] == [
        torch.bfloat16, torch.float16, torch.float32,
    ]  # fmt: skip


class TwoLayers(torch.nn.Sequential):
    """A model whose classifier has no weight of its own."""

    def get_classifier(self) -> torch.nn.Module:
        return self[0]


def test_a_classifier_of_several_layers_does_not_keep_a_teacher_from_half_precision() -> None:
    model = TwoLayers(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)))
    teacher = FrozenTeacher(model, Preprocess(2, (0.5,) * 3, (0.5,) * 3)).to(
        torch.device("cpu"), torch.bfloat16
    )
    assert teacher(torch.zeros(4, 3, 2, 2, dtype=torch.uint8)).shape == (4, 3)
    with pytest.raises(UserError, match="has no single classifier"):
        teacher.classifier()
