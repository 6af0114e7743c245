"""A run's numbers at this moment, by name, for whoever serves or sends them. Nothing is worked out unasked."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pytorch_lightning import LightningModule, Trainer

from kd.callbacks.closing import Closing
from kd.callbacks.phases import Phases
from kd.monitor.health import Health
from kd.monitor.system import System
from kd.monitor.watch import Watch
from kd.report.rules import RULES
from kd.report.step_facts import mean
from kd.report.verdict import NAMES

Values = dict[tuple[str, ...], float]  # By the values of a gauge's labels; of one without labels by ``()``
HEALTH = ("grad_norm", "update_ratio", "agreement", "teacher_entropy")
MB = 2**20


class Numbers:
    """Reads the callbacks that record."""

    def __init__(self, phases: Phases, system: System, health: Health, watch: Watch | None = None) -> None:
        self.phases, self.system, self.health, self.watch = phases, system, health, watch
        self.trainer: Trainer | None = None

    def read(self) -> dict[str, Values]:
        found = {name: gauge.read(self) for name, gauge in GAUGES.items()}
        return {name: values for name, values in found.items() if values}

    # -- the run -------------------------------------------------------------------------------------------------------
    def step(self) -> Values:
        newest = list(self.phases.recent)[-1:]
        return {(): float(newest[0]["step"] + 1)} if newest else {}

    def epoch(self) -> Values:
        newest = list(self.phases.recent)[-1:]
        return {(): float(newest[0]["epoch"])} if newest else {}

    def step_seconds(self) -> Values:
        steps = list(self.phases.recent)
        return {(): mean([s["ms"] for s in steps]) / 1000} if steps else {}

    def images_per_second(self) -> Values:
        seconds = self.step_seconds().get(())
        return {(): self.phases.images_per_step / max(seconds, 1e-9)} if seconds is not None else {}

    def phase_seconds(self) -> Values:
        steps = list(self.phases.recent)
        names = sorted({name for s in steps for name in s["p"]})
        return {(name,): mean([s["p"].get(name, 0.0) for s in steps]) / 1000 for name in names}

    def metric(self) -> Values:
        logged = self.trainer.callback_metrics.copy() if self.trainer is not None else {}
        return {(name,): float(value) for name, value in logged.items()}

    def health_readings(self) -> Values:
        readings = list(self.health.newest.items())
        known = ((name, student, r.get(name)) for student, r in readings for name in HEALTH)
        return {(name, student): float(value) for name, student, value in known if value is not None}

    def verdict(self) -> Values:
        found = self.watch.newest.get("verdict") if self.watch else None
        return {(name,): float(name == found["bound"]) for name in NAMES} if found else {}

    def limit_speedup(self) -> Values:
        found = (self.watch.newest.get("verdict") if self.watch else None) or {}
        gains = [(found.get("bound"), found.get("predicted_speedup"))]
        gains += [(other["bound"], other["gain"]) for other in reversed(found.get("others", []))]
        return {(bound,): float(gain) for bound, gain in reversed(gains) if gain}

    def rule_fired(self) -> Values:
        """1 for rules that fire now, 0 for the others: what an alarm asks for."""
        if self.watch is None or not self.watch.newest:
            return {}
        fired = {finding["rule"] for finding in self.watch.newest["findings"]}
        return {(rule,): float(rule in fired) for rule in RULES}

    # -- the machine ---------------------------------------------------------------------------------------------------
    def cpu_percent(self) -> Values:
        return {(str(core),): float(use) for core, use in enumerate(self.system.newest.get("cpu", []))}

    def of_sample(self, key: str, factor: float = 1.0) -> Values:
        sample = self.system.newest
        return {(): factor * sample[key]} if key in sample else {}

    def of_directions(self, keys: Mapping[str, str]) -> Values:
        sample = self.system.newest
        return {(direction,): MB * sample[key] for key, direction in keys.items() if key in sample}

    def of_gpus(self, key: str) -> Values:
        gpus = enumerate(self.system.newest.get("gpu", []))
        return {(str(number),): float(gpu[key]) for number, gpu in gpus if key in gpu}

    def thread_wait(self) -> Values:
        waits = self.system.newest.get("thread_wait")
        return {(): max(waits)} if waits else {}


@dataclass(frozen=True)
class Gauge:
    """One name."""

    text: str  # what it is
    unit: str  # of the values, as OpenTelemetry writes units
    read: Callable[[Numbers], Values]  # gives the values
    dimensions: tuple[str, ...] = ()  # names of the keys of its values


GAUGES: dict[str, Gauge] = {
    "step": Gauge("Batches done", "1", Numbers.step),
    "epoch": Gauge("Epoch, from 0", "1", Numbers.epoch),
    "step_seconds": Gauge("Mean of the last steps", "s", Numbers.step_seconds),
    "images_per_second": Gauge("Of all processes", "1/s", Numbers.images_per_second),
    "phase_seconds": Gauge("Mean of the last steps", "s", Numbers.phase_seconds, ("phase",)),
    "metric": Gauge("Logged losses and metrics", "1", Numbers.metric, ("name",)),
    "health": Gauge("The newest reading of each student", "1", Numbers.health_readings, ("name", "student")),
    "verdict": Gauge("1 for what the run is bound by", "1", Numbers.verdict, ("bound",)),
    "limit_speedup": Gauge("Predicted gain without each limit", "1", Numbers.limit_speedup, ("bound",)),
    "rule_fired": Gauge("1 for rules that fire now", "1", Numbers.rule_fired, ("rule",)),
    "cpu_percent": Gauge("Of each core", "%", Numbers.cpu_percent, ("core",)),
    "iowait_percent": Gauge("Of the machine", "%", lambda n: n.of_sample("iowait")),
    "memory_percent": Gauge("Of the machine", "%", lambda n: n.of_sample("mem")),
    "training_memory_bytes": Gauge("Training and loader processes", "By", lambda n: n.of_sample("rss_mb", MB)),
    "swap_bytes": Gauge("Of the machine", "By", lambda n: n.of_sample("swap_mb", MB)),
    "thread_wait_percent": Gauge("Ready but without a core", "%", Numbers.thread_wait),
    "network_bytes_per_second": Gauge(
        "Of the machine", "By/s", lambda n: n.of_directions({"net_r": "received", "net_w": "sent"}), ("direction",)
    ),
    "disk_bytes_per_second": Gauge(
        "Of the machine", "By/s", lambda n: n.of_directions({"disk_r": "read", "disk_w": "written"}), ("direction",)
    ),
    "gpu_percent": Gauge("Of each GPU", "%", lambda n: n.of_gpus("util"), ("gpu",)),
    "gpu_memory_percent": Gauge("Of each GPU", "%", lambda n: n.of_gpus("mem"), ("gpu",)),
    "gpu_watts": Gauge("Of each GPU", "W", lambda n: n.of_gpus("w"), ("gpu",)),
}


class Outlet(Closing, ABC):
    """Where the numbers go: open in the first process of each node while it trains, however training ends."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    @abstractmethod
    def open(self) -> None:
        pass

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.local_rank == 0:
            self.numbers.trainer = trainer
            self.open()
