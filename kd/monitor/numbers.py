"""A run's numbers at this moment, by name, for whoever serves or sends them. Nothing is worked out unasked."""

from abc import ABC, abstractmethod
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
# Gauge -> factor, and the key in a sample with its direction (of a number without one "").
OF_SAMPLE: dict[str, tuple[float, dict[str, str]]] = {
    "iowait_percent": (1, {"iowait": ""}),
    "memory_percent": (1, {"mem": ""}),
    "training_memory_bytes": (MB, {"rss_mb": ""}),
    "swap_bytes": (MB, {"swap_mb": ""}),
    "network_bytes_per_second": (MB, {"net_r": "received", "net_w": "sent"}),
    "disk_bytes_per_second": (MB, {"disk_r": "read", "disk_w": "written"}),
}
OF_GPU = {"gpu_percent": "util", "gpu_memory_percent": "mem", "gpu_watts": "w"}
"""Key in each GPU's part of a sample, by gauge."""


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
        numbers = {
            "metric": self._metrics(),
            "health": self._health(),
            **self._of_steps(),
            **self._of_rules(),
            **self._of_machine(),
        }
        return {name: values for name, values in numbers.items() if values}

    def _metrics(self) -> Values:
        """The metrics that were logged last, by name."""
        if self.trainer is None:
            return {}
        logged = self.trainer.callback_metrics.copy()
        return {(name,): float(value) for name, value in logged.items()}

    def _health(self) -> Values:
        """Each student's newest health reading, by (name, student), where a single student is ""; {} before the first."""
        values: Values = {}
        for student, reading in list(self.health.newest.items()):
            for name in HEALTH:
                if reading.get(name) is not None:
                    values[name, student] = float(reading[name])
        return values

    def _of_steps(self) -> dict[str, Values]:
        """Means of the newest steps (:data:`kd.monitor.phases.RECENT`), each of one batch: seconds a step and a phase,
        pictures a second of all processes; ``step``, the number of batches done, and ``epoch``, from 0, of the last one.

        {} before the first step.
        """
        steps = list(self.phases.recent)
        if not steps:
            return {}
        seconds = mean([step["ms"] for step in steps]) / 1000
        phases: Values = {}
        names = {name for step in steps for name in step["p"]}
        for name in sorted(names):
            milliseconds = [step["p"].get(name, 0.0) for step in steps]
            phases[(name,)] = mean(milliseconds) / 1000
        pictures = self.phases.images_per_step
        speed: Values = {(): pictures / max(seconds, 1e-9)} if pictures else {}
        return {
            "step": {(): float(steps[-1]["step"] + 1)},
            "epoch": {(): float(steps[-1]["epoch"])},
            "step_seconds": {(): seconds},
            "images_per_second": speed,
            "phase_seconds": phases,
        }

    def _of_rules(self) -> dict[str, Values]:
        """What limits the run, its predicted gains (factors), and which rules fire; an alarm needs the 0 of the others too.

        {} before the rules were first applied, and on other ranks than 0.
        """
        newest = self.watch.newest if self.watch else {}
        if not newest:
            return {}
        verdict = newest["verdict"]
        largest = verdict["bound"]
        gains = {other["bound"]: other["gain"] for other in verdict.get("others", [])}
        gains[largest] = verdict["predicted_speedup"]
        fired = {finding["rule"] for finding in newest["findings"]}
        speedups: Values = {(bound,): float(gain) for bound, gain in gains.items() if gain}
        return {
            "verdict": {(name,): float(name == largest) for name in NAMES},
            "limit_speedup": speedups,
            "rule_fired": {(rule,): float(rule in fired) for rule in RULES},
        }

    def _of_machine(self) -> dict[str, Values]:
        """The newest sample of the machine, in the units of :data:`GAUGES`; what was not sampled is left out."""
        sample = self.system.newest
        numbers: dict[str, Values] = {}
        cores: Values = {}
        for core, use in enumerate(sample.get("cpu", [])):
            cores[(str(core),)] = float(use)
        numbers["cpu_percent"] = cores
        for name, (factor, keys) in OF_SAMPLE.items():
            values: Values = {}
            for key, direction in keys.items():
                if key in sample:
                    values[(direction,) if direction else ()] = factor * sample[key]
            numbers[name] = values
        waits = sample.get("thread_wait")
        if waits:
            numbers["thread_wait_percent"] = {(): max(waits)}
        for name, key in OF_GPU.items():
            values = {}
            for number, gpu in enumerate(sample.get("gpu", [])):
                if key in gpu:
                    values[(str(number),)] = float(gpu[key])
            numbers[name] = values
        return numbers


class Gauge(NamedTuple):
    """What one number is, for those who publish it."""

    text: str
    """What it is, for people."""
    unit: str
    """Unit of the values, as OpenTelemetry writes units."""
    dimensions: tuple[str, ...] = ()
    """Names of the keys of its values."""


GAUGES: dict[str, Gauge] = {
    "step": Gauge("Batches done", "1"),
    "epoch": Gauge("Epoch, from 0", "1"),
    "step_seconds": Gauge("Mean of the last steps", "s"),
    "images_per_second": Gauge("Of all processes", "1/s"),
    "phase_seconds": Gauge("Mean of the last steps", "s", ("phase",)),
    "metric": Gauge("Logged losses and metrics", "1", ("name",)),
    "health": Gauge("The newest reading of each student", "1", ("name", "student")),
    "verdict": Gauge("1 for what the run is bound by", "1", ("bound",)),
    "limit_speedup": Gauge("Predicted gain without each limit", "1", ("bound",)),
    "rule_fired": Gauge("1 for rules that fire now", "1", ("rule",)),
    "cpu_percent": Gauge("Of each core", "%", ("core",)),
    "iowait_percent": Gauge("Of the machine", "%"),
    "memory_percent": Gauge("Of the machine", "%"),
    "training_memory_bytes": Gauge("Training and loader processes", "By"),
    "swap_bytes": Gauge("Of the machine", "By"),
    "thread_wait_percent": Gauge("Ready but without a core", "%"),
    "network_bytes_per_second": Gauge("Of the machine", "By/s", ("direction",)),
    "disk_bytes_per_second": Gauge("Of the machine", "By/s", ("direction",)),
    "gpu_percent": Gauge("Of each GPU", "%", ("gpu",)),
    "gpu_memory_percent": Gauge("Of each GPU", "%", ("gpu",)),
    "gpu_watts": Gauge("Of each GPU", "W", ("gpu",)),
}


class Outlet(Closing, ABC):
    """Where the numbers go: open in the first process of each node while it trains, however training ends.

    Args:
        numbers: to serve or send.
    """

    def __init__(self, numbers: RunNumbers) -> None:
        self.numbers = numbers
        self._reported = False

    def report_once(self, problem: object, setting: str) -> None:
        """Prints a problem, the first one alone, of whatever kind: a monitor never stops a run.

        Arguments as of :meth:`kd.monitor.watched.Watched.report`.
        """
        if not self._reported:
            self.numbers.phases.watched.report(problem, setting)
        self._reported = True

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
