"""CloudWatch over what ``monitor.cloudwatch`` sends: an alarm for each rule, and a dashboard, as requests."""

import json
import re
from typing import Any

from kd.report.alerts import summary_of
from kd.report.dashboard import PANELS
from kd.report.rules import RULES

PERIOD_S = 60


def alarms(namespace: str, topic: str | None = None) -> list[dict[str, Any]]:
    """Requests of ``PutMetricAlarm``; each alarm watches its rule in all runs that send to the namespace."""
    return [
        {
            "AlarmName": f"{namespace} {rule}",
            "AlarmDescription": summary_of(rule),
            "ActionsEnabled": topic is not None,
            "AlarmActions": [topic] if topic else [],
            "Metrics": [
                {"Id": "fires", "Expression": f"SELECT MAX(rule_fired) FROM \"{namespace}\" WHERE rule = '{rule}'",
                 "Period": PERIOD_S, "ReturnData": True}
            ],
            "EvaluationPeriods": 1, "Threshold": 0.0, "ComparisonOperator": "GreaterThanThreshold",
            "TreatMissingData": "notBreaching",
        }
        for rule in RULES
    ]  # fmt: skip


def dashboard(namespace: str, region: str) -> dict[str, Any]:
    """The request of ``PutDashboard``: the panels of the Grafana dashboard."""
    widgets = []
    for number, (title, expression, _, _, stacked) in enumerate(PANELS):
        names = dict.fromkeys(re.findall(r"kd_(\w+)", expression))
        shown = [
            [{"expression": f"SEARCH('Namespace=\"{namespace}\" MetricName=\"{name}\"', 'Average', {PERIOD_S})"}]
            for name in names
        ]
        properties = {"title": title, "view": "timeSeries", "stacked": stacked, "region": region, "metrics": shown}
        place = {"x": 12 * (number % 2), "y": 6 * (number // 2), "width": 12, "height": 6}
        widgets.append({"type": "metric", **place, "properties": properties})
    name = re.sub(r"[^\w-]+", "-", namespace)
    return {"DashboardName": name, "DashboardBody": json.dumps({"widgets": widgets})}
