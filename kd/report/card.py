"""A model card from a run's folder: Markdown with the metadata that the Hugging Face hub reads."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment

from kd.report.metric import format_metric, is_share, lost_classes
from kd.report.records import RunRecords
from kd.storage.elsewhere import mapping_of
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
    fidelity, latency = (
        mapping_of(run.folder / "fidelity.json"),
        mapping_of(run.folder / "export" / "latency.json"),
    )
    summary, student = run.summary, run.summary.get("student") or {}
    model, data = run.config.get("model") or {}, summary.get("data") or {}
    features = not (model.get("student") or {}).get("head", True)
    kind = str((model.get("task") or {}).get("class_path", "")).rpartition(".")[2].lower()
    answer = kind if kind in ("segmentation", "regression") else "classification"
    task = "image-feature-extraction" if features else f"image-{answer}"
    name = f"{summary.get('recipe', run.folder.name)} {student.get('arch', 'student')}"
    best = student.get("best_val") or student.get("val") or {}
    rows = fidelity.get("per_class") or []
    licenses = {
        "student": license_name,
        "teacher": teacher_license,
        "training pictures": data_license,
    }
    environment = Environment(keep_trailing_newline=True, finalize=_plain)
    environment.filters["percent"] = "{:.1%}".format
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        front=Raw(_front(name, task, best, str(data.get("source", "own pictures")), license_name)),
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
        classes=[
            (r["name"], r["count"], _percent(r.get("teacher")), _percent(r["student"]))
            for r in rows
        ],
        latency=latency,
        speed=_speed(latency),
        exports=_exports(mapping_of(run.folder / "export" / "export.json")),
        lost=lost_classes(rows)[:LOST],
        unseen=data.get("classes", len(rows)) - len(rows) if rows else 0,
        licenses=[(what, name or "not stated") for what, name in licenses.items()],
        few=sum(r["count"] < 10 for r in rows) if fidelity.get("kind") == "classification" else 0,
    )


def _front(
    name: str, task: str, best: dict[str, float], source: str, license_name: str | None
) -> str:
    metrics = [
        {
            "type": METRICS[key].replace(" ", "-"),
            "name": METRICS[key],
            "value": round(100 * value, 2) if is_share(key) else value,
        }
        for key, value in best.items()
        if key in METRICS
    ]
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
    model, data, summary = run.config.get("model") or {}, run.summary.get("data") or {}, run.summary
    counts = f"{data.get('train', '?')} training and {data.get('val', '?')} validation pictures"
    rows: list[tuple[str, Any]] = [("data", counts)]
    if data.get("unlabeled"):
        rows.append(("without labels", f"{data['unlabeled']} of them"))
    rows.append(("loss on the labels", f"weight {model.get('task_loss_weight', 1)}"))
    for name, loss in (model.get("distill_losses") or {}).items():
        arguments = ", ".join(
            f"{k} {v}" for k, v in (loss.get("init_args") or {}).items() if v is not None
        )
        rows.append(
            (f"loss {name}", f"{str(loss.get('class_path', '')).rpartition('.')[2]} ({arguments})")
        )
    if (model.get("student") or {}).get("inherit"):
        rows.append(("start", "from the teacher's layers, cut down to size"))
    rows += [
        ("epochs", summary.get("epochs", "?")),
        ("input", f"{(run.config.get('data') or {}).get('img_size', '?')} pixels"),
        ("precision", summary.get("precision", "?")),
        ("seed", summary.get("seed", "?")),
        ("made with", f"kd {summary.get('kd_version', '?')}"),
    ]
    return rows


def _goodness(
    best: dict[str, float], teacher: dict[str, float], fidelity: dict[str, Any]
) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (METRICS[key], *(format_metric(key, of.get(key)) for of in (teacher, best)))
        for key in METRICS
        if key in (best | teacher)
    ]
    errors = fidelity.get("ece", {})
    shown = (
        "" if errors.get(who) is None else f"{errors[who]:.3f}" for who in ("teacher", "student")
    )
    return [*rows, ("expected calibration error", *shown)] if "ece" in fidelity else rows


def _speed(latency: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (
            r["model"],
            r["runtime"],
            r["threads"],
            r["batch"],
            f"{r['median_ms']:.2f}",
            f"{r['p95_ms']:.2f}",
            f"{r['images_per_s']:.0f}",
            r.get("times_the_teacher", ""),
        )
        for r in latency.get("rows") or []
    ]


def _exports(exports: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            f"{e['size_mb']:.1f}",
            f"{e['agreement']:.2%}",
            _percent(e.get("export")),
            f"{e['max_difference']:.2g}",
        )
        for name, e in exports.items()
        if e.get("kept")
    ]


class Raw(str):
    """Text that is put into the card as it is."""


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Raw:
    lines = [columns, ["---"] * len(columns), *rows]
    return Raw("\n".join(f"| {' | '.join(str(_plain(cell)) for cell in line)} |" for line in lines))


def _plain(value: object) -> object:
    """No name opens markup, ends a cell or begins a line."""
    if isinstance(value, Raw):
        return value
    return in_markdown(str(value))


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
