"""A model card from a run's folder: Markdown with the metadata that the Hugging Face hub reads."""

import yaml

from kd.report.evaluated import fidelity_parts, in_millions
from kd.report.metric import format_metric, is_share
from kd.report.records import RunRecords
from kd.report.tables import results_of
from kd.report.templates import Raw, markdown, rendered
from kd.storage.elsewhere import Json
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
FEATURES = "image-feature-extraction"  # the hub's name of what a student without a classifier does


def card(
    run: RunRecords,
    license_name: str | None = None,
    teacher_license: str | None = None,
    data_license: str | None = None,
) -> str:
    """The model card of a finished run, Markdown with the hub's metadata.

    Args:
        run: read from its folder; its ``notes`` get a sentence for each file of results that is left out.
        license_name: of the weights, as the hub names it (``apache-2.0``); left out where it is not known.
        teacher_license: likewise, of the teacher.
        data_license: likewise, of the pictures.
    """
    summary = run.summary
    fidelity = run.fidelity
    best = run.student.get("best_val") or run.student.get("val") or {}
    results = results_of(run.folder, run.notes.append)
    task = _pipeline(run)
    name = f"{summary.get('recipe', run.folder.name)} {run.student.get('arch', 'student')}"
    source = str((summary.get("data") or {}).get("source", "own pictures"))
    return rendered(
        "card.md.j2",
        in_markdown,
        front=Raw(_front(name, task, best, source, license_name)),
        name=name,
        task=task,
        summary=summary,
        config=run.config,
        best=best,
        taught=(summary.get("teacher") or {}).get("val") or {},
        metrics=METRICS,
        shown=format_metric,
        millions=in_millions,
        classes=fidelity.get("per_class") or [],
        of_pictures=fidelity.get("kind") == "classification",
        fidelity=Raw(markdown(fidelity_parts(fidelity) if fidelity else [])),
        results=Raw("\n\n".join(markdown(parts) for parts in results.values())),
        licenses={
            "student": license_name,
            "teacher": teacher_license,
            "training pictures": data_license,
        },
    )


def _pipeline(run: RunRecords) -> str:
    """The hub's name of what the student does, its ``pipeline_tag``.

    :data:`FEATURES` without a classifier; else ``image-segmentation`` or ``image-regression``, by the task;
    ``image-classification`` of any other task.
    """
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
        best: the student's metrics by name, shares in [0, 1]; those that are not in :data:`METRICS` are left out.
        source: of the data.
        license_name: as the hub spells it; None: not given.
    """
    metrics = []
    for key in (key for key in best if key in METRICS):
        shown = round(100 * best[key], 2) if is_share(key) else best[key]
        kind = METRICS[key].replace(" ", "-")
        metrics.append({"type": kind, "name": METRICS[key], "value": shown})
    content: Json = {
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
