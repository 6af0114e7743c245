"""Prints a run's numbers as lines in Amazon CloudWatch's embedded metric format.

CloudWatch makes metrics of such a line wherever it takes in the job's output as a log: on SageMaker, on ECS and through
its agent. Nothing is sent from here, and no client of AWS is needed.
"""

import json
import math
import socket
import threading
import time
from collections.abc import Mapping

from pytorch_lightning import Trainer

from kd.monitor.numbers import GAUGES, Outlet, RunNumbers, Values
from kd.report.step_facts import mean
from kd.storage.elsewhere import Json

MOST = 100
"""Metrics of a line, at most, as the format allows."""
UNITS = {
    "s": "Seconds",
    "%": "Percent",
    "By": "Bytes",
    "By/s": "Bytes/Second",
    "1/s": "Count/Second",
}
"""CloudWatch's unit by that of a gauge; other gauges have none."""


class CloudWatch(Outlet):
    """Prints a line every ``every_s`` seconds and at the end, in the first process of each machine.

    Args:
        numbers: to print.
        namespace: of the metrics, ``monitor.cloudwatch``.
        every_s: seconds from one line to the next.
    """

    def __init__(self, numbers: RunNumbers, namespace: str, every_s: float) -> None:
        """Arguments as of the class; the thread begins with the training."""
        super().__init__(numbers)
        self._namespace = namespace
        self._every_s = every_s
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, trainer: Trainer) -> None:
        """Starts the thread that prints."""
        run = self.numbers.folder(trainer)
        whose = {"Recipe": run.parent.name, "Run": run.name, "Host": socket.gethostname()}
        self._end.clear()
        self._thread = threading.Thread(
            target=self._run, args=(whose,), name="kd-cloudwatch", daemon=True
        )
        self._thread.start()

    def _run(self, whose: dict[str, str]) -> None:
        """Thread: prints until the training ends; ``whose`` are the dimensions."""
        ended = False
        while not ended:
            ended = self._end.wait(self._every_s)
            content = embedded(self._namespace, whose, self.numbers.read(), time.time())
            print(json.dumps(content), flush=True)

    def close(self, trainer: Trainer) -> None:
        """Has the thread print the last values, and waits for it. Safe to call again."""
        if self._thread is not None:
            self._end.set()
            self._thread.join(timeout=5)
            self._thread = None


def embedded(
    namespace: str, whose: Mapping[str, str], numbers: Mapping[str, Values], now: float
) -> Json:
    """Numbers in CloudWatch's embedded metric format, the content of one line.

    A value with labels is a metric of its own (``phase_seconds.data``). As every metric is paid for, of cores there is their
    mean, and of rules how many fire (``rules_fired``), with their names as plain text. The verdict, NaN, infinite values
    and those beyond :data:`MOST` are left out.

    Args:
        namespace: of the metrics.
        whose: the dimensions, by name.
        numbers: of :meth:`kd.monitor.numbers.RunNumbers.read`.
        now: Unix time.
    """
    values: dict[str, float] = {}
    units = {}
    for name, of_gauge in numbers.items():
        if name in ("rule_fired", "verdict"):
            continue
        if name == "cpu_percent":
            of_gauge = {(): mean(list(of_gauge.values()))}
        for labels, value in of_gauge.items():
            if math.isfinite(value) and len(values) < MOST - 1:  # one is left for rules_fired
                metric = ".".join([name, *filter(None, labels)])
                values[metric] = value
                units[metric] = UNITS.get(GAUGES[name].unit, "None")
    fired = numbers.get("rule_fired", {})
    rules = [rule for (rule,), fires in fired.items() if fires]
    if fired:
        values["rules_fired"] = float(len(rules))
        units["rules_fired"] = "Count"
    metrics = [{"Name": metric, "Unit": unit} for metric, unit in units.items()]
    about = {"Namespace": namespace, "Dimensions": [list(whose)], "Metrics": metrics}
    return {
        "_aws": {"Timestamp": round(1000 * now), "CloudWatchMetrics": [about]},
        **whose,
        **values,
        "rules": rules,
    }
