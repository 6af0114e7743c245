"""What a run watches: the ``monitor`` keys and the callbacks that they turn on."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback

from kd.callbacks.phases import Phases
from kd.callbacks.preemption import Preemption
from kd.errors import UserError
from kd.monitor.cloudwatch import CloudWatch
from kd.monitor.confusion import Confusion
from kd.monitor.control import Control
from kd.monitor.health import Health
from kd.monitor.kernels import Kernels
from kd.monitor.numbers import RunNumbers
from kd.monitor.otlp import Otlp
from kd.monitor.prometheus import Prometheus
from kd.monitor.system import System
from kd.monitor.tier import TierRecord
from kd.monitor.watch import Watch
from kd.report.prices import by_kind, input_machines, price_of, read_prices
from kd.report.rules import RULES, by_rule, thresholds_of
from kd.settings import MonitorSettings


@dataclass
class MonitorSpec(MonitorSettings):
    """What is recorded; :class:`kd.settings.MonitorSettings` explains the arguments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prices is None) != (self.instances is None):
            raise UserError(
                "monitor.prices, monitor.instances: must be given together, a table and the machines in it"
            )
        if self.prices is not None and self.instances is not None:
            self.price_per_hour = price_of(self.instances, self.price_table())
        if self.budget is not None and not self.price_per_hour:
            raise UserError(
                f"monitor.budget: {self.budget:g} needs monitor.price_per_hour, the price of the whole job "
                "(or monitor.prices and monitor.instances)"
            )
        self._check_rules()

    def price_table(self) -> dict[str, dict[str, float]]:
        """The prices in the file ``prices``, by kind and instance type; {} without a file.

        Raises:
            UserError: it can't be read.
        """
        return read_prices(Path(self.prices).expanduser()) if self.prices is not None else {}

    def costs(self) -> dict[str, Any]:
        """What the run's records keep of prices, by the records' names; what is not known is left out."""
        table = self.price_table()
        prices = by_kind(self.instances or [], table)
        found = {
            "price_per_hour": self.price_per_hour,
            "input_machines": input_machines(table),
            "prices": prices,
        }
        return {name: value for name, value in found.items() if value not in (None, {})}

    def _check_rules(self) -> None:
        for rule, action in (self.actions or {}).items():
            _known(f"monitor.actions.{rule}", rule, list(RULES))
            if action == "webhook" and not re.match(r"https?://.", self.webhook or ""):
                given = f"'{self.webhook}'" if self.webhook else "nothing"
                raise UserError(
                    f"monitor.webhook: an http(s) address to post {rule} to, got {given}"
                )
        for rule, values in by_rule(self.thresholds or {}).items():
            _known(f"monitor.thresholds.{rule}", rule, list(RULES))
            for name in values:
                _known(f"monitor.thresholds.{rule}.{name}", name, list(thresholds_of(rule)))


def _known(key: str, name: str, names: list[str]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1) or names
        raise UserError(
            f"{key}: no '{name}'; known: {', '.join(near if len(near) == 1 else names) or 'none'}"
        )


def monitors(spec: MonitorSpec, preemption: Preemption) -> list[Callback]:
    """The callbacks that observe a run, in the order in which the trainer calls them; [] where monitoring is off.

    Args:
        spec: the settings ``monitor``.
        preemption: by which rules stop the run.
    """
    if not spec.enabled:
        return []
    phases = Phases(spec.costs(), spec.nvtx)
    system = System(spec.interval_s)
    health = Health(spec.health_every, spec.activations)
    kernels = Kernels(spec.kernels_at, spec.kernels_steps, spec.kernels_memory)
    watch = Watch(preemption, spec) if spec.rules_every_s or spec.max_hours or spec.budget else None
    found: list[Callback | None] = [
        phases,
        system,
        TierRecord(),
        Confusion(),
        watch,
        health,
        kernels,
    ]
    numbers = RunNumbers(phases, system, health, watch)
    found.append(Control(health, kernels, phases))
    if spec.prometheus_port is not None:
        found.append(Prometheus(numbers, spec.prometheus_port, spec.prometheus_host))
    if spec.otlp is not None:
        found.append(Otlp(numbers, spec.otlp, spec.send_every_s))
    if spec.cloudwatch is not None:
        found.append(CloudWatch(numbers, spec))
    return [callback for callback in found if callback is not None]
