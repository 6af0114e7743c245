"""Sends a run's numbers by OpenTelemetry's protocol. Needs the extra ``otel``."""

import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from pytorch_lightning import Trainer

from kd.errors import UserError, needs_extra
from kd.monitor.numbers import GAUGES, Outlet, RunNumbers

TIMEOUT_S = 5
"""Seconds of one sending; a collector that is gone holds the run's end up for no longer."""


class Otlp(Outlet):
    """Gauges ``kd.<name>``, with the headers of ``OTEL_EXPORTER_OTLP_HEADERS``, where a token may be."""

    def __init__(self, numbers: RunNumbers, endpoint: str, every_s: float) -> None:
        """Stores the settings; nothing is connected yet.

        Args:
            numbers: read each time something is sent.
            endpoint: the collector's address; without a path, ``/v1/metrics`` is added.
            every_s: seconds from one sending to the next.
        """
        path = ""
        if not urlsplit(endpoint).path.strip("/"):
            path = "/v1/metrics"
        super().__init__(numbers)
        self.every_s = every_s
        self.endpoint = endpoint.rstrip("/") + path
        self._provider: Any = None
        self._reported = False

    def open(self, trainer: Trainer) -> None:
        """Makes a gauge for each number and starts the exporter's thread, which sends every ``every_s`` seconds.

        Whether the collector answers is not tried: failures of sending are reported later, once.

        Raises:
            UserError: the extra ``otel`` is missing.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise UserError(f"monitor.otlp: {needs_extra('otel')}") from error
        run = self.numbers.folder(trainer)
        host = socket.gethostname()
        of = {
            "service.name": "kd",
            "kd.recipe": run.parent.name,
            "kd.run": run.name,
            "host.name": host,
        }
        exporter: Any = OTLPMetricExporter(endpoint=self.endpoint, timeout=TIMEOUT_S)
        # several lines a failed sending
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        exporter.export = self._reporting(exporter.export)
        reader = PeriodicExportingMetricReader(exporter, 1000 * self.every_s, 1000 * TIMEOUT_S)
        self._provider = MeterProvider([reader], Resource.create(of), shutdown_on_exit=False)
        meter = self._provider.get_meter("kd")
        for name, gauge in GAUGES.items():
            observe = [lambda _options, name=name: self._observed(name)]
            meter.create_observable_gauge(f"kd.{name}", observe, gauge.unit, gauge.text)

    def _reporting(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """An exporter's ``send`` that also reports its first result other than SUCCESS, and no later one.

        It raises nothing for such a result: a monitor never stops a run.
        """

        def export(*args: object, **kwargs: object) -> object:
            """Sends, and returns the exporter's result unchanged."""
            result = send(*args, **kwargs)
            if result.name != "SUCCESS" and not self._reported:
                problem = f"{self.endpoint} does not take the numbers"
                self.numbers.phases.watched.report(problem, "otlp")
                self._reported = True
            return result

        return export

    def _observed(self, name: str) -> Iterator[Any]:
        """A gauge's present values as OpenTelemetry's observations; its exporter calls this."""
        from opentelemetry.metrics import Observation

        gauge = GAUGES[name]
        for labels, value in gauge.source(self.numbers).get(name, {}).items():
            yield Observation(value, dict(zip(gauge.labels, labels, strict=True)))

    def close(self, trainer: Trainer) -> None:
        """Sends the last values; waits for at most :data:`TIMEOUT_S` seconds."""
        if self._provider is not None:
            self._provider.shutdown(timeout_millis=1000 * TIMEOUT_S)
            self._provider = None
