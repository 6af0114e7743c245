"""The scaling model of scripts/bench/scaling.py against what can be counted by hand."""

import importlib.util
import sys

import pytest

from tests._helpers import ROOT

SPEC = importlib.util.spec_from_file_location("scaling", ROOT / "scripts" / "bench" / "scaling.py")
assert SPEC is not None
assert SPEC.loader is not None
scaling = importlib.util.module_from_spec(SPEC)
sys.modules["scaling"] = scaling
SPEC.loader.exec_module(scaling)


def test_the_ring_by_hand() -> None:
    machine = scaling.Machine(
        gradient_bytes=8e8, alpha_intra_us=10, intra_gb_per_s=100, alpha_inter_us=100, inter_gb_per_s=10
    )
    assert scaling.all_reduce_s(1, machine) == 0
    inside = 14 * 10e-6 + 2 * 7 / 8 * 8e8 / 100e9
    assert scaling.all_reduce_s(8, machine) == pytest.approx(inside)
    assert scaling.all_reduce_s(32, machine) == pytest.approx(inside + 6 * 100e-6 + 2 * 3 / 4 * 8e8 / 10e9)


def test_efficiency_falls_with_gpus_and_rises_with_the_batch() -> None:
    rows = scaling.predict(scaling.Machine(), 36, 75_750)
    weak = [row["weak_efficiency"] for row in rows]
    assert weak == sorted(weak, reverse=True)
    assert weak[0] == 1
    larger = scaling.predict(scaling.Machine(), 144, 75_750)
    assert all(b["weak_efficiency"] >= a["weak_efficiency"] for a, b in zip(rows, larger, strict=True))
