"""What a run's page opens with: what the student has learnt, how large and fast it is, what it gets wrong."""

from typing import Any

from kd.report.charts import Section, by_epoch, epoch_chart, metric_lines, table
from kd.report.facts import Facts
from kd.report.metric import PROBE, format_metric, is_share, less_is_better
from kd.report.ratio import ratio
from kd.report.records import RunRecords

HARDEST = 10  # classes, and mistakes, that are shown


def learning(facts: Facts) -> list[Section | None]:
    """The page's first sections: metrics, sizes, hardest classes and mistakes, for each student."""
    run = facts.run
    confused = [
        (student, newest) for student in run.students if (newest := run.confusion_of(student))
    ]
    return [
        *(section for student in run.students for section in feature_lines(run, student)),
        *metric_lines(run),
        _sizes(run),
        *(_hardest(run, student, newest) for student, newest in confused),
        *(_mistakes(run, student, newest) for student, newest in confused),
    ]


def feature_lines(run: RunRecords, student: str) -> list[Section | None]:
    """k-NN and ridge probe of a student's features over the epochs, beside the teachers'; and their effective rank."""
    place, who, of = f"{student}/" if student else "", student or "student", _of(student)
    own = {f"{who} {metric}": by_epoch(run, f"{place}val/{metric}") for metric in PROBE}
    epochs = {epoch for values in own.values() for epoch in values}
    teacher = run.summary.get("teacher") or {}
    members = {
        f"teacher {name}": model.get("val") or {}
        for name, model in (teacher.get("members") or {}).items()
    }
    models = members or {"teacher": teacher.get("val") or {}}
    taught = {
        f"{name} {metric}": dict.fromkeys(epochs, values[metric])
        for name, values in models.items()
        for metric in PROBE
        if metric in values
    }
    ranks = {f"{who} rankme": by_epoch(run, f"{place}val/rankme")}
    return [
        epoch_chart(f"Accuracy of the features{of}, without training on labels", {**taught, **own}),
        epoch_chart(f"Directions that the features use{of} (RankMe)", ranks),
    ]


def headline(facts: Facts) -> Section | None:
    """The share of the teacher's accuracy that the (best) student keeps, and how small it is."""
    run = facts.run
    scores = {name: facts.best_val(name) for name in run.students}
    known = {name: score for name, score in scores.items() if score is not None}
    if not known:
        return None
    name = (min if less_is_better(run.primary) else max)(known, key=lambda student: known[student])
    who, score = f"The student {name}" if name else "The student", known[name]
    teacher = run.summary.get("teacher") or {}
    reached, metric = (teacher.get("val") or {}).get(run.primary), run.primary
    if not reached:
        return {
            "kind": "headline",
            "text": f"{who} reaches {metric} {format_metric(metric, score)}",
        }
    own, whole = format_metric(metric, score), format_metric(metric, reached)
    text = f"{who} keeps {ratio(score, reached):.1%} of its teacher's {metric} ({own} of {whole})"
    if not is_share(metric):
        text = f"{who} has {metric} {own}, its teacher {whole}"
    if score != reached and (score < reached) == less_is_better(metric):
        text = f"{who} is better than its teacher: {metric} {own} against {whole}"
    small, large = run.model_of(name).get("params"), teacher.get("params")
    if small and large:
        times = f"{ratio(small, large):.2g} of" if small < large else f"{ratio(small, large):.1f}x"
        text += f" with {times} its parameters"
    return {"kind": "headline", "text": text}


def _sizes(run: RunRecords) -> Section | None:
    models = {"teacher": run.summary.get("teacher") or {}}
    models |= {name or "student": run.model_of(name) for name in run.students}
    known = {name: model for name, model in models.items() if model.get("params")}
    if not known:
        return None
    settings = list(dict.fromkeys((r["runtime"], r["threads"], r["batch"]) for r in run.latency))[
        :6
    ]
    timed = {
        (r["model"], r["runtime"], r["threads"], r["batch"]): r["median_ms"] for r in run.latency
    }
    rows = [
        ["model", *(model.get("arch", "") for model in known.values())],
        ["parameters (M)", *(f"{model['params'] / 1e6:.3g}" for model in known.values())],
    ]
    for kind, threads, batch in settings:
        what = f"ms, {kind}, batch {batch}, {threads} thread{'s' * (threads > 1)}"
        rows.append([what, *(timed.get((name, kind, threads, batch), "") for name in known)])
    note = "" if settings else "kd-latency RUN measures milliseconds."
    return table("Size and latency", ["", *known], rows, note=note)


def _of(student: str) -> str:
    return f" of {student}" if student else ""


def _hardest(run: RunRecords, student: str, newest: dict[str, Any]) -> Section:
    found = [
        (right, name, n)
        for right, name, n in zip(newest["right"], run.classes, newest["counts"], strict=False)
        if right is not None
    ]
    rows = [[name, f"{100 * right:.1f}", n] for right, name, n in sorted(found)[:HARDEST]]
    title = f"Hardest classes{_of(student)} (epoch {newest['epoch'] + 1})"
    return table(title, ["class", "right (%)", "pictures"], rows)


def _mistakes(run: RunRecords, student: str, newest: dict[str, Any]) -> Section:
    counts, names = newest["counts"], run.classes
    rows = [
        [f"{names[true]} \u2192 {names[given]}", n, f"{100 * ratio(n, counts[true]):.1f}"]
        for true, given, n in newest["pairs"][:HARDEST]
    ]
    title = f"Mistakes{_of(student)} (epoch {newest['epoch'] + 1})"
    columns = ["class \u2192 taken for", "times", "% of the class"]
    return table(title, columns, rows, empty="None: every validation picture is right.")
