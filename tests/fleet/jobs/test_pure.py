"""Helpers that are pure functions, one call each."""

from kd.fleet.jobs.job import read_machines
from kd.fleet.jobs.slurm import _hours


def test_read_machines() -> None:
    assert repr(read_machines("instances", "4xA100:8")) == "Machines(count=4, type='A100:8')"
    assert read_machines("instances", "ml.g5.xlarge").count == 1


def test_hours() -> None:
    assert _hours("1-12:30:00") == 36.5
