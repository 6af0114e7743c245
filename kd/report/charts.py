"""Tables and charts of a run's page: phases, cores, the machine, losses, training health. ``None``: nothing to show."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from kd.report.facts import Facts
from kd.report.metric import PROBE, in_units
from kd.report.ratio import ratio
from kd.report.records import PHASES, RunRecords, Sample
from kd.report.step_facts import gpus_of

BINS = 160  # columns of a chart: what a screen shows, whatever the run's length
MACHINE = {
    "CPU{} (% of a core)": {
        "training processes CPU": "main",
        "loader processes CPU": "loaders",
        "I/O wait": "iowait",
    },
    "Memory{} (MB)": {"training and loaders": "rss_mb", "swap": "swap_mb"},
    "Disk and network{} (MB/s)": {
        "disk read": "disk_r",
        "disk write": "disk_w",
        "received": "net_r",
        "sent": "net_w",
    },
}
GPU = {"%": {"utilisation": "util", "memory": "mem"}, "W": {"power": "w"}, "MHz": {"clock": "mhz"}}
METRICS = [("Training losses", "train/", False), ("Validation", "val/", False), ("Validation, in units", "val/", True),
           ("Learning rate", "train/lr", False)]  # fmt: skip
Section = dict[str, Any]  # of a page


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], **more: object
) -> Section:
    """A section with a table; ``more`` are its further keys (``note``, ``sort``)."""
    return {"kind": "table", "title": title, "columns": columns, "rows": rows, **more}


def line_chart(
    title: str, x: Sequence[float], x_name: str, series: Mapping[str, Sequence[float]]
) -> Section | None:
    """Lines without any value are left out."""
    shown = {
        name: values for name, values in series.items() if any(math.isfinite(v) for v in values)
    }
    return (
        {"kind": "lines", "title": title, "x": x, "x_name": x_name, "series": shown}
        if shown
        else None
    )


def epoch_chart(title: str, series: Mapping[str, Mapping[float, float]]) -> Section | None:
    """Lines over epochs, counted from 1; None without values.

    Args:
        title: of the chart.
        series: by name, the value of each epoch (from 0); missing epochs leave a gap.
    """
    epochs = sorted({epoch for values in series.values() for epoch in values})
    lines = {
        name: [values.get(epoch, math.nan) for epoch in epochs] for name, values in series.items()
    }
    return line_chart(title, [epoch + 1 for epoch in epochs], "epoch", lines)


def by_epoch(run: RunRecords, metric: str) -> dict[float, float]:
    """The last value of a metric in each epoch that has one, in order; epochs from 0."""
    return dict(
        sorted({r["epoch"]: r[metric] for r in run.metrics if metric in r and "epoch" in r}.items())
    )


def _binned(items: Sequence[Any], value: Callable[[Sequence[Any]], Any]) -> list[Any]:
    """``value`` of each of up to :data:`BINS` equal slices."""
    size = max(1, math.ceil(len(items) / BINS))
    return [value(items[i : i + size]) for i in range(0, len(items), size)]


def _average(values: Sequence[float | None]) -> float:
    known = [v for v in values if v is not None]
    return round(ratio(sum(known), len(known), otherwise=math.nan), 4)


def _chart(
    title: str, x: Sequence[float], x_name: str, rows: Sequence[Any], keys: Mapping[str, str]
) -> Section | None:
    """A line of each of ``keys``: its label, and its name in the ``rows``."""
    return line_chart(
        title,
        x,
        x_name,
        {k: _binned([r.get(key) for r in rows], _average) for k, key in keys.items()},
    )


def phase_chart(facts: Facts) -> Section | None:
    """The phases of a step in ms, stacked over the steps of the typical rank; None without recorded steps."""
    if not facts.steps:
        return None
    used = [name for name in PHASES if any(name in s["p"] for s in facts.steps)]
    step, total = sum(facts.phases.get(name, 0.0) for name in used) or 1.0, facts.total
    own = ""
    if total.get("ms") and "own_ms" in total:
        own = f" Writing these records took {ratio(total['own_ms'], total['ms']):.2%} of it."
    clock = "the host's clock" if facts.cpu else "the device's clock (events)"
    return {
        "kind": "phases",
        "title": "Phases of a step (ms)",
        "names": used,
        "bars": _binned(
            facts.steps,
            lambda part: [_average([s["p"].get(name, 0.0) for s in part]) for name in used],
        ),
        "x": _binned(facts.steps, lambda part: part[0]["step"]),
        "share": [round(ratio(facts.phases.get(name, 0.0), step), 4) for name in used],
        "mean": [round(facts.phases.get(name, 0.0), 2) for name in used],
        "note": f"Rank {facts.rank}, by {clock}; the phases add up to the step.{own}",
    }


def _seconds(samples: Sequence[Sample]) -> list[float]:
    return _binned(samples, lambda part: round(part[0]["t"] - samples[0]["t"], 1))


def heat(run: RunRecords) -> Section | None:
    """How busy each core and GPU was over time, in %; None without samples."""
    rows: list[tuple[str, Sequence[float | None]]] = []
    for node, samples in run.samples.items():
        where = f"{node} " if len(run.samples) > 1 else ""
        cores = zip_longest(*(s["cpu"] for s in samples))
        rows += [(f"{where}core {number}", use) for number, use in enumerate(cores)]
        rows += [
            (f"{where}GPU {i}", [g.get("util") for g in gpu])
            for i, gpu in enumerate(gpus_of(samples))
        ]
    if not rows:
        return None
    shown = [[name, _binned(use, _average)] for name, use in rows]
    times = _seconds(next(iter(run.samples.values())))
    return {"kind": "heat", "title": "Cores and GPUs over time (% busy)", "rows": shown, "x": times}


def machine_lines(run: RunRecords) -> list[Section | None]:
    """CPU, memory, disk, network and GPUs of each machine over time."""
    charts: list[Section | None] = []
    for node, samples in run.samples.items():
        name, x = f" of {node}" if len(run.samples) > 1 else "", _seconds(samples)
        rows = [{**s, "loaders": sum(s.get("workers", []))} for s in samples]
        charts += [
            _chart(title.format(name), x, "s", rows, keys) for title, keys in MACHINE.items()
        ]
        for number, gpu in enumerate(gpus_of(samples)):
            charts += [
                _chart(f"GPU {number}{name} ({unit})", x, "s", gpu, keys)
                for unit, keys in GPU.items()
            ]
    return charts


def _is_shown(metric: str, prefix: str) -> bool:
    """The rate has a chart of its own, as features' accuracy; a line a class is too much, a rank has another scale."""
    if metric.rpartition("/")[2] in (*PROBE, "rankme"):
        return False
    return (
        metric.startswith(prefix)
        and "/iou_" not in metric
        and (metric.endswith("/lr") == prefix.endswith("/lr"))
    )


def metric_lines(run: RunRecords) -> list[Section | None]:
    """Losses and validation metrics over the steps, for each student."""
    known = {k for row in run.metrics for k in row}
    charts = []
    for student in run.students:
        place, of = (f"{student}/", f" of {student}") if student else ("", "")
        for title, prefix, units in METRICS:
            names = sorted(
                k for k in known if _is_shown(k, place + prefix) and in_units(k) == units
            )
            rows = [row for row in run.metrics if any(n in row for n in names)]
            x = _binned(rows, lambda part: part[-1].get("step", 0.0))
            charts.append(
                _chart(f"{title}{of}", x, "step", rows, {n.removeprefix(place): n for n in names})
            )
    return charts


def health_lines(run: RunRecords) -> list[Section | None]:
    """Gradients, updates, activations, teacher and student over the steps."""
    return [
        chart for student in run.students for chart in _health_of(run.health_of(student), student)
    ]


def _health_of(health: Sequence[dict[str, Any]], student: str) -> list[Section | None]:
    of = f" of {student}" if student else ""
    x = _binned(health, lambda part: part[0]["step"])

    def group(title: str, key: str) -> Section | None:
        rows = [h.get(key, {}) for h in health]
        return _chart(title, x, "step", rows, {name: name for row in rows for name in row})

    return [
        _chart(f"Gradient norm{of}", x, "step", health, {"before clipping": "grad_norm"}),
        _chart(
            f"Update of the weights over their size{of}",
            x,
            "step",
            health,
            {"ratio": "update_ratio"},
        ),
        _chart(
            f"Teacher and {student or 'student'} on training batches",
            x,
            "step",
            health,
            {"agreement": "agreement", "teacher entropy / maximum": "teacher_entropy"},
        ),
        group(f"Loss shares{of}", "loss_shares"),
        group(f"Activations' standard deviation{of}", "spread"),
        group(f"Units that never fire{of}", "dead"),
    ]
