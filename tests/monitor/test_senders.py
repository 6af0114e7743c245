"""The numbers leave the machine: by OTLP to a receiver of the tests' own, to CloudWatch as lines of the log."""

import json
import time
from pathlib import Path

import pytest

from kd.monitor.cloudwatch import embedded
from tests._collector import Receiver, collector  # noqa: F401 (a fixture)
from tests._files import read_json
from tests._helpers import Command
from tests._runs import callback, run

MONITOR = Path(__file__).parents[2] / "scripts" / "monitor"
SLOW = callback("tests._stop.Slow", seconds=0.05)
SHORT = [SLOW, "monitor.interval_s=0.1", "trainer.max_epochs=1"]


def test_otlp(recipe: Path, collector: str) -> None:  # noqa: F811
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    run(recipe, *SHORT, f"monitor.otlp={collector}", "monitor.send_every_s=0.2")
    assert set(Receiver.paths) == {"/v1/metrics"}
    newest = ExportMetricsServiceRequest.FromString(Receiver.bodies[-1]).resource_metrics[0]
    of = {a.key: a.value.string_value for a in newest.resource.attributes}
    assert (of["service.name"], of["kd.recipe"], of["kd.run"]) == ("kd", "tiny", "000")
    found = {
        (metric.name, *(a.value.string_value for a in point.attributes)): point.as_double
        for metric in newest.scope_metrics[0].metrics for point in metric.gauge.data_points
    }  # fmt: skip
    assert found["kd.step",] > 1
    assert found["kd.phase_seconds", "teacher"] > 0
    assert found["kd.metric", "train/loss"] > 0
    assert found["kd.health", "grad_norm", ""] > 0
    assert ("kd.cpu_percent", "0") in found
    units = {metric.name: metric.unit for metric in newest.scope_metrics[0].metrics}
    assert units["kd.phase_seconds"] == "s"


def test_cloudwatch(recipe: Path, prints: Command) -> None:
    """Each line is in the embedded metric format, and its last one has what the run measured."""
    items = ["monitor.cloudwatch=KD/Tests", "monitor.send_every_s=0.3", "monitor.rules_every_s=0.2"]
    lines = [
        json.loads(line)
        for line in prints("train", [f"recipe={recipe}", *SHORT, *items]).splitlines()
        if "_aws" in line
    ]
    assert len(lines) > 1
    for line in lines:
        (about,) = line["_aws"]["CloudWatchMetrics"]
        assert about["Namespace"] == "KD/Tests" and about["Dimensions"] == [
            ["Recipe", "Run", "Host"]
        ]
        assert all(isinstance(line[metric["Name"]], float) for metric in about["Metrics"])
        assert (
            len(about["Metrics"]) <= 100
            and abs(line["_aws"]["Timestamp"] / 1000 - time.time()) < 600
        )
    newest = lines[-1]
    assert (newest["Recipe"], newest["Run"]) == ("tiny", "000")
    assert newest["step"] > 1 and newest["phase_seconds.teacher"] > 0
    assert newest["health.grad_norm"] > 0 and newest["cpu_percent"] >= 0
    units = {
        metric["Name"]: metric["Unit"]
        for metric in newest["_aws"]["CloudWatchMetrics"][0]["Metrics"]
    }
    assert (units["phase_seconds.teacher"], units["cpu_percent"]) == ("Seconds", "Percent")


def test_the_alarm_reads_a_metric_of_the_line() -> None:
    """The file is AWS's own request, and counts the rules that fire."""
    alarm = read_json(MONITOR / "cloudwatch_alarm.json")
    fired = {"rule_fired": {("Overfit",): 1.0, ("Swap",): 0.0, ("AllZero",): 1.0}}
    line = embedded("KD", {"Run": "000"}, fired, now=2.5)
    assert line["_aws"]["Timestamp"] == 2500 and line["rules"] == ["Overfit", "AllZero"]
    (metric,) = line["_aws"]["CloudWatchMetrics"][0]["Metrics"]
    assert line[metric["Name"]] == 2.0
    assert alarm["Metrics"][0]["Expression"] == f'SELECT MAX({metric["Name"]}) FROM "KD"'
    pytest.importorskip("boto3")
    from botocore.session import get_session
    from botocore.validate import ParamValidator

    operation = get_session().get_service_model("cloudwatch").operation_model("PutMetricAlarm")
    report = ParamValidator().validate(alarm, operation.input_shape)
    assert not report.has_errors(), report.generate_report()


def test_a_collector_that_is_gone_stops_no_run(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody listens: told once."""
    pytest.importorskip("opentelemetry")
    monkeypatch.setattr("kd.monitor.otlp.TIMEOUT_S", 1)
    items = ["monitor.otlp=http://127.0.0.1:9", "monitor.send_every_s=0.1"]
    run(recipe, *SHORT, *items)
    told = capsys.readouterr().err
    assert told.count("kd-train: monitor.") == 1
    assert "Transient" not in told
