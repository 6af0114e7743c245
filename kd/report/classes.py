"""Class by class: how often the models are right, and what a class is taken for, in one section of the page."""

from collections.abc import Mapping, Sequence
from typing import Any

from kd.report.charts import Section
from kd.report.ratio import ratio
from kd.report.records import RunRecords

BARS = 30  # classes that are shown: those that lost most
MATRIX = 20  # classes of the table of confusions: those of the largest
PAIRS = 3  # largest confusions that are named
MODELS = ("teacher", "student")
NAMES = {"iou": "intersection over union", "f1": "F1"}


def classes_of_fidelity(content: dict[str, Any], of: str) -> Section | None:
    """Teacher beside student, of the best epoch; the classes that lost most come first.

    At most :data:`BARS` classes are drawn; a class's score is a share of 1.

    Args:
        content: of ``fidelity.json``.
        of: `` of NAME`` where there are several students.

    Returns:
        The section; None where no class occurs in the validation pictures.
    """
    rows = sorted(content["per_class"], key=_gain_and_score)
    if not rows:
        return None
    models = [model for model in MODELS if model in rows[0]]
    has_teacher = "teacher" in models
    bars: list[list[Any]] = []
    for row in rows[:BARS]:
        scores = [row[model] for model in models]
        bars.append([row["name"], *scores, row["count"]])
    score = content["score"]
    order = "those that lost most first" if has_teacher else "the worst first"
    title = f"Each class's {NAMES.get(score, score)}{of}, {order}"

    counts = {}
    right = {}
    for row in content["per_class"]:
        name = row["name"]
        counts[name] = row["count"]
        right[name] = row.get("recall", row["student"])
    teacher_answers = "teacher" in content["ece"]
    confusions = []
    for pair in content["confusions"]:
        taught = pair["teacher"] if teacher_answers else None
        confusions.append((pair["is"], pair["called"], pair["student"], taught))
    return _section(title, models, bars, len(rows), counts, right, confusions)


def classes_of_counts(run: RunRecords, student: str) -> Section | None:
    """The student alone, as its newest validation has counted; None where it has counted nothing."""
    newest = run.confusion_of(student)
    if newest is None:
        return None
    counts: dict[str, int] = dict(zip(run.classes, newest["counts"], strict=False))
    right: dict[str, float] = {}
    for name, share in zip(run.classes, newest["right"], strict=False):
        if share is not None:
            right[name] = share
    confusions = []
    for true_id, called_id, times in newest["pairs"]:
        true_name = run.classes[true_id]
        called_name = run.classes[called_id]
        confusions.append((true_name, called_name, times, None))

    worst = sorted(right, key=lambda name: (right[name], name))
    bars = []
    for name in worst[:BARS]:
        bars.append([name, right[name], counts[name]])
    of = f" of {student}" if student else ""
    epoch = newest["epoch"] + 1
    title = f"Each class's accuracy{of} in epoch {epoch}, the worst first"
    return _section(title, ["student"], bars, len(worst), counts, right, confusions)


Confusion = tuple[str, str, int, int | None]
"""What it is, what it is called, how often by the student, and by the teacher (None: not known)."""


def _section(
    title: str,
    models: Sequence[str],
    bars: Sequence[Sequence[Any]],
    classes: int,
    counts: Mapping[str, int],
    right: Mapping[str, float],
    confusions: Sequence[Confusion],
) -> Section:
    """Bars, the most frequent mistake of each class beside its bar, and all confusions, folded.

    Args:
        title: of the section.
        models: whose bars they are.
        bars: of each shown class its name, a share of 1 for each model, and its pictures (or pixels).
        classes: that occur in the validation pictures.
        counts: pictures (or pixels) by class.
        right: share of a class that the student has right, by class.
        confusions: the largest first.
    """
    mistakes: dict[str, str] = {}
    for true, called, times, taught in confusions:
        if true not in mistakes:
            mistakes[true] = f"{ratio(times, counts.get(true, 0)):.0%} taken for {called}"
            if taught is not None:
                mistakes[true] += f" (teacher: {ratio(taught, counts.get(true, 0)):.0%})"

    note = f"{classes} classes occur in the validation pictures"
    if classes > BARS:
        rest = "lost less" if "teacher" in models else "are better"
        note += f"; {classes - BARS} more classes {rest}"
        largest = []
        for true, called, times, taught in confusions[:PAIRS]:
            by_teacher = ""
            if taught is not None:
                by_teacher = f" (teacher {taught})"
            largest.append(f"{true} called {called} {times} times{by_teacher}")
        if largest:
            note += f". Most often: {'; '.join(largest)}"
    return {
        "kind": "bars",
        "title": title,
        "models": models,
        "rows": bars,
        "mistakes": [mistakes.get(row[0], "") for row in bars],
        "note": f"{note}.",
        "matrix": _matrix(counts, right, confusions),
    }


def _matrix(
    counts: Mapping[str, int], right: Mapping[str, float], confusions: Sequence[Confusion]
) -> Section | None:
    """The student's confusions among the classes of the largest; a cell is a share of its row's class, in [0, 1], on the
    diagonal the share right (None: no picture is of the class). None without confusions.

    Args:
        counts: pictures of each class, by name.
        right: the share right of each class.
        confusions: the largest first.
    """
    confused: dict[str, None] = {}  # names of classes, those of the largest confusions first
    for true, called, _times, _taught in confusions:
        confused |= {true: None, called: None}
    chosen = list(confused)[:MATRIX]
    if not chosen:
        return None
    names = [name for name in right if name in chosen]
    names += sorted(set(chosen) - set(names))  # no picture is of these classes

    times_of = {(true, called): times for true, called, times, _taught in confusions}
    cells: list[list[float | None]] = []
    for true in names:
        cells_of_true: list[float | None] = []
        for called in names:
            if true == called:
                cells_of_true.append(right.get(true))
            else:
                times = times_of.get((true, called), 0)
                cells_of_true.append(ratio(times, counts.get(true, 0)))
        cells.append(cells_of_true)
    return {"names": names, "cells": cells}


def _gain_and_score(row: dict[str, Any]) -> tuple[float, float]:
    """What a class has gained over the teacher, then its score: the order of the bars, the largest loss first."""
    return row["student"] - row.get("teacher", 0.0), row["student"]
