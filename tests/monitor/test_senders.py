"""The numbers leave the machine: by OTLP to a receiver of the tests' own, to CloudWatch as moto plays it."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from kd.cli import train_main
from kd.report.rules import RULES
from tests._collector import Receiver, collector  # noqa: F401 (a fixture)

TOPIC = "arn:aws:sns:us-east-1:123456789012:kd"
SLOW = json.dumps({"class_path": "tests._stop.Slow", "init_args": {"seconds": 0.05}})
SHORT = [f"trainer.callbacks+={SLOW}", "monitor.interval_s=0.1", "trainer.max_epochs=1"]


def test_otlp(recipe: Path, collector: str) -> None:  # noqa: F811
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    assert (
        train_main(
            [f"recipe={recipe}", *SHORT, f"monitor.otlp={collector}", "monitor.send_every_s=0.2"]
        )
        == 0
    )
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


def test_cloudwatch(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    moto = pytest.importorskip("moto")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with moto.mock_aws():
        import boto3

        items = [
            "monitor.cloudwatch=KD/Tests",
            "monitor.cloudwatch_alarms=true",
            f"monitor.cloudwatch_topic={TOPIC}",
        ]
        assert train_main([f"recipe={recipe}", *SHORT, *items]) == 0
        client = boto3.client("cloudwatch")
        made = [
            a
            for page in client.get_paginator("describe_alarms").paginate()
            for a in page["MetricAlarms"]
        ]
        boards = client.list_dashboards()["DashboardEntries"]
        found = [m for page in client.get_paginator("list_metrics").paginate(Namespace="KD/Tests")
                 for m in page["Metrics"]]  # fmt: skip
    assert {alarm["AlarmName"] for alarm in made} == {f"KD/Tests {rule}" for rule in RULES}
    assert made[0]["AlarmActions"] == [TOPIC] and [board["DashboardName"] for board in boards] == [
        "KD-Tests"
    ]
    by_name: dict[str, list[dict[str, str]]] = {}
    for metric in found:
        by_name.setdefault(metric["MetricName"], []).append(
            {d["Name"]: d["Value"] for d in metric["Dimensions"]}
        )
    assert all(
        {"Recipe", "Run", "Host"} <= set(of) for dimensions in by_name.values() for of in dimensions
    )
    assert {of["phase"] for of in by_name["phase_seconds"]} >= {"teacher", "student", "backward"}
    assert by_name["step"][0] | {"Host": ""} == {"Recipe": "tiny", "Run": "000", "Host": ""}
    assert len(by_name["cpu_percent"]) == 1  # the mean of the cores
    assert {of["name"] for of in by_name["health"]} >= {"grad_norm", "agreement"}


def test_services_that_are_gone_stop_no_run(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody listens: told once each."""
    gone, items = "http://127.0.0.1:9", []
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL_CLOUDWATCH", gone)
    monkeypatch.setattr("kd.monitor.otlp.TIMEOUT_S", 1)
    items += ["monitor.cloudwatch=KD/Tests"] if find_spec("boto3") else []
    items += [f"monitor.otlp={gone}"] if find_spec("opentelemetry") else []
    if not items:
        pytest.skip("neither boto3 nor OpenTelemetry is installed")
    assert train_main([f"recipe={recipe}", *SHORT, *items, "monitor.send_every_s=0.1"]) == 0
    told = capsys.readouterr().err
    assert told.count("kd-train: monitor.") == len(items)
    assert "Transient" not in told


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (
            "monitor.otlp=collector:4318",
            "monitor.otlp: must be an http(s) address, got 'collector:4318'",
        ),
        (
            "monitor.cloudwatch=AWS/EC2",
            "monitor.cloudwatch: must be a namespace other than AWS's own",
        ),
        ("monitor.send_every_s=0", "monitor.send_every_s: must be > 0, got 0"),
    ],
)
def test_what_is_wrong_is_told_by_its_key(
    recipe: Path, item: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_main([f"recipe={recipe}", item]) == 2
    assert told in capsys.readouterr().err
