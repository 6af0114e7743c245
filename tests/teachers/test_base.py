"""Teachers of a user's own."""

import torch

from kd.teachers.answer import ALL, Answer, Wanted
from kd.teachers.base import OwnTeacher
from tests._helpers import refuses


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
    with refuses(r"model.teacher: Constant.answer must give .* a row for each picture"):
        OwnTeacher(Constant(3)).answer(batch, Wanted())  # type: ignore[arg-type]
