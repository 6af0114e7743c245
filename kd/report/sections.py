"""The sections of a run's page, from its facts."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kd.report import traces
from kd.report.charts import Section, health_lines, heat, machine_lines, phase_chart, table
from kd.report.facts import Facts
from kd.report.faithful import faithful
from kd.report.input_costs import costs_by_kind, input_costs, tier_table
from kd.report.learning import headline, learning
from kd.report.metric import duration, format_metric
from kd.report.ratio import ratio, share
from kd.report.records import PHASES, RunRecords, percentile
from kd.report.rules import Explained, attempt, sentence
from kd.report.sized import card_of
from kd.report.step_facts import gpus_of, mean

Parts = Callable[[], Sequence[Section | None]]  # makes sections of the page
PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}


def report(explained: Explained) -> list[Section]:
    """The page's sections, in order; those without data are left out.

    A section that can't be worked out is left out too, and the notes name it: the others are shown.
    """
    run, facts = explained.run, explained.facts
    done = status(run) == "done"
    speed: dict[str, Parts] = {
        "verdict": lambda: [_verdict(explained)],
        "rules": lambda: [_rules(explained)],
    }
    results: dict[str, Parts] = {
        "learning": lambda: learning(facts),
        "faithfulness": lambda: faithful(run),
    }
    first: dict[str, Parts] = {
        "headline": lambda: [headline(facts)],
        "cards": lambda: [_cards(facts)],
        "cost by group": lambda: [_cost_by_group(facts)],
        "cost by price": lambda: [costs_by_kind(facts)],
    }
    rest: dict[str, Parts] = {
        **(
            results | speed if done else speed | results
        ),  # of one that trains, or failed, the speed first of all
        "headspace": lambda: [_headspace(run)],
        "input costs": lambda: [input_costs(facts)],
        "data tier": lambda: [tier_table(facts)],
        "start-up": lambda: [_startup(facts)],
        "phases": lambda: [phase_chart(facts)],
        "cores": lambda: [heat(run)],
        "machine": lambda: machine_lines(run),
        "percentiles": lambda: [_percentiles(facts)],
        "operations": lambda: [_operations(facts)],
        "traces": lambda: [traces.section(run)],
        "health": lambda: health_lines(run),
        "settings": lambda: [_settings(run)],
        "environment": lambda: [_environment(facts)],
    }
    opening, body = (_worked_out(parts, explained.failures) for parts in (first, rest))
    return [
        *opening,
        *filter(None, [notes(run, explained.failures)]),
        *body,
    ]  # the notes last: they name failures


def _worked_out(parts: Mapping[str, Parts], failures: list[str]) -> list[Section]:
    made = [attempt(f"section {name}", failures, part) or [] for name, part in parts.items()]
    return [section for sections in made for section in sections if section]


def _settings(run: RunRecords) -> Section | None:
    return (
        table("Settings", ["key", "value"], flat(run.config), folded=True) if run.config else None
    )


def _verdict(explained: Explained) -> Section:
    found, summary = explained.verdict, explained.run.summary
    text = found["text"]
    if summary.get("error") and summary.get("status") == "failed":
        text = f"failed: {summary['error'].splitlines()[0]}; until then {text}"
    others = [sentence(limit) for limit in explained.limits[1:] if "others" in found]
    return {"kind": "verdict", "bound": found["bound"], "text": text, "others": others}


def _cards(facts: Facts) -> Section:
    run, summary = facts.run, facts.run.summary
    teacher, metric = summary.get("teacher") or {}, run.primary
    middle, high = (percentile(facts.steps_ms, q) for q in (50, 95))
    spread = f"step {middle:.0f} ms, p95 {high:.0f} ms" if facts.steps_ms else ""
    state = (
        "status",
        status(run),
        (summary.get("error") or "").splitlines()[0] if summary.get("error") else "",
    )
    rows = [
        *([state] if state[1] != "done" else []),
        *(_progress(facts) if state[1] == "running" else []),
        *(
            (
                name or "student",
                format_metric(metric, facts.best_val(name)),
                _about(f"best val {metric}", run.model_of(name)),
            )
            for name in run.students
        ),
        (
            "teacher",
            format_metric(metric, (teacher.get("val") or {}).get(metric)),
            _about(f"val {metric}", teacher),
        ),
        *(
            (f"{name or 'student'} keeps", _kept(facts, name), "of its teacher")
            for name in run.students
        ),
        *([state] if state[1] == "done" else []),
        ("images/s", "" if facts.images_per_s is None else f"{facts.images_per_s:,.0f}", spread),
        (
            "start-up",
            duration(facts.startup["s"]) if facts.startup["s"] else "",
            _longest_part(facts),
        ),
        (
            "time per epoch",
            duration(facts.epoch_s),
            f"{len({s['epoch'] for s in facts.steps})} epochs seen",
        ),
        *([card] if (card := card_of(run.folder, run.config)) else []),
        ("cost per epoch", _cost(facts, facts.epoch_s), f"at {facts.price} an hour"),
        (
            "cost per 1000 steps",
            _cost(facts, facts.step_ms),
            "of the mean step",
        ),  # a step's ms are 1000 steps' seconds
        ("time left", duration(facts.left_s), "at the pace so far"),
    ]
    return {"kind": "cards", "cards": [list(row) for row in rows if row[1]]}


def _longest_part(facts: Facts) -> str:
    parts = facts.startup["parts"]
    longest = max(parts, key=lambda name: parts[name], default="")
    return f"most of it {longest} ({duration(parts[longest])})" if longest else ""


def status(run: RunRecords) -> str:
    """The status in the summary; without one, whether the run still trains."""
    if "status" in run.summary:
        return str(run.summary["status"])
    newest = max((s[-1]["t"] for s in run.steps.values() if s), default=0.0)
    return "running" if time.time() - newest < 600 else "ended early"


def _about(metric: str, model: dict[str, Any]) -> str:
    return ", ".join(part for part in (metric, model.get("arch")) if part)


def _progress(facts: Facts) -> list[tuple[str, str, str]]:
    if not facts.steps:
        return []
    of = facts.epochs * facts.batches_per_epoch
    loss = [row["train/loss"] for row in facts.run.metrics if "train/loss" in row][-1:]
    step, epoch = facts.steps[-1]["step"] + 1, facts.steps[-1]["epoch"] + 1
    rest = (
        f"of {of:.0f}, epoch {epoch} of {facts.epochs:g}" if math.isfinite(of) else f"epoch {epoch}"
    )
    return [("step", f"{step:,}", rest), ("train/loss", f"{loss[0]:.4g}" if loss else "", "newest")]


def _kept(facts: Facts, student: str) -> str:
    reached = ((facts.run.summary.get("teacher") or {}).get("val") or {}).get(facts.run.primary)
    score = facts.best_val(student)
    return f"{ratio(score, reached):.1%}" if reached and score is not None else ""


def _cost(facts: Facts, seconds: float | None) -> str:
    return "" if facts.price is None or not seconds else f"{facts.price * seconds / 3600:.4g}"


def _cost_by_group(facts: Facts) -> Section | None:
    """Machines, price and cost of each group of ``kd-launch``'s job, by the hours of the place, else the run's."""
    job = facts.run.job
    groups = [
        group
        for group in job.get("groups") or []
        if isinstance(group, dict) and "machines" in group
    ]
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
    title = (
        f"Machines and cost ({job.get('target', 'kd-launch')}, job {job.get('job', '')}{billed})"
    )
    return table(title, ["group", "machines", "price an hour", "hours", "cost"], rows, empty="")


def notes(run: RunRecords, failures: Sequence[str] = ()) -> Section | None:
    """What could not be read, and what could not be worked out from the rest."""
    read = [
        note
        for note in run.notes
        if not (note == "summary.json is missing" and status(run) == "running")
    ]
    shown = [*read, *failures]
    return {"kind": "notes", "notes": shown} if shown else None


def _rules(explained: Explained) -> Section:
    rows = [[f.rule, f.text, f.lever] for f in explained.findings]
    empty = "None: nothing unusual about the machine or the training."
    return table("Rules that fired", ["rule", "evidence", "what to do"], rows, empty=empty)


def _headspace(run: RunRecords) -> Section | None:
    found = run.event("headspace")
    if found is None:
        return None
    names = {
        "now_ms": "as it is",
        "free_input_ms": "with a perfect input",
        "free_input_and_teacher_ms": "with a free teacher as well",
    }
    rows = [
        [text, found[key], f"{ratio(found['now_ms'], found[key]):.2f}x"]
        for key, text in names.items()
        if key in found
    ]
    return table("Headspace", ["", "ms a step", "speed"], rows)


def _startup(facts: Facts) -> Section | None:
    """The parts of the newest start, before the first step was done."""
    seconds, parts = facts.startup["s"], facts.startup["parts"]
    rows = [[name, f"{s:,.1f}", f"{share(s, seconds):.0%}"] for name, s in parts.items()]
    return (
        table(f"Start-up ({duration(seconds)})", ["", "s", "of the start"], rows) if rows else None
    )


def _percentiles(facts: Facts) -> Section | None:
    run, steps = facts.run, facts.usual_steps
    columns = {"step (ms)": facts.steps_ms} if steps else {}
    for name in PHASES:
        if any(name in s["p"] for s in steps):
            columns[f"{name} (ms)"] = [s["p"].get(name, 0.0) for s in steps]
    for node, samples in run.samples.items():
        where = f", {node}" if len(run.samples) > 1 else ""
        columns[f"CPU{where} (%)"] = [mean(s["cpu"]) for s in samples]
        columns[f"memory{where} (%)"] = [s["mem"] for s in samples]
        for number, gpu in enumerate(gpus_of(samples)):
            for key, label in (("util", "utilisation"), ("mem", "memory")):
                columns[f"GPU {number} {label}{where} (%)"] = [
                    g[key] for g in gpu if g.get(key) is not None
                ]
    rows = [
        [name, *(round(percentile(v, q), 2) for q in PERCENTILES.values())]
        for name, v in columns.items()
    ]
    return table("Percentiles", ["", *PERCENTILES], rows) if rows else None


def _operations(facts: Facts) -> Section | None:
    if not facts.windows:
        return None
    window = facts.windows[-1]
    rows = [
        [op["name"], op["range"], op["ms"], round(100 * op["share"], 1), op["calls"]]
        for op in window["top"]
    ]
    title = f"Top operations (steps {window['first']} to {window['last']})"
    return table(title, ["operation", "range", "ms a step", "%", "calls a step"], rows, long=True)


def flat(tree: object, prefix: str = "") -> list[list[str]]:
    """Nested settings as rows of dotted key and value, both text."""
    if isinstance(tree, dict) and tree:
        return [
            row for k, v in tree.items() for row in flat(v, f"{prefix}.{k}" if prefix else str(k))
        ]
    return [[prefix, "" if tree is None else str(tree)]]


def _environment(facts: Facts) -> Section:
    known = ("host", "device_name", "cores", "threads", "world_size", "python", "torch", "platform")
    run, header = facts.run, facts.header
    rows = [[key, str(header[key])] for key in known if key in header]
    rows += [["GPUs", ", ".join(node["gpus"])] for node in run.nodes.values() if node.get("gpus")]
    rows += [
        [key, str(run.summary[key])]
        for key in ("kd_version", "precision", "strategy", "wall_s", "peak_memory_mb", "seed")
        if key in run.summary
    ]
    rows.append(["folder", str(run.folder)])
    return table("Environment", ["", ""], rows, folded=True)
