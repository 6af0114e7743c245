"""What a run's page says of the student: what it has learnt, how large and how fast it is."""

from collections.abc import Iterable, Sequence
from itertools import islice

from kd.report.charts import Section, by_epoch, epoch_chart, metric_lines, table
from kd.report.facts import Facts
from kd.report.metric import (
    PROBE,
    format_metric,
    is_share,
    less_is_better,
    part_in_words,
    timed_with,
)
from kd.report.ratio import ratio
from kd.report.records import RunRecords

SETTINGS = 6  # of kd-latency that are shown


def learning(facts: Facts) -> list[Section | None]:
    """The sections on what was learnt: charts of features and metrics, and the table of sizes and times; None in place of
    one without values.
    """
    run = facts.run
    sections: list[Section | None] = []
    for student in run.students:
        sections += feature_lines(run, student)
    return [*sections, *metric_lines(run), _sizes(run)]


def feature_lines(run: RunRecords, student: str) -> list[Section | None]:
    """Charts of a student's features over the epochs: k-NN and ridge probe beside the teachers', and RankMe; None in place
    of one without values.

    Args:
        run: the records; accuracies are shares of 1, RankMe is a number of directions.
        student: its name; "" for a single one.
    """
    place = f"{student}/" if student else ""
    name = student or "student"
    of_student = {}
    for metric in PROBE:
        of_student[f"{name} {metric}"] = by_epoch(run, f"{place}val/{metric}")
    epochs = {epoch for values in of_student.values() for epoch in values}

    # A teacher's values do not change: level lines.
    of_teachers = {}
    for teacher, values in _teachers(run).items():
        for metric in PROBE:
            if metric in values:
                of_teachers[f"{teacher} {metric}"] = dict.fromkeys(epochs, values[metric])

    of = f" of {student}" if student else ""
    ranks = {f"{name} rankme": by_epoch(run, f"{place}val/rankme")}
    title = f"Accuracy of the features{of}, without training on labels"
    return [
        epoch_chart(title, {**of_teachers, **of_student}),
        epoch_chart(f"Directions that the features use{of} (RankMe)", ranks),
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
    """The page's first sentence: what the best student reaches, beside its teacher, and how small it is.

    Of a student that is worse, the share of the teacher's metric that it keeps, where the metric is a share; else both
    values. None where nothing was validated.
    """
    run = facts.run
    metric = facts.run.primary
    scores = {}
    for student in run.students:
        score = facts.best_val(student)
        if score is not None:
            scores[student] = score
    if not scores:
        return None
    best = max
    if less_is_better(metric):
        best = min
    name = best(scores, key=lambda student: scores[student])
    who = f"The student {name}" if name else "The student"
    if facts.exports_its_start(name):
        who += ", as it was before training,"
    score = scores[name]
    shown = format_metric(metric, score)
    teacher = run.teacher
    teacher_score = (teacher.get("val") or {}).get(metric)
    if not teacher_score:
        return {"kind": "headline", "text": f"{who} reaches {metric} {shown}"}

    shown_of_teacher = format_metric(metric, teacher_score)
    if less_is_better(metric):
        better = score < teacher_score
    else:
        better = score > teacher_score
    if better:
        text = f"{who} is better than its teacher: {metric} {shown} against {shown_of_teacher}"
    elif is_share(metric):
        share = ratio(score, teacher_score)
        text = f"{who} keeps {share:.1%} of its teacher's {metric} ({shown} of {shown_of_teacher})"
    else:
        text = f"{who} has {metric} {shown}, its teacher {shown_of_teacher}"
    small = run.model_of(name).get("params")
    large = teacher.get("params")
    if small and large:
        times = ratio(small, large)
        if small < large:
            shown = f"{part_in_words(times)} of"
        else:
            shown = f"{times:.1f} times"
        text += f" with {shown} its parameters"
    return {"kind": "headline", "text": text}


def _sizes(run: RunRecords) -> Section | None:
    """Parameters of teacher and students, and what ``kd-latency`` has measured of them; None where no size is known."""
    models = {"teacher": run.teacher}
    for student in run.students:
        models[student or "student"] = run.model_of(student)
    known = {name: model for name, model in models.items() if model.get("params")}
    if not known:
        return None
    archs = ["model"]
    sizes = ["parameters (M)"]
    for model in known.values():
        millions = model["params"] / 1e6
        archs.append(model.get("arch", ""))
        sizes.append(f"{millions:.3g}")
    rows: list[Sequence[object]] = [archs, sizes, *_timed_rows(run, known)]
    note = "" if run.latency else "kd-latency RUN measures milliseconds."
    return table("Size and latency", ["", *known], rows, note=note)


def _timed_rows(run: RunRecords, models: Iterable[str]) -> list[list[object]]:
    """What ``kd-latency`` has measured: a row for each of its first :data:`SETTINGS` settings, median ms a batch.

    Args:
        run: with the rows of ``latency.json``.
        models: the table's columns, in order; "" where a model was not timed under a setting.
    """
    ms_by_setting: dict[str, dict[str, float]] = {}
    for row in run.latency:
        setting = timed_with(row)
        ms = ms_by_setting.setdefault(setting, {})
        model = row["model"]
        ms[model] = row["median_ms"]
    rows: list[list[object]] = []
    for setting, ms in islice(ms_by_setting.items(), SETTINGS):
        of_models = [ms.get(name, "") for name in models]
        rows.append([f"ms, {setting}", *of_models])
    return rows
