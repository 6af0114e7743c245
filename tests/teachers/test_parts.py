"""Small parts of the teachers: records of features, own teachers, what a cache must keep."""

import pytest
import torch

from kd.errors import UserError
from kd.losses import DISTLoss, KDLoss
from kd.models import Preprocess
from kd.teachers.answer import ALL, Answer, Wanted
from kd.teachers.answer_codec import HalfFeature, half
from kd.teachers.base import OwnTeacher
from kd.teachers.cache_layout import temperatures, topk_temperature
from kd.teachers.frozen import FrozenTeacher, dtype_for


def test_half_precision_keeps_what_is_too_large_as_its_largest() -> None:
    assert half(torch.tensor([1e9, -1e9, 1.5])).tolist() == [65504, -65504, 1.5]
    codec, x = HalfFeature((3, 2)), torch.randn(4, 3, 2)
    records = codec.encode(x)
    assert (records.shape, records.dtype, codec.bytes) == ((4, 12), torch.uint8, 12)
    torch.testing.assert_close(codec.decode(records), x, rtol=2**-11, atol=1e-6)


def test_a_teacher_stays_in_the_precision_of_the_training() -> None:
    assert [dtype_for(p) for p in ("bf16-mixed", "16-mixed", "32-true")] == [
        torch.bfloat16, torch.float16, torch.float32,
    ]  # fmt: skip


def test_losses_that_can_do_with_the_largest_logits_say_at_which_temperature() -> None:
    assert temperatures([KDLoss(4.0), KDLoss(2.0), KDLoss(4.0), DISTLoss()]) == (2.0, 4.0)
    assert topk_temperature(DISTLoss()) is None


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


class Constant:
    """A teacher of one's own."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def answer(self, batch: object, wanted: Wanted) -> Answer:
        return Answer({ALL: torch.ones(self.rows, 3, dtype=torch.float64)})

    def identity(self) -> dict[str, str]:
        return {"weights": "1"}


def test_a_teacher_of_ones_own_gives_a_row_for_each_picture() -> None:
    batch = {"image": torch.zeros(4, 3, 8, 8)}
    own = OwnTeacher(Constant(4))  # type: ignore[arg-type]
    answer = own.answer(batch, Wanted())  # type: ignore[arg-type]
    assert (answer.logits[ALL].shape, answer.logits[ALL].dtype) == ((4, 3), torch.float32)
    assert own.identity() == {"arch": "Constant", "weights": "1"}
    with pytest.raises(
        UserError, match=r"model.teacher: Constant.answer must give .* a row for each picture"
    ):
        OwnTeacher(Constant(3)).answer(batch, Wanted())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a feature loss needs a module"):
        own.listen("norm", "class")
