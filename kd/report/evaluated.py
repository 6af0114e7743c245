"""What was measured of a student beside its teacher, as parts (:mod:`kd.report.tables`): each result is worded here once."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from kd.report.metric import counted, difference, duration, format_metric, in_tables, short
from kd.report.ratio import Number, ratio
from kd.report.tables import (
    COLOUR,
    JPEG,
    Cell,
    Chart,
    Gallery,
    Part,
    Parts,
    Picture,
    Table,
    sentences,
)
from kd.storage.elsewhere import Json

if TYPE_CHECKING:
    from kd.proof.paired import PairedCounts

MODELS = ("teacher", "student")
BINS = 15
"""Of confidences, of a calibration curve."""
CLASSES = 200
"""Rows of a table of classes, at most."""
PAIRS = 20
"""Rows of a table of confusions, at most."""
DISPUTED = 24
"""Disputed labels that are shown, with their pictures."""
COUNTED = {"classification": "pictures", "multilabel": "labels", "segmentation": "pixels"}
SCORES = {"iou": "intersection over union", "f1": "F1"}
TITLES = {
    "lost": "What the teacher knew and the student lost",
    "both_wrong": "Where both are wrong",
    "alone": "What the student gets wrong",
}
OUTCOMES = {
    "both_right": "both right",
    "only_teacher": "only the teacher right",
    "only_student": "only the student right",
    "both_wrong": "both wrong",
}
NOT_PROBED = "k-NN and ridge probe need labelled pictures: data.probe.root=DIR (DIR/train/<class>, DIR/val/<class>)"
STARTS = {"random": "a random start", "pretrained": "the pre-trained weights"}
"""Names of a backbone's starts in sentences."""


# -- one model, or several side by side --------------------------------------------------------------------------------
def evaluation_parts(
    results: Sequence[Json], pairs: Sequence["PairedCounts"], parts: Sequence[Part]
) -> Parts:
    """The metrics of all models and of each teacher once, and what else was measured of them.

    Args:
        results: of ``kd-eval``, one a model.
        pairs: of each model after the first, beside it; [] of tasks whose answers are not names of classes.
        parts: of a cascade, of disputed labels or of a backbone's starts, shown last; of the starts, which have no metrics
            of a student beside them, these alone are returned.
    """
    first = results[0]
    if "student" not in first:
        return [*parts]
    names = without_common_folders([result["run"] for result in results])
    by_name = dict(zip(names, results, strict=True))
    lines = []
    for name, pair in zip(names[1:], pairs, strict=False):
        lines.append(paired(names[0], name, pair))
    if "rankme" in first["student"] and "knn1" not in first["student"]:
        lines.append(NOT_PROBED)
    shown: Parts = [models_table(by_name), sentences("", lines)]
    for name, result in by_name.items():
        if "fidelity" in result:
            shown += fidelity_parts(result["fidelity"], f"{name}: " if len(results) > 1 else "")
        if "certificate" in result:
            shown.append(certificate_table(result["certificate"], name))
    return [*shown, *parts]


def models_table(results: Mapping[str, Json]) -> Table:
    """A row for each teacher, once, and for each student: parameters in millions, and metrics.

    A further row compares each student after the first with the first: the quotient of the parameters, and the difference
    of each metric.

    Args:
        results: of ``kd-eval``, by the model's name.
    """
    (first_name, first), *others = results.items()
    before = first["student"]
    shown = [name for name in before if name != "params" and not name.startswith("iou_")]
    teachers: dict[str, Mapping[str, float]] = {}
    students = {}
    for name, result in results.items():
        of_name = ""
        student = "student"
        if others:
            of_name = f" of {name}"
            student = name
        for key, figures in result.items():
            is_teacher = key.startswith("teacher")
            if is_teacher and figures not in teachers.values():
                teachers[f"{key}{of_name}"] = figures
        students[student] = result["student"]
    rows = []
    for name, model in [*teachers.items(), *students.items()]:
        parameters = in_millions(model["params"])
        rows.append([name, parameters, *_figures(model, shown)])
    for name, result in others:
        after = result["student"]
        size = ""
        if before["params"]:
            size = f"x {after['params'] / before['params']:.2f}"
        gaps = [difference(metric, before.get(metric), after.get(metric)) for metric in shown]
        rows.append([f"{name} - {first_name}", size, *gaps])
    title = f"{first['pictures']} pictures: {first['data']}"
    return Table(title, ["", "parameters", *shown], rows)


def run_table(summary: Json, of_teacher: bool = False) -> Table:
    """The models of a run: teacher, student after the last epoch and, where another epoch or the start is kept, that one.

    Args:
        summary: content of the run's ``summary.json``.
        of_teacher: the run has trained the teacher of another run: rows are named "teacher" instead of "student".
    """
    student = summary["student"]
    teacher = summary["teacher"]
    best = student["best_val"]
    trained = "teacher" if of_teacher else "student"
    # an epoch may have several validations
    end = summary["epochs"], summary.get("steps")
    is_last = bool(best) and (best["epoch"], best.get("step")) == end
    last = "last epoch (kept)" if is_last else "last epoch"
    models = [(f"{trained}, {last}", student, student["val"])]
    if teacher:
        models.insert(0, ("teacher", teacher, teacher["val"]))
    if best and not is_last:
        which = f"kept epoch ({best['epoch']})" if best["epoch"] else "the start (kept)"
        models.append((f"{trained}, {which}", student, best))
    shown = [name for name in student["val"] if in_tables(name)]
    names = [name if name in ("agreement", "kl") else f"val {name}" for name in shown]
    rows = []
    for name, model, values in models:
        size = in_millions(model["params"])
        rows.append([name, model_name(model), size, *_figures(values, shown)])
    epochs = counted(summary["epochs"], "epoch")
    title = f"{summary['recipe']}: {epochs} in {duration(summary['wall_s'])}"
    return Table(title, ["", "model", "parameters", *names], rows)


def _figures(values: Json, metrics: Sequence[str]) -> list[str]:
    """Metrics as cells of a table."""
    return [format_metric(metric, values.get(metric)) for metric in metrics]


def without_common_folders(names: Sequence[str]) -> list[str]:
    """Paths without the leading folders that all of them share.

    Files that all have the same name (``a/student.pth``, ``b/student.pth``) are named by their folders. Where some paths are
    absolute and others not, none is shortened.

    >>> without_common_folders(["runs/food/000", "runs/food/001"]), without_common_folders(["a/best", "b/best"])
    (['000', '001'], ['a/best', 'b/best'])
    >>> without_common_folders(["runs/a/student.pth", "runs/b/student.pth"]), without_common_folders(["runs/a/student.pth"])
    (['a', 'b'], ['student.pth'])
    """
    paths = [Path(name) for name in names]
    folders = [path.parent for path in paths]
    files = {path.name for path in paths}
    of_one_name = len(paths) > 1 and len(files) == 1 and bool(paths[0].suffix)
    if of_one_name and all(folder.name for folder in folders):
        paths = folders
        folders = [path.parent for path in paths]
    are_absolute = {path.is_absolute() for path in paths}
    if len(are_absolute) > 1:
        return [str(path) for path in paths]
    common = os.path.commonpath(folders)
    shorter = [path.relative_to(common) for path in paths]
    return [str(path) for path in shorter]


def in_millions(parameters: float) -> str:
    """A number of parameters as tables show it; "-" where none are known, as of a teacher whose answers are read.

    >>> in_millions(161_234), in_millions(4_820), in_millions(0)
    ('0.16 M', '0.0048 M', '-')
    """
    millions = parameters / 1e6
    if millions < 0.1:
        return f"{millions:.2g} M" if parameters else "-"
    return f"{millions:.2f} M"


def model_name(model: Json) -> str:
    """A model of ``summary.json`` for people; "" where its architecture is not known."""
    return model.get("name") or model.get("arch") or ""


def paired(first: str, other: str, pair: "PairedCounts") -> str:
    """How sure the difference of two models is, as a line; ``pair``: the reference is the first.

    >>> from kd.proof.paired import PairedCounts
    >>> paired("a", "b", PairedCounts(100, 2, 6))
    'a alone is right on 2 of 100 pictures, b alone on 6: +4.0 points (-1.9 to 10.8), paired, 95 % interval'
    """
    return (
        f"{first} alone is right on {pair.only_reference} of {pair.pictures} pictures, {other} alone on "
        f"{pair.only_candidate}: {gap_in_points(pair.gap)}, paired, 95 % interval"
    )


def gap_in_points(gap: Json) -> str:
    """A difference of two accuracies with its interval (:attr:`kd.proof.paired.PairedCounts.gap`), as text."""
    return with_interval(*(100 * gap[end] for end in ("difference", "low", "high")))


def certificate_table(certificate: Json, pictures: str) -> Table:
    """What is proven of one model beside another, its answer first.

    Args:
        certificate: of :func:`kd.proof.certificate.certify`.
        pictures: what it is about.
    """
    return sentences(f"Not worse, and by how much: {pictures}", certificate["text"])


def exports_parts(records: Mapping[str, Json]) -> Parts:
    """A table of exports, each beside the student.

    Its note names layers kept in float32 and results simulated in FP16, and says why a file was not run.

    Args:
        records: of ``export/export.json``, by name; a number that one lacks is left empty.
    """
    rows: list[list[Cell]] = []
    notes: list[str] = []
    # of one student
    metric = next((record["metric"] for record in records.values() if "metric" in record), "acc1")
    for name, record in records.items():
        note = record.get("note")  # why its file was not run
        size = record.get("size_mb")
        apart = record.get("max_difference")
        scores = [format_metric(metric, record.get(model)) for model in ("export", "student")]
        rows.append([name, size, _percent(record.get("agreement")), *scores, apart])
        layers = ", ".join(record.get("float32_layers") or [])
        if layers:
            notes.append(f"{name} keeps in float32: {layers}")
        simulated = record.get("simulated")
        if simulated:
            score = format_metric(metric, simulated.get("export"))
            notes.append(f"{name} simulated in FP16: {_percent(simulated['agreement'])} {score}")
        if note:
            notes.append(note)
    # of a cascade both models in torch
    scores = [metric, f"{metric} in torch"]
    columns = ["export", "MB", "same answers", *scores, "largest difference"]
    return [Table("Exports", columns, rows, "\n".join(notes))]


def _percent(share: Number) -> str:
    """A share in 0..1 in percent; "" where it is not known."""
    return "" if share is None else f"{share:.2%}"


def latency_table(latencies: Json) -> Table:
    """Milliseconds, images/s and memory of student, exports and teacher on one machine.

    Args:
        latencies: content of ``latency.json`` (:func:`kd.ship.latency.measure_latency`); what a row lacks is left empty.
    """
    columns = {
        "model": "",
        "runtime": "runtime",
        "threads": "threads",
        "batch": "batch",
        "median_ms": "median ms",
        "p95_ms": "p95 ms",
        "images_per_s": "images/s",
        "peak_memory_mb": "peak MB",
        "times_the_teacher": "x teacher",
    }
    rows = [[row.get(key) for key in columns] for row in latencies["rows"]]
    return Table(f"Latency on {latencies['machine']}", list(columns.values()), rows)


# -- how faithful the student is ---------------------------------------------------------------------------------------
def fidelity_parts(content: Json, whose: str = "") -> Parts:
    """How faithful the student is to its teacher: numbers, classes, calibration, examples.

    Args:
        content: of ``fidelity.json`` (:meth:`kd.tasks.fidelity.Fidelity.result` and examples).
        whose: before the titles, where there are several students.
    """
    parts: Parts = []
    if content["kind"] == "numbers":
        for target in content["targets"]:
            parts += _target(target, content["pictures"])
    else:
        parts.append(_numbers(content))
        parts += _class_parts(content)
        parts += _calibration(content["reliability"])
        parts += _galleries(content)
    return [replace(part, title=whose + part.title) for part in parts]


def _numbers(content: Json) -> Table:
    """Agreement, divergence (nats), outcomes and calibration errors; without a teacher, the last alone."""
    rows = []
    if "agreement" in content:
        rows.append(["the same answer", f"{content['agreement']:.1%}"])
        rows.append(["mean KL(teacher || student), nats", f"{content['kl']:.3f}"])
        for outcome, text in OUTCOMES.items():
            rows.append([text, f"{content['outcomes'][outcome]:.1%}"])
    for name, error in content["ece"].items():
        rows.append([f"expected calibration error of the {name}", f"{error:.3f}"])
    of = COUNTED[content["kind"]]
    note = f"Of {content['pictures']} pictures; shares are of {of}."
    return Table("How faithful the student is", ["", "value"], rows, note)


def _class_parts(content: Json) -> Parts:
    """A table of the classes with score and most frequent mistake, and one of the largest confusions; [] without classes.

    The classes that lost most against the teacher come first; without a teacher, those with the lowest score.
    """
    per_class = sorted(content["per_class"], key=_gain_and_score)
    if not per_class:
        return []
    counts = {row["name"]: row["count"] for row in per_class}
    has_teacher = "teacher" in content["ece"]
    mistakes: dict[str, str] = {}
    pairs: list[list[Cell]] = []
    for pair in content["confusions"]:
        true = pair["is"]
        called = pair["called"]
        times = pair["student"]
        share = ratio(times, counts.get(true, 0))
        part = f"{share:.0%}"
        mistakes.setdefault(true, f"{called} {part}")  # the most frequent pairs come first
        taught = pair["teacher"] if has_teacher else None
        pairs.append([true, called, times, part, taught])

    models = [model for model in MODELS if model in per_class[0]]
    rows: list[list[Cell]] = []
    for row in per_class[:CLASSES]:
        name = row["name"]
        scores = [f"{row[model]:.1%}" for model in models]
        mistake = mistakes.get(name, "")
        rows.append([name, row["count"], *scores, mistake])
    order = "those that lost most first" if "teacher" in models else "the worst first"
    score = SCORES.get(content["score"], content["score"])
    title = f"Each class's {score}, {order}"
    note = f"{len(per_class)} classes occur in the pictures, at most {CLASSES} are shown."
    columns = ["class", COUNTED[content["kind"]], *models, "most often taken for"]
    parts: Parts = [Table(title, columns, rows, note, folded=True)]
    if pairs:
        names = ["is", "called", "times", "of the class", "by the teacher"]
        parts.append(Table("Most frequent confusions", names, pairs[:PAIRS], folded=True))
    return parts


def _gain_and_score(row: Json) -> tuple[float, float]:
    """What a class has gained over the teacher, then its score: the order of the rows, the largest loss first."""
    return row["student"] - row.get("teacher", 0.0), row["student"]


def _target(target: Json, pictures: int) -> Parts:
    """A table and a chart for one target number: the models' errors, how close they are to each other, and their errors by
    the target's size.
    """
    name = target["name"]
    rows = []
    for model, value in target["mae"].items():
        rows.append([f"mean absolute error of the {model}", short(value)])
    if "correlation" in target:
        gap = short(target["difference"])
        rows.append(["mean absolute difference of student and teacher", gap])
        rows.append(["their correlation", f"{target['correlation']:.3f}"])
    note = f"Of {pictures} pictures, in the units of the targets."
    parts: Parts = [Table(f"{name}: student and teacher", ["", "value"], rows, note)]
    deciles = target["deciles"]
    if deciles:
        series = {m: [tenth[m] for tenth in deciles] for m in MODELS if m in target["mae"]}
        middles = [(tenth["from"] + tenth["to"]) / 2 for tenth in deciles]
        title = f"{name}: mean absolute error by the target's size, tenths of the pictures"
        parts.append(Chart(title, middles, name, series))
    return parts


def _calibration(curves: Mapping[str, Sequence[tuple[float, float, int]]]) -> Parts:
    """Share right by confidence, at the middle of each bin; a calibrated model is on the diagonal. [] without curves."""
    if not curves:
        return []
    middles = [round((i + 0.5) / BINS, 2) for i in range(BINS)]
    series: dict[str, list[Number]] = {"as sure as right": [*middles]}
    for model, points in curves.items():
        shares: list[Number] = [None] * BINS
        for confidence, right, _count in points:
            place = min(BINS - 1, int(confidence * BINS))
            shares[place] = round(right, 4)
        series[model] = shares
    return [Chart("Share right by confidence", middles, "confidence", series)]


def _galleries(content: Json) -> Parts:
    """Example pictures for each kind of outcome; an example whose image is no JPEG in a data URL is left out."""
    colours = content.get("colours", {})
    legend = [(name, colours[name]) for name in colours if re.fullmatch(COLOUR, colours[name])]
    galleries: Parts = []
    for kind, examples in content.get("examples", {}).items():
        items = []
        for example in examples:
            said = {"is": example.get("truth")}
            for model in MODELS:
                if model in example:
                    said[model] = [f"{name} {share:.0%}" for name, share in example[model]]
            said["from left"] = example.get("panels")
            known = {name: words for name, words in said.items() if words is not None}
            lines = [(name, ", ".join(words) or "none") for name, words in known.items()]
            if example["image"].startswith(JPEG):
                wide = "panels" in example
                items.append(Picture(example["image"], example["name"], lines, wide))
        alone = kind == "both_wrong" and "agreement" not in content
        if items:
            galleries.append(Gallery(TITLES["alone" if alone else kind], items, legend))
    return galleries


# -- the cascade, disputed labels, what a backbone pays ----------------------------------------------------------------
def cascade_parts(found: Json) -> Parts:
    """A cascade's curve, and its threshold with what is guaranteed.

    Args:
        found: of :func:`kd.run.cascade.cascade_of`, the content of ``cascade.json``.
    """
    curve = found["curve"]
    teacher_ms = found["teacher_ms"]
    rows = [[f"{point['share']:.1%}", f"{point['accuracy']:.1%}"] for point in curve]
    columns = ["teacher answers", "accuracy"]
    x_name = "% of the pictures that the teacher answers"
    x = [round(100 * point["share"], 2) for point in curve]
    alone = f"the teacher alone: {found['teacher']:.1%}"
    if teacher_ms is not None:  # None: it is stored answers
        columns += ["ms a picture", "of the teacher's ms"]
        for row, point in zip(rows, curve, strict=True):
            row += [f"{point['ms']:.2f}", f"{ratio(point['ms'], teacher_ms):.0%}"]
        alone += f" in {teacher_ms:.1f} ms"
        x_name = "ms a picture"
        x = [round(point["ms"], 2) for point in curve]
    title = "The student where it is sure, else the teacher"
    accuracies = [round(100 * point["accuracy"], 2) for point in curve]
    return [
        Chart(title, x, x_name, {"accuracy, %": accuracies}),
        Table(f"{title} ({found['pictures']:,} pictures)", columns, rows),
        sentences("Its threshold", [alone, *_threshold(found)]),
    ]


def _threshold(found: Json) -> list[str]:
    """The threshold that was chosen for the goal, and what it gives on other pictures, in words.

    With ``cautions`` about the pictures, which are the last lines, the goal is called reached, not guaranteed.
    """
    goal = found["goal"]
    certain = f"{100 * found['confidence']:.4g} % confidence on {found['chosen_on']:,} pictures"
    if found["threshold"] is None:
        return [f"{goal}: no threshold is sure to reach it with {certain}"]
    cautions = found.get("cautions", [])
    sure = "reached on these pictures" if cautions else "guaranteed"
    chosen = found["chosen"]
    checked = found["checked"]
    took = f", {checked['ms']:.2f} ms a picture" if "ms" in checked else ""
    low, high = found["share_interval"]
    return [
        f"{goal}: threshold {found['threshold']:.4f}, {sure} with {certain} "
        f"({chosen['accuracy']:.1%}, {chosen['share']:.1%} asked)",
        f"checked on {checked['pictures']:,} others: {checked['accuracy']:.1%} (the teacher {checked['teacher']:.1%}), "
        f"{checked['share']:.1%} asked{took}",
        f"share asked on such pictures: {low:.1%} to {high:.1%}",
        *cautions,
    ]


def disputed_parts(found: Json, images: Sequence[str] = ()) -> Parts:
    """The labels that a teacher disputes, the least likely first, and the first of them as pictures.

    Args:
        found: of :meth:`kd.run.disputes.Disputes.found`.
        images: of the first rows (:data:`kd.report.tables.JPEG`).
    """
    count = found["disputed"]
    pictures = found["pictures"]
    note = (
        f"{count:,} of {pictures:,} labels of {found['split']} ({ratio(count, pictures):.1%}) are disputed: a fit of "
        f"the {found['judge']}'s features to the other pictures names another class"
    )
    rows = []
    items = []
    for row, image in zip_longest(found["labels"][:DISPUTED], images):
        label = f"{row['label']} ({row['p_label']:.0%})"
        suggested = f"{row['suggested']} ({row['p_suggested']:.0%})"
        rows.append([row["picture"], label, suggested])
        answers = [(f"the {model}", str(row[model])) for model in MODELS if model in row]
        lines = [("label", label), ("rather", suggested), *answers]
        if image is not None:
            items.append(Picture(image, row["picture"], lines))
    table = Table("Disputed labels", ["picture", "its label", "rather"], rows, note, folded=True)
    more = "All are in disputed_labels.csv. A dispute is not yet an error: look."
    return [table, *([Gallery("Labels to look at", items, note=more)] if items else [])]


def with_interval(points: float, low: float, high: float, unit: str = "points") -> str:
    """A difference with its sign, and the ends of its interval.

    >>> with_interval(6.12, 4.9, 7.31)
    '+6.1 points (4.9 to 7.3)'
    """
    return f"{points:+.1f} {unit} ({low:.1f} to {high:.1f})"


def labels_alone_table(found: Json) -> Table:
    """What a teacher's answers have added, in words; the first line is also part of the page's headline.

    Args:
        found: ``gain`` (:func:`kd.proof.certificate.gain_interval`), ``measure``, ``pictures``; ``metric`` of the students
            by labels alone, by learning rate in ``rates``; ``of_start``: both students are exported as they were before
            their first step, so that nothing is compared.
    """
    unit = "points"
    if found["measure"] == "mean absolute error":
        unit = "% less error"
    elif found["measure"] != "accuracy":
        unit = f"points of {found['measure']}"
    points, low, high = (100 * share for share in found["gain"])
    line = f"{with_interval(points, low, high, unit)} over labels alone"
    if low <= 0 <= high:
        line = f"{line}: not shown"
    if found.get("of_start"):
        line = "not compared with labels alone: neither training made the start better, which both export"
    metric = found["metric"]
    rates = found["rates"].items()
    scores = [f"{format_metric(metric, score)} at optim.lr={rate}" for rate, score in rates]
    how = (
        f"by labels alone the same student, from the same start and for as many epochs, has {metric} "
        f"{', '.join(scores)}; the better one is compared"
    )
    pictures = f"{counted(found['pictures'], 'validation picture')}, paired, 95 % interval"
    return sentences("Did the teacher help?", [line, how, pictures])


def gain_line(gain: Json) -> str:
    """One sentence: whether a distilled backbone pays, and by how much.

    Args:
        gain: ``over``, the start that the distilled backbone is compared with; ``points``, the gain in percentage points
            (above 0: the distilled one is better); ``low`` and ``high``, the ends of its 95 % interval, which decide.

    >>> gain_line({"over": "random", "points": 7.1, "low": 5.2, "high": 9.0})
    'it pays: +7.1 points (5.2 to 9.0) over a random start'
    """
    low = gain["low"]
    high = gain["high"]
    size = with_interval(gain["points"], low, high)
    other = STARTS.get(gain["over"], gain["over"])
    if low > 0:
        return f"it pays: {size} over {other}"
    if high < 0:
        return f"it does not pay: {size} against {other}"
    return f"not shown: {size} against {other}"


def pays_parts(probe: Json) -> Parts:
    """The accuracies of each start of a backbone, and whether the distilled one pays.

    Args:
        probe: of :func:`kd.run.pays.measure_pays`: ``starts``, by start an accuracy in [0, 1] for each seed; ``gains``,
            ``how`` and ``notes``.
    """
    rows = []
    for name, values in probe["starts"].items():
        each = ", ".join(f"{100 * value:.1f}" for value in values)
        mean = f"{fmean(values):.1%}"
        rows.append([name, mean, each])
    lines = [gain_line(gain) for gain in probe["gains"]]
    lines.append(probe["how"])
    lines += probe["notes"]
    columns = ["backbone", "mean accuracy", "each seed"]
    return [Table("Does it pay?", columns, rows, ". ".join(lines))]
