"""The page about two runs or more: how their settings, results, speed and cost differ.

``runs`` are the facts of the runs in the order given, ``names`` their names for people; both as long, two or more.
"""

import math
from collections.abc import Sequence

from kd.report.charts import Section, by_epoch, epoch_chart, heat, line_chart, table
from kd.report.facts import Facts
from kd.report.metric import difference, duration, format_metric, short, timed_with
from kd.report.ratio import ratio, times
from kd.report.records import PHASES, percentile
from kd.report.rules import Explained
from kd.report.sections import PERCENTILES, flat, notes
from kd.report.step_facts import known_utilisation, mean

CLASSES = 8  # that changed most
PARTS_OF_A_CURVE = 60  # points of a run's curve of losses, about
NO_DIFFERENCE = ("recipe", "runs_dir", "resume")  # settings that change nothing of a run
AS_TRAINED = {
    "trainer.precision": "precision",
    "trainer.strategy": "strategy",
    "trainer.devices": "world_size",
}
"""Settings that kd's runs and others write differently, and where ``summary.json`` has them for both alike."""
LEFT_OUT = "Not all of these are runs of kd: what only some of them have is left out."
Numbers = dict[str, float | None]
"""Numbers of a run by their row's name; None: not known."""


def comparison(explained: Sequence[Explained]) -> list[Section]:
    """The sections of the page, in order; those without data are left out.

    Args:
        explained: the runs; the others are compared with the first.
    """
    runs = [explained_run.facts for explained_run in explained]
    names = labels(runs)
    differing = _settings(runs)
    only_common = _are_of_both_kinds(runs)
    note = ""
    if only_common:
        note = LEFT_OUT
    sections: list[Section | None] = [
        _verdict(explained, names, differing),
        _table("What came of it", [_outcome(facts) for facts in runs], names, only_common),
        *_curves(runs, names),
        _moved_classes(runs[0], runs[-1], names),
        _table(
            "Side by side" if len(runs) > 2 else "Before and after",
            [_numbers(facts) for facts in runs],
            names,
            only_common,
        ),
        table(
            "Settings that differ", ["key", *names], differing, empty="None.", note=note, long=True
        ),
        _hardware(runs, names),
        _phase_bars(runs, names),
        _operations(runs, names),
        *_heat_maps(runs, names),
        *(notes(explained_run.run, explained_run.failures) for explained_run in explained),
    ]
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


def _other_pictures(first: Facts, last: Facts) -> str:
    """A sentence where two runs name different pictures to be judged by; else ""."""
    of_first = first.run.config.get("data") or {}
    of_last = last.run.config.get("data") or {}
    for key in ("source", "val_fraction"):
        if of_first.get(key) != of_last.get(key):
            return f"they have different data.{key}: judged by other pictures, their metrics can't be compared"
    return ""


def _verdict(
    explained: Sequence[Explained], names: Sequence[str], differing: Sequence[Sequence[str]]
) -> Section:
    """The page's first section: how settings and results of the first and last run differ, then each run's verdict.

    Args:
        explained: the runs.
        names: of the runs, in the same order.
        differing: rows of the table of settings that differ.
    """
    first = explained[0].facts
    last = explained[-1].facts
    verdicts = [
        f"{name}: {explained_run.verdict['text']}"
        for name, explained_run in zip(names, explained, strict=True)
    ]
    return {
        "kind": "verdict",
        "bound": "comparison",
        "text": f"{_differences(differing)}; {_headline(first, last)}",
        "others": verdicts,
    }


def _are_of_both_kinds(runs: Sequence[Facts]) -> bool:
    """Whether kd has made some of the runs, and a training that ``kd.Monitor`` has watched others."""
    return len({facts.of_kd for facts in runs}) > 1


# -- settings ----------------------------------------------------------------------------------------------------------
def _settings(runs: Sequence[Facts]) -> list[list[str]]:
    """Rows of the settings that are not the same in all runs: key, and the value of each run as text.

    Between a run of kd and another training only settings that both have are compared.
    """
    only_common = _are_of_both_kinds(runs)
    settings: list[dict[str, str]] = []
    keys: dict[str, None] = {}  # in the order of the files
    for facts in runs:
        config = facts.run.config
        settings_of_run = dict(flat(config)) if config else {}
        if only_common:
            settings_of_run |= _as_trained(facts)
        settings.append(settings_of_run)
        keys.update(dict.fromkeys(settings_of_run))
    rows = []
    for key in keys:
        values = [settings_of_run.get(key, "not set") for settings_of_run in settings]
        differs = len(set(values)) > 1
        if only_common and not all(key in settings_of_run for settings_of_run in settings):
            continue
        if differs and key not in NO_DIFFERENCE:
            rows.append([key, *values])
    return rows


def _as_trained(facts: Facts) -> dict[str, str]:
    """The settings of :data:`AS_TRAINED` by key, as the run had them; those that its summary lacks are left out."""
    summary = facts.run.summary
    return {key: str(summary[name]) for key, name in AS_TRAINED.items() if name in summary}


def _differences(rows: Sequence[Sequence[str]]) -> str:
    """The first four differing settings in words, and how many more there are."""
    if not rows:
        return "no setting differs"
    settings = []
    for key, *values in rows[:4]:
        shown = ", ".join(value or "null" for value in values)
        settings.append(f"{key} ({shown})")
    text = f"they differ in {', '.join(settings)}"
    if len(rows) > 4:
        text += f" and {len(rows) - 4} more settings"
    return text


def _hardware(runs: Sequence[Facts], names: Sequence[str]) -> Section:
    """Devices and cores of each run as a table, a column a run; ``names`` are its heads."""
    devices = []
    cores = []
    for facts in runs:
        device = facts.header.get("device_name", "unknown")
        count = facts.header.get("cores", "")
        devices.append(f"{device} x {facts.devices}")
        cores.append(str(count))
    rows = [["devices", *devices], ["cores of a machine", *cores]]
    return table("Hardware", ["", *names], rows)


# -- numbers -----------------------------------------------------------------------------------------------------------
def _outcome(facts: Facts) -> Numbers:
    """What each student has reached, its size, and its measured latency."""
    run = facts.run
    numbers = {}
    for student in run.students:
        name = student or "student"
        model = run.model_of(student)
        best_val = model.get("best_val") or {}
        millions = None
        if model.get("params"):
            millions = model["params"] / 1e6
        numbers[f"{name} val {run.primary}"] = facts.best_val(student)
        numbers[f"{name} val agreement"] = best_val.get("agreement")
        numbers[f"{name} parameters (M)"] = millions
        for row in run.latency:
            if row["model"] == name:
                numbers[f"{name} ms, {timed_with(row)}"] = row["median_ms"]
    return numbers


def _moved_classes(before: Facts, after: Facts, names: Sequence[str]) -> Section | None:
    """The :data:`CLASSES` classes whose share of right answers differs most, of each run's (first) student.

    None where one of the runs has counted none, or they have other classes.

    Args:
        before: the first run.
        after: the last.
        names: of all runs; the first and the last head the columns.
    """
    first = before.run.confusion_of(before.run.students[0])
    last = after.run.confusion_of(after.run.students[0])
    if not first or not last or before.run.classes != after.run.classes:
        return None
    moved = []
    for name, share_before, share_after in zip(
        before.run.classes, first["right"], last["right"], strict=False
    ):
        known = share_before is not None and share_after is not None
        if known and share_before != share_after:
            moved.append((name, share_before, share_after))
    moved.sort(key=lambda row: abs(row[2] - row[1]), reverse=True)
    rows = [
        [
            name,
            f"{100 * share_before:.1f}",
            f"{100 * share_after:.1f}",
            f"{100 * (share_after - share_before):+.1f}",
        ]
        for name, share_before, share_after in moved[:CLASSES]
    ]
    note = f"After the last validations, of epochs {first['epoch'] + 1} and {last['epoch'] + 1}."
    return table(
        "Classes that changed most (% right)",
        ["class", names[0], names[-1], "points"],
        rows,
        empty="None: all are as before.",
        note=note,
    )


def _hours(facts: Facts) -> float | None:
    """Hours of a run as its own closing table has them; of one that has not ended, those recorded so far; None: none are."""
    wall_s = facts.run.summary.get("wall_s")
    if wall_s:
        return wall_s / 3600
    return facts.hours


def _hours_per_epoch(facts: Facts) -> float | None:
    """:func:`_hours` an epoch; None before any is recorded."""
    hours = _hours(facts)
    if not hours or not facts.epochs_done:
        return None
    return ratio(hours, facts.epochs_done)


def _numbers(facts: Facts) -> Numbers:
    """The numbers of a run that are compared: length, cost, speed, utilisation, step times and phases."""
    thousand_steps_hours = None
    if facts.step_ms:
        thousand_steps_hours = facts.step_ms / 3600  # a step's ms are 1000 steps' seconds
    images_per_device = None
    if facts.images_per_s:
        images_per_device = ratio(facts.images_per_s, facts.devices)
    hours = _hours(facts)
    hours_per_epoch = _hours_per_epoch(facts)
    numbers: Numbers = {
        "hours": hours,
        "epochs": facts.epochs_done,
        "hours per epoch": hours_per_epoch,
        "devices": float(facts.devices),
        "device-hours": _product(hours, facts.devices),
        "device-hours per epoch": _product(hours_per_epoch, facts.devices),
        "training seconds per epoch": facts.epoch_s,
        "cost": _product(facts.price, hours),
        "cost per epoch": _product(facts.price, hours_per_epoch),
        "cost per 1000 steps": _product(facts.price, thousand_steps_hours),
        "images/s": facts.images_per_s,
        "images/s per device": images_per_device,
    }
    utilisation = {
        "GPU": known_utilisation(facts.samples),
        "CPU": [mean(row) for row in facts.core_use if row],
    }
    for device, percent in utilisation.items():
        for name in ("p50", "p90", "p95", "p99"):
            numbers[f"{device} {name} (%)"] = percentile(percent, PERCENTILES[name])
    for name, q in PERCENTILES.items():
        numbers[f"step {name} (ms)"] = percentile(facts.steps_ms, q)
    for name in PHASES:
        if name in facts.phases:
            numbers[f"{name} (ms)"] = facts.phases[name]
    return numbers


def _product(a: float | None, b: float | None) -> float | None:
    """``a * b``; None where one of them is not known."""
    if a is None or b is None:
        return None
    return a * b


def _table(
    title: str, numbers: Sequence[Numbers], names: Sequence[str], only_common: bool
) -> Section | None:
    """A row for each number that a run has; for two runs a last column with the change.

    A phase that one of the runs lacks took 0 ms there.

    Args:
        title: of the table.
        numbers: by name, of each run.
        names: of the runs.
        only_common: leave out numbers that one of the runs lacks; None where no number is left.
    """
    absent = {f"{name} (ms)": 0.0 for name in PHASES}
    two_runs = len(numbers) == 2
    rows = []
    for name in dict.fromkeys(name for numbers_of_run in numbers for name in numbers_of_run):
        if only_common and any(numbers_of_run.get(name) is None for numbers_of_run in numbers):
            continue
        values = [numbers_of_run.get(name, absent.get(name)) for numbers_of_run in numbers]
        row = [name, *(short(value) for value in values)]
        if not any(row[1:]):
            continue
        if two_runs:
            before, after = values
            row.append(_change(name, before, after))
        rows.append(row)
    if only_common and not rows:
        return None
    columns = ["", *names]
    if two_runs:
        columns.append("after / before")
    return table(title, columns, rows, empty="Nothing is known yet.")


def _quotient(a: float | None, b: float | None) -> float | None:
    """``a / b``; None where one of them is not known or infinite, or ``b`` is 0."""
    if a is None or not b or not math.isfinite(a) or not math.isfinite(b):
        return None
    return ratio(a, b)


def _change(name: str, before: float | None, after: float | None) -> str:
    """How a number has changed from ``before`` to ``after``, for the table's last column; "" where one is not known.

    A metric in points or its units, utilisation in percentage points, any other number by a factor.

    Args:
        name: of the row: ``... val METRIC`` of a metric, ``... (%)`` of utilisation.
        before: of the first run.
        after: of the last.
    """
    _, is_metric, metric = name.partition(" val ")
    if is_metric:
        return difference(metric, before, after)
    if not name.endswith("(%)"):
        return times(before, after)
    if before is None or after is None or not math.isfinite(before - after):
        return ""
    return f"{after - before:+.0f} %"


def headline(explained: Sequence[Explained]) -> list[str]:
    """The comparison in a few lines, for a terminal: each run's metric and time, their difference, what they differ in.

    Args:
        explained: the runs; the last is compared with the first.
    """
    runs = [explained_run.facts for explained_run in explained]
    names = labels(runs)
    lines = []
    for facts, name in zip(runs, names, strict=True):
        values = [name + ":"]
        for student in facts.run.students:
            value = format_metric(facts.run.primary, facts.best_val(student))
            if value:
                values.append(f"{student} val {facts.run.primary} {value},".lstrip())
        seconds = _product(_hours(facts), 3600)
        values.append(f"in {duration(seconds) or 'an unknown time'}")
        lines.append(" ".join(values))
    first = runs[0]
    last = runs[-1]
    changes = []
    for student in first.run.students:
        if student in last.run.students and first.run.primary == last.run.primary:
            values_of_both = first.best_val(student), last.best_val(student)
            change = difference(first.run.primary, *values_of_both)
            if change:
                changes.append(f"{student} {change}".lstrip())
    times_the_time = times(_hours(first), _hours(last))
    if times_the_time:
        changes.append(f"{times_the_time} the time")
    in_words = ", ".join(changes) or "unknown"
    lines.append(f"{names[-1]} against {names[0]}: {in_words}")
    caution = _other_pictures(first, last)
    if caution:
        lines.append(caution)
    lines.append(_verdict(explained, names, _settings(runs))["text"])
    return lines


def _headline(before: Facts, after: Facts) -> str:
    """How much faster the last run is, in a sentence, and by which phase.

    With as many devices by pictures a second; with another number of them by hours an epoch, altogether and for each
    device-hour.
    """
    change = _largest_change(before, after)
    more_devices = ratio(after.devices, before.devices)

    # With another number of devices: hours an epoch, then the same for each device-hour.
    faster = None
    if more_devices != 1:
        faster = _quotient(_hours_per_epoch(before), _hours_per_epoch(after))
    if faster is not None:
        on_gpus = "cuda" in (before.header.get("device"), after.header.get("device"))
        what = "GPU" if on_gpus else "process"
        epochs = (
            f"{_hours_per_epoch(before):.3g} hours an epoch before, "
            f"{_hours_per_epoch(after):.3g} after"
        )
        count = f"{more_devices:.3g}x"
        if more_devices < 1:
            count = f"1 / {ratio(1, more_devices):.3g} of"
        each = f"{ratio(faster, more_devices):.2f}x per {what}-hour"
        return f"{epochs}: {faster:.1f}x faster on {count} the {what}s, {each}{change}"

    # Else, and where an epoch's hours are not known: pictures a second.
    speed = _quotient(after.images_per_s, before.images_per_s)
    if speed is None:
        return "one of the runs has no steps to compare"
    speeds = f"{before.images_per_s:,.0f} images/s before, {after.images_per_s:,.0f} after"
    each = ""
    if more_devices != 1:
        each = f" ({ratio(speed, more_devices):.2f}x per device)"
    return f"{speeds}: {speed:.2f}x{each}{change}"


def _largest_change(before: Facts, after: Facts) -> str:
    """The phase whose ms a step differ most, in words; "" where that is at most 2 % of the step."""
    phases: Sequence[str] = PHASES
    if _are_of_both_kinds([before, after]):
        phases = [name for name in PHASES if name in before.phases and name in after.phases]
    changes = {}
    for name in phases:
        ms_before = before.phases.get(name, 0.0)
        ms_after = after.phases.get(name, 0.0)
        changes[name] = abs(ms_before - ms_after)
    largest = max(phases, key=lambda name: changes[name], default="")
    if not largest or changes[largest] <= 0.02 * max(before.step_ms, after.step_ms):
        return ""
    ms_before = before.phases.get(largest, 0.0)
    ms_after = after.phases.get(largest, 0.0)
    return (
        f"; most of the difference: {largest} went from {ms_before:.0f} to {ms_after:.0f} ms a step"
    )


# -- charts ------------------------------------------------------------------------------------------------------------
def _curves(runs: Sequence[Facts], names: Sequence[str]) -> list[Section | None]:
    """The training loss, each primary metric and the agreement over the epochs: one axis, a line for each run.

    None in place of a chart that no run has; ``names`` are the lines' names.
    """
    metrics = dict.fromkeys(f"val/{facts.run.primary}" for facts in runs)
    metrics["val/agreement"] = None
    charts = [_loss_chart(runs, names)]
    for metric in metrics:
        lines = {}
        for name, facts in zip(names, runs, strict=True):
            lines[name] = by_epoch(facts.run, metric)
        charts.append(epoch_chart(metric, lines))
    return charts


def _loss_chart(runs: Sequence[Facts], names: Sequence[str]) -> Section | None:
    """The mean of the logged training losses of each part of an epoch; the parts are as long in all runs. Runs whose epoch
    has no known length are left out; None without others.
    """
    finite = [facts for facts in runs if math.isfinite(facts.batches_per_epoch)]
    if not finite:
        return None
    longest = 1.0  # epochs
    for facts in finite:
        if facts.run.metrics:
            newest = facts.run.metrics[-1]
            longest = max(longest, newest.get("epoch", 0.0) + 1)
    parts_an_epoch = max(1, round(ratio(PARTS_OF_A_CURVE, longest)))
    means: dict[str, dict[int, float]] = {}
    for facts, name in zip(runs, names, strict=True):
        if facts in finite:
            means[name] = _losses_by_part(facts, parts_an_epoch)

    parts = sorted({part for by_part in means.values() for part in by_part})
    epochs = [ratio(part, parts_an_epoch) for part in parts]
    lines = {}
    for name, by_part in means.items():
        lines[name] = [by_part.get(part, math.nan) for part in parts]
    return line_chart("train/loss", epochs, "epoch", lines)


def _losses_by_part(facts: Facts, parts_an_epoch: int) -> dict[int, float]:
    """The mean training loss of each part of an epoch; parts are numbered from 1, from the run's start."""
    batches_a_step = facts.header.get("accumulate", 1)
    epochs_a_step = ratio(batches_a_step, facts.batches_per_epoch)
    losses: dict[int, list[float]] = {}
    for row in facts.run.metrics:
        loss = row.get("train/loss")
        step = row.get("step")
        if loss is None or step is None:
            continue
        epochs_done = (step + 1) * epochs_a_step
        parts_done = round(epochs_done * parts_an_epoch, 6)  # a whole number may be 1e-12 above it
        part = max(1, math.ceil(parts_done))
        losses.setdefault(part, []).append(loss)
    return {part: mean(values) for part, values in losses.items()}


def _phase_bars(runs: Sequence[Facts], names: Sequence[str]) -> Section | None:
    """The phases of each run's mean step in ms, as bars under the runs' ``names``; None where no phases were
    recorded.
    """
    used = [name for name in PHASES if any(name in facts.phases for facts in runs)]
    if not used:
        return None
    bars = []
    for facts in runs:
        bars.append([round(facts.phases.get(name, 0.0), 3) for name in used])
    return {
        "kind": "phases",
        "title": "Phases of a mean step (ms)",
        "names": used,
        "bars": bars,
        "x": list(names),
        "note": "By rank of median computing time.",
    }


def _operations(runs: Sequence[Facts], names: Sequence[str]) -> Section | None:
    """Top operations of the profiled windows: which stay, enter or leave from the first run to the last.

    None where fewer than two runs have a profile; ``names`` are the columns' heads.
    """
    shares = []  # of each run, 0 to 1 by operation
    for facts in runs:
        top = []
        if facts.windows:
            top = facts.windows[-1]["top"]
        shares.append({operation["name"]: operation["share"] for operation in top})
    if sum(bool(shares_of_run) for shares_of_run in shares) < 2:
        return None
    rows = []
    for name in dict.fromkeys(name for shares_of_run in shares for name in shares_of_run):
        if name not in shares[-1]:
            change = "leaves"
        elif name in shares[0]:
            change = "stays"
        else:
            change = "enters"
        percent = [
            round(100 * shares_of_run[name], 1) if name in shares_of_run else ""
            for shares_of_run in shares
        ]
        rows.append([name, change, *percent])
    columns = ["operation", "", *(f"% of {name}" for name in names)]
    return table("Top operations that came and went", columns, rows, long=True)


def _heat_maps(runs: Sequence[Facts], names: Sequence[str]) -> list[Section]:
    """The heat map of each run that has one, with its name of ``names`` in the title."""
    maps = []
    for facts, name in zip(runs, names, strict=True):
        section = heat(facts.run)
        if section:
            maps.append({**section, "title": f"{section['title']} of {name}"})
    return maps
