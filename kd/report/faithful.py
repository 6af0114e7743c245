"""How faithful the student is to its teacher: numbers, classes, confusions, calibration, pictures of its mistakes."""

import re
from typing import Any

from kd.report.charts import Section, table
from kd.report.metric import short
from kd.report.ratio import ratio
from kd.report.records import RunRecords
from kd.storage.elsewhere import json_of, text_of

BARS = 30  # classes in the chart of bars: those that lost most
MATRIX = 20  # classes in the heat map: those of the largest confusions
PAIRS = 3  # largest confusions that are named
BINS = 15
TITLES = {
    "lost": "What the teacher knew and the student lost",
    "both_wrong": "Where both are wrong",
    "alone": "What the student gets wrong",
}
NAMES = {"iou": "intersection over union", "f1": "F1"}
OUTCOMES = {"both_right": "both right", "only_teacher": "only the teacher right",
            "only_student": "only the student right", "both_wrong": "both wrong"}  # fmt: skip


def faithful(run: RunRecords) -> list[Section]:
    """The sections, by student where there are several; none without ``fidelity.json``."""
    found: list[Section] = []
    for student in run.students:
        file = (run.folder / "students" / student if student else run.folder) / "fidelity.json"
        if not file.is_file():
            continue
        of = f" of {student}" if student else ""
        try:
            content = json_of(text_of(file))
            if content["kind"] == "numbers":
                found += [
                    section
                    for target in content["targets"]
                    for section in _target(content, target, of)
                ]
                continue
            parts = [make(content, of) for make in (_numbers, _bars, _matrix, _calibration)]
            found += [section for section in (*parts, *_pictures(content, of)) if section]
        except (ValueError, KeyError, TypeError, AttributeError):
            run.notes.append(f"{file.name}{of} can't be read")
    return found


def _numbers(content: dict[str, Any], of: str) -> Section:
    rows: list[list[Any]] = []
    if "agreement" in content:
        rows = [
            ["the same answer", f"{content['agreement']:.1%}"],
            ["mean KL(teacher || student), nats", f"{content['kl']:.3f}"],
            *([text, f"{content['outcomes'][outcome]:.1%}"] for outcome, text in OUTCOMES.items()),
        ]
    rows += [
        [f"calibration error of the {name}", f"{value:.3f}"]
        for name, value in content["ece"].items()
    ]
    counted = {"classification": "pictures", "multilabel": "labels", "segmentation": "pixels"}[
        content["kind"]
    ]
    note = f"Of {content['pictures']} validation pictures; shares are of {counted}."
    return table(f"How faithful the student{of} is", ["", "value"], rows, note=note)


def _target(content: dict[str, Any], target: dict[str, Any], of: str) -> list[Section]:
    """Of one number: how close the models are to the targets and to each other, and where on the scale."""
    name = target["name"]
    rows = [
        [f"mean absolute error of the {model}", short(value)]
        for model, value in target["mae"].items()
    ]
    if "correlation" in target:
        rows += [
            ["mean absolute difference of student and teacher", short(target["difference"])],
            ["their correlation", f"{target['correlation']:.3f}"],
        ]
    note = f"Of {content['pictures']} validation pictures, in the units of the targets."
    numbers = table(f"{name}: student{of} and teacher", ["", "value"], rows, note=note)
    models = [model for model in ("teacher", "student") if model in target["mae"]]
    series = {model: [part[model] for part in target["deciles"]] for model in models}
    lines = {
        "kind": "lines",
        "title": f"{name}: mean absolute error{of} by the target's size, tenths of the pictures",
        "x": [(part["from"] + part["to"]) / 2 for part in target["deciles"]],
        "x_name": name,
        "series": series,
    }
    return [numbers, lines] if target["deciles"] else [numbers]


def _bars(content: dict[str, Any], of: str) -> Section | None:
    """Teacher beside student; the classes that lost most come first."""
    rows, score = content["per_class"], content["score"]
    rows = sorted(rows, key=lambda row: (row["student"] - row.get("teacher", 0.0), row["student"]))
    if not rows:
        return None
    models = [name for name in ("teacher", "student") if name in rows[0]]
    shown = [[row["name"], *(row[name] for name in models), row["count"]] for row in rows[:BARS]]
    first = "those that lost most first" if "teacher" in models else "the worst first"
    left = f"; {len(rows) - BARS} more classes lost less" if len(rows) > BARS else ""
    title = f"Each class's {NAMES.get(score, score)}{of}, {first}"
    note = f"{len(rows)} classes occur in the validation pictures{left}."
    return {"kind": "bars", "title": title, "models": models, "rows": shown, "note": note}


def _matrix(content: dict[str, Any], of: str) -> Section | None:
    """The student's confusions among the classes of the largest; a row's colours are shares of it."""
    pairs, counts = (
        content["confusions"],
        {row["name"]: row["count"] for row in content["per_class"]},
    )
    if not pairs:
        return None
    chosen = list(dict.fromkeys(name for pair in pairs for name in (pair["is"], pair["called"])))[
        :MATRIX
    ]
    names = [row["name"] for row in content["per_class"] if row["name"] in chosen]
    names += sorted(set(chosen) - set(names))  # called so, and never there
    known = {(p["is"], p["called"]): p for p in pairs}
    scores = {row["name"]: row.get("recall", row["student"]) for row in content["per_class"]}
    cells = [
        [
            scores.get(a)
            if a == b
            else ratio(known[a, b]["student"], counts[a])
            if (a, b) in known
            else 0.0
            for b in names
        ]
        for a in names
    ]
    taught = " (teacher {teacher})" if "teacher" in content["ece"] else ""
    most = [
        f"{p['is']} called {p['called']} {p['student']} times{taught.format_map(p)}"
        for p in pairs[:PAIRS]
    ]
    note = f"Rows: what it is; columns: what it is called; share of the row. Most often: {'; '.join(most)}."
    title = f"What the student{of} takes for what"
    return {"kind": "matrix", "title": title, "names": names, "cells": cells, "note": note}


def _calibration(content: dict[str, Any], of: str) -> Section:
    """Share right by confidence, at the middle of each bin; a calibrated model is on the diagonal."""
    middles = [round((i + 0.5) / BINS, 2) for i in range(BINS)]
    curves = content["reliability"]
    series: dict[str, list[float | None]] = {}
    for name in ("teacher", "as sure as right", "student"):  # in the order of the page's colours
        if name in curves:
            series[name] = [None] * BINS
            for confidence, right, _ in curves[name]:
                series[name][min(BINS - 1, int(confidence * BINS))] = round(right, 4)
        elif name != "teacher":
            series[name] = list(middles)
    return {
        "kind": "lines",
        "title": f"Share right by confidence{of}",
        "x": middles,
        "x_name": "confidence",
        "series": series,
    }


def _pictures(content: dict[str, Any], of: str) -> list[Section]:
    found = []
    for kind, examples in content.get("examples", {}).items():
        title = TITLES["alone" if kind == "both_wrong" and "agreement" not in content else kind]
        items = [
            _item(example)
            for example in examples
            if example["image"].startswith("data:image/jpeg;base64,")
        ]
        if items:
            colours = {
                name: c
                for name, c in content.get("colours", {}).items()
                if re.fullmatch("#[0-9a-f]{6}", c)
            }
            found.append(
                {
                    "kind": "pictures",
                    "title": f"{title}{of}",
                    "items": items,
                    "legend": list(colours.items()),
                }
            )
    return found


def _item(example: dict[str, Any]) -> Section:
    lines = [["is", ", ".join(example["truth"]) or "none"]] if "truth" in example else []
    for model in ("teacher", "student"):
        if model in example:
            lines.append([model, ", ".join(f"{name} {p:.0%}" for name, p in example[model])])
    if "panels" in example:
        lines.append(["from left", ", ".join(example["panels"])])
    return {
        "image": example["image"],
        "name": example["name"],
        "lines": lines,
        "wide": "panels" in example,
    }
