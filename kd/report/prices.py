"""What an hour of machines costs, from a table: ``prices.yaml``, instance -> price, or on demand and spot.

``prices`` is that table in all functions, as :func:`read_prices` gives it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kd.errors import UserError
from kd.storage.elsewhere import text_of, yaml_of

PRICES = ("on_demand", "spot")
PARTS = ("vcpus", "gpus")  # of a machine in the table, beside its prices
INSTANCE = re.compile(r"(?:(\d+)\*)?([^*]+?)(?::(on_demand|spot))?")


def read_prices(file: Path, key: str = "monitor.prices") -> dict[str, dict[str, float]]:
    """A table of ``instance: 3.06`` or ``instance: {on_demand: 3.06, spot: 1.1}``, of an hour of one machine.

    ``vcpus: 72`` beside the prices says that the machine could make batches for others; with ``gpus: 1`` too, that it
    could train in place of a smaller one of its family.

    Args:
        file: YAML.
        key: the setting that names it, for messages.

    Returns:
        By instance: its prices, ``on_demand`` (a plain price is one) and ``spot``, in the user's currency, and parts.

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
    for instance, value in content.items():
        name = str(instance)
        prices[name] = _kinds(value, f"{key}: {file}: {name}")
    return prices


def _kinds(value: object, where: str) -> dict[str, float]:
    """Prices and parts of one machine, from its value in the table: a price, or several by kind.

    Raises:
        UserError: a value of another form; ``where`` begins the message.
    """
    kinds = value if isinstance(value, dict) else {"on_demand": value}
    numbers = {}
    for kind, number in kinds.items():
        known = kind in PRICES or kind in PARTS
        if known and isinstance(number, int | float) and number >= 0:
            numbers[kind] = float(number)
    has_price = any(kind in numbers for kind in PRICES)
    if len(numbers) < len(kinds) or not has_price:
        raise UserError(f"{where}: must be a price, or on_demand and spot, got {value}")
    return numbers


def machines_of(instances: Iterable[object]) -> list[tuple[int, str]]:
    """How many machines of which name: ``2*p4d:spot`` -> ``(2, "p4d:spot")``, ``2*A100:8`` -> ``(2, "A100:8")``.

    The names are those of :func:`by_name`: ``:on_demand`` is dropped. What is not of this form is one machine of that
    name.
    """
    machines = []
    for item in instances:
        match = INSTANCE.fullmatch(str(item))
        if match is None:
            machines.append((1, str(item)))
            continue
        count, name, kind = match.groups()
        machines.append((int(count or 1), f"{name}:spot" if kind == "spot" else name))
    return machines


def by_name(prices: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Price of an hour of ``NAME`` (on demand) and of ``NAME:spot``, where the table has it."""
    named = {}
    for name, kinds in prices.items():
        if "on_demand" in kinds:
            named[name] = kinds["on_demand"]
        if "spot" in kinds:
            named[f"{name}:spot"] = kinds["spot"]
    return named


def price_of(
    instances: Sequence[str],
    prices: Mapping[str, Mapping[str, float]],
    key: str = "monitor.instances",
) -> float:
    """The price of an hour of all ``instances``, each as ``[COUNT*]NAME[:spot]``.

    Args:
        instances: the machines.
        prices: the table.
        key: the setting that names the machines, for the message.

    Raises:
        UserError: an instance that has no such price.

    >>> price_of(["p4d.24xlarge", "2*c5.18xlarge:spot"],
    ...          {"p4d.24xlarge": {"on_demand": 37.688}, "c5.18xlarge": {"on_demand": 3.672, "spot": 1.5}})
    40.688
    """
    known = by_name(prices)
    price: float = 0
    for count, name in machines_of(instances):
        if name not in known:
            listed = ", ".join(list(known)[:20])
            raise UserError(f"{key}: no price of '{name}'; known: {listed}")
        price += count * known[name]
    return price


def by_kind(
    instances: Sequence[str], prices: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """The price of an hour of all ``instances``: on demand, on spot, and with half of the hours on each.

    For the page's comparison: whether the instances were named ``:spot`` does not matter.

    Machines without a spot price stay on demand. Empty where one has no price on demand, or none has one on spot.

    >>> by_kind(["big", "2*small"], {"big": {"on_demand": 37}, "small": {"on_demand": 4, "spot": 1.5}})
    {'on demand': 45.0, 'spot': 40.0, 'half of the hours on spot': 42.5}
    """
    full = spot = 0.0
    has_spot = False
    for count, name in machines_of(instances):
        kinds = prices.get(name.removesuffix(":spot"), {})
        if "on_demand" not in kinds:
            return {}
        has_spot = has_spot or "spot" in kinds
        full += count * kinds["on_demand"]
        spot += count * kinds.get("spot", kinds["on_demand"])
    if not has_spot:
        return {}
    return {"on demand": full, "spot": spot, "half of the hours on spot": (full + spot) / 2}


def input_machines(prices: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Those of the table whose ``vcpus`` are known: with them ``price`` of an hour and ``gpus``, by name."""
    machines = {}
    for name, price in by_name(prices).items():
        parts = prices[name.removesuffix(":spot")]
        if parts.get("vcpus"):
            gpus = parts.get("gpus", 0)
            machines[name] = {"price": price, "vcpus": parts["vcpus"], "gpus": gpus}
    return machines
