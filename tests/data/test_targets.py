"""What a source labels its pictures with: each kind's way into a view and a batch."""

import pytest
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from kd.data.targets import LabelSets, Masks, Numbers, Targets

PICTURE = torch.arange(3 * 4 * 6, dtype=torch.uint8).view(3, 4, 6)
MASK = tv_tensors.Mask(torch.arange(24, dtype=torch.uint8).view(1, 4, 6))
FLIP = v2.RandomHorizontalFlip(1.0)


def test_class_ids_are_a_vector_and_counted() -> None:
    kind = Targets()
    assert kind.view(FLIP, PICTURE, 3, None)[1] == 3
    assert kind.stack([0, 2, -1], 3).tolist() == [0, 2, -1]
    assert kind.counts([0, 2, 2, -1], 4) == [1, 0, 2, 0]


def test_label_sets_are_rows_of_0_and_1() -> None:
    rows = LabelSets().stack([[0, 2], [], -1], 3)
    assert rows[:2].tolist() == [[1, 0, 1], [0, 0, 0]]
    assert rows[2].isnan().all()
    assert LabelSets().counts([[0]], 3) is None


def test_equal_numbers_have_the_deviation_1() -> None:
    """Rounding leaves 1e-17 of three times 0.1, by which a loss would divide."""
    assert Numbers().scales([[0.1, 5.0]] * 3, 2) == [(pytest.approx(0.1), 1.0), (5.0, 1.0)]


def test_a_mask_goes_with_its_picture() -> None:
    picture, mask = Masks().view(FLIP, tv_tensors.Image(PICTURE), MASK, None)
    assert torch.equal(torch.as_tensor(picture), PICTURE.flip(-1))
    assert torch.equal(mask.as_subclass(Tensor), MASK.as_subclass(Tensor).flip(-1))
    assert Masks().stack([mask, mask], 3).shape == (2, 4, 6)


@pytest.mark.parametrize(("ignore", "value"), [(None, 255), (255, 254), (9, 255)])
def test_a_picture_without_a_mask_counts_for_distillation_alone(
    ignore: int | None, value: int
) -> None:
    mask = Masks().view(FLIP, tv_tensors.Image(PICTURE), -1, ignore)[1]
    assert mask.shape == (1, 4, 6)
    assert mask.unique().tolist() == [value]
