"""What a run's page says of the student: what it has learnt, how large and how fast it is."""

from dataclasses import replace

from kd.report.charts import Section, by_epoch, epoch_chart, metric_lines
from kd.report.evaluated import gap_in_points, run_table
from kd.report.facts import Facts
from kd.report.metric import (
    PROBE,
    counted,
    format_metric,
    is_share,
    less_is_better,
)
from kd.report.ratio import known, ratio
from kd.report.records import RunRecords
from kd.report.tables import Chart, Part, Table
from kd.storage.of_weights import LABELS_ALONE


def learning(facts: Facts) -> list[Part | None]:
    """The parts on what was learnt: the models' metrics and sizes, charts of features and metrics; None in place of one
    without values.
    """
    run = facts.run
    return [_models(facts), *_feature_lines(run), *metric_lines(run)]


def _models(facts: Facts) -> Table | None:
    """The table that the terminal showed at the run's end; None before it, and of a training that is not kd's."""
    summary = facts.run.summary
    ended_well = summary.get("status") == "done" and "wall_s" in summary
    if not ended_well or "best_val" not in (summary.get("student") or {}):
        return None
    note = "" if "latency" in facts.results else "kd-latency RUN measures milliseconds."
    return replace(run_table(summary), note=note)


def _feature_lines(run: RunRecords) -> list[Chart | None]:
    """The student's features over the epochs: k-NN and ridge probe beside the teachers', shares of 1, and RankMe, a number
    of directions.
    """
    of_student = {f"student {metric}": by_epoch(run, f"val/{metric}") for metric in PROBE}
    epochs = {epoch for values in of_student.values() for epoch in values}
    members = run.teacher.get("members") or {}
    teachers = {f"teacher {name}": model for name, model in members.items()}
    of_teachers = {}  # their values do not change: level lines
    for name, model in (teachers or {"teacher": run.teacher}).items():
        values = model.get("val") or {}
        for metric in PROBE:
            if metric in values:
                of_teachers[f"{name} {metric}"] = dict.fromkeys(epochs, values[metric])
    title = "Accuracy of the features, without training on labels"
    ranks = {"student rankme": by_epoch(run, "val/rankme")}
    return [
        epoch_chart(title, {**of_teachers, **of_student}),
        epoch_chart("Directions that the features use (RankMe)", ranks),
    ]


def headline(facts: Facts) -> Section | None:
    """The page's first sentence: what the student reaches, beside its teacher, and how small it is.

    A worse student is described by the share of the teacher's metric that it keeps; where the metric is no share, by both
    values. For ``acc1`` the difference has its 95 % interval; where that holds 0, the sentence says that the pictures can't
    tell the two apart. Last comes what the teacher's answers have added, where that was measured. None where nothing was
    validated.
    """
    run = facts.run
    metric = run.primary
    score = facts.best_val()
    if score is None:
        return None
    shown = format_metric(metric, score)
    who = "The student" if run.teacher else "The model"
    if facts.exports_its_start():
        who += ", as it was before training,"
    of_teacher = known((run.teacher.get("val") or {}).get(metric))
    if not of_teacher:
        return {"kind": "headline", "text": f"{who} reaches {metric} {shown}"}
    text = f"{who} {_beside_teacher(facts, score, of_teacher)}"
    small = run.student.get("params")
    large = run.teacher.get("params")
    if small and large:
        times = ratio(small, large)
        part = f"{times:.1%} of" if small < large else f"{times:.1f} times"
        text += f", with {part} its parameters"
    for part_of_result in facts.results.get(LABELS_ALONE, [])[:1]:
        if isinstance(part_of_result, Table):
            text += f"; {part_of_result.rows[0][0]}"
    return {"kind": "headline", "text": text}


def _beside_teacher(facts: Facts, score: float, of_teacher: float) -> str:
    """How a student's main metric compares with its teacher's: what follows "The student" in a sentence."""
    metric = facts.run.primary
    shown = format_metric(metric, score)
    taught = format_metric(metric, of_teacher)
    gap = facts.run.fidelity.get("gap") if metric == "acc1" else None
    in_points = ""
    if gap:
        count = counted(gap["pictures"], "picture")
        in_points = f", {gap_in_points(gap)} on {count}"
    against = f"{metric} {shown} against {taught}{in_points}"
    if gap and gap["low"] <= 0 <= gap["high"]:
        return f"can't be told from its teacher by these pictures: {against}"
    if score < of_teacher if less_is_better(metric) else score > of_teacher:
        return f"is better than its teacher: {against}"
    if not is_share(metric):
        return f"has {metric} {shown}, its teacher {taught}"
    kept = ratio(score, of_teacher)
    return f"keeps {kept:.1%} of its teacher's {metric} ({shown} of {taught}{in_points})"
