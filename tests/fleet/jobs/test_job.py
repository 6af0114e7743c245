"""A job by its command line."""

from pathlib import Path

from kd.fleet.jobs.job import JobOptions, _prices, read_machines
from tests._helpers import refuses


def test_prices_of_machines_by_type_and_by_parts(tmp_path: Path) -> None:
    """An hour of all machines of a group; what is wrong names the key that was typed."""
    file = tmp_path / "prices.yaml"
    file.write_text("A100:8: {on_demand: 20, spot: 8}\nml.c5.xlarge: 0.2\n")
    options = JobOptions(prices=file, spot=True)
    eight_gpus = read_machines("instances", "2xA100:8")
    assert _prices(options, eight_gpus, None) == {"train": 16}
    options = JobOptions(prices=file)
    cpus = read_machines("data_instances", "4xml.c5.xlarge")
    assert _prices(options, eight_gpus, cpus) == {"train": 40, "data": 0.8}
    known = "known: A100:8, A100:8:spot, ml.c5.xlarge$"
    with refuses(rf"^instances: no price of 'gpu:8'; {known}"):
        _prices(options, read_machines("instances", "gpu:8"), None)
    with refuses(rf"^data_instances: no price of 'cpu:4'; {known}"):
        _prices(options, eight_gpus, read_machines("data_instances", "2xcpu:4"))
    with refuses(r"^prices: nowhere can't be read"):
        _prices(JobOptions(prices=Path("nowhere")), eight_gpus, None)
