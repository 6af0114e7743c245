"""The sections of a run's page, from its facts.

A *section* is a dict that ``report/html.py`` writes and the page draws by its ``kind``; None: nothing to show.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kd.config.trees import flatten
from kd.report.charts import Section, health_lines, heat, machine_lines, phase_chart
from kd.report.costs import input_costs, tier_table
from kd.report.evaluated import fidelity_parts, model_name
from kd.report.facts import Facts
from kd.report.learning import headline, learning
from kd.report.metric import counted, duration, format_metric
from kd.report.ratio import share
from kd.report.records import PHASES, RunRecords, percentile
from kd.report.rules import Explained, attempt, evidence_of, remedy, sentence
from kd.report.step_facts import gpus_of, mean
from kd.report.tables import Cell, Part, Table, results_of, sentences
from kd.storage.of_weights import LABELS_ALONE

PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
RUNNING_S = 600.0  # a run without a status whose newest step is younger still trains
OF_HEADER = ("host", "device_name", "cores", "threads", "world_size", "python", "torch", "platform")
OF_SUMMARY = ("kd_version", "precision", "strategy", "wall_s", "peak_memory_mb", "seed")


def report(explained: Explained) -> list[Section | Part]:
    """The page's sections, in the order of :data:`PAGE`; those without data are left out.

    A section that can't be worked out is left out too, and the notes name it: the others are shown. Of a run that ended
    well, with a student that became no worse, what is unusual comes after the results.
    """
    made: dict[str, list[Section | Part]] = {}
    for name, parts_of in PAGE.items():
        parts = attempt(f"section {name}", explained.failures, partial(parts_of, explained))
        made[name] = [part for part in parts or [] if part]
    problems = notes(
        explained.run, explained.failures
    )  # last: they name the failures of the others
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


def _results(run: RunRecords) -> list[Part]:
    """What commands have measured of the student, in the order of their names; of a finished student what was not compared,
    and how it is.
    """
    results = results_of(run.folder, run.notes.append)
    parts = [part for of_one in results.values() for part in of_one]
    model = run.config.get("model") or {}
    student = model.get("student") or {}
    ended_well = run.summary.get("status") == "done"
    has_classifier = student.get("head", True)
    if "pays" not in results and ended_well and not has_classifier:
        parts.append(sentences("Does it pay?", [NOT_MEASURED]))
    if (
        LABELS_ALONE not in results
        and ended_well
        and has_classifier
        and model.get("distill_losses")
    ):
        parts.append(sentences("Did the teacher help?", [NOT_COMPARED]))
    return parts


def _faithful(run: RunRecords) -> list[Part]:
    """How the student compares with its teacher; [] before its first validation."""
    return fidelity_parts(run.fidelity) if run.fidelity else []


def _settings(run: RunRecords) -> Table | None:
    """All settings of the run as a folded table; None without ``config.yaml``."""
    if not run.config:
        return None
    rows = [[key, value] for key, value in flat(run.config).items()]
    return Table("Settings", ["key", "value"], rows, folded=True)


def verdict_of(explained: Explained) -> Section:
    """What limits the run in one line, of a failed run after its error; below it what to change, and the other limits,
    folded where the run is done.
    """
    verdict, summary = explained.verdict, explained.run.summary
    text, details = verdict["text"], []
    if "others" in verdict:
        first, *others = explained.limits
        text = evidence_of(first)
        details = [f"what to change: {remedy(first)}"] if remedy(first) else []
        details += [sentence(limit) for limit in others]
    if summary.get("error") and summary.get("status") == "failed":
        text = f"failed: {_error_line(explained.run)}; until then {text}"
    return {
        "kind": "verdict",
        "bound": verdict["bound"],
        "text": text,
        "others": details,
        "folded": status(explained.run) == "done",
    }


def _error_line(run: RunRecords) -> str:
    """The first line of the error that ended a run; "" without one."""
    error = run.summary.get("error")
    return error.splitlines()[0] if error else ""


Card = tuple[str, str, str]
"""What a card of the page shows: title, value, note."""


def _cards(facts: Facts) -> Section:
    """The cards at the page's top: status, progress, results, speed; empty ones are left out."""
    run = facts.run
    state = "status", status(run), _error_line(run)
    cards = []
    if state[1] != "done":
        cards.append(state)
        cards += _progress(facts)
    cards += _result_cards(facts)
    if state[1] == "done":
        cards.append(state)
    cards += _speed_cards(facts)
    return {"kind": "cards", "cards": [list(card) for card in cards if card[1]]}


def _result_cards(facts: Facts) -> list[Card]:
    """The best values of student and teacher."""
    run = facts.run
    metric = run.primary
    teacher_value = (run.teacher.get("val") or {}).get(metric)
    score = facts.best_val()
    which = f"best val {metric}"
    if facts.exports_its_start():
        which = f"val {metric} before training"
    return [
        ("student", format_metric(metric, score), _about(which, run.student)),
        ("teacher", format_metric(metric, teacher_value), _about(f"val {metric}", run.teacher)),
    ]


def _speed_cards(facts: Facts) -> list[Card]:
    """Speed, start-up, and what an epoch and 1000 steps take and cost."""
    spread = speed = startup = ""
    if facts.steps_ms:
        median, high = percentile(facts.steps_ms, 50), percentile(facts.steps_ms, 95)
        spread = f"step {median:.0f} ms, p95 {high:.0f} ms"
    if facts.images_per_s is not None:
        speed = f"{facts.images_per_s:,.0f}"
    if facts.startup_s:
        startup = duration(facts.startup_s)
    epochs_seen = len({step["epoch"] for step in facts.steps})
    cards = [
        ("images/s", speed, spread),
        ("start-up", startup, _longest_part(facts)),
        ("time per epoch", duration(facts.epoch_s), f"{counted(epochs_seen, 'epoch')} seen"),
    ]
    thousand_steps_s = facts.step_ms  # a step's ms are 1000 steps' seconds
    return [
        *cards,
        ("cost per epoch", _cost(facts, facts.epoch_s), f"at {facts.price} an hour"),
        ("cost per 1000 steps", _cost(facts, thousand_steps_s), "of the mean step"),
    ]


def _longest_part(facts: Facts) -> str:
    """Which part of the start took longest, and how long; "" where parts were not recorded."""
    parts = facts.startup["parts"]
    if not parts:
        return ""
    longest = max(parts, key=lambda name: parts[name])
    return f"most of it {longest} ({duration(parts[longest])})"


def status(run: RunRecords) -> str:
    """``done``, ``failed`` or another status of the summary; without one ``running`` or ``ended early``.

    A run without a status still trains where its newest step, or its records' beginning, is younger than
    :data:`RUNNING_S`.
    """
    if "status" in run.summary:
        return str(run.summary["status"])
    newest_t = 0.0
    for header in run.headers.values():
        newest_t = max(newest_t, header.get("t", 0.0))
    for steps in run.steps.values():
        if steps:
            newest_t = max(newest_t, steps[-1]["t"])
    silent_s = time.time() - newest_t
    if silent_s < RUNNING_S:
        return "running"
    return "ended early"


def _about(metric: str, model: dict[str, Any]) -> str:
    name = model_name(model)
    return f"{metric}, {name}" if name else metric


def _progress(facts: Facts) -> list[Card]:
    """Epoch and step (a batch of each process) of a run that trains or has not come to its end, the time left, and its
    newest training loss.
    """
    if not facts.steps:
        return []
    step = facts.steps[-1]["step"] + 1
    steps_in_all = facts.epochs * facts.batches_per_epoch
    of_all = f"of {steps_in_all:.0f}" if math.isfinite(steps_in_all) else ""
    losses = [row["train/loss"] for row in facts.run.metrics if "train/loss" in row]
    newest = f"{losses[-1]:.4g}" if losses else ""
    return [
        ("epoch", epoch_in_words(facts), ""),
        ("step", f"{step:,}", of_all),
        ("time left", duration(facts.left_s), "at the pace so far"),
        ("train/loss", newest, "newest"),
    ]


def epoch_in_words(facts: Facts) -> str:
    """The epoch that the newest step is of, and how many there are to be: ``3 of 10``; empty without steps."""
    if not facts.steps:
        return ""
    newest = facts.steps[-1]
    epoch = str(newest["epoch"] + 1)
    if math.isfinite(facts.epochs):
        return f"{epoch} of {facts.epochs:g}"
    return epoch


def _cost(facts: Facts, seconds: float | None) -> str:
    """What so many seconds of the job cost; "" where the price of an hour or the seconds are not known."""
    if facts.price is None or not seconds:
        return ""
    return f"{facts.price * seconds / 3600:.4g}"


def _cost_by_group(facts: Facts) -> Table | None:
    """Machines, price and cost of each group of ``kd-launch``'s job, by the hours that the place where it ran has counted,
    else the run's; None without such a job.
    """
    job = facts.run.job
    hours = job.get("hours") or facts.hours
    rows = []
    total = 0.0
    for group in job.get("groups") or []:
        if not isinstance(group, dict) or "machines" not in group:
            continue
        price = group.get("price_per_hour")
        cost = None
        if price is not None and hours:
            cost = price * hours
            total += cost
        shown = ["" if value is None else f"{value:.4g}" for value in (price, hours, cost)]
        rows.append([str(group.get("name", "")), str(group["machines"]), *shown])
    if not rows:
        return None
    if len(rows) > 1 and total:
        rows.append(["all", "", "", "", f"{total:.4g}"])
    where = f"{job.get('target', 'kd-launch')}, job {job.get('job', '')}"
    if job.get("billed_hours"):
        where += f"; billed: {job['billed_hours']:.4g} h"
    columns = ["group", "machines", "price an hour", "hours", "cost"]
    return Table(f"Machines and cost ({where})", columns, rows, empty="")


def notes(run: RunRecords, failures: Sequence[str] = ()) -> Section | None:
    """What could not be read, and what could not be worked out from the rest; None without either.

    Args:
        run: with its notes.
        failures: of :attr:`kd.report.rules.Explained.failures`.
    """
    shown = list(run.notes)
    if status(run) == "running" and "summary.json is missing" in shown:
        shown.remove("summary.json is missing")  # it is written at the end
    shown += failures
    return {"kind": "notes", "notes": shown} if shown else None


def _rules(explained: Explained) -> Table:
    """The rules that fired, with their evidence and what to do, as a table; it is shown without any, too."""
    rows = [[finding.rule, finding.text, finding.lever] for finding in explained.findings]
    empty = "None: nothing unusual about the machine or the training."
    return Table("Rules that fired", ["rule", "evidence", "what to do"], rows, empty=empty)


def _startup(facts: Facts) -> Table | None:
    """The parts of the newest start, before the first step was done; None where they were not recorded."""
    start_s = facts.startup_s
    parts = facts.startup["parts"]
    if not parts:
        return None
    rows = []
    for name, part_s in parts.items():
        part = share(part_s, start_s)
        rows.append([name, f"{part_s:,.1f}", f"{part:.0%}"])
    title = f"Start-up ({duration(start_s)})"
    return Table(title, ["", "s", "of the start"], rows)


def _percentiles(facts: Facts) -> Table | None:
    """Percentiles of each phase over the steps that start no loader, and of the machine's readings over all samples; None
    without both.
    """
    steps = facts.usual_steps
    series = {}
    if steps:
        series["step (ms)"] = facts.steps_ms
    for name in PHASES:
        if any(name in step["p"] for step in steps):
            series[f"{name} (ms)"] = [step["p"].get(name, 0.0) for step in steps]
    series.update(_machine_series(facts.run))
    if not series:
        return None
    rows: list[list[Cell]] = []
    for name, values in series.items():
        percentiles = [round(percentile(values, q), 2) for q in PERCENTILES.values()]
        rows.append([name, *percentiles])
    return Table("Percentiles", ["", *PERCENTILES], rows)


def _machine_series(run: RunRecords) -> dict[str, list[float]]:
    """What the samples of all machines hold, in % by name: cores, memory, each GPU."""
    series = {}
    for node, samples in run.samples.items():
        where = ""
        if len(run.samples) > 1:
            where = f", {node}"
        of_cores = [mean(sample["cpu"]) for sample in samples]
        of_memory = [sample["mem"] for sample in samples]
        series[f"CPU{where} (%)"] = of_cores
        series[f"memory{where} (%)"] = of_memory
        for number, readings in enumerate(gpus_of(samples)):
            gpu = f"GPU {number}"
            use = _known(readings, "util")
            memory = _known(readings, "mem")
            series[f"{gpu} utilisation{where} (%)"] = use
            series[f"{gpu} memory{where} (%)"] = memory
    return series


def _known(readings: Iterable[dict[str, Any]], key: str) -> list[float]:
    """The values of a key, where the machine gives one."""
    values = [reading.get(key) for reading in readings]
    return [value for value in values if value is not None]


def _operations(facts: Facts) -> Table | None:
    """The operations that take most of a profiled step, as a table; None without a profile."""
    if not facts.windows:
        return None
    window = facts.windows[-1]
    rows: list[list[Cell]] = []
    for operation in window["top"]:
        name = operation["name"]
        within = operation["range"]
        percent = round(100 * operation["share"], 1)
        row = [name, within, operation["ms"], percent, operation["calls"]]
        rows.append(row)
    first = window["first"]
    last = window["last"]
    groups = []
    for name, part in window.get("groups", {}).items():
        groups.append(f"{name} {part:.0%}")
    note = ", ".join(groups)
    title = f"Top operations (steps {first} to {last})"
    columns = ["operation", "range", "ms a step", "%", "calls a step"]
    return Table(title, columns, rows, note, long=True)


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings as text by dotted key; "" for null."""
    values = flatten(config) if config else {}
    return {key: "" if value is None else str(value) for key, value in values.items()}


def _environment(facts: Facts) -> Table:
    """Versions, devices and folder of the run, as a folded table."""
    run = facts.run
    rows = []
    for key in OF_HEADER:
        if key in facts.header:
            rows.append([key, str(facts.header[key])])
    for node in run.nodes.values():
        if node.get("gpus"):
            rows.append(["GPUs", ", ".join(node["gpus"])])
    for key in OF_SUMMARY:
        if key in run.summary:
            rows.append([key, str(run.summary[key])])
    rows.append(["folder", str(run.folder)])
    return Table("Environment", ["", ""], rows, folded=True)


PAGE: dict[str, Callable[[Explained], Sequence[Section | Part | None]]] = {
    "headline": lambda explained: [headline(explained.facts)],
    "verdict": lambda explained: [verdict_of(explained)],
    "cards": lambda explained: [_cards(explained.facts)],
    "cost by group": lambda explained: [_cost_by_group(explained.facts)],
    "rules": lambda explained: [_rules(explained)],
    "learning": lambda explained: learning(explained.facts),
    "results": lambda explained: _results(explained.run),
    "faithfulness": lambda explained: _faithful(explained.run),
    "input costs": lambda explained: [input_costs(explained.facts)],
    "data tier": lambda explained: [tier_table(explained.facts)],
    "start-up": lambda explained: [_startup(explained.facts)],
    "phases": lambda explained: [phase_chart(explained.facts)],
    "cores": lambda explained: [heat(explained.run)],
    "machine": lambda explained: machine_lines(explained.run),
    "percentiles": lambda explained: [_percentiles(explained.facts)],
    "operations": lambda explained: [_operations(explained.facts)],
    "health": lambda explained: health_lines(explained.run),
    "settings": lambda explained: [_settings(explained.run)],
    "environment": lambda explained: [_environment(explained.facts)],
}
"""The parts of a run's page by the name that a failure is reported under, in the order of a run that trains or failed."""
