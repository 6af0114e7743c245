"""A job by its command line."""

from kd.fleet.jobs.job import read_machines


def test_read_machines() -> None:
    assert repr(read_machines("instances", "4xA100:8")) == "Machines(count=4, type='A100:8')"
    assert read_machines("instances", "ml.g5.xlarge").count == 1
