"""A student without a classifier that has its teacher's layers: what all pictures share leaves its features."""

from typing import Any

import pytest
import timm
import torch

from kd.data.info import DataInfo
from kd.distill.objective import Objective
from kd.distill.step import as_teacher
from kd.distill.student import Student
from kd.losses import CosineLoss
from kd.models import Preprocess
from kd.settings import TapSpec
from kd.tasks import Features

SMALL = {"patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "img_size": 32}
STUDENTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "vit": ("vit_tiny_patch16_224", SMALL, True),
    "attention pooling": ("vit_base_patch16_siglip_224", SMALL, False),  # no norm follows it
    "convnext": ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 16)}, True),
    "resnet": ("resnet10t", {"channels": (8, 8, 8, 16)}, False),  # a ReLU is last
}
"""timm's name, arguments, and whether the features end in a norm with a shift."""


@pytest.mark.parametrize("kind", STUDENTS)
def test_features_are_centred_where_a_shift_can_do_it(kind: str) -> None:
    arch, kwargs, ends_in_a_norm = STUDENTS[kind]
    model = timm.create_model(arch, num_classes=0, **kwargs).eval()
    prepare = Preprocess(32, (0.5,) * 3, (0.5,) * 3)
    taps = {"cosine": TapSpec("prelogits", "prelogits")}
    objective = Objective(Features(), {"cosine": CosineLoss()}, 0.0, taps)
    teacher = as_teacher(timm.create_model(arch, num_classes=0, **kwargs), prepare)
    data = DataInfo([], labels=False)
    student = Student(model, prepare, objective, data, teacher, start="inherited")
    pictures = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    student.eval()
    with torch.no_grad():
        before = student.logits(pictures)
        student.begin(lambda count: pictures)
        after = student.logits(pictures)
    expected = before
    if ends_in_a_norm:
        expected = before - before.mean(dim=0)
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-4)
