"""A Grafana dashboard over the endpoint of ``monitor.prometheus_port``: ``kd-report --dashboard``."""

from typing import Any

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


def panel(number: int, title: str, expression: str, legend: str, unit: str, stacked: bool) -> dict[str, Any]:
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


def dashboard() -> dict[str, Any]:
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
