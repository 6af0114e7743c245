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


def test_machines_named_by_their_parts_are_found_in_the_table() -> None:
    """As ``kd-launch instances=2xA100:8`` names them; ``monitor.instances`` took the count for a part of the name."""
    table = {"A100:8": {"price": 20.0}, "A100:8:spot": {"price": 8.0}}
    assert price_of(["2*A100:8", "A100:8:spot", "3*A100:8:on_demand"], table) == 108
