"""What an hour of machines costs, from one table: ``prices.yaml``, instance -> price, or on demand and spot.

In all functions ``prices`` is that table as :func:`read_prices` gives it, and instances are written ``[COUNT*]NAME[:spot]``.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeFloat, TypeAdapter, ValidationError

from kd.errors import UserError
from kd.storage.elsewhere import text_of, yaml_of

PARTS = ("vcpus", "gpus")  # of a machine in the table, beside its prices
SUFFIX = {"on_demand": "", "spot": ":spot"}
NUMBERS = TypeAdapter(dict[Literal["on_demand", "spot", "vcpus", "gpus"], NonNegativeFloat])
"""Of a machine."""
INSTANCE = re.compile(r"(?:(\d+)\*)?([^*]+?)(:on_demand)?")
Prices = Mapping[str, Mapping[str, float]]
"""By name, ``NAME`` (on demand) and ``NAME:spot``: ``price`` of an hour, and ``vcpus`` and ``gpus`` where they are known."""


def read_prices(file: Path, key: str = "monitor.prices") -> Prices:
    """A table of ``instance: 3.06`` or ``instance: {on_demand: 3.06, spot: 1.1}``, of an hour of one machine.

    ``vcpus: 72`` beside the prices says that the machine could make batches for others; with ``gpus: 1`` too, that it
    could train in place of a smaller one of its family.

    Args:
        file: YAML.
        key: the setting that names it, for messages.

    Raises:
        UserError: a file that can't be read, an instance without a price, or with another key or value than these.
    """
    try:
        content = yaml_of(text_of(file))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{key}: {file} can't be read: {reason}") from error
    if not isinstance(content, dict):
        raise UserError(f"{key}: {file} is no table of instances and prices")
    prices = {}
    for name, value in content.items():
        numbers: dict[Any, float] = {}
        with suppress(ValidationError):
            numbers = NUMBERS.validate_python(
                value if isinstance(value, dict) else {"on_demand": value}
            )
        parts = {part: numbers.pop(part) for part in PARTS if part in numbers}
        if not numbers:
            raise UserError(
                f"{key}: {file}: {name}: must be a price, or on_demand and spot, got {value}"
            )
        for kind, price in numbers.items():
            prices[f"{name}{SUFFIX[kind]}"] = {"price": price, **parts}
    return prices


def machines_of(instances: Iterable[object]) -> list[tuple[int, str]]:
    """How many machines of which name: ``2*p4d:spot`` -> ``(2, "p4d:spot")``, ``2*A100:8`` -> ``(2, "A100:8")``.

    ``:on_demand`` is dropped. What is not of this form is one machine of that name.
    """
    machines = []
    for item in instances:
        match = INSTANCE.fullmatch(str(item))
        count, name = (match[1], match[2]) if match else (None, str(item))
        machines.append((int(count or 1), name))
    return machines


def price_of(instances: Iterable[str], prices: Prices, key: str = "monitor.instances") -> float:
    """The price of an hour of all ``instances``.

    Raises:
        UserError: an instance that has no such price; ``key``, the setting that names the machines, begins the message.

    >>> price_of(["p4d.24xlarge", "2*c5.18xlarge:spot"],
    ...          {"p4d.24xlarge": {"price": 37.688}, "c5.18xlarge:spot": {"price": 1.5}})
    40.688
    >>> price_of(["2*A100:8", "A100:8:spot", "3*A100:8:on_demand"], {"A100:8": {"price": 20}, "A100:8:spot": {"price": 8}})
    108
    """
    price: float = 0
    for count, name in machines_of(instances):
        if name not in prices:
            raise UserError(f"{key}: no price of '{name}'; known: {', '.join(list(prices)[:20])}")
        price += count * prices[name]["price"]
    return price


def input_machines(prices: Prices) -> dict[str, dict[str, float]]:
    """Those of the table whose ``vcpus`` are known, with ``gpus``, 0 where the table has none."""
    return {
        name: {"gpus": 0, **machine} for name, machine in prices.items() if machine.get("vcpus")
    }
