"""A model card from a run's folder: Markdown with the metadata that the Hugging Face hub reads."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment

from kd.report.certified import certificates_of
from kd.report.metric import format_metric, is_share, lost_classes
from kd.report.records import RunRecords
from kd.storage.elsewhere import mapping_of
from kd.storage.of_weights import LATENCY, exports, read_of_weights
from kd.storage.shown import in_markdown

METRICS = {
    "acc1": "accuracy",
    "acc5": "top-5 accuracy",
    "miou": "mean IoU",
    "miou_of_targets": "mean IoU over the classes of the targets",
    "map": "mean average precision",
    "f1": "F1",
    "knn1": "k-NN accuracy",
    "probe1": "ridge-probe accuracy",
    "r2": "R2",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
}
TEMPLATE = Path(__file__).parent / "card.md.j2"
LOST = 10  # classes in the list of those that lost most
RARE = 10  # a class with fewer validation pictures
FEATURES = "image-feature-extraction"  # the hub's name of what a student without a classifier does


def card(
    run: RunRecords,
    license_name: str | None = None,
    teacher_license: str | None = None,
    data_license: str | None = None,
) -> str:
    """The model card of a finished run, Markdown with the hub's metadata.

    Args:
        run: read from its folder.
        license_name: of the weights, as the hub names it (``apache-2.0``); left out where it is not known.
        teacher_license: likewise, of the teacher.
        data_license: likewise, of the pictures.
    """
    summary = run.summary
    student = summary.get("student") or {}
    data = summary.get("data") or {}
    best = student.get("best_val") or student.get("val") or {}
    fidelity = mapping_of(run.folder / "fidelity.json")
    latency = read_of_weights(run.folder, LATENCY, run.notes.append)
    task = _pipeline(run)
    features = task == FEATURES
    name = f"{summary.get('recipe', run.folder.name)} {student.get('arch', 'student')}"
    source = str(data.get("source", "own pictures"))
    classes = fidelity.get("per_class") or []
    rare = 0  # classes with too few pictures for a number of their own
    if fidelity.get("kind") == "classification":
        rare = sum(row["count"] < RARE for row in classes)
    unseen = 0
    if classes:
        unseen = data.get("classes", len(classes)) - len(classes)
    licenses = {
        "student": license_name,
        "teacher": teacher_license,
        "training pictures": data_license,
    }
    environment = Environment(keep_trailing_newline=True, finalize=_plain)
    environment.filters["percent"] = "{:.1%}".format
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        front=Raw(_front(name, task, best, source, license_name)),
        table=_table,
        name=name,
        task=task,
        student=student,
        teacher=summary.get("teacher"),
        data=data,
        features=features,
        making=_making(run),
        goodness=_goodness(best, (summary.get("teacher") or {}).get("val") or {}, fidelity),
        fidelity=fidelity,
        classes=[_class_row(row) for row in classes],
        latency=latency,
        speed=[_speed_row(row) for row in latency.get("rows") or []],
        exports=_exports(exports(run.folder, run.notes.append)),
        lost=lost_classes(classes)[:LOST],
        unseen=unseen,
        licenses=[(what, text or "not stated") for what, text in licenses.items()],
        few=rare,
        certificates=[line for _, lines in certificates_of(run) for line in lines],
    )


def _pipeline(run: RunRecords) -> str:
    """The hub's name of what the student does, its ``pipeline_tag``."""
    model = run.config.get("model") or {}
    if not (model.get("student") or {}).get("head", True):
        return FEATURES
    class_path = str((model.get("task") or {}).get("class_path", ""))
    kind = class_path.rpartition(".")[2].lower()
    if kind in ("segmentation", "regression"):
        return f"image-{kind}"
    return "image-classification"


def _front(
    name: str, task: str, best: dict[str, float], source: str, license_name: str | None
) -> str:
    """The card's metadata as YAML, which the hub reads: library, task, license and metrics.

    Args:
        name: of the model.
        task: the hub's, :func:`_pipeline`.
        best: the student's metrics, shares in [0, 1].
        source: of the data.
        license_name: as the hub spells it; None: not given.
    """
    metrics = []
    for key, value in best.items():
        if key in METRICS:
            shown = value
            if is_share(key):
                shown = round(100 * value, 2)
            kind = METRICS[key].replace(" ", "-")
            metrics.append({"type": kind, "name": METRICS[key], "value": shown})
    content: dict[str, Any] = {
        "library_name": "timm",
        "pipeline_tag": task,
        "tags": ["knowledge-distillation", task],
    }
    if license_name:
        content["license"] = license_name
    if metrics:
        data = {"name": source.split("/")[-1], "type": "image-folder"}
        result = {"task": {"type": task}, "dataset": data, "metrics": metrics}
        content["model-index"] = [{"name": name, "results": [result]}]
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _making(run: RunRecords) -> list[tuple[str, Any]]:
    """How the student was trained: rows of what and value."""
    model = run.config.get("model") or {}
    data = run.summary.get("data") or {}
    summary = run.summary
    counts = f"{data.get('train', '?')} training and {data.get('val', '?')} validation pictures"
    rows: list[tuple[str, Any]] = [("data", counts)]
    if data.get("unlabeled"):
        rows.append(("without labels", f"{data['unlabeled']} of them"))
    rows.append(("loss on the labels", f"weight {model.get('task_loss_weight', 1)}"))
    losses = model.get("distill_losses") or {}
    for name, loss in losses.items():
        rows.append((f"loss {name}", _loss_in_words(loss)))
    student = summary.get("student") or {}
    if student.get("start") == "inherited":
        rows.append(("start", "from the teacher's layers, cut down to size"))
    size = (run.config.get("data") or {}).get("img_size", "?")
    return [
        *rows,
        ("epochs", summary.get("epochs", "?")),
        ("input", f"{size} pixels"),
        ("precision", summary.get("precision", "?")),
        ("seed", summary.get("seed", "?")),
        ("made with", f"kd {summary.get('kd_version', '?')}"),
    ]


def _loss_in_words(loss: dict[str, Any]) -> str:
    """A loss with its settings, from the run's config: ``KDLoss (temperature 2.0)``."""
    path = str(loss.get("class_path", ""))
    _, _, kind = path.rpartition(".")
    arguments = loss.get("init_args") or {}
    words = []
    for key, value in arguments.items():
        if value is not None:
            words.append(f"{key} {value}")
    settings = ", ".join(words)
    return f"{kind} ({settings})"


def _goodness(
    best: dict[str, float], teacher: dict[str, float], fidelity: dict[str, Any]
) -> list[tuple[str, ...]]:
    """The rows of the card's table: each metric of teacher and student, and their calibration error.

    Args:
        best: the student's metrics, by name.
        teacher: the teacher's.
        fidelity: the content of ``fidelity.json``.
    """
    rows: list[tuple[str, ...]] = []
    for key, title in METRICS.items():
        if key in best or key in teacher:
            of_teacher = format_metric(key, teacher.get(key))
            of_student = format_metric(key, best.get(key))
            rows.append((title, of_teacher, of_student))
    errors: dict[str, float | None] = fidelity.get("ece", {})
    if errors:
        shown = []
        for model in ("teacher", "student"):
            error = errors.get(model)
            text = "" if error is None else f"{error:.3f}"
            shown.append(text)
        rows.append(("expected calibration error", *shown))
    return rows


def _class_row(row: dict[str, Any]) -> tuple[Any, ...]:
    """A class of ``fidelity.json`` for the card: name, pictures, score of teacher ("" without one) and student."""
    return row["name"], row["count"], _percent(row.get("teacher")), _percent(row["student"])


def _speed_row(row: dict[str, Any]) -> tuple[Any, ...]:
    """A row of ``latency.json`` for the card; times in ms of one batch."""
    return (
        row["model"],
        row["runtime"],
        row["threads"],
        row["batch"],
        f"{row['median_ms']:.2f}",
        f"{row['p95_ms']:.2f}",
        f"{row['images_per_s']:.0f}",
        row.get("times_the_teacher", ""),
    )


def _exports(kept: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each export: name, MB, the share of answers that are the student's, its own main metric, and
    the largest difference of an output.
    """
    rows: list[tuple[str, ...]] = []
    for name, export in kept.items():
        size = f"{export['size_mb']:.1f}"
        agreement = f"{export['agreement']:.2%}"
        metric = format_metric(export.get("metric", "acc1"), export.get("export"))
        difference = f"{export['max_difference']:.2g}"
        rows.append((name, size, agreement, metric, difference))
    return rows


class Raw(str):
    """Text that is put into the card as it is."""


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Raw:
    """A table in Markdown with a head of ``columns`` and a line for each of ``rows``, its cells escaped."""
    rule = ["---"] * len(columns)
    lines = []
    for row in (columns, rule, *rows):
        cells = [str(_plain(cell)) for cell in row]
        line = " | ".join(cells)
        lines.append(f"| {line} |")
    return Raw("\n".join(lines))


def _plain(value: object) -> object:
    """A value for Markdown: escaped, so that no name opens markup, ends a cell or begins a line; :class:`Raw` as it is.

    Jinja calls it for each value that the template prints.
    """
    if isinstance(value, Raw):
        return value
    return in_markdown(str(value))


def _percent(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1%}"
