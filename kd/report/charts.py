"""Tables and charts of a run's page: phases, cores, the machine, losses, training health. ``None``: nothing to show.

A *section* is a dict that ``report/html.py`` writes and the page draws by its ``kind``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from kd.report.facts import Facts
from kd.report.metric import PROBE, in_units
from kd.report.ratio import ratio
from kd.report.records import PHASES, RunRecords, Sample
from kd.report.step_facts import gpus_of
from kd.report.tables import Chart

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
METRICS = [
    ("Training losses, weighted", "train/", False),
    ("Validation", "val/", False),
    ("Validation, in units", "val/", True),
    ("Learning rate", "train/lr", False),
]
HEALTH = {  # chart -> its lines: label, and name in the records
    "Gradient norm": {"before clipping": "grad_norm"},
    "Update of the weights over their size": {"ratio": "update_ratio"},
    "Teacher and student on training batches": {
        "agreement": "agreement",
        "teacher entropy / maximum": "teacher_entropy",
    },
}
HEALTH_GROUPS = {  # chart -> a value of the records with a number for each loss, or layer
    "Loss shares": "loss_shares",
    "Activations' standard deviation": "spread",
    "Units that never fire": "dead",
}
Section = dict[str, Any]  # of a page


def line_chart(
    title: str, x: Sequence[float], x_name: str, series: Mapping[str, Sequence[float]]
) -> Chart | None:
    """A chart of the series that have a value; None without any. NaN leaves a gap."""
    shown = {}
    for name, values in series.items():
        if any(math.isfinite(value) for value in values):
            shown[name] = values
    return Chart(title, x, x_name, shown) if shown else None


def epoch_chart(title: str, series: Mapping[str, Mapping[float, float]]) -> Chart | None:
    """Lines over epochs, counted from 1; None without values.

    Args:
        title: of the chart.
        series: by name, the value of each epoch (from 0); missing epochs leave a gap.
    """
    known: set[float] = set()
    for values in series.values():
        known.update(values)
    epochs = sorted(known)
    lines = {}
    for name, values in series.items():
        lines[name] = [values.get(epoch, math.nan) for epoch in epochs]
    from_1 = [epoch + 1 for epoch in epochs]
    return line_chart(title, from_1, "epoch", lines)


def by_epoch(run: RunRecords, metric: str) -> dict[float, float]:
    """The last value of a metric in each epoch that has one, in order; epochs from 0."""
    values = {}
    for row in run.metrics:
        if metric in row and "epoch" in row:
            values[row["epoch"]] = row[metric]
    return dict(sorted(values.items()))


def _binned(items: Sequence[Any], value: Callable[[Sequence[Any]], Any]) -> list[Any]:
    """``value`` of each of up to :data:`BINS` slices of equal length, in order; the last may be shorter."""
    size = max(1, math.ceil(len(items) / BINS))
    values = []
    for first in range(0, len(items), size):
        part = items[first : first + size]
        values.append(value(part))
    return values


def _average(values: Sequence[float | None]) -> float:
    """The mean of the values that are known, to four digits; NaN, a gap in a chart, where none is."""
    known = [value for value in values if value is not None]
    mean = ratio(sum(known), len(known), otherwise=math.nan)
    return float(f"{mean:.4g}")


def _chart(
    title: str, x: Sequence[float], x_name: str, rows: Sequence[Any], keys: Mapping[str, str]
) -> Chart | None:
    """A chart with a line for each of ``keys``, averaged over the slices of :func:`_binned`; None without values.

    Args:
        title: of the chart.
        x: of each slice of ``rows``, common to all lines.
        x_name: its name and unit.
        rows: readings in order; a reading may lack a key.
        keys: name in a row by the line's label.
    """
    lines = {}
    for label, key in keys.items():
        values = [row.get(key) for row in rows]
        lines[label] = _binned(values, _average)
    return line_chart(title, x, x_name, lines)


def phase_chart(facts: Facts) -> Section | None:
    """The phases of a step in ms, stacked over the steps of the typical rank; None without recorded steps.

    ``bars`` are means of the recorded steps of a slice; ``mean`` (ms) and ``share`` (0 to 1) are exact, over all steps but
    the first of the run and of each part that resumed it.
    """
    if not facts.steps:
        return None
    used = [name for name in PHASES if any(name in step["p"] for step in facts.steps)]
    means = {name: facts.phases.get(name, 0.0) for name in used}  # ms
    step_ms = sum(means.values()) or 1.0

    def phase_means(steps: Sequence[Any]) -> list[float]:
        return [_average([step["p"].get(name, 0.0) for step in steps]) for name in used]

    clock = "the host's clock" if facts.cpu else "the device's clock (events)"
    note = f"Rank {facts.rank}, by {clock}; the phases add up to the step."
    total = facts.total
    if total.get("ms") and "own_ms" in total:
        note += f" Writing these records took {ratio(total['own_ms'], total['ms']):.2%} of it."
    return {
        "kind": "phases",
        "title": "Phases of a step (ms)",
        "names": used,
        "bars": _binned(facts.steps, phase_means),
        "x": _binned(facts.steps, lambda steps: steps[0]["step"]),
        "share": [round(ratio(ms, step_ms), 4) for ms in means.values()],
        "mean": [round(ms, 2) for ms in means.values()],
        "note": note,
    }


def _seconds(samples: Sequence[Sample]) -> list[float]:
    """Seconds since the first sample, of each slice."""
    start_t = samples[0]["t"]
    return _binned(samples, lambda slice_: round(slice_[0]["t"] - start_t, 1))


def heat(run: RunRecords) -> Section | None:
    """How busy each core and GPU was over time, in %, a row each; None without samples.

    The time axis is that of the first machine.
    """
    rows = []
    for node, samples in run.samples.items():
        where = ""
        if len(run.samples) > 1:
            where = f"{node} "
        use_of_cores = [sample["cpu"] for sample in samples]
        for number, use in enumerate(zip_longest(*use_of_cores)):
            rows.append([f"{where}core {number}", _binned(use, _average)])
        for number, readings in enumerate(gpus_of(samples)):
            use_of_gpu = [reading.get("util") for reading in readings]
            rows.append([f"{where}GPU {number}", _binned(use_of_gpu, _average)])
    if not rows:
        return None
    first_samples = next(iter(run.samples.values()))
    title = "Cores and GPUs over time (% busy)"
    return {"kind": "heat", "title": title, "rows": rows, "x": _seconds(first_samples)}


def machine_lines(run: RunRecords) -> list[Chart | None]:
    """CPU, memory, disk, network and GPUs of each machine over time; None in place of a chart without values."""
    charts = []
    for node, samples in run.samples.items():
        name = ""
        if len(run.samples) > 1:
            name = f" of {node}"
        x = _seconds(samples)
        rows = []
        for sample in samples:
            loaders = sum(sample.get("workers", []))
            rows.append({**sample, "loaders": loaders})
        for title, keys in MACHINE.items():
            charts.append(_chart(title.format(name), x, "s", rows, keys))
        for number, readings in enumerate(gpus_of(samples)):
            for unit, keys in GPU.items():
                title = f"GPU {number}{name} ({unit})"
                charts.append(_chart(title, x, "s", readings, keys))
    return charts


def _is_shown(metric: str, prefix: str) -> bool:
    """Whether a metric belongs in the chart of all metrics that begin with ``prefix``.

    The rate has a chart of its own, as features' accuracy; a line a class is too much, a rank has another scale.
    """
    _, _, name = metric.rpartition("/")
    if name in (*PROBE, "rankme") or "/iou_" in metric:
        return False
    is_rate = metric.endswith("/lr")
    rate_chart = prefix.endswith("/lr")
    return metric.startswith(prefix) and is_rate == rate_chart


def metric_lines(run: RunRecords) -> list[Chart | None]:
    """Losses and validation metrics over the steps; None in place of a chart without values.

    Training losses are shown as they enter their sum: each times its weight.
    """
    known = sorted({name for row in run.metrics for name in row})
    weights = _weights(run)
    charts = []
    for title, prefix, units in METRICS:
        names = [name for name in known if _is_shown(name, prefix) and in_units(name) == units]
        rows = []
        for row in run.metrics:
            shown = {}
            for name in names:
                if name in row:
                    shown[name] = row[name] * weights.get(name, 1.0)
            if shown:
                shown["step"] = row.get("step", 0.0)
                rows.append(shown)
        steps = _binned(rows, lambda slice_: slice_[-1]["step"])
        charts.append(_chart(title, steps, "step", rows, {name: name for name in names}))
    return charts


def _weights(run: RunRecords) -> dict[str, float]:
    """The weight of each training loss by its column of ``metrics.csv``; losses without one weigh 1."""
    model = run.config.get("model") or {}
    weights = {"train/task_loss": model.get("task_loss_weight", 1.0)}
    for name, loss in (model.get("distill_losses") or {}).items():
        arguments: dict[str, float] = {}
        if isinstance(loss, dict):
            arguments = loss.get("init_args") or {}
        weights[f"train/{name}_loss"] = arguments.get("weight", 1.0)
    return weights


def health_lines(run: RunRecords) -> list[Chart | None]:
    """Charts of the training's health over the steps: gradients, updates, activations, teacher; None in place of a chart
    without values.
    """
    steps = _binned(run.health, lambda slice_: slice_[0]["step"])
    charts = []
    for title, lines in HEALTH.items():
        charts.append(_chart(title, steps, "step", run.health, lines))
    for title, key in HEALTH_GROUPS.items():
        rows = [reading.get(key, {}) for reading in run.health]
        names = {}
        for row in rows:
            names.update({name: name for name in row})
        charts.append(_chart(title, steps, "step", rows, names))
    return charts
