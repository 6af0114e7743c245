"""What was measured of a student beside its teacher, as parts (:mod:`kd.report.tables`): each result is worded here once."""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kd.report.metric import counted, difference, format_metric, short
from kd.report.ratio import ratio
from kd.report.tables import JPEG, Cell, Chart, Gallery, Part, Picture, Table, sentences

MODELS = ("teacher", "student")
BINS = 15
"""Of confidences, of a calibration curve."""
CLASSES = 200
"""Rows of a table of classes, at most."""
PAIRS = 20
"""Rows of a table of confusions, at most."""
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
STARTS = {"random": "a random start", "pretrained": "the pre-trained weights"}
"""Names of a backbone's starts in sentences."""


# -- one model, or several side by side --------------------------------------------------------------------------------
def models_table(
    result: Mapping[str, Any],
    models: Sequence[tuple[str, Mapping[str, float]]],
    more: Sequence[Sequence[str]] = (),
) -> Table:
    """A row for each model, its parameters in millions and its metrics.

    Args:
        result: whose ``pictures``, ``data`` and metrics head the table.
        models: name and figures.
        more: rows that follow.
    """
    shown = _shown(result)
    rows = []
    for name, model in models:
        row = [name, in_millions(model["params"])]
        for metric in shown:
            row.append(format_metric(metric, model.get(metric)))
        rows.append(row)
    title = f"{result['pictures']} pictures: {result['data']}"
    return Table(title, ["", "parameters", *shown], [*rows, *more])


def _shown(result: Mapping[str, Any]) -> list[str]:
    """The metrics that have a column."""
    return [name for name in result["student"] if name != "params" and not name.startswith("iou_")]


def in_millions(parameters: float) -> str:
    """A number of parameters as tables show it; "-" where none are known, as of a teacher whose answers are read.

    >>> in_millions(161_234), in_millions(0)
    ('0.16 M', '-')
    """
    return f"{parameters / 1e6:.2f} M" if parameters else "-"


def model_name(model: Mapping[str, Any]) -> str:
    """A model of ``summary.json`` for people; "" where its architecture is not known."""
    return model.get("name") or model.get("arch") or ""


def differences(
    first: Mapping[str, Any], name: str, others: Mapping[str, Mapping[str, Any]]
) -> list[list[str]]:
    """Rows of each other student less the first: the quotient of the parameters, then each metric's difference.

    Args:
        first: result of the first model.
        name: of it.
        others: results of the others, by name.
    """
    before = first["student"]
    rows = []
    for other, result in others.items():
        after = result["student"]
        size = ""
        if before["params"]:
            size = f"x {after['params'] / before['params']:.2f}"
        row = [f"{other} - {name}", size]
        for metric in _shown(first):
            row.append(difference(metric, before.get(metric), after.get(metric)))
        rows.append(row)
    return rows


def paired(first: str, other: str, pair: tuple[int, int], pictures: int) -> str:
    """How sure the difference of two models is, as a line.

    Args:
        first: name of the first model.
        other: of the other.
        pair: pictures on which the first alone is right, and on which the other alone is.
        pictures: all.

    >>> paired("a", "b", (2, 6), 100)
    'a alone is right on 2 of 100 pictures, b alone on 6: +4.0 ± 2.8 points (standard error, paired by picture)'
    """
    # Of N pictures b and c are right for one model alone. Their difference d is -1, 0 or 1 a picture, so that its
    # mean is (c - b) / N and its variance (b + c) / N - mean^2; the standard error is the root of variance / N.
    first_alone, other_alone = pair
    gap = (other_alone - first_alone) / pictures
    variance = (first_alone + other_alone) / pictures - gap**2
    error = (variance / pictures) ** 0.5
    return (
        f"{first} alone is right on {first_alone} of {pictures} pictures, {other} alone on {other_alone}: "
        f"{100 * gap:+.1f} ± {100 * error:.1f} points (standard error, paired by picture)"
    )


def certificate_table(certificate: Mapping[str, Any], pictures: str) -> Table:
    """What is proven of one model beside another, its answer first.

    Args:
        certificate: of :func:`kd.proof.certificate.certify`.
        pictures: what it is about: the pictures, or the export.
    """
    return sentences(f"Not worse, and by how much: {pictures}", certificate["text"])


def exports_parts(records: Mapping[str, Mapping[str, Any]]) -> list[Part]:
    """Exports, each beside the student, and their certificates.

    Args:
        records: of ``export/export.json``, by name; a number that one lacks is left empty.
    """
    rows: list[list[Cell]] = []
    notes: list[str] = []
    certificates: list[Part] = []
    metrics = [record["metric"] for record in records.values() if "metric" in record]
    metric = metrics[0] if metrics else "acc1"  # of one student
    for name, record in records.items():
        note = record.get("note")
        cells = [
            name,
            record.get("size_mb"),
            _percent(record.get("agreement")),
            format_metric(metric, record.get("export")),
            format_metric(metric, record.get("student")),
            record.get("max_difference"),
            None if note else record.get("export_ms"),  # else its file was not run
            record.get("student_ms"),
        ]
        rows.append(cells)
        layers = record.get("float32_layers")
        if layers:
            notes.append(f"{name} keeps in float32: {', '.join(layers)}")
        simulated = record.get("simulated")
        if simulated:
            score = format_metric(metric, simulated.get("export"))
            notes.append(f"{name} simulated in FP16: {_percent(simulated['agreement'])} {score}")
        if note:
            notes.append(note)
        if "certificate" in record:
            certificates.append(certificate_table(record["certificate"], f"export {name}"))
    columns = [
        "export",
        "MB",
        "same answers",
        metric,
        f"{metric} in torch",  # of a cascade both models
        "largest difference",
        "ms",
        "ms in torch",
    ]
    return [Table("Exports", columns, rows, "\n".join(notes)), *certificates]


def _percent(share: float | None) -> str:
    """A share in 0..1 in percent; "" where it is not known."""
    return "" if share is None else f"{share:.2%}"


def latency_table(latencies: Mapping[str, Any]) -> Table:
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
def fidelity_parts(content: Mapping[str, Any]) -> list[Part]:
    """How faithful the student is to its teacher: numbers, classes, calibration, examples.

    Args:
        content: of ``fidelity.json`` (:meth:`kd.tasks.fidelity.Fidelity.result` and examples).
    """
    if content["kind"] == "numbers":
        return [
            part for target in content["targets"] for part in _target(target, content["pictures"])
        ]
    return [
        _numbers(content, COUNTED[content["kind"]]),
        *_class_parts(content),
        *_calibration(content["reliability"]),
        *_galleries(content),
    ]


def _numbers(content: Mapping[str, Any], counted: str) -> Table:
    """Agreement, divergence (nats), outcomes and calibration errors; without a teacher, the last alone."""
    rows = []
    if "agreement" in content:
        agreement = content["agreement"]
        divergence = content["kl"]
        rows.append(["the same answer", f"{agreement:.1%}"])
        rows.append(["mean KL(teacher || student), nats", f"{divergence:.3f}"])
        for outcome, text in OUTCOMES.items():
            share = content["outcomes"][outcome]
            rows.append([text, f"{share:.1%}"])
    for name, error in content["ece"].items():
        what = f"expected calibration error of the {name}"
        rows.append([what, f"{error:.3f}"])
    note = f"Of {content['pictures']} pictures; shares are of {counted}."
    return Table("How faithful the student is", ["", "value"], rows, note)


def _class_parts(content: Mapping[str, Any]) -> list[Part]:
    """Each class's score and most frequent mistake, those that lost most first, and the largest confusions."""
    per_class = content["per_class"]
    if not per_class:
        return []
    counts = {row["name"]: row["count"] for row in per_class}
    has_teacher = "teacher" in content["ece"]
    mistakes: dict[str, str] = {}
    pairs: list[list[Cell]] = []
    for pair in content["confusions"]:
        true, called = pair["is"], pair["called"]
        times = pair["student"]
        count = counts.get(true, 0)
        share = ratio(times, count)
        part = f"{share:.0%}"
        mistakes.setdefault(true, f"{called} {part}")
        taught = None
        if has_teacher:
            taught = pair["teacher"]
        pairs.append([true, called, times, part, taught])

    models = [model for model in MODELS if any(model in row for row in per_class)]
    rows: list[list[Cell]] = []
    for row in sorted(per_class, key=_gain_and_score):
        name = row["name"]
        scores = [f"{row[model]:.1%}" for model in models]
        mistake = mistakes.get(name, "")
        rows.append([name, row["count"], *scores, mistake])
    order = "those that lost most first" if "teacher" in models else "the worst first"
    score = SCORES.get(content["score"], content["score"])
    note = f"{len(rows)} classes occur in the pictures."
    left_out = len(rows) - CLASSES
    if left_out > 0:
        note += f" {left_out} more lost less, or are better."
    columns = ["class", COUNTED[content["kind"]], *models, "most often taken for"]
    title = f"Each class's {score}, {order}"
    parts: list[Part] = [Table(title, columns, rows[:CLASSES], note, folded=True)]
    if pairs:
        names = ["is", "called", "times", "of the class", "by the teacher"]
        parts.append(Table("Most frequent confusions", names, pairs[:PAIRS], folded=True))
    return parts


def _gain_and_score(row: Mapping[str, Any]) -> tuple[float, float]:
    """What a class has gained over the teacher, then its score: the order of the rows, the largest loss first."""
    return row["student"] - row.get("teacher", 0.0), row["student"]


def lost_line(content: Mapping[str, Any]) -> str:
    """The classes that lost most against the teacher, as a sentence; "" where none did."""
    named = []
    for row in sorted(content.get("per_class", []), key=_gain_and_score):
        name = row["name"]
        student = row["student"]
        teacher = row.get("teacher", 0)
        if teacher > student:
            named.append(f"{name} {teacher:.0%} -> {student:.0%}")
    if not named:
        return ""
    worst = ", ".join(named[:5])
    score = content["score"]
    return f"classes that lost most ({score}): {worst}"


def _target(target: Mapping[str, Any], pictures: int) -> list[Part]:
    """Of one number: how close the models are to the targets and to each other, and where on the scale."""
    name = target["name"]
    rows = [
        [f"mean absolute error of the {model}", short(value)]
        for model, value in target["mae"].items()
    ]
    if "correlation" in target:
        rows.append(
            ["mean absolute difference of student and teacher", short(target["difference"])]
        )
        rows.append(["their correlation", f"{target['correlation']:.3f}"])
    note = f"Of {pictures} pictures, in the units of the targets."
    parts: list[Part] = [Table(f"{name}: student and teacher", ["", "value"], rows, note)]
    deciles = target["deciles"]
    if deciles:
        series = {m: [tenth[m] for tenth in deciles] for m in MODELS if m in target["mae"]}
        middles = [(tenth["from"] + tenth["to"]) / 2 for tenth in deciles]
        title = f"{name}: mean absolute error by the target's size, tenths of the pictures"
        parts.append(Chart(title, middles, name, series))
    return parts


def _calibration(curves: Mapping[str, Sequence[tuple[float, float, int]]]) -> list[Part]:
    """Share right by confidence, at the middle of each bin; a calibrated model is on the diagonal. [] without curves."""
    middles = [round((i + 0.5) / BINS, 2) for i in range(BINS)]
    series: dict[str, list[float | None]] = {}
    for model, points in curves.items():
        shares: list[float | None] = [None] * BINS
        for confidence, right, _count in points:
            shares[min(BINS - 1, int(confidence * BINS))] = round(right, 4)
        series[model] = shares
    if not series:
        return []
    return [
        Chart(
            "Share right by confidence",
            middles,
            "confidence",
            {"as sure as right": middles, **series},
        )
    ]


def _galleries(content: Mapping[str, Any]) -> list[Part]:
    """Example pictures for each kind of outcome; colours and pictures that are none are left out."""
    legend = [
        (name, colour)
        for name, colour in content.get("colours", {}).items()
        if re.fullmatch("#[0-9a-f]{6}", colour)
    ]
    galleries: list[Part] = []
    for kind, examples in content.get("examples", {}).items():
        alone = kind == "both_wrong" and "agreement" not in content
        items = []
        for example in examples:
            if not example["image"].startswith(JPEG):
                continue
            lines = []
            if "truth" in example:
                lines.append(("is", ", ".join(example["truth"]) or "none"))
            for model in MODELS:
                answers = [f"{name} {share:.0%}" for name, share in example.get(model, [])]
                if model in example:
                    lines.append((model, ", ".join(answers)))
            if "panels" in example:
                lines.append(("from left", ", ".join(example["panels"])))
            items.append(Picture(example["image"], example["name"], lines, "panels" in example))
        if items:
            galleries.append(Gallery(TITLES["alone" if alone else kind], items, legend))
    return galleries


# -- the cascade, disputed labels, what a backbone pays ----------------------------------------------------------------
def cascade_parts(found: Mapping[str, Any]) -> list[Part]:
    """A cascade's curve, and its threshold with what is guaranteed.

    Args:
        found: of :func:`kd.run.cascade.cascade_of`, the content of ``cascade.json``.
    """
    curve = found["curve"]
    teacher_ms = found["teacher_ms"]
    columns = ["teacher answers", "accuracy"]
    rows = [[f"{point['share']:.1%}", f"{point['accuracy']:.1%}"] for point in curve]
    alone = f"the teacher alone: {found['teacher']:.1%}"
    x_name = "% of the pictures that the teacher answers"
    x = [round(100 * point["share"], 2) for point in curve]
    if teacher_ms is not None:  # None: it is stored answers
        columns += ["ms a picture", "of the teacher's ms"]
        for row, point in zip(rows, curve, strict=True):
            of_teacher = ratio(point["ms"], teacher_ms)
            row += [f"{point['ms']:.2f}", f"{of_teacher:.0%}"]
        alone += f" in {teacher_ms:.1f} ms"
        x_name = "ms a picture"
        x = [round(point["ms"], 2) for point in curve]
    title = "The student where it is sure, else the teacher"
    accuracies = [round(100 * point["accuracy"], 2) for point in curve]
    chart = Chart(
        title,
        x,
        x_name,
        {"accuracy, %": accuracies},
    )
    words = sentences("Its threshold", [alone, *_threshold(found)])
    return [
        chart,
        Table(f"{title} ({found['pictures']:,} pictures)", columns, rows),
        words,
    ]


def _threshold(found: Mapping[str, Any]) -> list[str]:
    """The threshold that was chosen for the goal, and what it gives on other pictures, in words."""
    goal = found["goal"]
    certain = f"{100 * found['confidence']:.4g} % confidence on {found['chosen_on']:,} pictures"
    if found["threshold"] is None:
        lines = [f"{goal}: no threshold is sure to reach it with {certain}"]
        if "kept_goal" in found:
            lines.append(f"cascade.json keeps the rule for {found['kept_goal']}, found before")
        return lines
    cautions = found.get("cautions", [])
    sure = "reached on these pictures" if cautions else "guaranteed"
    chosen, checked = found["chosen"], found["checked"]
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


def disputed_parts(found: Mapping[str, Any], images: Sequence[str]) -> list[Part]:
    """The labels that a teacher disputes, the least likely first, and the first of them as pictures.

    Args:
        found: of :meth:`kd.run.disputes.Disputes.found`.
        images: of the first rows (:data:`kd.report.tables.JPEG`).
    """
    share = found["disputed"] / found["pictures"]
    note = (
        f"{found['disputed']:,} of {found['pictures']:,} labels of {found['split']} ({share:.1%}) are disputed: a fit of "
        f"the {found['judge']}'s features to the other pictures names another class"
    )
    rows = []
    items = []
    shown = max(10, len(images))
    for number, row in enumerate(found["labels"][:shown]):
        picture = row["picture"]
        label = f"{row['label']} ({row['p_label']:.0%})"
        suggested = f"{row['suggested']} ({row['p_suggested']:.0%})"
        rows.append([picture, label, suggested])
        if number >= len(images):
            continue
        lines = [("label", label), ("rather", suggested)]
        for model in MODELS:
            if model in row:
                lines.append((f"the {model}", str(row[model])))
        item = Picture(images[number], picture, lines)
        items.append(item)
    parts: list[Part] = [Table("Disputed labels", ["picture", "its label", "rather"], rows, note)]
    if items:
        more = "All are in disputed_labels.csv. A dispute is not yet an error: look."
        parts.append(Gallery("Labels to look at", items, note=more))
    return parts


def with_interval(points: float, low: float, high: float, unit: str = "points") -> str:
    """A difference with its sign, and the ends of its interval.

    >>> with_interval(6.12, 4.9, 7.31)
    '+6.1 points (4.9 to 7.3)'
    """
    return f"{points:+.1f} {unit} ({low:.1f} to {high:.1f})"


def labels_alone_table(found: Mapping[str, Any]) -> Table:
    """What a teacher's answers have added, in words; the first line is the page's.

    Args:
        found: ``gain`` (:func:`kd.proof.certificate.gain_interval`), ``measure``, ``pictures``; ``metric`` of the students
            by labels alone, by learning rate in ``rates``.
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
    metric = found["metric"]
    scores = [
        f"{format_metric(metric, score)} at optim.lr={rate}"
        for rate, score in found["rates"].items()
    ]
    how = (
        f"by labels alone the same student, from the same start and for as many epochs, has {metric} "
        f"{', '.join(scores)}; the better one is compared"
    )
    pictures = f"{counted(found['pictures'], 'validation picture')}, paired, 95 % interval"
    return sentences("Did the teacher help?", [line, how, pictures])


def gain_line(gain: Mapping[str, Any]) -> str:
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


def pays_parts(probe: Mapping[str, Any]) -> list[Part]:
    """The accuracies of each start of a backbone, and whether the distilled one pays.

    Args:
        probe: of :func:`kd.run.pays.measure_pays`: ``metrics``, names; ``starts``, by start and metric a value in [0, 1]
            for each seed; ``gains``, ``how`` and ``notes``.
    """
    rows = []
    for metric in probe["metrics"]:
        for name, by_metric in probe["starts"].items():
            values = by_metric[metric]
            each = ", ".join(f"{100 * value:.1f}" for value in values)
            mean = f"{fmean(values):.1%}"
            rows.append([metric, name, mean, each])
    lines = [gain_line(gain) for gain in probe["gains"]]
    lines.append(probe["how"])
    lines += probe["notes"]
    columns = ["", "backbone", "mean", "each seed"]
    return [Table("Does it pay?", columns, rows, ". ".join(lines))]
