"""Charts of a run's page: phases, cores, the machine, losses, training health. ``None``: nothing to show.

A *section* is a dict that ``report/html.py`` writes and the page draws by its ``kind``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from kd.report.facts import Facts
from kd.report.metric import PROBE, in_units
from kd.report.ratio import Number, ratio
from kd.report.records import PHASES, RunRecords
from kd.report.step_facts import gpus_of, mean
from kd.report.tables import Chart
from kd.storage.elsewhere import Json

BINS = 160  # columns of a chart: what a screen shows, whatever the run's length
MACHINE = {  # chart -> its lines: label, and the value's name in a sample
    "Machine{} (%)": {"CPU": "cores", "memory": "mem", "I/O wait": "iowait"},
    "CPU{} (% of a core)": {"training processes": "main", "loader processes": "loaders"},
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
Section = Json  # of a page
Lines = dict[str, list[Any]]
"""By label, a value of each reading; None where it lacks one."""


def lines_in_rows(rows: Sequence[Json], keys: Mapping[str, str]) -> Lines:
    """A line for each label of ``keys``: each row's value under the label's key, None where the row lacks it.

    Lines without any value are left out.
    """
    lines = {label: [row.get(key) for row in rows] for label, key in keys.items()}
    return {label: values for label, values in lines.items() if set(values) != {None}}


def line_chart(title: str, x: Sequence[float], x_name: str, lines: Lines) -> Chart | None:
    """A chart of lines, averaged over up to :data:`BINS` slices of equal length, each drawn at its first ``x``.

    Lines without a finite value are left out; None where none is left.
    """
    shown = {}
    for label, values in lines.items():
        averages = _binned(values, _average)
        if any(math.isfinite(value) for value in averages):
            shown[label] = averages
    return Chart(title, _binned(x, lambda slice_: slice_[0]), x_name, shown) if shown else None


def epoch_chart(title: str, series: Mapping[str, Mapping[float, float]]) -> Chart | None:
    """Lines over epochs, counted from 1; None without values.

    Args:
        title: of the chart.
        series: by name, the value of each epoch (from 0); missing epochs leave a gap.
    """
    epochs = sorted(set().union(*series.values()))
    lines = {}
    for name, values in series.items():
        lines[name] = [values.get(epoch) for epoch in epochs]
    counted_from_one = [epoch + 1 for epoch in epochs]
    return line_chart(title, counted_from_one, "epoch", lines)


def by_epoch(run: RunRecords, metric: str) -> dict[float, float]:
    """The last value of a metric in each epoch that has one, in order, NaN left out; epochs from 0."""
    values = {}
    for row in run.metrics:
        value = row.get(metric, math.nan)
        if "epoch" in row and not math.isnan(value):
            values[row["epoch"]] = value
    return dict(sorted(values.items()))


def _binned(items: Sequence[Any], value: Callable[[Sequence[Any]], Any]) -> list[Any]:
    """``value`` of each of up to :data:`BINS` slices of equal length, in order; the last may be shorter."""
    size = max(1, math.ceil(len(items) / BINS))
    return [value(items[first : first + size]) for first in range(0, len(items), size)]


def _average(values: Sequence[Number]) -> float:
    """The mean of the values that are known, to four digits; NaN, a gap in a chart, where none is."""
    known = [value for value in values if value is not None]
    return float(f"{mean(known):.4g}")


def phase_chart(facts: Facts) -> Section | None:
    """The phases of a step in ms, stacked over the steps of the typical rank; None without recorded steps.

    ``bars`` are means of the recorded steps of a slice; ``mean`` (ms) and ``share`` (0 to 1) are exact, over all steps but
    the first of the run and of each part that resumed it.
    """
    if not facts.steps:
        return None
    used = [name for name in PHASES if any(name in step["p"] for step in facts.steps)]
    means = [facts.phases.get(name, 0.0) for name in used]  # ms
    step_ms = sum(means) or 1.0

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
        "share": [round(ratio(ms, step_ms), 4) for ms in means],
        "mean": [round(ms, 2) for ms in means],
        "note": note,
    }


# -- the machine -------------------------------------------------------------------------------------------------------
def machine_series(run: RunRecords) -> dict[str, tuple[list[float], Lines]]:
    """The readings of each machine and its GPUs by chart title: seconds since the machine's first sample, and lines."""
    series = {}
    for node, samples in run.samples.items():
        where = f" of {node}" if len(run.samples) > 1 else ""
        seconds = [round(sample["t"] - samples[0]["t"], 1) for sample in samples]
        rows: list[Json] = []
        for sample in samples:
            loaders = sum(sample.get("workers", []))
            rows.append({**sample, "cores": mean(sample["cpu"]), "loaders": loaders})
        for title, keys in MACHINE.items():
            series[title.format(where)] = seconds, lines_in_rows(rows, keys)
        for number, readings in enumerate(gpus_of(samples)):
            for unit, keys in GPU.items():
                series[f"GPU {number}{where} ({unit})"] = seconds, lines_in_rows(readings, keys)
    return series


def heat(facts: Facts) -> Section | None:
    """How busy each core and GPU was over time, in %, a row each; None without samples.

    The time axis is that of the first machine.
    """
    run = facts.run
    rows = []
    x: list[float] = []
    for node, samples in run.samples.items():
        where = f"{node} " if len(run.samples) > 1 else ""
        begun = samples[0]["t"]
        x = x or [round(sample["t"] - begun, 1) for sample in samples]
        of_samples = [sample["cpu"] for sample in samples]
        use: dict[str, Sequence[float | None]] = {}
        for number, core in enumerate(zip_longest(*of_samples)):
            use[f"core {number}"] = core
        for number, readings in enumerate(gpus_of(samples)):
            use[f"GPU {number}"] = [reading.get("util") for reading in readings]
        for name, percent in use.items():
            rows.append([where + name, _binned(percent, _average)])
    if not rows:
        return None
    title = "Cores and GPUs over time (% busy)"
    times = _binned(x, lambda slice_: slice_[0])
    return {"kind": "heat", "title": title, "rows": rows, "x": times}


def machine_lines(facts: Facts) -> list[Chart | None]:
    """CPU, memory, disk, network and GPUs of each machine over time; None in place of a chart without values."""
    charts = machine_series(facts.run).items()
    return [line_chart(title, seconds, "s", lines) for title, (seconds, lines) in charts]


# -- losses, metrics, health -------------------------------------------------------------------------------------------
def _is_shown(metric: str, prefix: str) -> bool:
    """Whether a metric belongs in the chart of all metrics that begin with ``prefix``.

    The learning rate has its own chart, and so has the accuracy of features (:data:`PROBE`). The IoU of each class would be
    too many lines; ``rankme``, a rank, has another scale.
    """
    _, _, name = metric.rpartition("/")
    if name in (*PROBE, "rankme") or "/iou_" in metric:
        return False
    if not metric.startswith(prefix):
        return False
    return metric.endswith("/lr") == prefix.endswith("/lr")


def metric_lines(run: RunRecords) -> list[Chart | None]:
    """The charts of :data:`METRICS` over the steps; None in place of a chart without values.

    A training loss is shown as it enters the sum of the losses: times its weight. Validation begins, at step 0, with the
    student before its first step, where that was measured.
    """
    start = {f"val/{name}": value for name, value in (run.student.get("start_val") or {}).items()}
    rows = [start, *run.metrics]
    known = sorted({name for row in run.metrics for name in row})
    weights = _weights(run)
    charts = []
    for title, prefix, units in METRICS:
        names = []
        for name in known:
            if _is_shown(name, prefix) and in_units(name) == units:
                names.append(name)
        shown = [row for row in rows if not row.keys().isdisjoint(names)]
        lines: dict[str, list[float | None]] = {name: [] for name in names}
        steps = []
        for row in shown:
            steps.append(row.get("step", 0.0))
            for name in names:
                value = row.get(name)
                if value is not None:
                    value *= weights.get(name, 1.0)
                lines[name].append(value)
        charts.append(line_chart(title, steps, "step", lines))
    return charts


def _weights(run: RunRecords) -> dict[str, float]:
    """The weight of each training loss by its column of ``metrics.csv``; losses without one weigh 1."""
    model = run.config.get("model") or {}
    weights = {"train/task_loss": model.get("task_loss_weight", 1.0)}
    for name, loss in (model.get("distill_losses") or {}).items():
        arguments = loss.get("init_args") if isinstance(loss, dict) else None
        weights[f"train/{name}_loss"] = (arguments or {}).get("weight", 1.0)
    return weights


def health_lines(facts: Facts) -> list[Chart | None]:
    """Charts of the training's health over the steps: gradients, updates, activations, teacher; None in place of a chart
    without values.
    """
    run = facts.run
    charts = {title: lines_in_rows(run.health, keys) for title, keys in HEALTH.items()}
    for title, key in HEALTH_GROUPS.items():
        rows = [reading.get(key, {}) for reading in run.health]
        names = {name: name for row in rows for name in row}
        charts[title] = lines_in_rows(rows, names)
    steps = [reading["step"] for reading in run.health]
    drawn = []
    for title, lines in charts.items():
        drawn.append(line_chart(title, steps, "step", lines))
    return drawn
