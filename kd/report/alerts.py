"""Alerts: one for each rule, and those of kd-serve: ``kd-report --alerts`` writes them for Prometheus."""

import inspect
import re
from typing import Any, NamedTuple

from kd.report.rules import RULES, thresholds_of


class Alert(NamedTuple):
    """One alert on the series of ``monitor.prometheus_port`` or of kd-serve's ``/metrics``."""

    name: str
    expression: str  # in PromQL
    held: str  # how long it must hold
    summary: str


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
    *(Alert(rule, f'kd_rule_fired{{rule="{rule}"}} > 0', "1m", summary_of(rule)) for rule in RULES),
    Alert("ServerRefuses", f"sum by (instance) ({REFUSED}) / sum by (instance) ({ALL}) > 0.05", "5m",
          "kd-serve answers 503 to more than 5 % of the requests: they come faster than it computes."),
    Alert("ServerFails", 'sum by (instance) (rate(kd_requests_total{code=~"5..",code!="503"}[5m])) > 0', "1m",
          "kd-serve answers with errors of its own: see its log."),
]  # fmt: skip


def prometheus_rules() -> dict[str, Any]:
    """A file of alerting rules as Prometheus reads it."""
    rules = [
        {"alert": a.name, "expr": a.expression, "for": a.held, "labels": {"severity": "warning"},
         "annotations": {"summary": f"{{{{ $labels.instance }}}}: {a.summary}"}}
        for a in ALERTS
    ]  # fmt: skip
    return {"groups": [{"name": "kd", "rules": rules}]}
