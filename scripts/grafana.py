"""Writes scripts/grafana.json, the dashboard over the endpoint of ``monitor.prometheus_port``.

python scripts/grafana.py
"""

import json
from pathlib import Path

PANELS = [  # title, expression, legend, unit, stacked
    ("Phases of a step", "kd_phase_seconds", "{{phase}}", "s", True),
    ("Images/s", "kd_images_per_second", "{{instance}}", "none", False),
    ("Losses", 'kd_metric{name=~"(.*/)?train/.*"}', "{{name}}", "none", False),
    ("Validation", 'kd_metric{name=~"(.*/)?val/.*"}', "{{name}}", "none", False),
    ("Data wait, share of the step", 'kd_phase_seconds{phase="data"} / ignoring(phase) kd_step_seconds',
     "{{instance}}", "percentunit", False),
    ("Cores", "kd_cpu_percent", "core {{core}}", "percent", False),
    ("GPUs", "kd_gpu_percent", "GPU {{gpu}}", "percent", False),
    ("GPU memory", "kd_gpu_memory_percent", "GPU {{gpu}}", "percent", False),
]  # fmt: skip


def panel(number: int, title: str, expression: str, legend: str, unit: str, stacked: bool) -> dict:
    """A time series, two in a row."""
    custom = {"fillOpacity": 60 if stacked else 0, "stacking": {"mode": "normal" if stacked else "none"}}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [{"refId": "A", "expr": expression, "legendFormat": legend}],
    }


def dashboard() -> dict:
    """Grafana's JSON model."""
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


if __name__ == "__main__":
    Path(__file__).with_suffix(".json").write_text(json.dumps(dashboard(), indent=2) + "\n")
