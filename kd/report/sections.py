"""The sections of a run's page, from its facts.

A *section* is a dict that ``report/html.py`` writes and the page draws by its ``kind``; None: nothing to show.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kd.config.trees import flatten
from kd.report.charts import (
    Section,
    health_lines,
    heat,
    machine_lines,
    machine_series,
    phase_chart,
)
from kd.report.costs import input_costs
from kd.report.evaluated import fidelity_parts, model_name
from kd.report.facts import Facts
from kd.report.learning import headline, learning
from kd.report.metric import duration, format_metric, short
from kd.report.ratio import Number, share
from kd.report.records import PHASES, RunRecords, percentile
from kd.report.rules import Explained, attempt, sentence
from kd.report.tables import Cell, Part, Parts, Table, sentences
from kd.storage.elsewhere import Json
from kd.storage.of_weights import LABELS_ALONE

PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
RUNNING_S = 600.0  # a run without a status whose newest step is younger still trains
OF_HEADER = ("host", "device_name", "cores", "threads", "world_size", "python", "torch", "platform")
OF_SUMMARY = ("kd_version", "precision", "strategy", "wall_s", "peak_memory_mb", "seed")


def report(explained: Explained) -> list[Section | Part]:
    """The page's sections, in the order of :data:`PAGE`; those without data are left out.

    A section that can't be worked out is left out too, and the notes name it: the others are shown. Of a run that ended
    well, with a student that became no worse, the rules that fired come after the results.
    """
    made: dict[str, list[Section | Part]] = {}
    for name, parts_of in PAGE.items():
        source = explained if name in OF_EXPLAINED else explained.facts
        parts = attempt(f"section {name}", explained.failures, partial(parts_of, source))
        several = parts if isinstance(parts, list) else [parts]
        made[name] = [part for part in several if part]
    # Notes name the failures of the other sections, so they are made last; the page shows them after the costs by group.
    problems = notes(explained.run, explained.failures)
    if problems:
        made["cost by group"].append(problems)
    names = list(PAGE)
    worse = any(finding.rule == "WorseThanStart" for finding in explained.findings)
    if status(explained.run) == "done" and not worse:
        names.remove("rules")
        names.insert(names.index("faithfulness") + 1, "rules")
    return [part for name in names for part in made[name]]


NOT_MEASURED = (
    "kd-eval RUN pays=DIR compares the distilled backbone with a random start, by a linear probe on labelled pictures "
    "(DIR/train/<class>/*.jpg, DIR/val/<class>/*.jpg)."
)

NOT_COMPARED = (
    "Not compared with labels alone. kd-train resume=RUN labels_alone=true trains the same student from the same start "
    "without the teacher's answers, and says what these have added."
)


def _results(facts: Facts) -> Parts:
    """What commands have measured of the student, in the order of their names.

    Of a finished run also the comparison that is missing, with the command that makes it.
    """
    run = facts.run
    results = facts.results
    parts = [part for of_one in results.values() for part in of_one]
    model = run.config.get("model") or {}
    if run.summary.get("status") != "done":
        return parts
    if not (model.get("student") or {}).get("head", True):
        if "pays" not in results:
            parts.append(sentences("Does it pay?", [NOT_MEASURED]))
    elif LABELS_ALONE not in results and model.get("distill_losses"):
        parts.append(sentences("Did the teacher help?", [NOT_COMPARED]))
    return parts


def _faithfulness(facts: Facts) -> Parts:
    """How the student compares with its teacher; [] before its first validation."""
    return fidelity_parts(facts.run.fidelity) if facts.run.fidelity else []


def _settings(facts: Facts) -> Table:
    """Versions and devices of the run, its folder, and all its settings, as a folded table."""
    run = facts.run
    known: dict[str, Any] = {"folder": run.folder}
    for key in OF_HEADER:
        known[key] = facts.header.get(key)
    for name, node in run.nodes.items():
        known[f"GPUs of {name}"] = ", ".join(node.get("gpus") or [])
    for key in OF_SUMMARY:
        known[key] = run.summary.get(key)
    rows = []
    for key, value in known.items():
        if value not in (None, ""):
            rows.append([key, str(value)])
    rows += [[key, value] for key, value in flat(run.config).items()]
    return Table("Environment and settings", ["key", "value"], rows, folded=True)


def verdict_of(explained: Explained) -> Section:
    """One line: what limits the run, and what to change; of a failed run, after its error.

    Below it are the other limits, folded where the run is done.
    """
    verdict = explained.verdict
    run = explained.run
    text = verdict["text"]
    details: list[str] = []
    if "others" in verdict:
        _, *others = explained.limits
        details = [sentence(limit) for limit in others]
    if _error_line(run) and status(run) == "failed":
        text = f"failed: {_error_line(run)}; until then {text}"
    folded = status(run) == "done"
    bound = verdict["bound"]
    return {"kind": "verdict", "bound": bound, "text": text, "others": details, "folded": folded}


def _error_line(run: RunRecords) -> str:
    """The first line of the error that ended a run; "" without one."""
    return str(run.summary.get("error") or "").partition("\n")[0]


Card = tuple[str, str, str]
"""What a card of the page shows: title, value, note."""


def _cards(facts: Facts) -> Section:
    """The cards at the page's top: status, progress, results, speed; empty ones are left out."""
    run = facts.run
    state = status(run)
    cards = [("status", state, _error_line(run))]
    if state != "done":
        cards += _progress(facts)
    cards += _result_cards(facts)
    cards += _speed_cards(facts)
    return {"kind": "cards", "cards": [list(card) for card in cards if card[1]]}


def _result_cards(facts: Facts) -> list[Card]:
    """The main metric of the student that is kept and of its teacher; "" where it is not known."""
    run = facts.run
    metric = facts.run.primary
    teacher_value = (run.teacher.get("val") or {}).get(metric)
    which = (
        f"val {metric} before training"
        if facts.exports_its_start()
        else f"val {metric}, kept epoch"
    )
    student = ", ".join(filter(None, [which, model_name(run.student)]))
    teacher = ", ".join(filter(None, [f"val {metric}", model_name(run.teacher)]))
    return [
        ("student", format_metric(metric, facts.best_val()), student),
        ("teacher", format_metric(metric, teacher_value), teacher),
    ]


def _speed_cards(facts: Facts) -> list[Card]:
    """Speed, start-up, and what an epoch and 1000 steps take and cost."""
    spread = ""
    if facts.steps_ms:
        median = percentile(facts.steps_ms, 50)
        high = percentile(facts.steps_ms, 95)
        spread = f"median step {median:.0f} ms, p95 {high:.0f} ms"
    speed = "" if facts.images_per_s is None else f"{facts.images_per_s:,.0f}"
    thousand_steps_s = facts.step_ms  # a step's ms are 1000 steps' seconds
    return [
        ("images/s", speed, spread),
        ("start-up", duration(facts.startup_s or None), "until the first step was done"),
        ("time per epoch", duration(facts.epoch_s), "with its validation"),
        ("cost per epoch", _cost(facts, facts.epoch_s), f"at {facts.price} an hour"),
        ("cost per 1000 steps", _cost(facts, thousand_steps_s), "of the mean step"),
    ]


def status(run: RunRecords) -> str:
    """``done``, ``failed`` or another status of the summary; without one ``running`` or ``ended early``.

    A run without a status still trains where its newest step or sample of a machine, or its records' beginning, is younger
    than :data:`RUNNING_S`: a validation may take longer.
    """
    if "status" in run.summary:
        return str(run.summary["status"])
    times = [0.0]
    for header in run.headers.values():
        times.append(header.get("t", 0.0))
    for steps in run.steps.values():
        if steps:
            times.append(steps[-1]["t"])
    for samples in run.samples.values():
        times.append(samples[-1]["t"])
    silent_s = time.time() - max(times)
    if silent_s < RUNNING_S:
        return "running"
    return "ended early"


def _progress(facts: Facts) -> list[Card]:
    """The cards of a run that is not done: epoch, step (a batch of each process), time left, newest training loss.

    [] without recorded steps.
    """
    if not facts.steps:
        return []
    newest = facts.steps[-1]
    epoch = str(newest["epoch"] + 1)
    if math.isfinite(facts.epochs):
        epoch = f"{epoch} of {facts.epochs:g}"
    steps_in_all = facts.epochs * facts.batches_per_epoch
    of_all = f"of {steps_in_all:.0f}" if math.isfinite(steps_in_all) else ""
    losses = [row["train/loss"] for row in facts.run.metrics if "train/loss" in row]
    return [
        ("epoch", epoch, ""),
        ("step", f"{newest['step'] + 1:,}", of_all),
        ("time left", duration(facts.left_s), "at the pace so far"),
        ("train/loss", f"{losses[-1]:.4g}" if losses else "", "newest"),
    ]


def _cost(facts: Facts, seconds: Number) -> str:
    """What so many seconds of the job cost; "" where the price of an hour or the seconds are not known."""
    if facts.price is None or not seconds:
        return ""
    return f"{facts.price * seconds / 3600:.4g}"


def _cost_by_group(facts: Facts) -> Table | None:
    """Machines, price and cost of each group of ``kd-launch``'s job, and of all; None without such a job.

    The hours are those that the place where the job ran has counted, else the run's.
    """
    job = facts.run.job
    hours = job.get("hours") or facts.hours
    rows: list[list[Cell]] = []
    costs: list[float] = []
    for group in job.get("groups") or []:
        if isinstance(group, dict) and "machines" in group:
            price = group.get("price_per_hour")
            cost = (price or 0.0) * (hours or 0.0)
            costs.append(cost)
            numbers = [short(value) for value in (price, hours, cost or None)]
            rows.append([str(group.get("name", "")), str(group["machines"]), *numbers])
    if len(rows) > 1 and any(costs):
        rows.append(["all", "", "", "", short(sum(costs))])
    where = f"{job.get('target', 'kd-launch')}, job {job.get('job', '')}"
    if job.get("billed_hours"):
        where += f"; billed: {job['billed_hours']:.4g} h"
    columns = ["group", "machines", "price an hour", "hours", "cost"]
    return Table(f"Machines and cost ({where})", columns, rows) if rows else None


def notes(run: RunRecords, failures: Sequence[str] = ()) -> Section | None:
    """What could not be read, and what could not be worked out from the rest; None without either.

    That ``summary.json`` is missing is left out while the run trains: it is written at the end.

    Args:
        run: with its notes.
        failures: of :attr:`kd.report.rules.Explained.failures`.
    """
    at_the_end = "summary.json is missing" if status(run) == "running" else ""
    shown = [note for note in [*run.notes, *failures] if note != at_the_end]
    return {"kind": "notes", "notes": shown} if shown else None


def _rules(explained: Explained) -> Table:
    """The rules that fired, with their evidence and what to do, as a table; it is shown without any, too."""
    rows = [[finding.rule, finding.text, finding.lever] for finding in explained.findings]
    empty = "None: nothing unusual about the machine or the training."
    return Table("Rules that fired", ["rule", "evidence", "what to do"], rows, empty=empty)


def _startup(facts: Facts) -> Table | None:
    """The parts of the newest start, before the first step was done; None where they were not recorded."""
    start_s = facts.startup_s
    rows = []
    for name, part_s in facts.startup["parts"].items():
        rows.append([name, f"{part_s:,.1f}", f"{share(part_s, start_s):.0%}"])
    return (
        Table(f"Start-up ({duration(start_s)})", ["", "s", "of the start"], rows) if rows else None
    )


def _percentiles(facts: Facts) -> Table | None:
    """Percentiles of each phase over the steps that start no loader, and of the machine's readings over all samples; None
    without both.
    """
    steps = facts.usual_steps
    series: dict[str, list[float]] = {"step (ms)": facts.steps_ms}
    for name in PHASES:
        if any(name in step["p"] for step in steps):
            series[f"{name} (ms)"] = [step["p"].get(name, 0.0) for step in steps]
    for title, (_, lines) in machine_series(facts.run).items():
        for label, values in lines.items():
            series[f"{title}, {label}"] = [value for value in values if value is not None]
    rows: list[list[Cell]] = []
    for name, values in series.items():
        if not values:
            continue
        percentiles = [round(percentile(values, q), 2) for q in PERCENTILES.values()]
        rows.append([name, *percentiles])
    if not rows:
        return None
    return Table("Percentiles", ["", *PERCENTILES], rows)


def _operations(facts: Facts) -> Table | None:
    """The operations that take most of a step in the newest profile, as a table; None without a profile."""
    if not facts.windows:
        return None
    window = facts.windows[-1]
    rows: list[list[Cell]] = []
    for one in window["top"]:
        percent = round(100 * one["share"], 1)
        rows.append([one["name"], one["range"], one["ms"], percent, one["calls"]])
    groups = window.get("groups", {})
    note = ", ".join(f"{name} {part:.0%}" for name, part in groups.items())
    title = f"Top operations (steps {window['first']} to {window['last']})"
    columns = ["operation", "range", "ms a step", "%", "calls a step"]
    return Table(title, columns, rows, note, long=True)


def flat(config: Json) -> dict[str, str]:
    """Nested settings as text by dotted key; "" for null.

    >>> flat({"a": {"b": 1, "c": {}}, "d": None})
    {'a.b': '1', 'a.c': '{}', 'd': ''}
    """
    values = flatten(config) if config else {}
    return {key: "" if value is None else str(value) for key, value in values.items()}


PAGE: dict[str, Callable[[Any], Any]] = {
    "headline": headline,
    "verdict": verdict_of,
    "cards": _cards,
    "cost by group": _cost_by_group,
    "rules": _rules,
    "learning": learning,
    "results": _results,
    "faithfulness": _faithfulness,
    "input costs": input_costs,
    "start-up": _startup,
    "phases": phase_chart,
    "cores": heat,
    "machine": machine_lines,
    "percentiles": _percentiles,
    "operations": _operations,
    "health": health_lines,
    "settings": _settings,
}
"""The parts of a run's page by the name that a failure is reported under, in the order of a run that trains or failed: of
its facts, those of :data:`OF_EXPLAINED` of the explained run."""
OF_EXPLAINED = ("verdict", "rules")
