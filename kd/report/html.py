"""One page about a run, or about two: ``report.html`` and ``comparison.html``. One file each, no network."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kd.report import traces
from kd.report.records import PHASES, Run, percentile
from kd.report.rules import findings
from kd.report.verdict import kernels_of, limits, mean_phases, sentence, typical_rank, verdict

BINS = 160  # columns of a chart: what a screen shows, whatever the run's length
PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
PAGE = Path(__file__).parent / "page.html"


def write_report(run: Run, file: Path) -> Path:
    """Writes the page of one run."""
    return _write(file, {"title": f"{run.summary.get('recipe', 'run')} {run.folder.name}", "sections": report(run)})


def write_comparison(before: Run, after: Run, file: Path) -> Path:
    """Writes the page that compares two runs."""
    title = f"{_label(before)} and {_label(after)}"
    return _write(file, {"title": title, "sections": comparison(before, after)})


def _write(file: Path, content: dict[str, Any]) -> Path:
    text = json.dumps(_finite(content), separators=(",", ":")).replace("<", "\\u003c")  # no text opens markup
    page = PAGE.read_text(encoding="utf-8").replace("{{DATA}}", text)
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(page, encoding="utf-8")
    fresh.replace(file)  # a browser that reloads never sees half a page
    return file


def _finite(value: Any) -> Any:
    """JSON has no NaN: ``None`` instead."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


# -- one run -----------------------------------------------------------------------------------------------------------


def report(run: Run) -> list[dict[str, Any]]:
    """The page's sections, in order; those without data are left out."""
    sections = [
        _verdict(run),
        _cards(run),
        _notes(run),
        _rules(run),
        _headspace(run),
        _phase_chart(run),
        _heat(run),
        *_machine_lines(run),
        *_metric_lines(run),
        _percentiles(run),
        _operations(run),
        traces.section(run),
        *_health_lines(run),
        _settings(run),
        _environment(run),
    ]
    return [section for section in sections if section]


def _verdict(run: Run) -> dict[str, Any]:
    found, text, error = limits(run), verdict(run)["text"], run.summary.get("error")
    if error and run.summary.get("status") == "failed":
        text = f"failed: {error.splitlines()[0]}; until then {text}"
    return {"kind": "verdict", "bound": verdict(run)["bound"], "text": text,
            "others": [sentence(limit) for limit in found[1:]]}  # fmt: skip


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _cards(run: Run) -> dict[str, Any]:
    summary = run.summary
    teacher = summary.get("teacher") or {}
    rows = [
        ("status", _status(run), (summary.get("error") or "").splitlines()[0] if summary.get("error") else ""),
        ("teacher", _percent((teacher.get("val") or {}).get(run.primary)), _about(f"val {run.primary}", teacher)),
        *(
            (name or "student", _percent(best_val(run, name)), _about(f"best val {run.primary}", _student(run, name)))
            for name in run.students
        ),
        ("images/s", _rounded(images_per_s(run)), _spread(run)),
        ("time per epoch", _duration(epoch_s(run)), f"{len(_epochs(run))} epochs seen"),
        ("cost per epoch", _cost(run), f"at {_price(run)} an hour"),
        ("time left", _duration(left_s(run)), "at the pace so far"),
    ]
    return {"kind": "cards", "cards": [list(row) for row in rows if row[1]]}


def _status(run: Run) -> str:
    if "status" in run.summary:
        return str(run.summary["status"])
    newest = max((s[-1]["t"] for s in run.steps.values() if s), default=0.0)
    return "running" if time.time() - newest < 600 else "stopped without a word"


def _about(metric: str, model: dict[str, Any]) -> str:
    return ", ".join(part for part in (metric, model.get("arch")) if part)


def _student(run: Run, name: str) -> dict[str, Any]:
    """What the summary says of a student."""
    found = (run.summary.get("students") or {}).get(name) if name else run.summary.get("student")
    return found or {}


def best_val(run: Run, student: str = "") -> float | None:
    """A student's best value of the task's main metric, in 0..1."""
    column = f"{student}/val/{run.primary}" if student else f"val/{run.primary}"
    known = [row[column] for row in run.metrics if column in row]
    return max(known) if known else None


def images_per_s(run: Run) -> float | None:
    """Of all processes, from the mean step; validation is left out."""
    rank = typical_rank(run)
    step = sum(ms for name, ms in mean_phases(run, rank).items() if name in PHASES)
    header = run.headers.get(rank)
    return 1000 * header["batch_size"] * header["world_size"] / step if header and step else None


def _spread(run: Run) -> str:
    ms = [s["ms"] for s in run.steps.get(typical_rank(run), []) if not s.get("first")]
    return f"step {percentile(ms, 50):.0f} ms, p95 {percentile(ms, 95):.0f} ms" if ms else ""


def _epochs(run: Run) -> dict[int, list[dict[str, Any]]]:
    by: dict[int, list[dict[str, Any]]] = {}
    for step in run.steps.get(typical_rank(run), []):
        by.setdefault(step["epoch"], []).append(step)
    return by


def epoch_s(run: Run) -> float | None:
    """Seconds an epoch with its validation, from the mean step and the epoch's length."""
    rank = typical_rank(run)
    header, phases = run.headers.get(rank, {}), mean_phases(run, rank)
    total = sum(ms for name, ms in phases.items() if name in (*PHASES, "validation"))
    batches = header.get("batches_per_epoch")
    return total * batches / 1000 if batches and total and math.isfinite(batches) else None


def left_s(run: Run) -> float | None:
    """Seconds until the end, of a run that goes on."""
    header, steps = run.headers.get(typical_rank(run), {}), run.steps.get(typical_rank(run), [])
    epochs, epoch = header.get("max_epochs") or -1, epoch_s(run)
    if "status" in run.summary or not steps or epochs < 0 or epoch is None:
        return None
    return max(0.0, epoch * (epochs - (steps[-1]["step"] + 1) / header["batches_per_epoch"]))


def _price(run: Run) -> float | None:
    return (run.config.get("monitor") or {}).get("price_per_hour")


def _cost(run: Run) -> str:
    price, epoch = _price(run), epoch_s(run)
    return f"{price * epoch / 3600:.4g}" if price is not None and epoch else ""


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def _notes(run: Run) -> dict[str, Any] | None:
    return {"kind": "notes", "notes": run.notes} if run.notes else None


def _rules(run: Run) -> dict[str, Any]:
    rows = [[f.rule, f.text, f.lever] for f in findings(run)]
    return {"kind": "table", "title": "Rules that fired", "columns": ["rule", "evidence", "what to do"], "rows": rows,
            "empty": "None: nothing unusual about the machine or the training."}  # fmt: skip


def _headspace(run: Run) -> dict[str, Any] | None:
    found = run.event("headspace")
    if found is None:
        return None
    names = {"now_ms": "as it is", "free_input_ms": "with a perfect input",
             "free_input_and_teacher_ms": "with a free teacher as well"}  # fmt: skip
    rows = [[text, found[key], f"{found['now_ms'] / found[key]:.2f}x"] for key, text in names.items() if key in found]
    return {"kind": "table", "title": "Headspace", "columns": ["", "ms a step", "speed"], "rows": rows}


def _binned(items: Sequence[Any], mean: Callable[[Sequence[Any]], Any], bins: int = BINS) -> list[Any]:
    """``mean`` of each of up to ``bins`` equal slices."""
    size = max(1, math.ceil(len(items) / bins))
    return [mean(items[i : i + size]) for i in range(0, len(items), size)]


def _average(values: Iterable[float | None]) -> float:
    known = [v for v in values if v is not None]
    return round(sum(known) / len(known), 4) if known else math.nan


def _phase_chart(run: Run) -> dict[str, Any] | None:
    steps = run.steps.get(typical_rank(run), [])
    if not steps:
        return None
    used = [name for name in PHASES if any(name in s["p"] for s in steps)]
    bars = _binned(steps, lambda part: [_average(s["p"].get(name, 0.0) for s in part) for name in used])
    labels = _binned(steps, lambda part: part[0]["step"])
    mean = mean_phases(run, typical_rank(run))
    step = sum(mean.get(name, 0.0) for name in used) or 1.0
    return {
        "kind": "phases", "title": "Phases of a step (ms)", "names": used, "bars": bars, "x": labels,
        "share": [round(mean.get(name, 0.0) / step, 4) for name in used],
        "mean": [round(mean.get(name, 0.0), 2) for name in used],
        "note": _clock_note(run),
    }  # fmt: skip


def _clock_note(run: Run) -> str:
    rank = typical_rank(run)
    device, total = run.headers.get(rank, {}).get("device", "cpu"), run.totals.get(rank, {})
    own = f" Writing these records took {total['own_ms'] / total['ms']:.2%} of it." if total.get("ms") else ""
    clock = "the device's clock (events)" if device == "cuda" else "the host's clock"
    return f"Rank {rank}, by {clock}; the phases add up to the step.{own}"


def _heat(run: Run) -> dict[str, Any] | None:
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


def _machine_lines(run: Run) -> list[dict[str, Any] | None]:
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


def _metric_lines(run: Run) -> list[dict[str, Any] | None]:
    known = {k for row in run.metrics for k in row}
    charts = []
    for student in run.students:
        place, of = (f"{student}/", f" of {student}") if student else ("", "")
        for title, prefix in ((f"Training losses{of}", f"{place}train/"), (f"Validation{of}", f"{place}val/")):
            names = sorted(k for k in known if k.startswith(prefix) and "/iou_" not in k)  # a line a class says nothing
            rows = [row for row in run.metrics if any(n in row for n in names)]
            x = _binned(rows, lambda part: part[-1].get("step", 0.0))
            series = {
                n.removeprefix(place): _binned(rows, lambda part, k=n: _average(r.get(k) for r in part))  # type: ignore[misc]
                for n in names
            }
            charts.append(_lines(title, x, "step", series))
    return charts


def _percentiles(run: Run) -> dict[str, Any] | None:
    rank = typical_rank(run)
    steps = [s for s in run.steps.get(rank, []) if not s.get("first")]
    columns: dict[str, list[float]] = {}
    if steps:
        columns["step (ms)"] = [s["ms"] for s in steps]
        for name in PHASES:
            if any(name in s["p"] for s in steps):
                columns[f"{name} (ms)"] = [s["p"].get(name, 0.0) for s in steps]
    for node, samples in run.samples.items():
        where = f", {node}" if len(run.samples) > 1 else ""
        columns[f"CPU{where} (%)"] = [sum(s["cpu"]) / len(s["cpu"]) for s in samples]
        columns[f"memory{where} (%)"] = [s["mem"] for s in samples]
        for gpu in range(max(len(s.get("gpu", [])) for s in samples)):
            for key, label in (("util", "utilisation"), ("mem", "memory")):
                columns[f"GPU {gpu} {label}{where} (%)"] = [
                    s["gpu"][gpu][key] for s in samples if gpu < len(s.get("gpu", []))
                ]
    rows = [[name, *(round(percentile(v, q), 2) for q in PERCENTILES.values())] for name, v in columns.items()]
    names = ["", *PERCENTILES]
    return {"kind": "table", "title": "Percentiles", "columns": names, "rows": rows} if rows else None


def _operations(run: Run) -> dict[str, Any] | None:
    if not run.kernels:
        return None
    window = kernels_of(run, typical_rank(run))[-1]
    rows = [[op["name"], op["range"], op["ms"], round(100 * op["share"], 1), op["calls"]] for op in window["top"]]
    return {"kind": "table", "title": f"Top operations (steps {window['first']} to {window['last']})",
            "columns": ["operation", "range", "ms a step", "%", "calls a step"],
            "rows": rows, "long": True}  # fmt: skip


def _health_lines(run: Run) -> list[dict[str, Any] | None]:
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


def _flat(tree: Any, prefix: str = "") -> list[list[str]]:
    if isinstance(tree, dict) and tree:
        return [row for k, v in tree.items() for row in _flat(v, f"{prefix}.{k}" if prefix else str(k))]
    return [[prefix, "" if tree is None else str(tree)]]


def _settings(run: Run) -> dict[str, Any] | None:
    rows = _flat(run.config) if run.config else []
    return (
        {"kind": "table", "title": "Settings", "columns": ["key", "value"], "rows": rows, "folded": True}
        if rows
        else None
    )


def _environment(run: Run) -> dict[str, Any]:
    known = ("host", "device_name", "cores", "threads", "world_size", "python", "torch", "platform")
    header = run.headers.get(typical_rank(run), {})
    rows = [[key, str(header[key])] for key in known if key in header]
    rows += [["GPUs", ", ".join(node["gpus"])] for node in run.nodes.values() if node.get("gpus")]
    startup = run.event("startup") or {"parts": {}}
    rows += [[f"start-up: {name} (s)", str(s)] for name, s in startup["parts"].items()]
    rows += [[key, str(run.summary[key])] for key in ("kd_version", "precision", "strategy", "wall_s", "peak_memory_mb",
                                                       "seed") if key in run.summary]  # fmt: skip
    rows.append(["folder", str(run.folder)])
    return {"kind": "table", "title": "Environment", "columns": ["", ""], "rows": rows, "folded": True}


# -- two runs ----------------------------------------------------------------------------------------------------------


def comparison(before: Run, after: Run) -> list[dict[str, Any]]:
    """The sections of a page about two runs."""
    rows = [
        [name, _short(a), _short(b), f"{ratio:.2f}x" if (ratio := _ratio(a, b)) is not None else ""]
        for name, a, b in _compared(before, after)
    ]
    names = [_label(before), _label(after)]
    sections: list[dict[str, Any] | None] = [
        {"kind": "verdict", "bound": "comparison", "text": _difference(before, after), "others": [
            f"{label}: {verdict(run)['text']}" for label, run in zip(names, (before, after), strict=True)]},
        {"kind": "table", "title": "Before and after", "columns": ["", *names, "before / after"], "rows": rows},
        _two_bars(before, after, names),
        _notes(before), _notes(after),
    ]  # fmt: skip
    return [section for section in sections if section]


def _label(run: Run) -> str:
    return f"{run.summary.get('recipe') or run.folder.parent.name}/{run.folder.resolve().name}"


def _hours(run: Run) -> float | None:
    wall = run.summary.get("wall_s")
    return wall / 3600 if wall else None


def _epochs_done(run: Run) -> float | None:
    """Of a run that was stopped inside an epoch, its part too."""
    header, steps = run.headers.get(typical_rank(run), {}), run.steps.get(typical_rank(run), [])
    batches = header.get("batches_per_epoch")
    return (steps[-1]["step"] + 1) / batches if steps and batches else run.summary.get("epochs")


def _times(a: float | None, b: float | None) -> float | None:
    return a * b if a is not None and b is not None else None


def _compared(before: Run, after: Run) -> list[tuple[str, float | None, float | None]]:
    """Rows of the table: name and the two values."""

    def per_epoch(run: Run) -> float | None:
        epochs, hours = _epochs_done(run), _hours(run)
        return hours / epochs if epochs and hours else None

    def ms(run: Run) -> list[float]:
        return [s["ms"] for s in run.steps.get(typical_rank(run), []) if not s.get("first")]

    makers: list[tuple[str, Callable[[Run], float | None]]] = [
        ("hours", _hours),
        ("epochs", _epochs_done),
        ("hours per epoch", per_epoch),
        ("training seconds per epoch", epoch_s),
        ("cost", lambda run: _times(_price(run), _hours(run))),
        ("cost per epoch", lambda run: _times(_price(run), per_epoch(run))),
        ("images/s", images_per_s),
    ]
    rows = [(name, make(before), make(after)) for name, make in makers]
    rows += [
        (f"{student or 'student'} val {metric}", _val_of(before, student, metric), _val_of(after, student, metric))
        for student, metric in dict.fromkeys((s, run.primary) for run in (before, after) for s in run.students)
    ]
    rows += [
        (f"step {name} (ms)", percentile(ms(before), q), percentile(ms(after), q)) for name, q in PERCENTILES.items()
    ]
    a, b = (mean_phases(run, typical_rank(run)) for run in (before, after))
    rows += [(f"{name} (ms)", a.get(name, 0.0), b.get(name, 0.0)) for name in PHASES if name in a or name in b]
    return [row for row in rows if any(v is not None and math.isfinite(v) for v in row[1:])]


def _val_of(run: Run, student: str, metric: str) -> float | None:
    return best_val(run, student) if student in run.students and run.primary == metric else None


def _short(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b and math.isfinite(a) and math.isfinite(b) else None


def _difference(before: Run, after: Run) -> str:
    speeds = images_per_s(before), images_per_s(after)
    ratio = _ratio(speeds[1], speeds[0])
    if ratio is None:
        return "one of the runs has no steps to compare"
    a, b = (mean_phases(run, typical_rank(run)) for run in (before, after))
    changed = max(PHASES, key=lambda name: abs(a.get(name, 0.0) - b.get(name, 0.0)))
    change = f"{changed} went from {a.get(changed, 0.0):.0f} to {b.get(changed, 0.0):.0f} ms a step"
    return f"{speeds[0]:,.0f} images/s before, {speeds[1]:,.0f} after: {ratio:.2f}x; most of the difference: {change}"


def _two_bars(before: Run, after: Run, names: list[str]) -> dict[str, Any] | None:
    means = [mean_phases(run, typical_rank(run)) for run in (before, after)]
    used = [name for name in PHASES if any(name in mean for mean in means)]
    bars = [[round(mean.get(name, 0.0), 3) for name in used] for mean in means]
    return {"kind": "phases", "title": "Phases of a mean step (ms)", "names": used, "bars": bars, "x": names,
            "note": "By rank of median computing time."} if used else None  # fmt: skip
