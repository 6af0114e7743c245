"""The teacher's activations, measured once."""

import torch

from kd.distill.inherit.measured import MeasuredTeacher
from kd.models import Preprocess
from tests.distill.inherit._vits import small_vit as vit


def test_the_teacher_is_measured_once_for_each_patch_grid() -> None:
    teacher, pictures = vit(32), torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    prepare = Preprocess(32, (0.5,) * 3, (0.5,) * 3)
    measured = MeasuredTeacher(teacher, pictures, prepare)
    with torch.no_grad():
        measured.use_grid_of(vit(16), (32, 32))
        last, block = measured.last, measured.activations_of(1, vit(16))
        measured.use_grid_of(vit(24), (32, 32))
        assert measured.last is last and measured.activations_of(1, vit(24)) is block
        measured.use_grid_of(vit(16, patch_size=16), (32, 32))
    assert measured.last is not last and measured.last.shape[1] == 5
