"""The sections of a run's page, from its facts."""

import math
import time
from typing import Any

from kd.report import traces
from kd.report.charts import health_lines, heat, machine_lines, phase_chart
from kd.report.explained import Explained
from kd.report.facts import Facts
from kd.report.faithful import faithful
from kd.report.input_costs import costs_by_kind, input_costs
from kd.report.learning import headline, learning
from kd.report.metric import duration, format_metric
from kd.report.records import PHASES, Run, percentile
from kd.report.sized import card_of
from kd.report.tier import tier_table
from kd.report.verdict import sentence

PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}


def report(explained: Explained) -> list[dict[str, Any]]:
    """The page's sections, in order; those without data are left out."""
    run, facts = explained.run, explained.facts
    done = status(run) == "done"
    speed = [_verdict(explained), _rules(explained)]  # of one that trains, or failed, first of all
    sections = [
        headline(facts),
        _cards(facts),
        _cost_by_group(facts),
        costs_by_kind(facts),
        notes(run),
        *([] if done else speed),
        *learning(facts),
        *faithful(run),
        *(speed if done else []),
        _headspace(run),
        input_costs(facts),
        tier_table(facts),
        phase_chart(facts),
        heat(run),
        *machine_lines(run),
        _percentiles(facts),
        _operations(facts),
        traces.section(run),
        *health_lines(run),
        _settings(run),
        _environment(facts),
    ]
    return [section for section in sections if section]


def _verdict(explained: Explained) -> dict[str, Any]:
    found, summary = explained.verdict, explained.run.summary
    text = found["text"]
    if summary.get("error") and summary.get("status") == "failed":
        text = f"failed: {summary['error'].splitlines()[0]}; until then {text}"
    others = [sentence(limit) for limit in explained.limits[1:] if "others" in found]
    return {"kind": "verdict", "bound": found["bound"], "text": text, "others": others}


def _value(run: Run, value: float | None) -> str:
    return "" if value is None else format_metric(run.primary, value)


def _cards(facts: Facts) -> dict[str, Any]:
    run, summary = facts.run, facts.run.summary
    teacher = summary.get("teacher") or {}
    state = ("status", status(run), (summary.get("error") or "").splitlines()[0] if summary.get("error") else "")
    rows = [
        *([state] if state[1] != "done" else []),
        *(_progress(facts) if state[1] == "running" else []),
        *((name or "student", _value(run, facts.best_val(name)), _about(f"best val {run.primary}", run.model_of(name)))
          for name in run.students),
        ("teacher", _value(run, (teacher.get("val") or {}).get(run.primary)), _about(f"val {run.primary}", teacher)),
        *((f"{name or 'student'} keeps", _kept(facts, name), "of its teacher") for name in run.students),
        *([state] if state[1] == "done" else []),
        ("images/s", _rounded(facts.images_per_s), _spread(facts)),
        ("time per epoch", duration(facts.epoch_s), f"{len({s['epoch'] for s in facts.steps})} epochs seen"),
        *([card] if (card := card_of(run.folder, run.config)) else []),
        ("cost per epoch", _cost(facts, facts.epoch_s), f"at {facts.price} an hour"),
        ("cost per 1000 steps", _cost(facts, facts.step_ms), "of the mean step"),  # a step's ms are 1000 steps' seconds
        ("time left", duration(facts.left_s), "at the pace so far"),
    ]  # fmt: skip
    return {"kind": "cards", "cards": [list(row) for row in rows if row[1]]}


def status(run: Run) -> str:
    """As the summary says; of a run without one, whether it still trains."""
    if "status" in run.summary:
        return str(run.summary["status"])
    newest = max((s[-1]["t"] for s in run.steps.values() if s), default=0.0)
    return "running" if time.time() - newest < 600 else "stopped without a word"


def _about(metric: str, model: dict[str, Any]) -> str:
    return ", ".join(part for part in (metric, model.get("arch")) if part)


def _progress(facts: Facts) -> list[tuple[str, str, str]]:
    if not facts.steps:
        return []
    of = facts.epochs * facts.batches_per_epoch
    loss = [row["train/loss"] for row in facts.run.metrics if "train/loss" in row][-1:]
    step, epoch = facts.steps[-1]["step"] + 1, facts.steps[-1]["epoch"] + 1
    rest = f"of {of:.0f}, epoch {epoch} of {facts.epochs:g}" if math.isfinite(of) else f"epoch {epoch}"
    return [("step", f"{step:,}", rest), ("train/loss", f"{loss[0]:.4g}" if loss else "", "newest")]


def _kept(facts: Facts, student: str) -> str:
    reached = ((facts.run.summary.get("teacher") or {}).get("val") or {}).get(facts.run.primary)
    score = facts.best_val(student)
    return f"{score / reached:.1%}" if reached and score is not None else ""


def _spread(facts: Facts) -> str:
    ms = facts.steps_ms
    return f"step {percentile(ms, 50):.0f} ms, p95 {percentile(ms, 95):.0f} ms" if ms else ""


def _cost(facts: Facts, seconds: float | None) -> str:
    return "" if facts.price is None or not seconds else f"{facts.price * seconds / 3600:.4g}"


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _cost_by_group(facts: Facts) -> dict[str, Any] | None:
    """Machines, price and cost of each group of ``kd-launch``'s job, by the hours of the place, else the run's."""
    job = facts.run.job
    groups = [group for group in job.get("groups") or [] if isinstance(group, dict) and "machines" in group]
    if not groups:
        return None
    hours = job.get("hours") or facts.hours
    rows, total = [], 0.0
    for group in groups:
        price = group.get("price_per_hour")
        cost = price * hours if price is not None and hours else None
        total += cost or 0.0
        shown = ["" if value is None else f"{value:.4g}" for value in (price, hours, cost)]
        rows.append([str(group.get("name", "")), str(group["machines"]), *shown])
    if len(rows) > 1 and total:
        rows.append(["all", "", "", "", f"{total:.4g}"])
    billed = f"; billed: {job['billed_hours']:.4g} h" if job.get("billed_hours") else ""
    title = f"Machines and cost ({job.get('target', 'kd-launch')}, job {job.get('job', '')}{billed})"
    return {"kind": "table", "title": title, "columns": ["group", "machines", "price an hour", "hours", "cost"],
            "rows": rows, "empty": ""}  # fmt: skip


def notes(run: Run) -> dict[str, Any] | None:
    """What could not be read."""
    shown = [note for note in run.notes if not (note == "summary.json is missing" and status(run) == "running")]
    return {"kind": "notes", "notes": shown} if shown else None


def _rules(explained: Explained) -> dict[str, Any]:
    rows = [[f.rule, f.text, f.lever] for f in explained.findings]
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


def _percentiles(facts: Facts) -> dict[str, Any] | None:
    run, steps = facts.run, facts.usual_steps
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


def _operations(facts: Facts) -> dict[str, Any] | None:
    if not facts.windows:
        return None
    window = facts.windows[-1]
    rows = [[op["name"], op["range"], op["ms"], round(100 * op["share"], 1), op["calls"]] for op in window["top"]]
    return {"kind": "table", "title": f"Top operations (steps {window['first']} to {window['last']})",
            "columns": ["operation", "range", "ms a step", "%", "calls a step"],
            "rows": rows, "long": True}  # fmt: skip


def flat(tree: object, prefix: str = "") -> list[list[str]]:
    """Nested settings as rows of key and value."""
    if isinstance(tree, dict) and tree:
        return [row for k, v in tree.items() for row in flat(v, f"{prefix}.{k}" if prefix else str(k))]
    return [[prefix, "" if tree is None else str(tree)]]


def _settings(run: Run) -> dict[str, Any] | None:
    rows = flat(run.config) if run.config else []
    table = {"kind": "table", "title": "Settings", "columns": ["key", "value"], "rows": rows, "folded": True}
    return table if rows else None


def _environment(facts: Facts) -> dict[str, Any]:
    known = ("host", "device_name", "cores", "threads", "world_size", "python", "torch", "platform")
    run, header = facts.run, facts.header
    rows = [[key, str(header[key])] for key in known if key in header]
    rows += [["GPUs", ", ".join(node["gpus"])] for node in run.nodes.values() if node.get("gpus")]
    rows += [[f"start-up: {name} (s)", str(s)] for name, s in facts.startup["parts"].items()]
    rows += [[key, str(run.summary[key])] for key in ("kd_version", "precision", "strategy", "wall_s", "peak_memory_mb",
                                                       "seed") if key in run.summary]  # fmt: skip
    rows.append(["folder", str(run.folder)])
    return {"kind": "table", "title": "Environment", "columns": ["", ""], "rows": rows, "folded": True}
