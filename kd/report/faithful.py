"""How faithful the student is to its teacher: numbers, classes, calibration, pictures of its mistakes.

``content`` is that of a ``fidelity.json`` in all functions (:meth:`kd.tasks.fidelity.Fidelity.result` and
``examples``); ``of`` follows titles: " of NAME" for one of several students.
"""

import re
from collections.abc import Sequence
from typing import Any

from kd.report.charts import JPEG, Section, gallery, table
from kd.report.classes import MODELS, classes_of_counts, classes_of_fidelity
from kd.report.metric import short
from kd.report.records import RunRecords
from kd.storage.elsewhere import json_of, text_of

BINS = 15
TITLES = {
    "lost": "What the teacher knew and the student lost",
    "both_wrong": "Where both are wrong",
    "alone": "What the student gets wrong",
}
COUNTED = {"classification": "pictures", "multilabel": "labels", "segmentation": "pixels"}
OUTCOMES = {"both_right": "both right", "only_teacher": "only the teacher right",
            "only_student": "only the student right", "both_wrong": "both wrong"}  # fmt: skip


def faithful(run: RunRecords) -> list[Section]:
    """The sections, by student where there are several; without ``fidelity.json`` what its validations have counted."""
    sections = []
    for student in run.students:
        file = run.folder / "fidelity.json"
        if not file.is_file():
            counted = classes_of_counts(run, student)
            if counted:
                sections.append(counted)
            continue
        of = f" of {student}" if student else ""
        try:
            sections += _sections_of(json_of(text_of(file)), of)
        except (ValueError, KeyError, TypeError, AttributeError):
            run.notes.append(f"{file.name}{of} can't be read")
    return sections


def _sections_of(content: dict[str, Any], of: str) -> list[Section]:
    """The sections of one ``fidelity.json``, whose ``kind`` decides which; ``of`` follows their titles."""
    sections = []
    if content["kind"] == "numbers":
        for target in content["targets"]:
            sections += _target(content, target, of)
        return sections
    for make in (_numbers, classes_of_fidelity, _calibration):
        section = make(content, of)
        if section:
            sections.append(section)
    return [*sections, *_pictures(content, of)]


def _numbers(content: dict[str, Any], of: str) -> Section:
    """Agreement, divergence (nats), outcomes and calibration errors as a table; without a teacher, the last alone."""
    rows = []
    if "agreement" in content:
        shares = content["outcomes"]
        rows.append(["the same answer", f"{content['agreement']:.1%}"])
        rows.append(["mean KL(teacher || student), nats", f"{content['kl']:.3f}"])
        for outcome, text in OUTCOMES.items():
            rows.append([text, f"{shares[outcome]:.1%}"])
    for name, error in content["ece"].items():
        rows.append([f"calibration error of the {name}", f"{error:.3f}"])
    title = f"How faithful the student{of} is"
    counted = COUNTED[content["kind"]]
    note = f"Of {content['pictures']} validation pictures; shares are of {counted}."
    return table(title, ["", "value"], rows, note=note)


def _target(content: dict[str, Any], target: dict[str, Any], of: str) -> list[Section]:
    """Of one number: how close the models are to the targets and to each other, and where on the scale.

    Args:
        content: of ``fidelity.json``.
        target: its part about this number.
        of: follows the titles.
    """
    name = target["name"]
    errors = target["mae"]
    deciles = target["deciles"]
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


def _calibration(content: dict[str, Any], of: str) -> Section | None:
    """Share right by confidence, at the middle of each bin; a calibrated model is on the diagonal.

    None where no model was judged: no validation picture has a known label.
    """
    middles = [round((i + 0.5) / BINS, 2) for i in range(BINS)]
    curves = content["reliability"]
    if not curves:
        return None
    series = {}  # in the order of the page's colours
    if "teacher" in curves:
        series["teacher"] = _curve(curves["teacher"])
    series["as sure as right"] = list(middles)
    if "student" in curves:
        series["student"] = _curve(curves["student"])
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
    last = BINS - 1
    for confidence, right, _count in points:
        number = min(last, int(confidence * BINS))
        shares[number] = round(right, 4)
    return shares


def _pictures(content: dict[str, Any], of: str) -> list[Section]:
    """A gallery of example pictures for each kind of outcome; colours and pictures that are none are left out."""
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
            if example["image"].startswith(JPEG):
                items.append(_item(example))
        if items:
            sections.append(gallery(f"{title}{of}", items, colours))
    return sections


def _item(example: dict[str, Any]) -> Section:
    """A picture with what it shows and what the models answered."""
    lines = []
    if "truth" in example:
        truth = ", ".join(example["truth"])
        lines.append(["is", truth or "none"])
    for model in MODELS:
        if model in example:
            answers = [f"{name} {probability:.0%}" for name, probability in example[model]]
            lines.append([model, ", ".join(answers)])
    wide = "panels" in example
    if wide:
        panels = ", ".join(example["panels"])
        lines.append(["from left", panels])
    return {"image": example["image"], "name": example["name"], "lines": lines, "wide": wide}
