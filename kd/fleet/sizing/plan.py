"""The command line of ``kd-size``: budgets, conditions of latency, candidates. Imports nothing heavy."""

from typing import Annotated, Literal

from kd.config.kinds import Checked, Range
from kd.errors import UserError
from kd.report.metric import counted
from kd.run.options import CommandOptions
from kd.ship.export.base import find_format

BUDGETS = {"latency_ms": "ms", "mb": "MB", "params_m": "M parameters"}
"""Units of the budgets, by key."""
Amount = Annotated[float, Range("> 0")]
Count = Annotated[int, Range(">= 1")]


class Conditions(Checked):
    """What latency is measured under; also as text."""

    runtime: Literal["torch", "onnx", "openvino"] = "torch"
    """torch, onnx or openvino."""
    int8: bool = False
    """Of onnx and openvino."""
    threads: Count = 1
    """What latency is measured with."""
    batch: Count = 1
    """Likewise."""

    def __str__(self) -> str:
        threads = counted(self.threads, "thread")
        return f"{self.runtime}{' int8' * self.int8}, {threads}, batch {self.batch}"


class Budget(CommandOptions):
    """What a size may cost."""

    latency_ms: Amount | None = None
    """Budget: milliseconds a batch. Without any budget the front alone is shown."""
    mb: Amount | None = None
    """Budget: MB of the exported file."""
    params_m: Amount | None = None
    """Budget: million parameters."""

    @property
    def budget(self) -> dict[str, float]:
        """The upper bounds that were given, by the names of :data:`BUDGETS`."""
        return {key: getattr(self, key) for key in BUDGETS if key in self.given}


class SizeOptions(Conditions, Budget):
    """What ``kd-size`` is given beside the settings of a run."""

    OTHERS = "run"
    HINT = "kd-latency RUN times a trained student"
    candidates: Annotated[int, Range(">= 1 and <= 1000")] = 24
    """In all: sizes that can start from the teacher's layers, and the recipe's own student."""

    @property
    def conditions(self) -> Conditions:
        """Under which latency is measured."""
        return Conditions(self.runtime, self.int8, self.threads, self.batch)


def check_plan(options: SizeOptions) -> None:
    """Checks what ``kd-size``'s options say of each other and of this machine.

    Raises:
        UserError: a key with a wrong value, ``int8`` where the runtime has none, or a missing extra.
    """
    if options.int8 and options.runtime == "torch":
        raise UserError("int8: runtime=torch has no int8 (runtime=onnx and openvino have)")
    if options.runtime != "torch":
        find_format(options.runtime).check(f"runtime={options.runtime}", options.int8)
