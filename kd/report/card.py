"""A model card from a run's folder: Markdown with the metadata that the Hugging Face hub reads."""

from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment

from kd.report.evaluated import fidelity_parts
from kd.report.metric import format_metric, is_share, lost_classes
from kd.report.records import RunRecords
from kd.report.tables import Table, markdown, results_of
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
    settings = run.config.get("data") or {}
    best = student.get("best_val") or student.get("val") or {}
    fidelity = run.fidelity
    results = results_of(run.folder, run.notes.append)
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
    licenses = [
        ["student", license_name or "not stated"],
        ["teacher", teacher_license or "not stated"],
        ["training pictures", data_license or "not stated"],
    ]
    environment = Environment(keep_trailing_newline=True, finalize=_plain)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        front=Raw(_front(name, task, best, source, license_name)),
        name=name,
        task=task,
        size=_size(settings.get("img_size")),
        crop_ratio=settings.get("crop_ratio", 0.875),
        student=student,
        teacher=summary.get("teacher"),
        data=data,
        features=features,
        making=Raw(markdown([Table("", ["", ""], _making(run))])),
        goodness=Raw(markdown([_goodness(best, (summary.get("teacher") or {}).get("val") or {})])),
        fidelity=Raw(markdown(fidelity_parts(fidelity) if fidelity else [])),
        results=Raw("\n\n".join(markdown(parts) for parts in results.values())),
        lost=lost_classes(classes)[:LOST],
        unseen=unseen,
        licenses=Raw(markdown([Table("", ["", "licence"], licenses)])),
        few=rare,
    )


def _size(side: int | list[int] | None) -> list[int]:
    """Height and width of a view by the setting ``data.img_size``, in pixels; [] where a run does not have it."""
    if isinstance(side, list):
        return side
    return [side, side] if side else []


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


def _making(run: RunRecords) -> list[list[str]]:
    """How the student was trained: rows of what and value."""
    model = run.config.get("model") or {}
    data = run.summary.get("data") or {}
    summary = run.summary
    counts = f"{data.get('train', '?')} training and {data.get('val', '?')} validation pictures"
    rows = [["data", counts]]
    if data.get("unlabeled"):
        rows.append(["without labels", f"{data['unlabeled']} of them"])
    rows.append(["loss on the labels", f"weight {model.get('task_loss_weight', 1)}"])
    for name, loss in (model.get("distill_losses") or {}).items():
        rows.append([f"loss {name}", _loss_in_words(loss)])
    if (summary.get("student") or {}).get("start") == "inherited":
        rows.append(["start", "from the teacher's layers, cut down to size"])
    size = (run.config.get("data") or {}).get("img_size", "?")
    return [
        *rows,
        ["epochs", f"{summary.get('epochs', '?')}"],
        ["input", f"{size} pixels"],
        ["precision", f"{summary.get('precision', '?')}"],
        ["seed", f"{summary.get('seed', '?')}"],
        ["made with", f"kd {summary.get('kd_version', '?')}"],
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


def _goodness(best: dict[str, float], teacher: dict[str, float]) -> Table:
    """Each metric of teacher and student."""
    rows = []
    for key, title in METRICS.items():
        of_teacher = teacher.get(key)
        of_student = best.get(key)
        if key in best or key in teacher:
            values = [format_metric(key, of_teacher), format_metric(key, of_student)]
            rows.append([title, *values])
    return Table("", ["", "teacher", "student"], rows)


class Raw(str):
    """Text that is put into the card as it is."""


def _plain(value: object) -> object:
    """A value for Markdown: escaped, so that no name opens markup, ends a cell or begins a line; :class:`Raw` as it is.

    Jinja calls it for each value that the template prints.
    """
    if isinstance(value, Raw):
        return value
    return in_markdown(str(value))
