"""What a run watches: the ``monitor`` keys and the callbacks that they turn on."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from pytorch_lightning import Callback

from kd.callbacks.phases import Phases
from kd.callbacks.run_folder import RunFolder
from kd.errors import UserError
from kd.monitor.cloudwatch import CloudWatch
from kd.monitor.confusion import Confusion
from kd.monitor.control import Control
from kd.monitor.health import Health
from kd.monitor.kernels import Kernels
from kd.monitor.numbers import Numbers
from kd.monitor.otlp import Otlp
from kd.monitor.prometheus import Prometheus
from kd.monitor.system import System
from kd.monitor.tier import TierRecord
from kd.monitor.watch import Action, Watch
from kd.report.prices import input_machines, price_of, read_prices
from kd.report.rules import RULES, by_rule, thresholds_of


@dataclass
class MonitorSpec:
    """What is recorded below the run's ``records`` folder.

    Attributes:
        enabled: record at all.
        interval_s: seconds between two samples of the machine; SIGUSR2 turns the sampling off and on. Words in the run
            folder's file ``monitor`` change this, the next two and ``nvtx`` in a running job.
        health_every: batches between two readings of gradients, updates and agreement; 0: none.
        activations: layers of the student whose activations are read: module paths or patterns
            (``[blocks.*.mlp.fc2, norm]``); default: a few of all kinds.
        kernels_at: profile operations from this batch on (at least 1; later ones are past the warm-up).
        kernels_steps: batches in that window.
        kernels_memory: record allocations in it too.
        nvtx: name the phases of a step as NVTX ranges, for Nsight.
        prometheus_port: serve the numbers to Prometheus on this port (extra ``prometheus``; ``kd-report --dashboard``
            writes a dashboard for Grafana).
        prometheus_host: address to serve them at, on the first process of each machine; the default one is not seen
            from outside, ``0.0.0.0`` is on all interfaces.
        otlp: send them to this OpenTelemetry collector (``http://host:4318``; extra ``otel``).
        cloudwatch: send them to Amazon CloudWatch, below this namespace (extra ``aws``).
        send_every_s: seconds between two sendings.
        price_per_hour: of the whole job, in your currency: the report says what an epoch costs.
        prices: a YAML table of instances and prices of an hour (``p4d.24xlarge: {on_demand: 37.688, spot: 12.1}``);
            with ``vcpus`` those that could make batches, for the report's advice.
        instances: the machines of the job, by that table: ``[4*p4d.24xlarge, 2*c5.18xlarge:spot]``.
        rules_every_s: seconds between two looks of the rules at the records while the run trains; 0: only at its end.
        actions: what a rule that fires does: ``log`` (a line), ``webhook`` or ``stop`` (saves a checkpoint, status
            ``stopped: <rule>``); ``monitor.actions.Overtraining=stop`` is early stopping.
        thresholds: of rules, by argument: ``monitor.thresholds.Overtraining.patience=5``.
        webhook: http(s) address to which a rule is posted as JSON.
        max_hours: the run stops after so many hours (those before a resume counted), as a rule would stop it.
        budget: the run stops when it has cost so much at ``price_per_hour``.
    """

    enabled: bool = True
    interval_s: float = 0.5
    health_every: int = 50
    activations: list[str] | None = None
    kernels_at: int | None = None
    kernels_steps: int = 5
    kernels_memory: bool = False
    nvtx: bool = False
    prometheus_port: int | None = None
    prometheus_host: str = "127.0.0.1"
    otlp: str | None = None
    cloudwatch: str | None = None
    send_every_s: float = 60.0
    price_per_hour: float | None = None
    rules_every_s: float = 60.0
    actions: dict[str, Action] | None = None
    thresholds: dict[str, float | dict[str, float]] | None = None
    prices: str | None = None
    instances: list[str] | None = None
    webhook: str | None = None
    max_hours: float | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        if not self.interval_s >= 0.05:
            raise ValueError(f"interval_s must be >= 0.05, got {self.interval_s}")
        for name, low in (("health_every", 0), ("kernels_at", 1), ("kernels_steps", 1), ("prometheus_port", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} must be >= {low}, got {value}")
        for name in ("price_per_hour", "rules_every_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must be >= 0, got {value}")
        for name in ("max_hours", "budget", "send_every_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")
        self._check_places()
        if (self.prices is None) != (self.instances is None):
            raise UserError("monitor.prices: a table, and monitor.instances: the machines, are given together")
        if self.prices is not None and self.instances is not None:
            self.price_per_hour = price_of(self.instances, self.price_table())
        if self.budget is not None and not self.price_per_hour:
            raise UserError(
                f"monitor.budget: {self.budget:g} needs monitor.price_per_hour, the price of the whole job "
                "(or monitor.prices and monitor.instances)"
            )
        self._check_rules()

    def price_table(self) -> dict[str, dict[str, float]]:
        """What ``prices`` holds; empty without."""
        return read_prices(Path(self.prices).expanduser()) if self.prices is not None else {}

    def _check_places(self) -> None:
        if self.otlp is not None and not re.match(r"https?://.", self.otlp):
            raise ValueError(f"otlp must be an http(s) address, got '{self.otlp}'")
        if self.cloudwatch is not None and not re.fullmatch(r"(?!AWS/)[\w.\-/#:]{1,255}", self.cloudwatch):
            raise ValueError(f"cloudwatch must be a namespace other than AWS's own, got '{self.cloudwatch}'")

    def _check_rules(self) -> None:
        for rule, action in (self.actions or {}).items():
            _known(f"monitor.actions.{rule}", rule, list(RULES))
            if action == "webhook" and not re.match(r"https?://.", self.webhook or ""):
                given = f"'{self.webhook}'" if self.webhook else "nothing"
                raise UserError(f"monitor.webhook: an http(s) address to post {rule} to, got {given}")
        for rule, values in by_rule(self.thresholds or {}).items():
            _known(f"monitor.thresholds.{rule}", rule, list(RULES))
            for name in values:
                _known(f"monitor.thresholds.{rule}.{name}", name, list(thresholds_of(rule)))


def _known(key: str, name: str, names: list[str]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1) or names
        raise UserError(f"{key}: no '{name}'; known: {', '.join(near if len(near) == 1 else names) or 'none'}")


def monitors(spec: MonitorSpec, folder: RunFolder) -> list[Callback]:
    """The callbacks that observe a run."""
    if not spec.enabled:
        return []
    phases = Phases(folder, spec.price_per_hour, spec.nvtx, input_machines(spec.price_table()))
    system = System(folder, spec.interval_s)
    health = Health(folder, spec.health_every, spec.activations)
    kernels = Kernels(folder, spec.kernels_at, spec.kernels_steps, spec.kernels_memory)
    watch = None
    if spec.rules_every_s or spec.max_hours or spec.budget:
        limits = spec.max_hours, spec.budget, spec.price_per_hour
        watch = Watch(folder, spec.rules_every_s, spec.actions, spec.webhook, *limits)
    found: list[Callback | None] = [phases, system, TierRecord(folder), Confusion(folder), watch, health, kernels]
    found += [Control(folder, health, kernels, phases), *_senders(spec, folder, Numbers(phases, system, health, watch))]
    return [callback for callback in found if callback is not None]


def _senders(spec: MonitorSpec, folder: RunFolder, numbers: Numbers) -> list[Callback]:
    found: list[Callback] = []
    if spec.prometheus_port is not None:
        found.append(Prometheus(numbers, spec.prometheus_port, spec.prometheus_host))
    if spec.otlp is not None:
        found.append(Otlp(folder, numbers, spec.otlp, spec.send_every_s))
    if spec.cloudwatch is not None:
        found.append(CloudWatch(folder, numbers, spec.cloudwatch, spec.send_every_s))
    return found
