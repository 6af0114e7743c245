"""Tables of prices: of machines, on demand and spot."""

from pathlib import Path

from kd.report.prices import input_machines, price_of, read_prices
from tests._helpers import refuses


def test_prices_of_machines(tmp_path: Path) -> None:
    table = tmp_path / "prices.yaml"
    table.write_text("big: 30\nsmall: {on_demand: 3, spot: 1, vcpus: 72}\n")
    prices = read_prices(table)
    assert price_of(["big", "2*small:spot"], prices) == 32
    assert input_machines(prices) == {
        "small": {"price": 3.0, "vcpus": 72.0, "gpus": 0},
        "small:spot": {"price": 1.0, "vcpus": 72.0, "gpus": 0},
    }
    with refuses(r"monitor.instances: no price of 'big:spot'; known: big, small, small:spot"):
        price_of(["big:spot"], prices)
