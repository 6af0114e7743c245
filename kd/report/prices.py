"""What an hour of machines costs, from a table: ``prices.yaml``, instance -> price, or on demand and spot."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kd.errors import UserError
from kd.storage.elsewhere import text_of, yaml_of

PARTS = {"vcpus", "gpus"}  # of a machine in the table, beside its prices
INSTANCE = re.compile(r"(?:(\d+)\*)?([^*:]+)(?::(on_demand|spot))?")


def read_prices(file: Path) -> dict[str, dict[str, float]]:
    """A table of ``instance: 3.06`` or ``instance: {on_demand: 3.06, spot: 1.1}``, of an hour of one machine.

    ``vcpus: 72`` beside the prices says that the machine could make batches for others; with ``gpus: 1`` too, that it
    could train in place of a smaller one of its family.
    """
    try:
        found = yaml_of(text_of(file))
    except (OSError, ValueError) as error:
        raise UserError(f"monitor.prices: {file} can't be read: {error}".splitlines()[0]) from error
    if not isinstance(found, dict):
        raise UserError(f"monitor.prices: {file} is no table of instances and prices")
    return {str(name): _kinds(file, str(name), value) for name, value in found.items()}


def _kinds(file: Path, name: str, value: object) -> dict[str, float]:
    kinds = value if isinstance(value, dict) else {"on_demand": value}
    known = ("on_demand", "spot", *PARTS)
    wrong = [
        k for k, v in kinds.items() if k not in known or not isinstance(v, int | float) or v < 0
    ]
    if wrong or not set(kinds) - PARTS:
        raise UserError(
            f"monitor.prices: {file}: {name}: must be a price, or on_demand and spot, got {value}"
        )
    return {kind: float(price) for kind, price in kinds.items() if isinstance(price, int | float)}


def counted(instances: Iterable[object]) -> list[tuple[int, str]]:
    """Machines of each ``[COUNT*]NAME[:spot]``, and its name in :func:`by_name`."""
    found = [(item, INSTANCE.fullmatch(str(item))) for item in instances]
    return [
        (int(match[1] or 1), f"{match[2]}{':spot' * (match[3] == 'spot')}")
        if match
        else (1, str(item))
        for item, match in found
    ]


def by_name(prices: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Price of an hour of ``NAME`` and of ``NAME:spot``."""
    return {
        f"{name}{':spot' * (kind == 'spot')}": price
        for name, kinds in prices.items()
        for kind, price in kinds.items()
        if kind not in PARTS
    }


def price_of(instances: Sequence[str], prices: Mapping[str, Mapping[str, float]]) -> float:
    """An hour of all ``instances``, each as ``[COUNT*]NAME[:spot]``.

    Raises:
        UserError: an instance that has no such price.

    >>> price_of(["p4d.24xlarge", "2*c5.18xlarge:spot"],
    ...          {"p4d.24xlarge": {"on_demand": 37.688}, "c5.18xlarge": {"on_demand": 3.672, "spot": 1.5}})
    40.688
    """
    known, machines = by_name(prices), counted(instances)
    for item, (_, name) in zip(instances, machines, strict=True):
        if name not in known:
            raise UserError(
                f"monitor.instances: no price of '{item}'; known: {', '.join(list(known)[:20])}"
            )
    return sum(count * known[name] for count, name in machines)


def by_kind(
    instances: Sequence[str], prices: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """An hour of all ``instances`` on demand, at the table's spot prices, and of a run with half of its hours on each.

    Machines without a spot price stay on demand. Empty where no machine has both prices.

    >>> by_kind(["big", "2*small"], {"big": {"on_demand": 37}, "small": {"on_demand": 4, "spot": 1.5}})
    {'on demand': 45.0, 'spot': 40.0, 'half of the hours on spot': 42.5}
    """
    known = [
        (count, prices.get(name.removesuffix(":spot"), {})) for count, name in counted(instances)
    ]
    if not all("on_demand" in kinds for _, kinds in known) or not any(
        "spot" in kinds for _, kinds in known
    ):
        return {}
    full = sum(count * kinds["on_demand"] for count, kinds in known)
    spot = sum(count * kinds.get("spot", kinds["on_demand"]) for count, kinds in known)
    return {
        "on demand": float(full),
        "spot": float(spot),
        "half of the hours on spot": (full + spot) / 2,
    }


def input_machines(prices: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Those of the table whose ``vcpus`` are known: with them ``price`` of an hour and ``gpus``, by name."""
    found = {
        name: (price, prices[name.removesuffix(":spot")]) for name, price in by_name(prices).items()
    }
    return {
        name: {"price": price, "vcpus": machine["vcpus"], "gpus": machine.get("gpus", 0)}
        for name, (price, machine) in found.items()
        if machine.get("vcpus")
    }
