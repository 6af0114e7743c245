"""A run's numbers at this moment: one table of gauges, for whoever serves or sends them. Nothing is worked out unasked."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
        sources = dict.fromkeys(gauge.source for gauge in GAUGES.values())
        numbers: dict[str, Values] = {}
        for source in sources:
            for name, values in source(self).items():
                if values:
                    numbers[name] = values
        return numbers


def _of_steps(numbers: RunNumbers) -> dict[str, Values]:
    """Values of the newest steps (:data:`kd.monitor.phases.RECENT`), each of one batch; {} before the first.

    Batches done and epoch are those of the newest step; seconds, pictures a second and phases are means over these steps.
    """
    steps = list(numbers.phases.recent)
    if not steps:
        return {}
    newest = steps[-1]
    seconds = mean([step["ms"] for step in steps]) / 1000
    phases: Values = {}
    for name in sorted({name for step in steps for name in step["p"]}):
        phases[(name,)] = mean([step["p"].get(name, 0.0) for step in steps]) / 1000
    pictures = numbers.phases.images_per_step
    return {
        "step": {(): float(newest["step"] + 1)},
        "epoch": {(): float(newest["epoch"])},
        "step_seconds": {(): seconds},
        "images_per_second": {(): pictures / max(seconds, 1e-9)} if pictures else {},
        "phase_seconds": phases,
    }


def _of_training(numbers: RunNumbers) -> dict[str, Values]:
    """Losses and metrics as they were logged last, and :data:`HEALTH` of the newest health record."""
    logged: Values = {}
    if numbers.trainer is not None:
        for name, value in numbers.trainer.callback_metrics.copy().items():
            logged[(name,)] = float(value)
    reading = numbers.health.newest
    health: Values = {
        (name,): float(reading[name]) for name in HEALTH if reading.get(name) is not None
    }
    return {"metric": logged, "health": health}


def _of_rules(numbers: RunNumbers) -> dict[str, Values]:
    """Verdict, predicted gains and fired rules, as they were found last; {} before, and on other ranks than 0."""
    said = numbers.watch.newest if numbers.watch else {}
    if not said:
        return {}
    verdict = said["verdict"]
    gains = {other["bound"]: other["gain"] for other in verdict.get("others", [])}
    gains[verdict["bound"]] = verdict["predicted_speedup"]
    fired = {finding["rule"] for finding in said.get("findings", [])}
    return {
        "verdict": {(name,): float(name == verdict["bound"]) for name in NAMES},
        "limit_speedup": {(bound,): float(gain) for bound, gain in gains.items() if gain},
        # an alarm needs the 0 of the other rules too
        "rule_fired": {(rule,): float(rule in fired) for rule in RULES},
    }


def _of_machine(numbers: RunNumbers) -> dict[str, Values]:
    """Values of the machine's newest sample, in the gauges' units; of a list (``thread_wait``) the largest counts."""
    sample = numbers.system.newest
    values: dict[str, Values] = {
        "cpu_percent": {(str(core),): float(use) for core, use in enumerate(sample.get("cpu", []))}
    }
    for key, (gauge, labels, factor) in SAMPLED.items():
        if key in sample:
            reading = sample[key]
            largest = max(reading) if isinstance(reading, list) else reading
            values.setdefault(gauge, {})[labels] = factor * float(largest)
    for number, gpu in enumerate(sample.get("gpu", [])):
        for key, gauge in OF_GPUS.items():
            if key in gpu:
                values.setdefault(gauge, {})[(str(number),)] = float(gpu[key])
    return values


SAMPLED: dict[str, tuple[str, tuple[str, ...], float]] = {
    "iowait": ("iowait_percent", (), 1),
    "mem": ("memory_percent", (), 1),
    "rss_mb": ("training_memory_bytes", (), MB),
    "swap_mb": ("swap_bytes", (), MB),
    "thread_wait": ("thread_wait_percent", (), 1),
    "net_r": ("network_bytes_per_second", ("received",), MB),
    "net_w": ("network_bytes_per_second", ("sent",), MB),
    "disk_r": ("disk_bytes_per_second", ("read",), MB),
    "disk_w": ("disk_bytes_per_second", ("written",), MB),
}
"""A key of the sample -> its gauge, the values of the gauge's labels, and the factor to the gauge's unit."""
OF_GPUS = {"util": "gpu_percent", "mem": "gpu_memory_percent", "w": "gpu_watts"}
"""A key of a GPU's reading -> its gauge."""


class Gauge(NamedTuple):
    """One number: what it is, and who reads it."""

    text: str
    """What it is, for people."""
    unit: str
    """Unit of the values, as OpenTelemetry writes units."""
    source: Callable[[RunNumbers], dict[str, Values]]
    """Reads the values of several gauges now, by their names; a name may be missing, or without values."""
    labels: tuple[str, ...] = ()
    """Names of the keys of its values."""


GAUGES: dict[str, Gauge] = {
    "step": Gauge("Batches done", "1", _of_steps),
    "epoch": Gauge("Epoch, from 0", "1", _of_steps),
    "step_seconds": Gauge("Mean of the last steps", "s", _of_steps),
    "images_per_second": Gauge("Of all processes", "1/s", _of_steps),
    "phase_seconds": Gauge("Mean of the last steps", "s", _of_steps, ("phase",)),
    "metric": Gauge("Logged losses and metrics", "1", _of_training, ("name",)),
    "health": Gauge("Newest reading of the student", "1", _of_training, ("name",)),
    "verdict": Gauge("1 for what the run is bound by", "1", _of_rules, ("bound",)),
    "limit_speedup": Gauge("Predicted gain without each limit", "1", _of_rules, ("bound",)),
    "rule_fired": Gauge("1 for rules that fire now", "1", _of_rules, ("rule",)),
    "cpu_percent": Gauge("Of each core", "%", _of_machine, ("core",)),
    "iowait_percent": Gauge("Of the machine", "%", _of_machine),
    "memory_percent": Gauge("Of the machine", "%", _of_machine),
    "training_memory_bytes": Gauge("Training and loader processes", "By", _of_machine),
    "swap_bytes": Gauge("Of the machine", "By", _of_machine),
    "thread_wait_percent": Gauge("Ready but without a core", "%", _of_machine),
    "network_bytes_per_second": Gauge("Of the machine", "By/s", _of_machine, ("direction",)),
    "disk_bytes_per_second": Gauge("Of the machine", "By/s", _of_machine, ("direction",)),
    "gpu_percent": Gauge("Of each GPU", "%", _of_machine, ("gpu",)),
    "gpu_memory_percent": Gauge("Of each GPU", "%", _of_machine, ("gpu",)),
    "gpu_watts": Gauge("Of each GPU", "W", _of_machine, ("gpu",)),
}
"""What is served and sent: one table for Prometheus, OpenTelemetry and CloudWatch."""


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
        """Gives the numbers their trainer and calls :meth:`open`, in the first process of the machine."""
        if trainer.local_rank == 0:
            self.numbers.trainer = trainer
            self.open(trainer)
