"""The command line of ``kd-size``: budgets, conditions of latency, candidates. Imports nothing heavy."""

import re
from dataclasses import dataclass

from kd.errors import UserError
from kd.run.own_keys import positive, take, truth, whole_number, whole_numbers
from kd.run.request import Request
from kd.ship.export.base import find_format

BUDGETS = {"latency_ms": "ms", "mb": "MB", "params_m": "M parameters"}
"""Units of the budgets, by key."""
EVIDENCE = 3
"""Scored candidates that a prediction needs at least, of whose size the recipe has a finished run."""
RUNTIMES = ("torch", "onnx", "openvino")
KEYS = (
    *BUDGETS,
    "runtime",
    "int8",
    "threads",
    "batch",
    "archs",
    "img_sizes",
    "candidates",
    "steps",
)


@dataclass(frozen=True)
class Conditions:
    """What latency is measured under; also as text."""

    runtime: str = "torch"
    """``torch``, ``onnx`` or ``openvino``."""
    int8: bool = False
    """Whether weights and activations are quantised."""
    threads: int = 1
    """CPU threads."""
    batch: int = 1
    """Pictures at a time."""

    def __str__(self) -> str:
        several = "s" * (self.threads > 1)
        return f"{self.runtime}{' int8' * self.int8}, {self.threads} thread{several}, batch {self.batch}"


@dataclass(frozen=True)
class SizingPlan:
    """A search for a size by its command line, checked."""

    budget: dict[str, float]
    """Upper bounds, by the names of :data:`BUDGETS`."""
    conditions: Conditions
    """Under which latency is measured."""
    archs: tuple[str, ...]
    """timm models that are candidates beside the grid, by name."""
    sizes: tuple[int, ...]
    """Sides of the students' input in pixels; empty: the recipe's."""
    count: int
    """How many candidates in all; ``archs`` may be more."""
    steps: int
    """Optimizer steps of the short distillation; 0: none, candidates are scored as inherited."""


def plan(request: Request) -> SizingPlan:
    """Takes ``kd-size``'s keys out of a command line and checks them; the recipe's settings stay in ``request``.

    Raises:
        UserError: a key with a wrong value, ``int8`` where the runtime has none, or a missing extra.
    """
    options = take(request, *KEYS)
    runtime = options.get("runtime", "torch")
    int8 = truth(options, "int8")
    if runtime not in RUNTIMES:
        raise UserError(f"runtime: must be one of {', '.join(RUNTIMES)}, got '{runtime}'")
    if int8 and runtime == "torch":
        raise UserError("int8: runtime=torch has no int8 (runtime=onnx and openvino have)")
    if runtime != "torch":
        find_format(runtime).check(f"runtime={runtime}", int8)
    archs = re.findall(r"[^\s,\[\]]+", options.get("archs", ""))
    if "archs" in options and not archs:
        raise UserError(
            f"archs: must be names of timm models with commas between, got '{options['archs']}'"
        )
    budget = {}
    for key in BUDGETS:
        if key in options:
            budget[key] = positive(key, options[key])
    threads = whole_number(options, "threads", 1)
    batch = whole_number(options, "batch", 1)
    sizes: list[int] = []
    if "img_sizes" in options:
        sizes = whole_numbers(options, "img_sizes", "1")
    return SizingPlan(
        budget=budget,
        conditions=Conditions(runtime, int8, threads, batch),
        archs=tuple(dict.fromkeys(archs)),
        sizes=tuple(sizes),
        count=whole_number(options, "candidates", 24, high=1000),
        steps=whole_number(options, "steps", 60 if archs else 0, low=0),
    )
