"""The examples run, and teach."""

import runpy

from tests._helpers import ROOT


def test_models_data_and_trainer_of_ones_own() -> None:
    found = runpy.run_path(str(ROOT / "scripts/examples/own_models.py"))["main"]()
    assert found["teacher"] > 0.9 and found["student"] > 0.8


def test_a_loop_of_ones_own() -> None:
    losses = runpy.run_path(str(ROOT / "scripts/examples/plain_loop.py"))["main"]()
    assert losses[-1] < 0.7 * losses[0]
