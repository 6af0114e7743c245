"""Helpers that are pure functions, one call each."""

from kd.monitor.control import parse
from kd.monitor.kernels import group_of


def test_parse() -> None:
    assert (
        repr(parse("off health=10")) == "MonitorCommand(on=False, interval_s=None, health=10, kernels=None, nvtx=None)"
    )


def test_group_of() -> None:
    assert group_of("aten::_scaled_dot_product_flash_attention") == "attention"
    assert group_of("aten::gelu") == "other"
