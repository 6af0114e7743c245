"""What a run's page opens with: what the student has learnt, how large and fast it is, what it gets wrong."""

from typing import Any

from kd.report.charts import metric_lines, metrics_by_epoch
from kd.report.facts import Facts
from kd.report.metric import PROBE, format_metric, is_share, less_is_better
from kd.report.records import Run

HARDEST = 10  # classes, and mistakes, that are shown


def learning(facts: Facts) -> list[dict[str, Any] | None]:
    """The sections, by student where there are several."""
    run = facts.run
    return [
        *(section for student in run.students for section in feature_lines(run, student)),
        *metric_lines(run),
        _sizes(run),
        *(_hardest(run, student) for student in run.students),
        *(_mistakes(run, student) for student in run.students),
    ]


def feature_lines(run: Run, student: str) -> list[dict[str, Any]]:
    """k-NN and ridge probe of a student's features over the epochs, beside the teachers'; and their effective rank."""
    place, of = (f"{student}/", f" of {student}") if student else ("", "")
    epochs, rank = metrics_by_epoch(run, [f"{place}val/rankme"])
    if not rank:
        return []
    ranks = {"kind": "lines", "title": f"Directions that the features use{of} (RankMe)", "x": epochs,
             "x_name": "epoch", "series": {f"{student or 'student'} rankme": rank[f"{place}val/rankme"]}}  # fmt: skip
    epochs, own = metrics_by_epoch(run, [f"{place}val/{metric}" for metric in PROBE])
    if not own:
        return [ranks]
    teacher = run.summary.get("teacher") or {}
    whole = {"teacher": teacher.get("val") or {}}
    members = {f"teacher {name}": model.get("val") or {} for name, model in (teacher.get("members") or {}).items()}
    series = {f"{who} {metric}": [values[metric]] * len(epochs)
              for who, values in (members or whole).items() for metric in PROBE if metric in values}  # fmt: skip
    series |= {f"{student or 'student'} {name.rpartition('/')[2]}": values for name, values in own.items()}
    title = f"Accuracy of the features{of}, without training on labels"
    return [{"kind": "lines", "title": title, "x": epochs, "x_name": "epoch", "series": series}, ranks]


def headline(facts: Facts) -> dict[str, Any] | None:
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
        return {"kind": "headline", "text": f"{who} reaches {metric} {format_metric(metric, score)}"}
    own, whole = format_metric(metric, score), format_metric(metric, reached)
    text = f"{who} keeps {score / reached:.1%} of its teacher's {metric} ({own} of {whole})"
    if not is_share(metric):
        text = f"{who} has {metric} {own}, its teacher {whole}"
    if score != reached and (score < reached) == less_is_better(metric):
        text = f"{who} is better than its teacher: {metric} {own} against {whole}"
    small, large = run.model_of(name).get("params"), teacher.get("params")
    if small and large:
        times = f"{small / large:.2g} of" if small < large else f"{small / large:.1f}x"
        text += f" with {times} its parameters"
    return {"kind": "headline", "text": text}


def _sizes(run: Run) -> dict[str, Any] | None:
    models = {"teacher": run.summary.get("teacher") or {}}
    models |= {name or "student": run.model_of(name) for name in run.students}
    known = {name: model for name, model in models.items() if model.get("params")}
    if not known:
        return None
    settings = list(dict.fromkeys((r["runtime"], r["threads"], r["batch"]) for r in run.latency))[:6]
    timed = {(r["model"], r["runtime"], r["threads"], r["batch"]): r["median_ms"] for r in run.latency}
    rows = [["model", *(model.get("arch", "") for model in known.values())],
            ["parameters (M)", *(f"{model['params'] / 1e6:.3g}" for model in known.values())]]  # fmt: skip
    for kind, threads, batch in settings:
        what = f"ms, {kind}, batch {batch}, {threads} thread{'s' * (threads > 1)}"
        rows.append([what, *(timed.get((name, kind, threads, batch), "") for name in known)])
    note = "" if settings else "kd-latency RUN measures milliseconds."
    return {"kind": "table", "title": "Size and latency", "columns": ["", *known], "rows": rows, "note": note}


def _of(student: str) -> str:
    return f" of {student}" if student else ""


def _hardest(run: Run, student: str) -> dict[str, Any] | None:
    newest = run.confusion_of(student)
    if newest is None or not run.classes:
        return None
    found = [(right, name, n) for right, name, n in zip(newest["right"], run.classes, newest["counts"], strict=False)
             if right is not None]  # fmt: skip
    rows = [[name, f"{100 * right:.1f}", n] for right, name, n in sorted(found)[:HARDEST]]
    return {"kind": "table", "title": f"Hardest classes{_of(student)} (epoch {newest['epoch'] + 1})",
            "columns": ["class", "right (%)", "pictures"], "rows": rows}  # fmt: skip


def _mistakes(run: Run, student: str) -> dict[str, Any] | None:
    newest = run.confusion_of(student)
    if newest is None or not run.classes:
        return None
    counts, names = newest["counts"], run.classes
    rows = [[f"{names[true]} \u2192 {names[given]}", n, f"{100 * n / counts[true]:.1f}"]
            for true, given, n in newest["pairs"][:HARDEST]]  # fmt: skip
    return {"kind": "table", "title": f"Mistakes{_of(student)} (epoch {newest['epoch'] + 1})",
            "columns": ["class \u2192 taken for", "times", "% of the class"], "rows": rows,
            "empty": "None: every validation picture is right."}  # fmt: skip
