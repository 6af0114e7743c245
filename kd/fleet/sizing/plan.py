"""The command line of ``kd-size``: budgets, conditions of latency, candidates. Imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from kd.config.kinds import Range, checked_group
from kd.errors import UserError
from kd.run.options import CommandOptions, take_options
from kd.run.request import Request
from kd.ship.export.base import find_format

BUDGETS = {"latency_ms": "ms", "mb": "MB", "params_m": "M parameters"}
"""Units of the budgets, by key."""
Budget = Annotated[float, Range("> 0")]
Count = Annotated[int, Range(">= 1")]


@checked_group
class SizeOptions(CommandOptions):
    """What ``kd-size`` is given beside the settings of a run."""

    latency_ms: Budget | None = None
    """Budget: milliseconds a batch. Without any budget the front alone is shown."""
    mb: Budget | None = None
    """Budget: MB of the exported file."""
    params_m: Budget | None = None
    """Budget: million parameters."""
    runtime: Literal["torch", "onnx", "openvino"] = "torch"
    """torch, onnx or openvino."""
    int8: bool = False
    """Of onnx and openvino."""
    threads: Count = 1
    """What latency is measured with."""
    batch: Count = 1
    """Likewise."""
    candidates: Annotated[int, Range(">= 1 and <= 1000")] = 24
    """In all: sizes that can start from the teacher's layers, and the recipe's own student."""
    archs: list[str] = field(default_factory=list)
    """Models of timm's beside them; what can't inherit is scored by the distillation alone."""
    img_sizes: Annotated[list[int], Range("> 0")] = field(default_factory=list)
    """Sides of the students' input; default: the recipe's."""
    steps: Annotated[int, Range(">= 0")] | None = None
    """Of a short distillation of all that meet the budgets, which then decides; default: 0, with archs= 60."""


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
    options = take_options(SizeOptions, request, "run")
    runtime, int8, archs = options.runtime, options.int8, options.archs
    if int8 and runtime == "torch":
        raise UserError("int8: runtime=torch has no int8 (runtime=onnx and openvino have)")
    if runtime != "torch":
        find_format(runtime).check(f"runtime={runtime}", int8)
    steps = options.steps
    if steps is None:
        steps = 60 if archs else 0
    return SizingPlan(
        budget={key: getattr(options, key) for key in BUDGETS if key in options.given},
        conditions=Conditions(runtime, int8, options.threads, options.batch),
        archs=tuple(dict.fromkeys(archs)),
        sizes=tuple(sorted({*options.img_sizes})),
        count=options.candidates,
        steps=steps,
    )
