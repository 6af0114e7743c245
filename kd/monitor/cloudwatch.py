"""Sends a run's numbers to Amazon CloudWatch. Needs the extra ``aws``."""

import math
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pytorch_lightning import Trainer

from kd.errors import UserError, needs_extra
from kd.monitor.numbers import GAUGES, Outlet, RunNumbers
from kd.report.alerts import alarms, cloudwatch
from kd.report.step_facts import mean
from kd.settings import MonitorSettings

AT_ONCE = 1000  # metrics in one request, at most
# CloudWatch's unit by that of a gauge; others are sent without
UNITS = {
    "s": "Seconds",
    "%": "Percent",
    "By": "Bytes",
    "By/s": "Bytes/Second",
    "1/s": "Count/Second",
}


class CloudWatch(Outlet):
    """Metrics below one namespace, with the dimensions ``Recipe``, ``Run`` and ``Host``, and a gauge's own.

    Of the cores their mean is sent: every metric is paid for.
    """

    def __init__(self, numbers: RunNumbers, spec: MonitorSettings) -> None:
        """Stores the settings; the thread and the client begin with the training.

        Args:
            numbers: read each time something is sent.
            spec: its ``cloudwatch`` is the namespace, ``send_every_s`` the seconds between two sendings.
        """
        super().__init__(numbers)
        self._spec = spec
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._client: Any = None

    def open(self, trainer: Trainer) -> None:
        """Starts the thread that sends, in the first process of each machine; nothing is sent yet.

        Raises:
            UserError: the extra ``aws`` is missing, or there is no region.
        """
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError as error:
            raise UserError(f"monitor.cloudwatch: {needs_extra('aws')}") from error
        config = Config(connect_timeout=5, read_timeout=5, retries={"max_attempts": 2})
        try:
            self._client = boto3.client("cloudwatch", config=config)
        except BotoCoreError as error:
            raise UserError(f"monitor.cloudwatch: {error}") from error
        run = self.numbers.folder(trainer)
        self._own = {"Recipe": run.parent.name, "Run": run.name, "Host": socket.gethostname()}
        self._end.clear()
        self._thread = threading.Thread(target=self._run, name="kd-cloudwatch", daemon=True)
        self._thread.start()

    def _make_alarms(self) -> None:
        """Writes alarms and dashboard, over those from before: they are the namespace's, all runs write the same ones."""
        for request in alarms(str(self._spec.cloudwatch), self._spec.cloudwatch_topic):
            self._client.put_metric_alarm(**request)
        self._client.put_dashboard(
            **cloudwatch(str(self._spec.cloudwatch), self._client.meta.region_name)
        )

    def _run(self) -> None:
        """Thread: makes the alarms (where ``cloudwatch_alarms`` is set, in the run's first process alone), then sends every
        ``send_every_s`` seconds, and once more at the end.
        """
        if (
            self._spec.cloudwatch_alarms
            and self.numbers.trainer is not None
            and self.numbers.trainer.is_global_zero
        ):
            self._try(self._make_alarms)
        while not self._end.wait(self._spec.send_every_s):
            self._send()
        self._send()

    def _send(self) -> None:
        """Sends all numbers of this moment, at most :data:`AT_ONCE` a request; a failure is reported, not raised."""
        data = list(self._data())
        namespace = self._spec.cloudwatch
        for start in range(0, len(data), AT_ONCE):
            part = data[start : start + AT_ONCE]
            put = partial(self._client.put_metric_data, Namespace=namespace, MetricData=part)
            self._try(put)

    def _try(self, call: Callable[[], object]) -> None:
        """Calls ``call``; what it raises is reported, the first time alone, and the training continues."""
        try:
            call()
        except Exception as error:  # a monitor that can't be reached must not stop a run
            self.report_once(error, "cloudwatch")

    def _data(self) -> Iterator[dict[str, Any]]:
        """Each finite number as an entry of CloudWatch's ``put_metric_data``, with the time of now in UTC; the cores' use is
        sent as their mean.
        """
        now = datetime.now(UTC)
        for name, values in self.numbers.read().items():
            labels = GAUGES[name].dimensions
            unit = UNITS.get(GAUGES[name].unit, "None")
            if labels == ("core",):
                labels = ()
                values = {(): mean(list(values.values()))}
            for key, value in values.items():
                if math.isfinite(value):  # it takes no other numbers
                    own_labels = dict(self._own)
                    for label, text in zip(labels, key, strict=True):
                        if text:  # nor empty names
                            own_labels[label] = text
                    dimensions = [{"Name": k, "Value": v} for k, v in own_labels.items()]
                    yield {
                        "MetricName": name,
                        "Dimensions": dimensions,
                        "Timestamp": now,
                        "Value": value,
                        "Unit": unit,
                    }

    def close(self, trainer: Trainer) -> None:
        """Has the thread send the last values; waits for at most 30 seconds. Safe to call again."""
        if self._thread is not None:
            self._end.set()
            self._thread.join(timeout=30)
            self._thread = None
