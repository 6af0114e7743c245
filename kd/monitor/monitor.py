"""``kd.Monitor``: watches a training, its machine and its learning; of kd's own runs and of any other."""

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Self

from pytorch_lightning import Callback, LightningModule, Trainer

from kd.errors import UserError, did_you_mean
from kd.monitor.cloudwatch import CloudWatch
from kd.monitor.control import Control
from kd.monitor.health import Health
from kd.monitor.kernels import Kernels
from kd.monitor.keys import MonitorSpec
from kd.monitor.numbers import RunNumbers
from kd.monitor.otlp import Otlp
from kd.monitor.phases import Phases
from kd.monitor.prometheus import Prometheus
from kd.monitor.results import Results
from kd.monitor.stopping import Stopping
from kd.monitor.system import System
from kd.monitor.watch import Watch
from kd.monitor.watched import Watched
from kd.settings import MonitorSettings


class Monitor(Callback):
    """Records what limits a training, for ``kd-report FOLDER``; a callback of Lightning's Trainer.

    It takes any LightningModule, data and strategy. The phases of each step, the machine's cores and GPUs, gradients
    and activations are recorded; rules act while the training runs; the report and a verdict are written at its end.

    Args:
        folder: where the records go; one training has one folder.
        settings: keys of ``monitor``, see :class:`kd.settings.MonitorSettings`.

    Raises:
        UserError: an unknown key, or a value that it does not take.

    >>> Monitor("runs/mine", max_hours=8).spec.max_hours
    8
    >>> Monitor("runs/mine", max_hour=8)
    Traceback (most recent call last):
    kd.errors.UserError: kd.Monitor: no key 'max_hour'; did you mean 'max_hours'?
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        spec = _spec_of(settings)
        stopping = Stopping()
        self._watch(Watched(Path(folder)), spec, stopping.stop_for)
        results = Results(Path(folder), _changed(spec), stopping)
        self.parts = [results, stopping, *self.parts] if spec.enabled else []

    @classmethod
    def of_own_run(
        cls, watched: Watched, spec: MonitorSpec, stop_for: Callable[[str], None]
    ) -> Self:
        """The monitor of a run of kd's own, which has its own settings, summary and way to stop.

        Args:
            watched: reads the run.
            spec: the settings ``monitor``.
            stop_for: stops the run for a rule of this name.
        """
        monitor = cls.__new__(cls)
        monitor._watch(watched, spec, stop_for)
        return monitor

    def _watch(self, watched: Watched, spec: MonitorSpec, stop_for: Callable[[str], None]) -> None:
        """Makes the parts, in the order in which the trainer calls them."""
        self.spec = spec
        self.phases = Phases(watched, spec.costs(), spec.nvtx)
        self.parts: list[Callback] = []
        if not spec.enabled:
            return
        system = System(watched, spec.interval_s)
        health = Health(watched, spec.health_every, spec.activations)
        kernels = Kernels(watched, spec.kernels_at, spec.kernels_steps, spec.kernels_memory)
        watch = None
        self.parts += [self.phases, system, *watched.parts()]
        if spec.rules_every_s or spec.max_hours or spec.budget:
            watch = Watch(watched, stop_for, spec)
            self.parts.append(watch)
        self.parts += [health, kernels, Control(watched, health, kernels, self.phases)]
        numbers = RunNumbers(self.phases, system, health, watch)
        if spec.prometheus_port is not None:
            self.parts.append(Prometheus(numbers, spec.prometheus_port, spec.prometheus_host))
        if spec.otlp is not None:
            self.parts.append(Otlp(numbers, spec.otlp, spec.send_every_s))
        if spec.cloudwatch is not None:
            self.parts.append(CloudWatch(numbers, spec))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Puts the parts after itself among the trainer's callbacks: Lightning calls them from here on."""
        if stage != "fit" or any(part in trainer.callbacks for part in self.parts):  # type: ignore[attr-defined]
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        place = callbacks.index(self) + 1
        callbacks[place:place] = self.parts


def _spec_of(settings: dict[str, Any]) -> MonitorSpec:
    """The settings, checked."""
    known = [field.name for field in fields(MonitorSettings)]
    for name in settings:
        if name not in known:
            raise UserError(f"kd.Monitor: no key '{name}'{did_you_mean(name, known)}")
    return MonitorSpec(**settings)


def _changed(spec: MonitorSpec) -> dict[str, Any]:
    """The settings that are not the defaults."""
    defaults = asdict(MonitorSettings())
    return {name: value for name, value in asdict(spec).items() if value != defaults[name]}
