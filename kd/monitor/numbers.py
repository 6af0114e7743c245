"""A run's numbers at this moment: one table of gauges, for whoever serves or sends them. Nothing is worked out unasked."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pytorch_lightning import LightningModule, Trainer

from kd.callbacks.hooks import Closing
from kd.monitor.health import Health
from kd.monitor.phases import Phases
from kd.monitor.system import System
from kd.monitor.watch import Watch
from kd.report.rules import NAMES, RULES
from kd.report.step_facts import mean

Values = dict[tuple[str, ...], float]
"""By the values of a gauge's labels; of one without labels by ``()``."""
HEALTH = ("grad_norm", "update_ratio", "agreement", "teacher_entropy")
"""The keys of a health record that are served."""
MB = 2**20


class RunNumbers:
    """A run's numbers of this moment, read from the callbacks that record them; nothing is measured for it.

    Args:
        phases: steps.
        system: the machine.
        health: gradients, updates, agreement.
        watch: rules and verdict, which rank 0 alone has; None: without.
    """

    def __init__(
        self, phases: Phases, system: System, health: Health, watch: Watch | None = None
    ) -> None:
        """Stores the parts that are read, which are the class's."""
        self.phases, self.system, self.health, self.watch = phases, system, health, watch
        self.trainer: Trainer | None = None
        """Set by :class:`Outlet` when the training begins; None before."""

    def folder(self, trainer: Trainer) -> Path:
        """The run's folder, whose name says whose numbers they are."""
        return self.phases.watched.folder(trainer).absolute()

    def read(self) -> dict[str, Values]:
        """The values of each of :data:`GAUGES` that has some now, in its unit, by the gauge's name.

        Called from the threads of :class:`Outlet`'s classes while the training writes the same objects: what grows is
        copied before it is read.
        """
        numbers = {name: gauge.read(self) for name, gauge in GAUGES.items()}
        return {name: values for name, values in numbers.items() if values}

    def steps(self) -> list[dict[str, Any]]:
        """Records of the newest steps (:data:`kd.monitor.phases.RECENT`), each of one batch; [] before the first."""
        return list(self.phases.recent)

    def told(self) -> dict[str, Any]:
        """What the rules said last (:attr:`kd.monitor.watch.Watch.newest`); {} before, and on other ranks than 0."""
        return self.watch.newest if self.watch else {}


def _logged(numbers: RunNumbers) -> Values:
    if numbers.trainer is None:
        return {}
    return {
        (name,): float(value) for name, value in numbers.trainer.callback_metrics.copy().items()
    }


def _health(numbers: RunNumbers) -> Values:
    values: Values = {}
    for student, reading in list(numbers.health.newest.items()):
        for name in HEALTH:
            if reading.get(name) is not None:
                values[name, student] = float(reading[name])
    return values


def _newest_step(key: str, add: int = 0) -> Callable[[RunNumbers], Values]:
    """Reads ``key`` of the newest step, and adds ``add``."""

    def read(numbers: RunNumbers) -> Values:
        steps = numbers.steps()
        return {(): float(steps[-1][key] + add)} if steps else {}

    return read


def _step_seconds(numbers: RunNumbers) -> Values:
    steps = numbers.steps()
    return {(): mean([step["ms"] for step in steps]) / 1000} if steps else {}


def _images_per_second(numbers: RunNumbers) -> Values:
    seconds = _step_seconds(numbers).get((), 0.0)
    pictures = numbers.phases.images_per_step
    return {(): pictures / max(seconds, 1e-9)} if numbers.steps() and pictures else {}


def _phase_seconds(numbers: RunNumbers) -> Values:
    steps = numbers.steps()
    names = {name for step in steps for name in step["p"]}
    return {
        (name,): mean([step["p"].get(name, 0.0) for step in steps]) / 1000 for name in sorted(names)
    }


def _verdict(numbers: RunNumbers) -> Values:
    told = numbers.told()
    return {(name,): float(name == told["verdict"]["bound"]) for name in NAMES} if told else {}


def _speedups(numbers: RunNumbers) -> Values:
    verdict = numbers.told().get("verdict", {})
    gains = {}
    for other in verdict.get("others", []):
        gains[other["bound"]] = other["gain"]
    if verdict:
        gains[verdict["bound"]] = verdict["predicted_speedup"]
    return {(bound,): float(gain) for bound, gain in gains.items() if gain}


def _fired(numbers: RunNumbers) -> Values:
    """1 or 0 of each rule: an alarm needs the 0 of the others too."""
    told = numbers.told()
    fired = {finding["rule"] for finding in told.get("findings", [])}
    return {(rule,): float(rule in fired) for rule in RULES} if told else {}


def _cores(numbers: RunNumbers) -> Values:
    use = numbers.system.newest.get("cpu", [])
    return {(str(core),): float(percent) for core, percent in enumerate(use)}


def _sampled(factor: float = 1, **keys: str) -> Callable[[RunNumbers], Values]:
    """Reads keys of the newest sample, ``factor`` times; each key's value is its label, "" where it has none."""

    def read(numbers: RunNumbers) -> Values:
        sample = numbers.system.newest
        values: Values = {}
        for key, label in keys.items():
            if key in sample:
                reading = sample[key]
                largest = max(reading) if isinstance(reading, list) else reading
                values[(label,) if label else ()] = factor * float(largest)
        return values

    return read


def _of_gpus(key: str) -> Callable[[RunNumbers], Values]:
    """Reads ``key`` of each GPU in the newest sample."""

    def read(numbers: RunNumbers) -> Values:
        readings = enumerate(numbers.system.newest.get("gpu", []))
        return {(str(number),): float(gpu[key]) for number, gpu in readings if key in gpu}

    return read


class Gauge(NamedTuple):
    """One number: what it is, and how it is read."""

    text: str
    """What it is, for people."""
    unit: str
    """Unit of the values, as OpenTelemetry writes units."""
    read: Callable[[RunNumbers], Values]
    """Reads its values now; {} where there are none."""
    labels: tuple[str, ...] = ()
    """Names of the keys of its values."""


GAUGES: dict[str, Gauge] = {
    "step": Gauge("Batches done", "1", _newest_step("step", add=1)),
    "epoch": Gauge("Epoch, from 0", "1", _newest_step("epoch")),
    "step_seconds": Gauge("Mean of the last steps", "s", _step_seconds),
    "images_per_second": Gauge("Of all processes", "1/s", _images_per_second),
    "phase_seconds": Gauge("Mean of the last steps", "s", _phase_seconds, ("phase",)),
    "metric": Gauge("Logged losses and metrics", "1", _logged, ("name",)),
    "health": Gauge("The newest reading of each student", "1", _health, ("name", "student")),
    "verdict": Gauge("1 for what the run is bound by", "1", _verdict, ("bound",)),
    "limit_speedup": Gauge("Predicted gain without each limit", "1", _speedups, ("bound",)),
    "rule_fired": Gauge("1 for rules that fire now", "1", _fired, ("rule",)),
    "cpu_percent": Gauge("Of each core", "%", _cores, ("core",)),
    "iowait_percent": Gauge("Of the machine", "%", _sampled(iowait="")),
    "memory_percent": Gauge("Of the machine", "%", _sampled(mem="")),
    "training_memory_bytes": Gauge("Training and loader processes", "By", _sampled(MB, rss_mb="")),
    "swap_bytes": Gauge("Of the machine", "By", _sampled(MB, swap_mb="")),
    "thread_wait_percent": Gauge("Ready but without a core", "%", _sampled(thread_wait="")),
    "network_bytes_per_second": Gauge(
        "Of the machine", "By/s", _sampled(MB, net_r="received", net_w="sent"), ("direction",)
    ),
    "disk_bytes_per_second": Gauge(
        "Of the machine", "By/s", _sampled(MB, disk_r="read", disk_w="written"), ("direction",)
    ),
    "gpu_percent": Gauge("Of each GPU", "%", _of_gpus("util"), ("gpu",)),
    "gpu_memory_percent": Gauge("Of each GPU", "%", _of_gpus("mem"), ("gpu",)),
    "gpu_watts": Gauge("Of each GPU", "W", _of_gpus("w"), ("gpu",)),
}
"""What is served and sent: a number is added here alone."""


class Outlet(Closing, ABC):
    """Where the numbers go: open in the first process of each node while it trains, however training ends.

    Args:
        numbers: to serve or send.
    """

    def __init__(self, numbers: RunNumbers) -> None:
        self.numbers = numbers

    @abstractmethod
    def open(self, trainer: Trainer) -> None:
        """Starts to publish; called in the first process of each machine.

        Raises:
            UserError: an extra is missing, or the place can't be used.
        """
        pass

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Calls :meth:`open` in the first process of the machine."""
        if trainer.local_rank == 0:
            self.numbers.trainer = trainer
            self.open(trainer)
