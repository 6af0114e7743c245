"""Charts of a run's page: phases, cores, the machine, losses, training health. Each gives a section or ``None``."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kd.report.facts import Facts
from kd.report.metric import PROBE, in_units
from kd.report.records import PHASES, Run

BINS = 160  # columns of a chart: what a screen shows, whatever the run's length


def _binned(items: Sequence[Any], mean: Callable[[Sequence[Any]], Any], bins: int = BINS) -> list[Any]:
    """``mean`` of each of up to ``bins`` equal slices."""
    size = max(1, math.ceil(len(items) / bins))
    return [mean(items[i : i + size]) for i in range(0, len(items), size)]


def _average(values: Iterable[float | None]) -> float:
    known = [v for v in values if v is not None]
    return round(sum(known) / len(known), 4) if known else math.nan


def phase_chart(facts: Facts) -> dict[str, Any] | None:
    """Stacked phases over the steps."""
    if not facts.steps:
        return None
    used = [name for name in PHASES if any(name in s["p"] for s in facts.steps)]
    bars = _binned(facts.steps, lambda part: [_average(s["p"].get(name, 0.0) for s in part) for name in used])
    labels = _binned(facts.steps, lambda part: part[0]["step"])
    step = sum(facts.phases.get(name, 0.0) for name in used) or 1.0
    return {
        "kind": "phases", "title": "Phases of a step (ms)", "names": used, "bars": bars, "x": labels,
        "share": [round(facts.phases.get(name, 0.0) / step, 4) for name in used],
        "mean": [round(facts.phases.get(name, 0.0), 2) for name in used],
        "note": _clock_note(facts),
    }  # fmt: skip


def _clock_note(facts: Facts) -> str:
    total = facts.total
    own = f" Writing these records took {total['own_ms'] / total['ms']:.2%} of it." if total.get("ms") else ""
    clock = "the host's clock" if facts.cpu else "the device's clock (events)"
    return f"Rank {facts.rank}, by {clock}; the phases add up to the step.{own}"


def heat(run: Run) -> dict[str, Any] | None:
    """Each core and GPU over time."""
    rows: list[tuple[str, list[float]]] = []
    times: list[float] = []
    for node, samples in run.samples.items():
        where = f"{node} " if len(run.samples) > 1 else ""
        start = samples[0]["t"]
        times = times or _binned(samples, lambda part, t=start: round(part[0]["t"] - t, 1))  # type: ignore[misc]
        for core in range(max(len(s["cpu"]) for s in samples)):
            values = _binned(samples, lambda part, c=core: _average(s["cpu"][c] for s in part if c < len(s["cpu"])))  # type: ignore[misc]
            rows.append((f"{where}core {core}", values))
        for gpu in range(max(len(s.get("gpu", [])) for s in samples)):
            values = _binned(
                samples,
                lambda part, g=gpu: _average(s["gpu"][g]["util"] for s in part if g < len(s.get("gpu", []))),  # type: ignore[misc]
            )
            rows.append((f"{where}GPU {gpu}", values))
    if not rows:
        return None
    return {"kind": "heat", "title": "Cores and GPUs over time (% busy)", "rows": [list(r) for r in rows], "x": times}


def _lines(title: str, x: Sequence[float], x_name: str, series: dict[str, list[float]]) -> dict[str, Any] | None:
    shown = {name: values for name, values in series.items() if any(math.isfinite(v) for v in values)}
    return {"kind": "lines", "title": title, "x": list(x), "x_name": x_name, "series": shown} if shown else None


def machine_lines(run: Run) -> list[dict[str, Any] | None]:
    """CPU, memory, disk, network and GPUs over time."""
    charts: list[dict[str, Any] | None] = []
    for node, samples in run.samples.items():
        start = samples[0]["t"]
        x = _binned(samples, lambda part, t=start: round(part[0]["t"] - t, 1))  # type: ignore[misc]

        def column(key: str, samples: Sequence[Any] = samples) -> list[float]:
            return _binned(samples, lambda part: _average(s.get(key) for s in part))

        workers = _binned(samples, lambda part: _average(sum(s.get("workers", [])) for s in part))
        name = f" of {node}" if len(run.samples) > 1 else ""
        percent = {
            "training processes CPU": column("main"),
            "loader processes CPU": workers,
            "I/O wait": column("iowait"),
        }
        charts += [
            _lines(f"CPU{name} (% of a core)", x, "s", percent),
            _lines(f"Memory{name} (MB)", x, "s", {"training and loaders": column("rss_mb"), "swap": column("swap_mb")}),
            _lines(f"Disk and network{name} (MB/s)", x, "s", {
                "disk read": column("disk_r"), "disk write": column("disk_w"),
                "received": column("net_r"), "sent": column("net_w")}),
        ]  # fmt: skip
        for gpu in range(max(len(s.get("gpu", [])) for s in samples)):
            readings = [s["gpu"][gpu] if gpu < len(s.get("gpu", [])) else {} for s in samples]
            for title, keys in (
                ("%", {"util": "utilisation", "mem": "memory"}),
                ("W", {"w": "power"}),
                ("MHz", {"mhz": "clock"}),
            ):
                series = {
                    label: _binned(readings, lambda part, k=key: _average(r.get(k) for r in part))  # type: ignore[misc]
                    for key, label in keys.items()
                }
                charts.append(_lines(f"GPU {gpu}{name} ({title})", x, "s", series))
    return charts


def _is_shown(metric: str, prefix: str) -> bool:
    """The rate has a chart of its own, as features' accuracy; a line a class says nothing, a rank has another scale."""
    if metric.rpartition("/")[2] in (*PROBE, "rankme"):
        return False
    return metric.startswith(prefix) and "/iou_" not in metric and (metric.endswith("/lr") == prefix.endswith("/lr"))


def metrics_by_epoch(run: Run, names: Sequence[str]) -> tuple[list[float], dict[str, list[float]]]:
    """Epochs, from 1, and the last value of each metric in each of them; metrics that no epoch has are left out."""
    last = {name: {row["epoch"]: row[name] for row in run.metrics if name in row and "epoch" in row} for name in names}
    epochs = sorted({epoch for values in last.values() for epoch in values})
    found = {name: [values.get(epoch, math.nan) for epoch in epochs] for name, values in last.items() if values}
    return [epoch + 1 for epoch in epochs], found


def metric_lines(run: Run) -> list[dict[str, Any] | None]:
    """Losses and validation metrics over the steps."""
    known = {k for row in run.metrics for k in row}
    charts = []
    for student in run.students:
        place, of = (f"{student}/", f" of {student}") if student else ("", "")
        parts = [("Training losses", "train/", False), ("Validation", "val/", False),
                 ("Validation, in units", "val/", True), ("Learning rate", "train/lr", False)]  # fmt: skip
        for title, prefix, units in ((f"{title}{of}", f"{place}{prefix}", units) for title, prefix, units in parts):
            names = sorted(k for k in known if _is_shown(k, prefix) and in_units(k.rpartition("/")[2]) == units)
            rows = [row for row in run.metrics if any(n in row for n in names)]
            x = _binned(rows, lambda part: part[-1].get("step", 0.0))
            series = {
                n.removeprefix(place): _binned(rows, lambda part, k=n: _average(r.get(k) for r in part))  # type: ignore[misc]
                for n in names
            }
            charts.append(_lines(title, x, "step", series))
    return charts


def health_lines(run: Run) -> list[dict[str, Any] | None]:
    """Gradients, updates, activations, teacher and student over the steps."""
    return [chart for student in run.students for chart in _health_of(run.health_of(student), student)]


def _health_of(health: Sequence[dict[str, Any]], student: str) -> list[dict[str, Any] | None]:
    of = f" of {student}" if student else ""
    x = _binned(health, lambda part: part[0]["step"])

    def column(key: str) -> list[float]:
        return _binned(health, lambda part: _average(h.get(key) for h in part))

    def group(key: str) -> dict[str, list[float]]:
        names = dict.fromkeys(name for h in health for name in h.get(key, {}))
        return {n: _binned(health, lambda part, k=n: _average(h.get(key, {}).get(k) for h in part)) for n in names}  # type: ignore[misc]

    return [
        _lines(f"Gradient norm{of}", x, "step", {"before clipping": column("grad_norm")}),
        _lines(f"Update of the weights over their size{of}", x, "step", {"ratio": column("update_ratio")}),
        _lines(f"Teacher and {student or 'student'} on training batches", x, "step", {
            "agreement": column("agreement"), "teacher entropy / maximum": column("teacher_entropy")}),
        _lines(f"Loss shares{of}", x, "step", group("loss_shares")),
        _lines(f"Activations' standard deviation{of}", x, "step", group("spread")),
        _lines(f"Units that never fire{of}", x, "step", group("dead")),
    ]  # fmt: skip
