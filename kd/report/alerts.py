"""Alerts, one for each rule, and dashboards: of Prometheus and Grafana, and of CloudWatch."""

import inspect
import json
import re
from typing import Any

from kd.report.rules import RULES, thresholds_of

PERIOD_S = 60  # of CloudWatch's values and alarms


def _alert(name: str, expression: str, held: str, summary: str) -> dict[str, Any]:
    """A rule of Prometheus on the series of ``monitor.prometheus_port`` or of kd-serve's ``/metrics``.

    Args:
        name: of the alert.
        expression: in PromQL.
        held: how long it must hold, such as ``5m``.
        summary: a sentence, sent with the alert.
    """
    summary = f"{{{{ $labels.instance }}}}: {summary}"
    return {
        "alert": name,
        "expr": expression,
        "for": held,
        "labels": {"severity": "warning"},
        "annotations": {"summary": summary},
    }


def summary_of(rule: str) -> str:
    """What a rule means, with its default thresholds.

    >>> summary_of("DeadRelu")
    "More than 0.5 of a layer's units never fire."
    """
    text = (inspect.getdoc(RULES[rule]) or rule).splitlines()[0]
    values = thresholds_of(rule)
    return re.sub("``(.+?)``", lambda name: f"{values.get(name[1], name[1])}", text)


REFUSED, ALL = 'rate(kd_requests_total{code="503"}[5m])', "rate(kd_requests_total[5m])"
ALERTS = [
    *(_alert(rule, f'kd_rule_fired{{rule="{rule}"}} > 0', "1m", summary_of(rule)) for rule in RULES),
    _alert("ServerRefuses", f"sum by (instance) ({REFUSED}) / sum by (instance) ({ALL}) > 0.05", "5m",
           "kd-serve answers 503 to more than 5 % of the requests: they come faster than it computes."),
    _alert("ServerFails", 'sum by (instance) (rate(kd_requests_total{code=~"5..",code!="503"}[5m])) > 0', "1m",
           "kd-serve answers with errors of its own: see its log."),
]  # fmt: skip


def prometheus_rules() -> dict[str, Any]:
    """Prometheus' rule file as plain values: one alert for each of kd's rules."""
    return {"groups": [{"name": "kd", "rules": ALERTS}]}


def alarms(namespace: str, topic: str | None = None) -> list[dict[str, Any]]:
    """Requests of CloudWatch's ``PutMetricAlarm``, one for each rule; each watches all runs that send to the namespace.

    Args:
        namespace: of the metrics, ``monitor.cloudwatch``.
        topic: ARN of the SNS topic that is notified; None: the alarm only changes its state.
    """
    return [
        {
            "AlarmName": f"{namespace} {rule}",
            "AlarmDescription": summary_of(rule),
            "ActionsEnabled": topic is not None,
            "AlarmActions": [topic] if topic else [],
            "Metrics": [
                {
                    "Id": "fires",
                    "Expression": f"SELECT MAX(rule_fired) FROM \"{namespace}\" WHERE rule = '{rule}'",
                    "Period": PERIOD_S,
                    "ReturnData": True,
                }
            ],
            "EvaluationPeriods": 1,
            "Threshold": 0.0,
            "ComparisonOperator": "GreaterThanThreshold",
            "TreatMissingData": "notBreaching",
        }
        for rule in RULES
    ]


PANELS = [  # title, expression, legend, unit, stacked
    ("Phases of a step", "kd_phase_seconds", "{{phase}}", "s", True),
    ("Images/s", "kd_images_per_second", "{{instance}}", "none", False),
    ("What it is bound by", "kd_verdict > 0", "{{bound}}", "none", False),
    ("Speed without each limit", "kd_limit_speedup", "{{bound}}", "none", False),
    ("Rules that fire", "kd_rule_fired > 0", "{{rule}}", "none", True),
    ("Losses", 'kd_metric{name=~"(.*/)?train/.*"}', "{{name}}", "none", False),
    ("Validation", 'kd_metric{name=~"(.*/)?val/.*"}', "{{name}}", "none", False),
    ("Data wait, share of the step", 'kd_phase_seconds{phase="data"} / ignoring(phase) kd_step_seconds',
     "{{instance}}", "percentunit", False),
    ("Gradient norm, update ratio", 'kd_health{name=~"grad_norm|update_ratio"}', "{{name}} {{student}}", "none", False),
    ("Agreement and the teacher's entropy", 'kd_health{name=~"agreement|teacher_entropy"}', "{{name}} {{student}}",
     "percentunit", False),
    ("Cores", "kd_cpu_percent", "core {{core}}", "percent", False),
    ("Ready but without a core; I/O wait", '{__name__=~"kd_thread_wait_percent|kd_iowait_percent"}', "{{__name__}}",
     "percent", False),
    ("Network", "kd_network_bytes_per_second", "{{direction}} {{instance}}", "Bps", False),
    ("Disk", "kd_disk_bytes_per_second", "{{direction}} {{instance}}", "Bps", False),
    ("Memory", "kd_training_memory_bytes", "{{instance}}", "bytes", False),
    ("GPUs", "kd_gpu_percent", "GPU {{gpu}}", "percent", False),
    ("GPU memory", "kd_gpu_memory_percent", "GPU {{gpu}}", "percent", False),
    ("GPU power", "kd_gpu_watts", "GPU {{gpu}}", "watt", False),
]  # fmt: skip


def panel(
    number: int, title: str, expression: str, legend: str, unit: str, stacked: bool
) -> dict[str, Any]:
    """One time series of a Grafana dashboard; two panels a row.

    Args:
        number: place on the dashboard, from 0.
        title: of the panel.
        expression: in PromQL.
        legend: format of a series' name.
        unit: as Grafana names it (``ms``, ``percent``).
        stacked: areas on top of each other.
    """
    custom = {
        "fillOpacity": 60 if stacked else 0,
        "stacking": {"mode": "normal" if stacked else "none"},
    }
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [{"refId": "A", "expr": expression, "legendFormat": legend}],
    }


def grafana() -> dict[str, Any]:
    """Grafana's dashboard of a training run as plain values, to be written as JSON."""
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "title": "kd training",
        "uid": "kd-training",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": [panel(number, *row) for number, row in enumerate(PANELS)],
    }


def cloudwatch(namespace: str, region: str) -> dict[str, Any]:
    """The request of CloudWatch's ``PutDashboard``: the panels of the Grafana dashboard.

    Args:
        namespace: of the metrics, ``monitor.cloudwatch``.
        region: of AWS.
    """
    widgets = []
    for number, (title, expression, _, _, stacked) in enumerate(PANELS):
        names = dict.fromkeys(re.findall(r"kd_(\w+)", expression))
        shown = [
            [
                {
                    "expression": f"SEARCH('Namespace=\"{namespace}\" MetricName=\"{name}\"', 'Average', {PERIOD_S})"
                }
            ]
            for name in names
        ]
        properties = {
            "title": title,
            "view": "timeSeries",
            "stacked": stacked,
            "region": region,
            "metrics": shown,
        }
        place = {"x": 12 * (number % 2), "y": 6 * (number // 2), "width": 12, "height": 6}
        widgets.append({"type": "metric", **place, "properties": properties})
    name = re.sub(r"[^\w-]+", "-", namespace)
    return {"DashboardName": name, "DashboardBody": json.dumps({"widgets": widgets})}
