"""Helpers that are pure functions, one call each."""

from kd.monitor.control import parse
from kd.monitor.kernels import group_of


def test_parse() -> None:
    assert parse("off health=10") == {"on": False, "health": 10}


def test_group_of() -> None:
    assert group_of("aten::_scaled_dot_product_flash_attention") == "attention"
    assert group_of("aten::gelu") == "other"
