"""How faithful the student is to its teacher: numbers, classes, confusions, calibration, pictures of its mistakes."""

import re
from collections.abc import Sequence
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
MODELS = ("teacher", "student")
COUNTED = {"classification": "pictures", "multilabel": "labels", "segmentation": "pixels"}
NAMES = {"iou": "intersection over union", "f1": "F1"}
OUTCOMES = {"both_right": "both right", "only_teacher": "only the teacher right",
            "only_student": "only the student right", "both_wrong": "both wrong"}  # fmt: skip


def faithful(run: RunRecords) -> list[Section]:
    """The sections, by student where there are several; none without ``fidelity.json``."""
    sections = []
    for student in run.students:
        folder = run.folder / "students" / student if student else run.folder
        file = folder / "fidelity.json"
        if not file.is_file():
            continue
        of = f" of {student}" if student else ""
        try:
            sections += _sections_of(json_of(text_of(file)), of)
        except (ValueError, KeyError, TypeError, AttributeError):
            run.notes.append(f"{file.name}{of} can't be read")
    return sections


def _sections_of(content: dict[str, Any], of: str) -> list[Section]:
    """The sections of one ``fidelity.json``; ``of`` follows their titles."""
    sections = []
    if content["kind"] == "numbers":
        for target in content["targets"]:
            sections += _target(content, target, of)
        return sections
    for make in (_numbers, _bars, _matrix, _calibration):
        section = make(content, of)
        if section:
            sections.append(section)
    return [*sections, *_pictures(content, of)]


def _numbers(content: dict[str, Any], of: str) -> Section:
    rows = []
    if "agreement" in content:
        rows.append(["the same answer", f"{content['agreement']:.1%}"])
        rows.append(["mean KL(teacher || student), nats", f"{content['kl']:.3f}"])
        for outcome, text in OUTCOMES.items():
            rows.append([text, f"{content['outcomes'][outcome]:.1%}"])
    for name, error in content["ece"].items():
        rows.append([f"calibration error of the {name}", f"{error:.3f}"])
    note = (
        f"Of {content['pictures']} validation pictures; shares are of {COUNTED[content['kind']]}."
    )
    return table(f"How faithful the student{of} is", ["", "value"], rows, note=note)


def _target(content: dict[str, Any], target: dict[str, Any], of: str) -> list[Section]:
    """Of one number: how close the models are to the targets and to each other, and where on the scale."""
    name, errors, deciles = target["name"], target["mae"], target["deciles"]
    rows = [
        [f"mean absolute error of the {model}", short(value)] for model, value in errors.items()
    ]
    if "correlation" in target:
        difference = short(target["difference"])
        rows.append(["mean absolute difference of student and teacher", difference])
        rows.append(["their correlation", f"{target['correlation']:.3f}"])
    note = f"Of {content['pictures']} validation pictures, in the units of the targets."
    numbers = table(f"{name}: student{of} and teacher", ["", "value"], rows, note=note)
    if not deciles:
        return [numbers]
    series = {}
    for model in MODELS:
        if model in errors:
            series[model] = [tenth[model] for tenth in deciles]
    lines = {
        "kind": "lines",
        "title": f"{name}: mean absolute error{of} by the target's size, tenths of the pictures",
        "x": [(tenth["from"] + tenth["to"]) / 2 for tenth in deciles],
        "x_name": name,
        "series": series,
    }
    return [numbers, lines]


def _bars(content: dict[str, Any], of: str) -> Section | None:
    """Teacher beside student; the classes that lost most come first."""
    rows, score = content["per_class"], content["score"]
    if not rows:
        return None
    rows = sorted(rows, key=_gain_and_score)
    models = [model for model in MODELS if model in rows[0]]
    bars: list[list[Any]] = []
    for row in rows[:BARS]:
        bars.append([row["name"], *(row[model] for model in models), row["count"]])
    order = "those that lost most first" if "teacher" in models else "the worst first"
    note = f"{len(rows)} classes occur in the validation pictures"
    if len(rows) > BARS:
        note += f"; {len(rows) - BARS} more classes lost less"
    title = f"Each class's {NAMES.get(score, score)}{of}, {order}"
    return {"kind": "bars", "title": title, "models": models, "rows": bars, "note": f"{note}."}


def _gain_and_score(row: dict[str, Any]) -> tuple[float, float]:
    """What a class has gained over the teacher, then its score."""
    return row["student"] - row.get("teacher", 0.0), row["student"]


def _matrix(content: dict[str, Any], of: str) -> Section | None:
    """The student's confusions among the classes of the largest; a row's colours are shares of it."""
    pairs = content["confusions"]
    if not pairs:
        return None
    counts: dict[str, int] = {}
    scores: dict[str, float | None] = {}
    for row in content["per_class"]:
        counts[row["name"]] = row["count"]
        scores[row["name"]] = row.get("recall", row["student"])
    confused: dict[str, None] = {}  # names of classes, those of the largest confusions first
    for pair in pairs:
        confused |= {pair["is"]: None, pair["called"]: None}
    chosen = list(confused)[:MATRIX]
    names = [name for name in counts if name in chosen]
    names += sorted(set(chosen) - set(names))  # no picture is of these classes

    times = {(pair["is"], pair["called"]): pair["student"] for pair in pairs}
    cells = []
    for true in names:
        row_of_true = []
        for called in names:
            if true == called:
                row_of_true.append(scores.get(true))
            elif (true, called) in times:
                row_of_true.append(ratio(times[true, called], counts[true]))
            else:
                row_of_true.append(0.0)
        cells.append(row_of_true)

    largest = []
    for pair in pairs[:PAIRS]:
        text = f"{pair['is']} called {pair['called']} {pair['student']} times"
        if "teacher" in content["ece"]:
            text += f" (teacher {pair['teacher']})"
        largest.append(text)
    note = (
        "Rows: what it is; columns: what it is called; share of the row. "
        f"Most often: {'; '.join(largest)}."
    )
    title = f"What the student{of} takes for what"
    return {"kind": "matrix", "title": title, "names": names, "cells": cells, "note": note}


def _calibration(content: dict[str, Any], of: str) -> Section:
    """Share right by confidence, at the middle of each bin; a calibrated model is on the diagonal."""
    middles = [round((i + 0.5) / BINS, 2) for i in range(BINS)]
    curves = content["reliability"]
    series = {}  # in the order of the page's colours
    if "teacher" in curves:
        series["teacher"] = _curve(curves["teacher"])
    series["as sure as right"] = list(middles)
    series["student"] = _curve(curves["student"]) if "student" in curves else list(middles)
    return {
        "kind": "lines",
        "title": f"Share right by confidence{of}",
        "x": middles,
        "x_name": "confidence",
        "series": series,
    }


def _curve(points: Sequence[tuple[float, float, int]]) -> list[float | None]:
    """The share right of each bin, from points of confidence, share right and count; None for an empty bin."""
    shares: list[float | None] = [None] * BINS
    for confidence, right, _count in points:
        bin_ = min(BINS - 1, int(confidence * BINS))
        shares[bin_] = round(right, 4)
    return shares


def _pictures(content: dict[str, Any], of: str) -> list[Section]:
    colours = []
    for name, colour in content.get("colours", {}).items():
        if re.fullmatch("#[0-9a-f]{6}", colour):
            colours.append((name, colour))
    sections = []
    for kind, examples in content.get("examples", {}).items():
        alone = kind == "both_wrong" and "agreement" not in content
        title = TITLES["alone" if alone else kind]
        items = []
        for example in examples:
            if example["image"].startswith("data:image/jpeg;base64,"):
                items.append(_item(example))
        if items:
            section = {"kind": "pictures", "title": f"{title}{of}", "items": items}
            sections.append({**section, "legend": colours})
    return sections


def _item(example: dict[str, Any]) -> Section:
    """A picture with what it shows and what the models answered."""
    lines = []
    if "truth" in example:
        lines.append(["is", ", ".join(example["truth"]) or "none"])
    for model in MODELS:
        if model in example:
            answers = [f"{name} {probability:.0%}" for name, probability in example[model]]
            lines.append([model, ", ".join(answers)])
    wide = "panels" in example
    if wide:
        lines.append(["from left", ", ".join(example["panels"])])
    return {"image": example["image"], "name": example["name"], "lines": lines, "wide": wide}
