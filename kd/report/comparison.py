"""The page about two runs or more: how their settings, results, speed and cost differ from the first one's.

``runs`` are the facts of the runs in the order given, ``names`` their names for people; both as long, two or more.
"""

import math
from collections.abc import Sequence
from operator import itemgetter

from kd.report.charts import Section, by_epoch, epoch_chart, heat
from kd.report.facts import Facts
from kd.report.metric import difference, short, timed_with
from kd.report.ratio import ratio, times
from kd.report.records import PHASES, percentile
from kd.report.rules import Explained
from kd.report.sections import flat, notes
from kd.report.step_facts import known_utilisation, mean
from kd.report.tables import Part, Table

NO_DIFFERENCE = ("recipe", "runs_dir", "resume")  # settings that change nothing of a run
Numbers = dict[str, float | None]
"""Numbers of a run by their row's name; None: not known."""


def comparison(explained: Sequence[Explained]) -> list[Section | Part]:
    """The sections of the page, in order; those without data are left out.

    Args:
        explained: the runs; the others are compared with the first.
    """
    runs = [one.facts for one in explained]
    names = labels(runs)
    text, *warnings = differences_in_words(explained)
    verdicts = [
        f"{name}: {one.verdict['text']}" for name, one in zip(names, explained, strict=True)
    ]
    verdict = {
        "kind": "verdict",
        "bound": "comparison",
        "text": text,
        "others": [*warnings, *verdicts],
    }
    title = "Settings that differ"
    sections: list[Section | Part | None] = [
        verdict,
        numbers_table(runs),
        Table(title, ["key", *names], _settings(runs), empty="None.", long=True),
    ]
    for metric in dict.fromkeys(["train/loss", *(f"val/{facts.run.primary}" for facts in runs)]):
        lines = {name: by_epoch(facts.run, metric) for name, facts in zip(names, runs, strict=True)}
        sections.append(epoch_chart(metric, lines))
    for facts, name in zip(runs, names, strict=True):
        cores = heat(facts.run)
        if cores:
            sections.append({**cores, "title": f"{cores['title']} of {name}"})
    sections += [notes(one.run, one.failures) for one in explained]
    return [section for section in sections if section]


def label(facts: Facts) -> str:
    """Recipe and number of a run, ``recipe/003``."""
    recipe = facts.run.summary.get("recipe") or facts.run.folder.parent.name
    return f"{recipe}/{facts.run.folder.resolve().name}"


def labels(runs: Sequence[Facts]) -> list[str]:
    """A name for each run that no other has: :func:`label`, or the folder as it was given where two are alike."""
    names = [label(facts) for facts in runs]
    if len(set(names)) < len(names):
        return [str(facts.run.folder) for facts in runs]
    return names


def _settings(runs: Sequence[Facts]) -> list[list[str]]:
    """Rows of the settings that are not the same in all runs: key, and the value of each run as text.

    Between a run of kd and another training only settings that both have are compared.
    """
    settings: list[dict[str, str]] = []
    keys: dict[str, None] = {}  # in their order
    for facts in runs:
        of_run = flat(facts.run.config)
        settings.append(of_run)
        keys |= dict.fromkeys(of_run)
    only_common = len({facts.of_kd for facts in runs}) > 1
    rows = []
    for key in keys:
        values = [of_run.get(key, "not set") for of_run in settings]
        different = len(set(values)) > 1
        missing = only_common and "not set" in values
        if different and not missing and key not in NO_DIFFERENCE:
            rows.append([key, *values])
    return rows


def _differences(rows: Sequence[Sequence[str]]) -> str:
    """The first four differing settings in words, and how many more there are."""
    if not rows:
        return "no setting differs"
    settings = [
        f"{key} ({', '.join(value or 'null' for value in values)})" for key, *values in rows[:4]
    ]
    more = f" and {len(rows) - 4} more settings" if len(rows) > 4 else ""
    return f"they differ in {', '.join(settings)}{more}"


# -- numbers -----------------------------------------------------------------------------------------------------------
def numbers_table(runs: Sequence[Facts]) -> Table:
    """A row for each number that a run has; for two runs a last column with the change.

    A phase that one of the runs lacks took 0 ms there.
    """
    numbers = []
    for facts in runs:
        numbers.append({**_outcome(facts), **_costs(facts), **_steps(facts)})
    absent = {f"{name} (ms)": 0.0 for name in PHASES}
    rows = []
    for name in dict.fromkeys(name for of_run in numbers for name in of_run):
        values = [of_run.get(name, absent.get(name)) for of_run in numbers]
        row = [name, *(short(value) for value in values)]
        if not any(row[1:]):
            continue
        if len(values) == 2:
            row.append(_change(name, *values))
        rows.append(row)
    columns = ["", *labels(runs)]
    if len(runs) == 2:
        columns.append("after / before")
    return Table("In numbers", columns, rows, empty="Nothing is known yet.")


def _outcome(facts: Facts) -> Numbers:
    """What the student has reached, its size, and its measured latency."""
    run = facts.run
    student = run.student
    params = student.get("params")
    numbers = {
        f"val {run.primary}": facts.best_val(),
        "val agreement": (student.get("best_val") or {}).get("agreement"),
        "parameters (M)": params / 1e6 if params else None,
    }
    for row in run.latency:
        if row["model"] == "student":
            numbers[f"ms, {timed_with(row)}"] = row["median_ms"]
    return numbers


def _costs(facts: Facts) -> Numbers:
    """Length, devices, cost and speed of a run."""
    hours = _hours(facts)
    per_epoch = _hours_per_epoch(facts)
    thousand_steps_hours = facts.step_ms / 3600 or None  # a step's ms are 1000 steps' seconds
    return {
        "hours": hours,
        "epochs": facts.epochs_done,
        "hours per epoch": per_epoch,
        "devices": float(facts.devices),
        "device-hours per epoch": _product(per_epoch, facts.devices),
        "cost": _product(facts.price, hours),
        "cost per epoch": _product(facts.price, per_epoch),
        "cost per 1000 steps": _product(facts.price, thousand_steps_hours),
        "images/s": facts.images_per_s,
        "images/s per device": _product(facts.images_per_s, ratio(1, facts.devices)),
    }


def _steps(facts: Facts) -> Numbers:
    """How busy the machine is, and percentiles and phases of a step."""
    series = {
        "GPU {} (%)": known_utilisation(facts.samples),
        "CPU {} (%)": [mean(row) for row in facts.core_use if row],
        "step {} (ms)": facts.steps_ms,
    }
    numbers: Numbers = {}
    for name, values in series.items():
        for q in (50, 90, 95, 99):
            numbers[name.format(f"p{q}")] = percentile(values, q)
    for name in PHASES:
        if name in facts.phases:
            numbers[f"{name} (ms)"] = facts.phases[name]
    return numbers


def _hours(facts: Facts) -> float | None:
    """Hours of a run as its own closing table has them; of one that has not ended, those recorded so far."""
    wall_s = facts.run.summary.get("wall_s")
    return wall_s / 3600 if wall_s else facts.hours


def _hours_per_epoch(facts: Facts) -> float | None:
    """:func:`_hours` an epoch; None before any is recorded."""
    return ratio(_hours(facts) or 0.0, facts.epochs_done or 0.0) or None


def _product(a: float | None, b: float | None) -> float | None:
    """``a * b``; None where one of them is not known."""
    return None if a is None or b is None else a * b


def _change(name: str, before: float | None, after: float | None) -> str:
    """How a number has changed: a metric in points or its units, utilisation in percentage points, others by a factor."""
    if name.startswith("val "):
        return difference(name.removeprefix("val "), before, after)
    if not name.endswith("(%)"):
        return times(before, after)
    if before is None or after is None or not math.isfinite(after - before):
        return ""
    return f"{after - before:+.0f} %"


# -- in words ----------------------------------------------------------------------------------------------------------
def differences_in_words(explained: Sequence[Explained]) -> list[str]:
    """What the runs differ in, and how much faster the last is than the first; where they are judged by other pictures, that
    their metrics can't be compared.
    """
    runs = [one.facts for one in explained]
    first = runs[0]
    last = runs[-1]
    settings = _settings(runs)
    differing = _differences(settings)
    speed = _speed(first, last)
    lines = [f"{differing}; {speed}"]
    of_first = first.run.config.get("data") or {}
    of_last = last.run.config.get("data") or {}
    for key in ("source", "val_fraction"):
        if of_first.get(key) != of_last.get(key):
            why = "judged by other pictures, their metrics can't be compared"
            lines.append(f"they have different data.{key}: {why}")
            break
    return lines


def _speed(before: Facts, after: Facts) -> str:
    """How much faster the last run is, in a sentence, and by which phase.

    With as many devices by pictures a second; with another number of them by hours an epoch, altogether and for each
    device-hour.
    """
    change = _largest_change(before, after)
    more_devices = ratio(after.devices, before.devices)
    hours = _hours_per_epoch(before), _hours_per_epoch(after)
    if more_devices != 1 and hours[0] and hours[1]:
        faster = ratio(hours[0], hours[1])
        on_gpus = "cuda" in (before.header.get("device"), after.header.get("device"))
        what = "GPU" if on_gpus else "process"
        count = f"{more_devices:.3g}x"
        if more_devices < 1:
            fewer = ratio(1, more_devices)
            count = f"1 / {fewer:.3g} of"
        of_one = ratio(faster, more_devices)
        each = f"{of_one:.2f}x per {what}-hour"
        epochs = f"{hours[0]:.3g} hours an epoch before, {hours[1]:.3g} after"
        return f"{epochs}: {faster:.1f}x faster on {count} the {what}s, {each}{change}"
    if not before.images_per_s or not after.images_per_s:
        return "one of the runs has no steps to compare"
    speed = ratio(after.images_per_s, before.images_per_s)
    each = ""
    if more_devices != 1:
        of_one = ratio(speed, more_devices)
        each = f" ({of_one:.2f}x per device)"
    speeds = f"{before.images_per_s:,.0f} images/s before, {after.images_per_s:,.0f} after"
    return f"{speeds}: {speed:.2f}x{each}{change}"


def _largest_change(before: Facts, after: Facts) -> str:
    """The phase whose ms a step differ most, in words; "" where that is at most 2 % of the step.

    Of a run of kd beside another training, whose phases have other names, those that both have count.
    """
    same_kind = before.of_kd == after.of_kd
    changes = []
    for name in PHASES:
        first = before.phases.get(name, 0.0)
        last = after.phases.get(name, 0.0)
        in_both = name in before.phases and name in after.phases
        if same_kind or in_both:
            difference_ms = abs(first - last)
            changes.append((difference_ms, name, first, last))
    none = (0.0, "", 0.0, 0.0)
    most, name, first, last = max(changes, key=itemgetter(0), default=none)
    longer_step = max(before.step_ms, after.step_ms)
    if most <= 0.02 * longer_step:
        return ""
    return f"; most of the difference: {name} went from {first:.0f} to {last:.0f} ms a step"
