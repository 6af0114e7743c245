"""A run's numbers at this moment, by name, for whoever serves or sends them. Nothing is worked out unasked."""

import sys
from abc import ABC, abstractmethod
from typing import NamedTuple

from pytorch_lightning import LightningModule, Trainer
from tqdm import tqdm

from kd.callbacks.hooks import Closing
from kd.callbacks.phases import Phases
from kd.monitor.health import Health
from kd.monitor.system import System
from kd.monitor.watch import Watch
from kd.report.rules import NAMES, RULES
from kd.report.step_facts import mean

Values = dict[
    tuple[str, ...], float
]  # By the values of a gauge's labels; of one without labels by ``()``
HEALTH = ("grad_norm", "update_ratio", "agreement", "teacher_entropy")
MB = 2**20


class RunNumbers:
    """A run's numbers of this moment, read from the callbacks that record them; nothing is measured for it.

    Args:
        phases: steps.
        system: the machine.
        health: gradients, updates, agreement.
        watch: rules and verdict (rank 0), where there is one.
    """

    def __init__(
        self, phases: Phases, system: System, health: Health, watch: Watch | None = None
    ) -> None:
        self.phases, self.system, self.health, self.watch = phases, system, health, watch
        self.trainer: Trainer | None = None

    def read(self) -> dict[str, Values]:
        """The values of each of :data:`GAUGES` that has some now."""
        return {
            name: values for name, values in (self._of_run() | self._of_machine()).items() if values
        }

    def _of_run(self) -> dict[str, Values]:
        logged = self.trainer.callback_metrics.copy() if self.trainer is not None else {}
        health = [
            ((name, student), r.get(name))
            for student, r in list(self.health.newest.items())
            for name in HEALTH
        ]
        found: dict[str, Values] = {
            "metric": {(name,): float(value) for name, value in logged.items()},
            "health": {key: float(value) for key, value in health if value is not None},
        }
        if steps := list(self.phases.recent):
            seconds, names = (
                mean([s["ms"] for s in steps]) / 1000,
                sorted({name for s in steps for name in s["p"]}),
            )
            found |= {
                "step": {(): float(steps[-1]["step"] + 1)},
                "epoch": {(): float(steps[-1]["epoch"])},
                "step_seconds": {(): seconds},
                "images_per_second": {(): self.phases.images_per_step / max(seconds, 1e-9)},
                "phase_seconds": {
                    (name,): mean([s["p"].get(name, 0.0) for s in steps]) / 1000 for name in names
                },
            }
        if self.watch and (newest := self.watch.newest):
            verdict, fired = newest["verdict"], {finding["rule"] for finding in newest["findings"]}
            gains = {other["bound"]: other["gain"] for other in verdict.get("others", [])}
            gains[verdict["bound"]] = verdict["predicted_speedup"]
            found |= {
                "verdict": {(name,): float(name == verdict["bound"]) for name in NAMES},
                "limit_speedup": {(bound,): float(gain) for bound, gain in gains.items() if gain},
                "rule_fired": {
                    (rule,): float(rule in fired) for rule in RULES
                },  # an alarm needs the 0 too
            }
        return found

    def _of_machine(self) -> dict[str, Values]:
        sample, gpus = self.system.newest, self.system.newest.get("gpu", [])

        def of(factor: float = 1.0, **keys: str) -> Values:
            """By direction; of a number without, by ``()``."""
            return {
                (label,) if label else (): factor * sample[key]
                for key, label in keys.items()
                if key in sample
            }

        waits = sample.get("thread_wait")
        return {
            "cpu_percent": {
                (str(core),): float(use) for core, use in enumerate(sample.get("cpu", []))
            },
            "iowait_percent": of(iowait=""),
            "memory_percent": of(mem=""),
            "training_memory_bytes": of(MB, rss_mb=""),
            "swap_bytes": of(MB, swap_mb=""),
            "thread_wait_percent": {(): max(waits)} if waits else {},
            "network_bytes_per_second": of(MB, net_r="received", net_w="sent"),
            "disk_bytes_per_second": of(MB, disk_r="read", disk_w="written"),
            **{
                name: {(str(i),): float(gpu[key]) for i, gpu in enumerate(gpus) if key in gpu}
                for name, key in (
                    ("gpu_percent", "util"),
                    ("gpu_memory_percent", "mem"),
                    ("gpu_watts", "w"),
                )
            },
        }


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
        self.numbers, self._reported = numbers, False

    def report_once(self, problem: object) -> None:
        """Prints a problem, the first one alone: a monitor never stops a run."""
        if not self._reported:
            tqdm.write(f"kd-train: {problem}", file=sys.stderr)
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
