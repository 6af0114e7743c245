"""A model card from a run's folder: Markdown with the metadata that the Hugging Face hub reads."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from kd.report.records import Run
from kd.storage.elsewhere import json_of, text_of

TASKS = {"segmentation": "image-segmentation", "features": "image-feature-extraction"}
METRICS = {
    "acc1": "accuracy",
    "acc5": "top-5 accuracy",
    "miou": "mean IoU",
    "miou_of_targets": "mean IoU over the classes of the targets",
    "map": "mean average precision",
    "f1": "F1",
    "knn1": "k-NN accuracy",
    "probe1": "ridge-probe accuracy",
}
LOST = 10  # classes in the list of those that lost most


def card(run: Run, license_name: str | None = None) -> str:
    """The card of a finished run.

    Args:
        run: read from its folder.
        license_name: of the weights, as the hub names it (``apache-2.0``); left out where it is not known.
    """
    fidelity = _read(run.folder / "fidelity.json")
    sections = [
        _front(run, license_name),
        f"# {_plain(_name(run))}\n\n{_opening(run)}",
        _loading(run),
        _making(run),
        _goodness(run, fidelity),
        _classes(fidelity),
        _speed(_read(run.folder / "export" / "latency.json")),
        _exports(_read(run.folder / "export" / "export.json")),
        _limits(run, fidelity),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json_of(text_of(file))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _name(run: Run) -> str:
    return f"{run.summary.get('recipe', run.folder.name)} {_student(run).get('arch', 'student')}"


def _student(run: Run) -> dict[str, Any]:
    return run.summary.get("student") or {}


def _best(run: Run) -> dict[str, float]:
    student = _student(run)
    return student.get("best_val") or student.get("val") or {}


def _front(run: Run, license_name: str | None) -> str:
    task = _task(run)
    metrics = [
        {"type": METRICS[key].replace(" ", "-"), "name": METRICS[key], "value": round(100 * value, 2)}
        for key, value in _best(run).items()
        if key in METRICS
    ]
    source = str((run.summary.get("data") or {}).get("source", "own pictures")).split("/")
    data = {"name": source[-1], "type": "image-folder"}
    content: dict[str, Any] = {"library_name": "timm", "pipeline_tag": task, "tags": ["knowledge-distillation", task]}
    if license_name:
        content["license"] = license_name
    if metrics:
        result = {"task": {"type": task}, "dataset": data, "metrics": metrics}
        content["model-index"] = [{"name": _name(run), "results": [result]}]
    return f"---\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True)}---"


def _is_features(run: Run) -> bool:
    return not ((run.config.get("model") or {}).get("student") or {}).get("head", True)


def _task(run: Run) -> str:
    if _is_features(run):
        return "image-feature-extraction"
    path = str(((run.config.get("model") or {}).get("task") or {}).get("class_path", ""))
    return "image-segmentation" if "Segmentation" in path else "image-classification"


def _opening(run: Run) -> str:
    teacher, student = run.summary.get("teacher"), _student(run)
    data = run.summary.get("data") or {}
    size = f"{student['params'] / 1e6:.2f} M parameters" if "params" in student else ""
    taught = f", distilled from {_plain(teacher['arch'])} ({teacher['params'] / 1e6:.2f} M)" if teacher else ""
    known = f" It tells {_plain(data['classes'])} classes apart." if data.get("classes") else ""
    known = " It gives features, without a classifier." if _is_features(run) else known
    return f"{_plain(student.get('arch', 'A student'))}, {size}{taught}.{known}"


def _loading(run: Run) -> str:
    if _task(run) == "image-segmentation":
        return (
            "## How to load\n\n```python\nfrom kd.ship.export import load_student\n\n"
            'model, prepare, classes = load_student("student.safetensors")\n'
            "masks = model(prepare(pictures)).argmax(1)  # uint8 (N, 3, H, W)\n```"
        )
    return (
        "## How to load\n\n```python\nimport timm\n\n"
        'model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()\n'
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n```\n\n"
        "FOLDER holds `config.json` and `model.safetensors` (`student/` of the run, or `kd-export RUN to=hub`)."
    )


def _making(run: Run) -> str:
    model, data, summary = run.config.get("model") or {}, run.summary.get("data") or {}, run.summary
    rows = [("data", f"{data.get('train', '?')} training and {data.get('val', '?')} validation pictures")]
    if data.get("unlabeled"):
        rows.append(("without labels", f"{data['unlabeled']} of them"))
    rows.append(("loss on the labels", f"weight {model.get('task_loss_weight', 1)}"))
    for name, loss in (model.get("distill_losses") or {}).items():
        arguments = ", ".join(f"{k} {v}" for k, v in (loss.get("init_args") or {}).items() if v is not None)
        rows.append((f"loss {name}", f"{str(loss.get('class_path', '')).rpartition('.')[2]} ({arguments})"))
    if (model.get("student") or {}).get("inherit"):
        rows.append(("start", "from the teacher's layers, cut down to size"))
    rows += [
        ("epochs", str(summary.get("epochs", "?"))),
        ("input", f"{(run.config.get('data') or {}).get('img_size', '?')} pixels"),
        ("precision", str(summary.get("precision", "?"))),
        ("seed", str(summary.get("seed", "?"))),
        ("made with", f"kd {summary.get('kd_version', '?')}"),
    ]
    return "## How it was made\n\n" + _table(["", ""], rows)


def _goodness(run: Run, fidelity: dict[str, Any]) -> str:
    best, teacher = _best(run), ((run.summary.get("teacher") or {}).get("val")) or {}
    rows = [
        (METRICS[key], _percent(teacher.get(key)), _percent(best.get(key)))
        for key in METRICS
        if key in (best | teacher)
    ]
    if "ece" in fidelity:
        errors = fidelity["ece"]
        rows.append(("expected calibration error", _round(errors.get("teacher")), _round(errors.get("student"))))
    text = "## How good it is\n\nOn the validation pictures.\n\n" + _table(["", "teacher", "student"], rows)
    if "agreement" not in fidelity:
        return text
    shares = fidelity["outcomes"]
    return text + (
        f"\n\nThe student gives the teacher's answer for {fidelity['agreement']:.1%}; mean KL divergence "
        f"{fidelity['kl']:.3f} nats. Both are right for {shares['both_right']:.1%}, only the teacher for "
        f"{shares['only_teacher']:.1%}, only the student for {shares['only_student']:.1%}, neither for "
        f"{shares['both_wrong']:.1%}."
    )


def _classes(fidelity: dict[str, Any]) -> str:
    rows = fidelity.get("per_class") or []
    if not rows:
        return ""
    each = [(r["name"], str(r["count"]), _percent(r.get("teacher")), _percent(r["student"])) for r in rows]
    return (
        f"## Class by class\n\n<details><summary>{_plain(fidelity['score'])} of {len(rows)} classes</summary>\n\n"
        + _table(["class", "pixels" if fidelity["kind"] == "segmentation" else "pictures", "teacher", "student"], each)
        + "\n\n</details>"
    )


def _speed(latency: dict[str, Any]) -> str:
    rows = [
        (
            r["model"], r["runtime"], str(r["threads"]), str(r["batch"]), f"{r['median_ms']:.2f}", f"{r['p95_ms']:.2f}",
            f"{r['images_per_s']:.0f}", str(r.get("times_the_teacher", "")),
        )
        for r in latency.get("rows") or []
    ]  # fmt: skip
    columns = ["", "runtime", "threads", "batch", "median ms", "p95 ms", "images/s", "times the teacher's speed"]
    return f"## How fast it is\n\nOn {_plain(latency['machine'])}.\n\n{_table(columns, rows)}" if rows else ""


def _exports(exports: dict[str, Any]) -> str:
    rows = [
        (name, f"{e['size_mb']:.1f}", f"{e['agreement']:.2%}", _percent(e.get("export")), f"{e['max_difference']:.2g}")
        for name, e in exports.items()
        if e.get("kept")
    ]
    columns = ["export", "MB", "agreement with the student", "main metric", "largest difference"]
    return f"## Exports\n\n{_table(columns, rows)}" if rows else ""


def _limits(run: Run, fidelity: dict[str, Any]) -> str:
    rows = fidelity.get("per_class") or []
    lines = []
    lost = sorted((r for r in rows if r.get("teacher", 0) > r["student"]), key=lambda r: r["student"] - r["teacher"])
    if lost:
        told = ", ".join(f"{_plain(r['name'])} ({r['teacher']:.0%} to {r['student']:.0%})" for r in lost[:LOST])
        lines.append(f"Classes that lost most against the teacher: {told}.")
    unseen = (run.summary.get("data") or {}).get("classes", len(rows)) - len(rows)
    if rows and unseen > 0:
        lines.append(f"{unseen} classes do not occur in the validation pictures: nothing is known of them.")
    few = sum(r["count"] < 10 for r in rows) if fidelity.get("kind") == "classification" else 0
    if few:
        lines.append(f"{few} classes have fewer than 10 validation pictures: their figures are rough.")
    if _is_features(run):
        lines.append("It was taught on pictures without labels; pictures unlike them were not tested.")
    else:
        lines.append(
            "It names one of its classes whatever a picture shows; pictures unlike the training data were not tested."
        )
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines)


def _plain(value: object) -> str:
    """No name opens markup, ends a cell or begins a line."""
    return " ".join(re.sub(r"([\\|<*_`\[\]#&])", r"\\\1", str(value)).split())


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _round(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
