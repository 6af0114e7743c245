"""The page about two runs or more: how their settings, results, speed and cost differ."""

import math
from collections.abc import Sequence

from kd.report.charts import Section, by_epoch, epoch_chart, heat, table
from kd.report.facts import Facts
from kd.report.metric import short
from kd.report.ratio import ratio, times
from kd.report.records import PHASES, percentile
from kd.report.rules import Explained
from kd.report.sections import PERCENTILES, flat, notes
from kd.report.step_facts import known_utilisation, mean

CLASSES = 8  # that changed most
NO_DIFFERENCE = ("recipe", "runs_dir", "resume")  # settings that change nothing of a run


def comparison(explained: Sequence[Explained]) -> list[Section]:
    """The sections; the first run is the one that the others are held against."""
    runs = [one.facts for one in explained]
    names = [label(facts) for facts in runs]
    differing = _settings(runs)
    text = f"{_differences(differing)}; {_headline(runs[0], runs[-1])}"
    verdicts = [
        f"{name}: {one.verdict['text']}" for name, one in zip(names, explained, strict=True)
    ]
    hot = [heat(facts.run) for facts in runs]
    sections: list[Section | None] = [
        _table("What came of it", [_outcome(facts) for facts in runs], names),
        _moved_classes(runs[0], runs[-1], names),
        {"kind": "verdict", "bound": "comparison", "text": text, "others": verdicts},
        _table(
            "Side by side" if len(runs) > 2 else "Before and after",
            [_row(facts) for facts in runs],
            names,
        ),
        table("Settings that differ", ["key", *names], differing, empty="None.", long=True),
        table(
            "Hardware",
            ["", *names],
            [
                [
                    "devices",
                    *(
                        f"{facts.header.get('device_name', 'unknown')} x {facts.devices}"
                        for facts in runs
                    ),
                ],
                ["cores of a machine", *(str(facts.header.get("cores", "")) for facts in runs)],
            ],
        ),
        *_curves(runs, names),
        _bars(runs, names),
        _operations(runs, names),
        *(
            {**part, "title": f"{part['title']} of {name}"}
            for part, name in zip(hot, names, strict=True)
            if part
        ),
        *(notes(one.run, one.failures) for one in explained),
    ]
    return [section for section in sections if section]


def label(facts: Facts) -> str:
    """Recipe and number of a run, ``recipe/003``."""
    return f"{facts.run.summary.get('recipe') or facts.run.folder.parent.name}/{facts.run.folder.resolve().name}"


# -- settings ----------------------------------------------------------------------------------------------------------
def _settings(runs: Sequence[Facts]) -> list[list[str]]:
    """Rows of the settings that are not the same in all runs."""
    tables = [dict(flat(facts.run.config)) if facts.run.config else {} for facts in runs]
    keys = [
        key
        for key in dict.fromkeys(k for table in tables for k in table)
        if key not in NO_DIFFERENCE
    ]
    rows = [[key, *(table.get(key, "not set") for table in tables)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _differences(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "no setting differs"
    named = ", ".join(
        f"{key} ({', '.join(value or 'null' for value in values)})" for key, *values in rows[:4]
    )
    return f"they differ in {named}" + (
        f" and {len(rows) - 4} more settings" if len(rows) > 4 else ""
    )


# -- numbers -----------------------------------------------------------------------------------------------------------
def _outcome(facts: Facts) -> dict[str, float | None]:
    run, found = facts.run, dict[str, float | None]()
    for student in run.students:
        name, model = student or "student", run.model_of(student)
        found[f"{name} val {run.primary}"] = facts.best_val(student)
        found[f"{name} val agreement"] = (model.get("best_val") or {}).get("agreement")
        found[f"{name} parameters (M)"] = model["params"] / 1e6 if model.get("params") else None
        for row in run.latency:
            if row["model"] == name:
                threads = f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
                found[f"{name} ms, {row['runtime']}, batch {row['batch']}, {threads}"] = row[
                    "median_ms"
                ]
    return found


def _moved_classes(before: Facts, after: Facts, names: Sequence[str]) -> Section | None:
    """The classes whose share of right answers differs most, of each run's (first) student."""
    first, last = (facts.run.confusion_of(facts.run.students[0]) for facts in (before, after))
    if not first or not last or before.run.classes != after.run.classes:
        return None
    shares = [
        (name, a, b)
        for name, a, b in zip(before.run.classes, first["right"], last["right"], strict=False)
        if a is not None and b is not None and a != b
    ]
    moved = sorted(shares, key=lambda share: -abs(share[2] - share[1]))[:CLASSES]
    rows = [
        [name, f"{100 * a:.1f}", f"{100 * b:.1f}", f"{100 * (b - a):+.1f}"] for name, a, b in moved
    ]
    note = f"After the last validations, of epochs {first['epoch'] + 1} and {last['epoch'] + 1}."
    return table(
        "Classes that changed most (% right)",
        ["class", names[0], names[-1], "points"],
        rows,
        empty="None: all are as before.",
        note=note,
    )


def _row(facts: Facts) -> dict[str, float | None]:
    """The numbers of a run that are compared, by name."""
    found: dict[str, float | None] = {
        "hours": facts.hours,
        "epochs": facts.epochs_done,
        "hours per epoch": facts.hours_per_epoch,
        "devices": float(facts.devices),
        "device-hours": _times(facts.hours, facts.devices),
        "device-hours per epoch": _times(facts.hours_per_epoch, facts.devices),
        "training seconds per epoch": facts.epoch_s,
        "cost": _times(facts.price, facts.hours),
        "cost per epoch": _times(facts.price, facts.hours_per_epoch),
        "cost per 1000 steps": _times(facts.price, facts.step_ms / 3600 if facts.step_ms else None),
        "images/s": facts.images_per_s,
        "images/s per device": ratio(facts.images_per_s, facts.devices)
        if facts.images_per_s
        else None,
    }
    used = {
        "GPU": known_utilisation(facts.samples),
        "CPU": [mean(row) for row in facts.core_use if row],
    }
    for name, values in used.items():
        found |= {
            f"{name} {q} (%)": percentile(values, PERCENTILES[q])
            for q in ("p50", "p90", "p95", "p99")
        }
    found |= {f"step {name} (ms)": percentile(facts.steps_ms, q) for name, q in PERCENTILES.items()}
    return found | {f"{name} (ms)": facts.phases[name] for name in PHASES if name in facts.phases}


def _times(a: float | None, b: float | None) -> float | None:
    return a * b if a is not None and b is not None else None


def _table(title: str, runs: Sequence[dict[str, float | None]], names: Sequence[str]) -> Section:
    absent = {f"{name} (ms)": 0.0 for name in PHASES}
    found = {
        name: [run.get(name, absent.get(name)) for run in runs]
        for name in dict.fromkeys(k for r in runs for k in r)
    }
    rows = [row for name, values in found.items() if any((row := [name, *map(short, values)])[1:])]
    if len(runs) == 2:
        rows, names = (
            [[*row, _change(row[0], *found[row[0]])] for row in rows],
            [*names, "after / before"],
        )
    return table(title, ["", *names], rows, empty="Nothing is known yet.")


def _ratio(a: float | None, b: float | None) -> float | None:
    return ratio(a, b) if a is not None and b and math.isfinite(a) and math.isfinite(b) else None


def _change(name: str, a: float | None, b: float | None) -> str:
    """Accuracy differs in points, utilisation in percent; all else by a factor."""
    if " val " in name or name.endswith("(%)"):
        if a is None or b is None or not math.isfinite(a - b):
            return ""
        return f"{100 * (b - a):+.1f} points" if " val " in name else f"{b - a:+.0f} %"
    return times(a, b)


def _headline(before: Facts, after: Facts) -> str:
    """How much faster, for the same devices and for each."""
    a, b = before.phases, after.phases
    changed = max(PHASES, key=lambda name: abs(a.get(name, 0.0) - b.get(name, 0.0)))
    moved = abs(a.get(changed, 0.0) - b.get(changed, 0.0)) > 0.02 * max(
        before.step_ms, after.step_ms
    )
    change = f"; most of the difference: {changed} went from {a.get(changed, 0.0):.0f} to {b.get(changed, 0.0):.0f} ms"
    change = f"{change} a step" if moved else ""
    more = ratio(after.devices, before.devices)
    faster = _ratio(before.hours_per_epoch, after.hours_per_epoch) if more != 1 else None
    if faster is not None:
        what = (
            "GPU"
            if "cuda" in (before.header.get("device"), after.header.get("device"))
            else "process"
        )
        epochs = (
            f"{before.hours_per_epoch:.3g} hours an epoch before, {after.hours_per_epoch:.3g} after"
        )
        count = f"{more:.3g}x" if more > 1 else f"1 / {ratio(1, more):.3g} of"
        return f"{epochs}: {faster:.1f}x faster on {count} the {what}s, {ratio(faster, more):.2f}x per {what}-hour{change}"
    speed = _ratio(after.images_per_s, before.images_per_s)
    if speed is None:
        return "one of the runs has no steps to compare"
    speeds = (
        f"{before.images_per_s:,.0f} images/s before, {after.images_per_s:,.0f} after: {speed:.2f}x"
    )
    each = f" ({ratio(speed, more):.2f}x per device)" if more != 1 else ""
    return f"{speeds}{each}{change}"


# -- charts ------------------------------------------------------------------------------------------------------------
def _curves(runs: Sequence[Facts], names: Sequence[str]) -> list[Section | None]:
    metrics = dict.fromkeys(["train/loss", *(f"val/{facts.run.primary}" for facts in runs)])
    named = dict(zip(names, runs, strict=True))
    return [
        epoch_chart(m, {name: by_epoch(facts.run, m) for name, facts in named.items()})
        for m in metrics
    ]


def _bars(runs: Sequence[Facts], names: Sequence[str]) -> Section | None:
    means = [facts.phases for facts in runs]
    used = [name for name in PHASES if any(name in found for found in means)]
    bars = [[round(found.get(name, 0.0), 3) for name in used] for found in means]
    return (
        {
            "kind": "phases",
            "title": "Phases of a mean step (ms)",
            "names": used,
            "bars": bars,
            "x": list(names),
            "note": "By rank of median computing time.",
        }
        if used
        else None
    )


def _operations(runs: Sequence[Facts], names: Sequence[str]) -> Section | None:
    """Top operations of the profiled windows: who stays, comes or goes."""
    tops = [
        {op["name"]: op["share"] for op in facts.windows[-1]["top"]} if facts.windows else {}
        for facts in runs
    ]
    if sum(bool(top) for top in tops) < 2:
        return None
    came = {
        name: "stays"
        if name in tops[0] and name in tops[-1]
        else "enters"
        if name in tops[-1]
        else "leaves"
        for top in tops
        for name in top
    }
    rows = [
        [name, how, *(round(100 * t[name], 1) if name in t else "" for t in tops)]
        for name, how in came.items()
    ]
    columns = ["operation", "", *(f"% of {name}" for name in names)]
    return table("Top operations that came and went", columns, rows, long=True)
