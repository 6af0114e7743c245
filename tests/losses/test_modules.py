"""A loss by its class is its function, with the settings that it was built with."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kd.losses.base import DistillLoss
from kd.losses.dense import CWDLoss, PixelKDLoss
from kd.losses.features import ATLoss, PKDLoss
from kd.losses.functional.dense import cwd_loss, pixel_kd_loss
from kd.losses.functional.features import at_loss, pkd_loss, smooth_l1_loss
from kd.losses.functional.logits import dist_loss, kd_loss
from kd.losses.functional.relations import cka_loss, rkd_loss, sp_loss
from kd.losses.logits import DISTLoss, KDLoss
from kd.losses.regression import SmoothL1Loss
from kd.losses.relations import CKALoss, RKDLoss, SPLoss

LOGITS, MAPS, VECTORS = (6, 5), (2, 5, 4, 4), (6, 8)


@pytest.mark.parametrize(
    ("loss", "shape", "function"),
    [
        (KDLoss(3.0), LOGITS, lambda s, t: kd_loss(s, t, 3.0)),
        (DISTLoss(), LOGITS, dist_loss),
        (ATLoss(p=3.0), MAPS, lambda s, t: at_loss(s, t, 3.0)),
        (PKDLoss(), MAPS, pkd_loss),
        (SPLoss(), VECTORS, sp_loss),
        (CKALoss(), VECTORS, cka_loss),
        (RKDLoss(), VECTORS, rkd_loss),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, DistillLoss) else "",
)
def test_a_class_is_its_function(
    loss: DistillLoss, shape: tuple[int, ...], function: Callable[[Tensor, Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(shape), torch.randn(shape)
    found = loss(student, teacher, torch.zeros(len(student), dtype=torch.long))
    torch.testing.assert_close(found, function(student, teacher))
    assert found > 0


def test_pixels_to_ignore_count_for_nothing() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(MAPS), torch.randn(MAPS)
    ids = torch.randint(5, (2, 4, 4))
    ids[:, :2] = 255
    for loss, function in ((PixelKDLoss(2.0), pixel_kd_loss), (CWDLoss(2.0), cwd_loss)):
        loss.ignore_index = 255
        found = loss(student, teacher, ids)
        torch.testing.assert_close(found, function(student, teacher, ids, 2.0, 255))
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
