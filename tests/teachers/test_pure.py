"""Helpers that are pure functions, one call each."""

import torch

from kd.teachers.answer_codec import relative_error, worst_error


def test_relative_error() -> None:
    assert relative_error(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])) == 1.0


def test_worst_error() -> None:
    assert (
        worst_error(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        == 1.0
    )
