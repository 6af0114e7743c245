"""Helpers that are pure functions, one call each."""

from kd.callbacks.phases import phase_of


def test_phase_of() -> None:
    assert phase_of("[Strategy]SingleDeviceStrategy.backward") == "backward"
