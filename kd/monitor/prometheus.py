"""Serves a run's numbers to Prometheus. Needs the extra ``prometheus``."""

from collections.abc import Iterator
from typing import Any

from pytorch_lightning import LightningModule, Trainer

from kd.errors import UserError, needs_extra
from kd.monitor.numbers import GAUGES, Outlet, RunNumbers


class Prometheus(Outlet):
    """An HTTP endpoint on the first process of each node, of :data:`kd.monitor.numbers.GAUGES` below ``kd_``.

    Args:
        numbers: to serve.
        port: to listen on.
        address: of the interface; the loopback one is not seen from outside.
    """

    def __init__(self, numbers: RunNumbers, port: int, address: str = "127.0.0.1") -> None:
        """Arguments as of the class; the port opens when the training begins."""
        super().__init__(numbers)
        self.port = port
        self.address = address
        self._server: Any = None

    def open(self, trainer: Trainer) -> None:
        """Opens the port and serves the numbers on it.

        Raises:
            UserError: the extra ``prometheus`` is missing, or the port can't be opened.
        """
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise UserError(f"monitor.prometheus_port: {needs_extra('prometheus')}") from error
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(self.port, self.address, registry)
        except OSError as error:
            where = ""
            if self.address != "127.0.0.1":
                where = f" at {self.address} (monitor.prometheus_host)"
            raise UserError(
                f"monitor.prometheus_port: {self.port} can't be opened{where}: {error.strerror}"
            ) from error

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Opens the port and closes it again, in the first process of each machine: one that is taken is reported before
        the run has a folder; errors as of :meth:`open`.
        """
        if trainer.local_rank == 0:
            self.open(trainer)
            self.close(trainer)

    def describe(self) -> list[Any]:
        """Nothing: the registry calls it before the first scrape."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics at this moment, as prometheus-client's families ``kd_<gauge>``; its server's thread calls it."""
        from prometheus_client.core import GaugeMetricFamily

        for name, values in self.numbers.read().items():
            family = GaugeMetricFamily(f"kd_{name}", GAUGES[name].text, labels=GAUGES[name].labels)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family

    def close(self, trainer: Trainer) -> None:
        """Closes the port; safe to call again."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
