"""Helpers that are pure functions, one call each."""

from kd.data.splits import held_out
from kd.settings import height_width


def test_held_out() -> None:
    assert held_out([0] * 10 + [1] * 10, 0.1, seed=0).shape == (2,)


def test_height_width() -> None:
    assert height_width(224) == (224, 224)
    assert height_width([168, 224]) == (168, 224)
