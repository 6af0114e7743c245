"""What is to be different about a run that has run: ``kd-report RUN --what-if``, its words read."""

import math
from dataclasses import dataclass
from typing import Any

from kd.errors import UserError

KEYS = (
    "cache=on|off, pixels=on|off, workers=N, gpus=N, epochs=N, price=PER_HOUR, "
    "data_machines=N, data_cores=N, data_instance=NAME[:spot]"
)
LEAST = {"workers": 0, "data_machines": 0, "gpus": 1, "epochs": 1, "data_cores": 1}


@dataclass(frozen=True)
class Change:
    """What is to be different; ``None`` stays as it was."""

    cache: bool | None = None  # the teacher's answers are kept (True) or computed each time
    pixels: bool | None = None  # the pixels of cached views are kept too, or made each time
    workers: int | None = None  # loader processes of each training process; with a data tier its processes
    gpus: int | None = None  # training processes
    epochs: int | None = None  # of the run
    price: float | None = None  # of an hour of the whole changed job
    data_machines: int | None = None  # machines of a data tier that make all batches; 0: none do
    data_cores: int | None = None  # of each of them
    data_instance: str | None = None  # their name in the run's table of prices, which says their cores and their price

    def __post_init__(self) -> None:
        if self.data_cores and self.data_instance:
            raise UserError("data_instance: says how many cores a data machine has; leave data_cores out")
        if self.data_machines == 0 and (self.data_cores or self.data_instance):
            raise UserError(
                "data_machines: 0 is no tier; leave data_cores and data_instance out, or give a number >= 1"
            )

    @property
    def of_the_tier(self) -> bool:
        return self.data_machines is not None or self.data_cores is not None or self.data_instance is not None


def read_change(items: list[str]) -> Change:
    """``["cache=on", "gpus=8"]`` -> what is to be different."""
    found: dict[str, Any] = {}
    for item in items:
        key, _, value = item.partition("=")
        if key in found:
            raise UserError(f"{key}: given twice")
        if key in ("cache", "pixels"):
            if value not in ("on", "off"):
                raise UserError(f"{key}: must be on or off, got '{value}'")
            found[key] = value == "on"
        elif key == "data_instance":
            found[key] = value.removesuffix(":on_demand")
        elif key == "price":
            found[key] = _number(key, value, 0, "number")
        elif key in LEAST:
            found[key] = int(_number(key, value, LEAST[key], "whole number"))
        else:
            raise UserError(f"--what-if: no key '{key}'; known: {KEYS}")
    return Change(**found)


def _number(key: str, value: str, low: int, kind: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= low and (kind == "number" or number == int(number))):
        raise UserError(f"{key}: must be a {kind} >= {low}, got '{value}'")
    return number
