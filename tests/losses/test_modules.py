"""Pixels that a loss leaves out, and what it compares after its projection."""

import torch

from kd.losses.dense import CWDLoss, PixelKDLoss
from kd.losses.regression import SmoothL1Loss, smooth_l1_loss

MAPS = (2, 5, 4, 4)


def test_pixels_to_ignore_count_for_nothing() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(MAPS), torch.randn(MAPS)
    ids = torch.randint(5, (2, 4, 4))
    ids[:, :2] = 255
    for loss in (PixelKDLoss(2.0), CWDLoss(2.0)):
        loss.ignore_index = 255
        found = loss(student, teacher, ids)
        other = student.clone()
        other[:, :, :2] += 10
        torch.testing.assert_close(loss(other, teacher, ids), found)


def test_a_regression_compares_what_it_has_projected() -> None:
    torch.manual_seed(0)
    loss = SmoothL1Loss(beta=0.5)
    loss.build((6, 3), (6, 8))
    student, teacher = torch.randn(6, 3), torch.randn(6, 8)
    expected = smooth_l1_loss(loss.projection(student), teacher, 0.5).mean()
    torch.testing.assert_close(loss(student, teacher, torch.zeros(6)), expected)
