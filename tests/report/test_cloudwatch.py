"""CloudWatch's alarms and dashboard: requests that AWS's model takes, as printed and as a run makes them."""

import json

import pytest

from kd.cli import report_main
from kd.report.alerts import alarms, cloudwatch
from kd.report.rules import RULES

TOPIC = "arn:aws:sns:eu-west-1:123456789012:kd"


def test_the_requests_are_aws_own() -> None:
    pytest.importorskip("boto3")
    from botocore.session import get_session
    from botocore.validate import ParamValidator

    model = get_session().get_service_model("cloudwatch")

    def check(operation: str, request: dict) -> None:
        report = ParamValidator().validate(request, model.operation_model(operation).input_shape)
        assert not report.has_errors(), report.generate_report()

    found = alarms("KD/food", TOPIC)
    assert [alarm["AlarmName"] for alarm in found] == [f"KD/food {rule}" for rule in RULES]
    assert all(alarm["AlarmActions"] == [TOPIC] and alarm["AlarmDescription"] for alarm in found)
    assert found[0]["Metrics"][0]["Expression"].endswith(f"WHERE rule = '{next(iter(RULES))}'")
    for alarm in [*found, *alarms("KD")]:
        check("PutMetricAlarm", alarm)
    request = cloudwatch("KD/food", "eu-west-1")
    check("PutDashboard", request)
    widgets = json.loads(request["DashboardBody"])["widgets"]
    (searched,) = next(w for w in widgets if w["properties"]["title"] == "Phases of a step")[
        "properties"
    ]["metrics"]
    assert (
        searched[0]["expression"]
        == "SEARCH('Namespace=\"KD/food\" MetricName=\"phase_seconds\"', 'Average', 60)"
    )


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_main(["--alarms", "KD/food", f"topic={TOPIC}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        len(found["PutMetricAlarm"]) == len(RULES)
        and found["PutDashboard"]["DashboardName"] == "KD-food"
    )
    assert report_main(["--alarms"]) == 2
    assert "--alarms takes one namespace" in capsys.readouterr().err
