"""Helpers that are pure functions, one call each."""

from kd.fleet.scaling.model import fit_line, serial_part


def test_fit_line() -> None:
    assert repr(fit_line([(8, 20.0), (16, 30.0)])) == "Line(fixed=10.0, each=1.25)"


def test_serial_part() -> None:
    assert round(serial_part([(1, 100.0), (2, 55.0), (4, 32.5)]), 3) == 0.1
