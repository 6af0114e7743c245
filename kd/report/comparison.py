"""The page about two runs or more: how their settings, results, speed and cost differ from the first one's.

``runs`` are the facts of the runs in the order given, ``names`` their names for people; both as long, two or more.
"""

from collections.abc import Sequence
from itertools import chain

from kd.report.charts import Section, by_epoch, epoch_chart, heat
from kd.report.facts import Facts
from kd.report.metric import difference, short
from kd.report.ratio import Number, ratio, times
from kd.report.records import PHASES, percentile
from kd.report.rules import Explained
from kd.report.sections import flat, notes
from kd.report.step_facts import known_utilisation, mean
from kd.report.tables import Part, Table

NO_DIFFERENCE = ("recipe", "runs_dir", "resume")  # settings that change nothing of a run
Numbers = dict[str, Number]
"""Numbers of a run by their row's name; None: not known."""


def comparison(explained: Sequence[Explained]) -> list[Section | Part]:
    """The sections of the page, in order; those without data are left out.

    Args:
        explained: the runs; the others are compared with the first.
    """
    runs = [one.facts for one in explained]
    named = dict(zip(labels(runs), explained, strict=True))
    text, *others = differences_in_words(explained)
    others += [f"{name}: {one.verdict['text']}" for name, one in named.items()]
    sections: list[Section | Part | None] = [
        {"kind": "verdict", "bound": "comparison", "text": text, "others": others},
        *comparison_tables(runs),
    ]
    for metric in dict.fromkeys(["train/loss", *(f"val/{facts.run.primary}" for facts in runs)]):
        lines = {name: by_epoch(one.run, metric) for name, one in named.items()}
        sections.append(epoch_chart(metric, lines))
    for name, one in named.items():
        cores = heat(one.facts)
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


def comparison_tables(runs: Sequence[Facts]) -> list[Table]:
    """The runs in numbers, and their settings that are not the same in all."""
    return [numbers_table(runs), settings_table(runs)]


def settings_table(runs: Sequence[Facts]) -> Table:
    """A row for each setting that is not the same in all runs: key, and the value of each run as text.

    Those of :data:`NO_DIFFERENCE` are left out. Between a run of kd and another training only settings that both have are
    compared.
    """
    settings = [flat(facts.run.config) for facts in runs]
    only_common = len({facts.of_kd for facts in runs}) > 1
    rows = []
    keys = dict.fromkeys(chain(*settings))
    for key in keys:
        values = [of_run.get(key, "not set") for of_run in settings]
        missing = only_common and "not set" in values
        differs = len(set(values)) > 1
        if differs and not missing and key not in NO_DIFFERENCE:
            rows.append([key, *values])
    columns = ["key", *labels(runs)]
    return Table("Settings that differ", columns, rows, empty="None.", long=True)


# -- numbers -----------------------------------------------------------------------------------------------------------
def numbers_table(runs: Sequence[Facts]) -> Table:
    """A row for each number that a run has.

    For two runs a last column has the change: of a validation metric the difference, of any other number the quotient.
    """
    numbers = [_numbers_of(facts) for facts in runs]
    rows = []
    for name in dict.fromkeys(name for of_run in numbers for name in of_run):
        values = [of_run.get(name) for of_run in numbers]
        row = [name, *map(short, values)]
        if not any(row[1:]):
            continue
        if len(values) == 2:
            metric = name.removeprefix("val ")
            row.append(times(*values) if metric == name else difference(metric, *values))
        rows.append(row)
    columns = ["", *labels(runs), *(["after / before"] if len(runs) == 2 else [])]
    return Table("In numbers", columns, rows, empty="Nothing is known yet.")


def _numbers_of(facts: Facts) -> Numbers:
    """What a run's student has reached; its length, cost and speed; how busy the machine is; percentiles and phases."""
    run = facts.run
    student = facts.run.student
    numbers: Numbers = {
        f"val {run.primary}": facts.best_val(),
        "val agreement": (student.get("best_val") or {}).get("agreement"),
        "parameters (M)": ratio(student.get("params") or 0.0, 1e6) or None,
    }
    hours = facts.hours
    per_epoch = _hours_per_epoch(facts)
    price = facts.price
    thousand_steps_hours = facts.step_ms / 3600 or None  # a step's ms are 1000 steps' seconds
    numbers |= {
        "hours": hours,
        "epochs": facts.epochs_done,
        "hours per epoch": per_epoch,
        "devices": float(facts.devices),
        "device-hours per epoch": _product(per_epoch, facts.devices),
        "cost": _product(price, hours),
        "cost per epoch": _product(price, per_epoch),
        "cost per 1000 steps": _product(price, thousand_steps_hours),
        "images/s": facts.images_per_s,
        "images/s per device": _product(facts.images_per_s, ratio(1, facts.devices)),
    }
    series = {
        "GPU {} (%)": known_utilisation(facts.samples),
        "CPU {} (%)": [mean(row) for row in facts.core_use if row],
        "step {} (ms)": facts.steps_ms,
    }
    for name, values in series.items():
        for q in (50, 90, 95, 99):
            numbers[name.format(f"p{q}")] = percentile(values, q)
    phases = {f"{name} (ms)": facts.phases[name] for name in PHASES if name in facts.phases}
    return {**numbers, **phases}


def _hours_per_epoch(facts: Facts) -> Number:
    """Hours of a run divided by its epochs so far; None before any is recorded."""
    return ratio(facts.hours or 0.0, facts.epochs_done or 0.0) or None


def _product(a: Number, b: Number) -> Number:
    """``a * b``; None where one of them is not known."""
    return None if a is None or b is None else a * b


# -- in words ----------------------------------------------------------------------------------------------------------
def differences_in_words(explained: Sequence[Explained]) -> list[str]:
    """A line that says how much faster the last run is than the first.

    Where their ``data.source`` or ``data.val_fraction`` differ, a second line: their metrics can't be compared.
    """
    first = explained[0].facts
    last = explained[-1].facts
    lines = [_speed(first, last)]
    data, data_then = (facts.run.config.get("data") or {} for facts in (first, last))
    for key in ("source", "val_fraction"):
        if data.get(key) != data_then.get(key):
            why = "judged by other pictures, their metrics can't be compared"
            return [*lines, f"they have different data.{key}: {why}"]
    return lines


def _speed(before: Facts, after: Facts) -> str:
    """How much faster the last run is, in a sentence.

    With another number of devices it compares hours an epoch, in total and for each device-hour; with the same number, or
    where these hours are not known, pictures a second.
    """
    more_devices = ratio(after.devices, before.devices)
    hours = _hours_per_epoch(before)
    hours_after = _hours_per_epoch(after)
    if more_devices != 1 and hours and hours_after:
        faster = ratio(hours, hours_after)
        each = f"{ratio(faster, more_devices):.2f}x per device-hour"
        epochs = f"{hours:.3g} hours an epoch before, {hours_after:.3g} after"
        return f"{epochs}: {faster:.1f}x faster on {more_devices:.3g}x the devices, {each}"
    speed = before.images_per_s
    speed_after = after.images_per_s
    if not speed or not speed_after:
        return "one of the runs has no steps to compare"
    return f"{speed:,.0f} images/s before, {speed_after:,.0f} after: {times(speed, speed_after)}"
