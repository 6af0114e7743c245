"""The page about two runs."""

import math
from typing import Any

from kd.report.facts import Facts
from kd.report.records import PHASES, percentile
from kd.report.sections import PERCENTILES, notes
from kd.report.verdict import verdict_of


def comparison(before: Facts, after: Facts) -> list[dict[str, Any]]:
    """The sections."""
    rows = [
        [name, _short(a), _short(b), f"{ratio:.2f}x" if (ratio := _ratio(a, b)) is not None else ""]
        for name, a, b in _compared(before, after)
    ]
    names = [label(before), label(after)]
    sections: list[dict[str, Any] | None] = [
        {"kind": "verdict", "bound": "comparison", "text": _difference(before, after), "others": [
            f"{name}: {verdict_of(facts)['text']}" for name, facts in zip(names, (before, after), strict=True)]},
        {"kind": "table", "title": "Before and after", "columns": ["", *names, "before / after"], "rows": rows},
        _two_bars(before, after, names),
        notes(before.run), notes(after.run),
    ]  # fmt: skip
    return [section for section in sections if section]


def label(facts: Facts) -> str:
    """Recipe and number of a run."""
    return f"{facts.run.summary.get('recipe') or facts.run.folder.parent.name}/{facts.run.folder.resolve().name}"


def _hours(facts: Facts) -> float | None:
    wall = facts.run.summary.get("wall_s")
    return wall / 3600 if wall else None


def _hours_per_epoch(facts: Facts) -> float | None:
    hours = _hours(facts)
    return hours / facts.epochs_done if facts.epochs_done and hours else None


def _times(a: float | None, b: float | None) -> float | None:
    return a * b if a is not None and b is not None else None


def _row(facts: Facts) -> dict[str, float | None]:
    """The numbers of a run that are compared, by name."""
    found = {
        "hours": _hours(facts),
        "epochs": facts.epochs_done,
        "hours per epoch": _hours_per_epoch(facts),
        "training seconds per epoch": facts.epoch_s,
        "cost": _times(facts.price, _hours(facts)),
        "cost per epoch": _times(facts.price, _hours_per_epoch(facts)),
        "images/s": facts.images_per_s,
    }
    found |= {f"{name or 'student'} val {facts.run.primary}": facts.best_val(name) for name in facts.run.students}
    found |= {f"step {name} (ms)": percentile(facts.steps_ms, q) for name, q in PERCENTILES.items()}
    return found | {f"{name} (ms)": facts.phases[name] for name in PHASES if name in facts.phases}


def _compared(before: Facts, after: Facts) -> list[tuple[str, float | None, float | None]]:
    """Rows of the table: name and the two values."""
    a, b = _row(before), _row(after)
    absent = {f"{name} (ms)": 0.0 for name in PHASES}
    rows = [(name, a.get(name, absent.get(name)), b.get(name, absent.get(name))) for name in dict.fromkeys([*a, *b])]
    return [row for row in rows if any(v is not None and math.isfinite(v) for v in row[1:])]


def _short(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b and math.isfinite(a) and math.isfinite(b) else None


def _difference(before: Facts, after: Facts) -> str:
    ratio = _ratio(after.images_per_s, before.images_per_s)
    if ratio is None:
        return "one of the runs has no steps to compare"
    a, b = before.phases, after.phases
    changed = max(PHASES, key=lambda name: abs(a.get(name, 0.0) - b.get(name, 0.0)))
    change = f"{changed} went from {a.get(changed, 0.0):.0f} to {b.get(changed, 0.0):.0f} ms a step"
    speeds = f"{before.images_per_s:,.0f} images/s before, {after.images_per_s:,.0f} after"
    return f"{speeds}: {ratio:.2f}x; most of the difference: {change}"


def _two_bars(before: Facts, after: Facts, names: list[str]) -> dict[str, Any] | None:
    means = [before.phases, after.phases]
    used = [name for name in PHASES if any(name in found for found in means)]
    bars = [[round(found.get(name, 0.0), 3) for name in used] for found in means]
    return {"kind": "phases", "title": "Phases of a mean step (ms)", "names": used, "bars": bars, "x": names,
            "note": "By rank of median computing time."} if used else None  # fmt: skip
