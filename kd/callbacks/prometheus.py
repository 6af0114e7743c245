"""Serves a run's numbers to Prometheus. Needs the extra ``prometheus``."""

from collections.abc import Iterator
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from kd.callbacks.phases import Phases
from kd.callbacks.system import System
from kd.errors import UserError


class Prometheus(Callback):
    """An HTTP endpoint on the first process of each node. Values are read when Prometheus asks: a step pays nothing.

    Names: ``kd_step``, ``kd_epoch``, ``kd_images_per_second``, ``kd_step_seconds``, ``kd_phase_seconds{phase}`` (means
    of the last steps), ``kd_metric{name}`` (all logged losses and metrics), ``kd_cpu_percent{core}``,
    ``kd_memory_percent``, ``kd_gpu_percent{gpu}``, ``kd_gpu_memory_percent{gpu}``, ``kd_gpu_watts{gpu}``.

    Args:
        phases: where steps come from.
        system: where readings of the machine come from.
        port: to listen on.
        address: of the interface; the loopback one is not seen from outside.

    Raises:
        UserError: prometheus-client is not installed, or the port is taken.
    """

    def __init__(self, phases: Phases, system: System, port: int, address: str = "127.0.0.1") -> None:
        self.phases, self.system, self.port, self.address = phases, system, port, address
        self._server: Any = None
        self._trainer: Trainer | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the port."""
        if trainer.local_rank != 0:
            return
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise UserError("monitor.prometheus_port: needs the extra prometheus (prometheus-client)") from error
        self._trainer = trainer
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(self.port, self.address, registry)
        except OSError as error:
            where = "" if self.address == "127.0.0.1" else f" at {self.address} (monitor.prometheus_host)"
            raise UserError(f"monitor.prometheus_port: {self.port} can't be opened{where}: {error.strerror}") from error

    def describe(self) -> list[Any]:
        """Nothing ahead of the first scrape: the registry asks for it."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics at this moment; called by the server's thread."""
        from prometheus_client.core import GaugeMetricFamily

        assert self._trainer is not None

        def gauge(name: str, text: str, values: dict[str, float], label: str | None = None) -> Any:
            family = GaugeMetricFamily(f"kd_{name}", text, labels=[label] if label else None)
            for key, value in values.items():
                family.add_metric([key] if label else [], value)
            return family

        steps = list(self.phases.recent)
        if steps:
            seconds = sum(s["ms"] for s in steps) / len(steps) / 1000
            names = sorted({name for s in steps for name in s["p"]})
            means = {n: sum(s["p"].get(n, 0.0) for s in steps) / len(steps) / 1000 for n in names}
            yield gauge("step", "Batches done", {"": steps[-1]["step"] + 1})
            yield gauge("epoch", "Epoch, from 0", {"": steps[-1]["epoch"]})
            yield gauge("step_seconds", "Mean of the last steps", {"": seconds})
            yield gauge("images_per_second", "Of all processes", {"": self.phases.images_per_step / max(seconds, 1e-9)})
            yield gauge("phase_seconds", "Mean of the last steps", means, "phase")
        metrics = {k: float(v) for k, v in self._trainer.callback_metrics.copy().items()}
        yield gauge("metric", "Logged losses and metrics", metrics, "name")
        yield from self._machine(gauge)

    def _machine(self, gauge: Any) -> Iterator[Any]:
        sample = self.system.newest
        if not sample:
            return
        yield gauge("cpu_percent", "Of each core", {str(i): v for i, v in enumerate(sample["cpu"])}, "core")
        yield gauge("memory_percent", "Of the machine", {"": sample["mem"]})
        for key, name in (("util", "gpu_percent"), ("mem", "gpu_memory_percent"), ("w", "gpu_watts")):
            values = {str(i): g[key] for i, g in enumerate(sample.get("gpu", [])) if key in g}
            if values:
                yield gauge(name, "Of each GPU", values, "gpu")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Closes the port."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Closes the port."""
        self._close()

    def _close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
