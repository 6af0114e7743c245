"""What a run's page says of the student: what it has learnt, how large and how fast it is."""

from kd.report.charts import Section, by_epoch, epoch_chart, metric_lines
from kd.report.evaluated import model_name, with_interval
from kd.report.facts import Facts
from kd.report.metric import (
    PROBE,
    counted,
    format_metric,
    is_share,
    less_is_better,
)
from kd.report.ratio import ratio
from kd.report.records import RunRecords
from kd.report.tables import Chart, Part, Table, results_of
from kd.storage.of_weights import LABELS_ALONE


def learning(facts: Facts) -> list[Part | None]:
    """The parts on what was learnt: charts of features and metrics, and the table of sizes; None in place of one without
    values.
    """
    run = facts.run
    return [*_feature_lines(run), *metric_lines(run), _sizes(run)]


def _feature_lines(run: RunRecords) -> list[Chart | None]:
    """The student's features over the epochs: k-NN and ridge probe beside the teachers', shares of 1, and RankMe, a number
    of directions.
    """
    of_student = {f"student {metric}": by_epoch(run, f"val/{metric}") for metric in PROBE}
    epochs = {epoch for values in of_student.values() for epoch in values}
    of_teachers = {}  # their values do not change: level lines
    for teacher, values in _teachers(run).items():
        for metric in PROBE:
            if metric in values:
                of_teachers[f"{teacher} {metric}"] = dict.fromkeys(epochs, values[metric])
    ranks = {"student rankme": by_epoch(run, "val/rankme")}
    return [
        epoch_chart(
            "Accuracy of the features, without training on labels", {**of_teachers, **of_student}
        ),
        epoch_chart("Directions that the features use (RankMe)", ranks),
    ]


def _teachers(run: RunRecords) -> dict[str, dict[str, float]]:
    """The validation metrics of each teacher, by its name for the page."""
    teacher = run.teacher
    members = teacher.get("members") or {}
    if not members:
        return {"teacher": teacher.get("val") or {}}
    metrics = {}
    for name, model in members.items():
        metrics[f"teacher {name}"] = model.get("val") or {}
    return metrics


def headline(facts: Facts) -> Section | None:
    """The page's first sentence: what the student reaches, beside its teacher, and how small it is.

    Of a student that is worse, the share of the teacher's metric that it keeps, where the metric is a share; else both
    values. Of classes the difference has its interval, and one that the pictures do not show is named so. Last what the
    teacher's answers have added, where that was measured. None where nothing was validated.
    """
    run = facts.run
    metric = run.primary
    score = facts.best_val()
    if score is None:
        return None
    who = "The student"
    if facts.exports_its_start():
        who += ", as it was before training,"
    shown = format_metric(metric, score)
    of_teacher = (run.teacher.get("val") or {}).get(metric)
    if not of_teacher:
        return {"kind": "headline", "text": f"{who} reaches {metric} {shown}"}
    shown_of_teacher = format_metric(metric, of_teacher)
    better = score < of_teacher if less_is_better(metric) else score > of_teacher
    gap = run.fidelity.get("gap") if metric == "acc1" else None
    in_points = ""
    if gap:
        points, low, high = (100 * gap[end] for end in ("difference", "low", "high"))
        count = counted(gap["pictures"], "picture")
        in_points = f", {with_interval(points, low, high)} on {count}"
    against = f"{metric} {shown} against {shown_of_teacher}{in_points}"
    if gap and abs(gap["difference"]) * gap["pictures"] < 1.5:
        text = f"{who} equals its teacher within one picture: {against}"
    elif gap and gap["low"] <= 0 <= gap["high"]:
        text = f"{who} can't be told from its teacher by these pictures: {against}"
    elif better:
        text = f"{who} is better than its teacher: {against}"
    elif is_share(metric):
        kept = ratio(score, of_teacher)
        values = f"{shown} of {shown_of_teacher}{in_points}"
        text = f"{who} keeps {kept:.1%} of its teacher's {metric} ({values})"
    else:
        text = f"{who} has {metric} {shown}, its teacher {shown_of_teacher}"
    small, large = run.student.get("params"), run.teacher.get("params")
    if small and large:
        times = ratio(small, large)
        part = f"{times:.1%} of" if small < large else f"{times:.1f} times"
        text += f" with {part} its parameters"
    results = results_of(
        run.folder, lambda _: None
    )  # what is left out is named where results are shown
    for part_of_result in results.get(LABELS_ALONE, [])[:1]:
        if isinstance(part_of_result, Table):
            text += f"; {part_of_result.rows[0][0]}"
    return {"kind": "headline", "text": text}


def _sizes(run: RunRecords) -> Table | None:
    """Parameters of teacher and student; None where no size is known."""
    models = {"teacher": run.teacher, "student": run.student}
    rows = []
    for name, model in models.items():
        params = model.get("params")
        if params:
            millions = params / 1e6
            rows.append([name, model_name(model), f"{millions:.3g}"])
    if not rows:
        return None
    note = "" if run.latency else "kd-latency RUN measures milliseconds."
    columns = ["", "model", "parameters (M)"]
    return Table("Size", columns, rows, note)
