"""What ``/metrics`` shows."""

from functools import partial

from kd.ship.export.base import need

EXTRA = "serve"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histograms of durations, in seconds."""
PICTURES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Upper bounds of the histogram of batch sizes."""


class Metrics:
    """Prometheus metrics of one server, in a registry of their own.

    Where a teacher is served too, both models' batches are in the same histograms, and :attr:`waiting` is the sum of what
    waits for either. All are updated in the event loop.
    """

    def __init__(self) -> None:
        """Registers the metrics that ``/metrics`` shows; their names are read by dashboards."""
        prometheus = need("prometheus_client", EXTRA, "kd-serve")
        self.registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=self.registry)
        gauge = partial(prometheus.Gauge, registry=self.registry)
        histogram = partial(prometheus.Histogram, registry=self.registry)
        self.requests = counter("kd_requests", "Answered requests for predictions", ["code"])
        self.seconds = histogram("kd_request_seconds", "Duration of a request", buckets=SECONDS)
        self.model = histogram("kd_model_seconds", "Duration of a batch", buckets=SECONDS)
        self.batch = histogram("kd_batch_pictures", "Pictures in a batch", buckets=PICTURES)
        self.waiting = gauge("kd_waiting_pictures", "Pictures that wait for a batch")
        self.answers = counter("kd_answers", "Pictures of a cascade, by who answered", ["by"])
        self._text = prometheus.generate_latest
        self.content_type: str = prometheus.CONTENT_TYPE_LATEST

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return self._text(self.registry)
