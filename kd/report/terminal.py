"""What the terminal shows: a run's end, and the tables of ``kd-eval``."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kd.report.metric import duration, format_metric, in_tables, lost_classes


def print_features(results: list[dict[str, Any]]) -> None:
    """Prints k-NN, ridge probe and RankMe of models without a classifier.

    Args:
        results: the content of ``eval_*.json``, one for each model.
    """
    _print_models(results[0], _feature_rows(results, _short([result["run"] for result in results])))
    if "probe" not in results[0]:
        print(
            "k-NN and ridge probe need labelled pictures: data.probe.root=DIR (DIR/train/<class>, DIR/val/<class>)"
        )


def print_evaluation(result: dict[str, Any]) -> None:
    """Prints the metrics of student and teacher, their fidelity, and the accuracy on damaged pictures.

    Args:
        result: the content of ``eval_*.json``.
    """
    _print_models(
        result, [(name, result[name]) for name in ("teacher", "student") if name in result]
    )
    for line in _faithful(result.get("fidelity")):
        print(line)
    if "robust" in result:
        _print_robust(result["robust"])


def print_side_by_side(results: list[dict[str, Any]], pairs: list[tuple[int, int]]) -> None:
    """Each model, each teacher once, and the differences to the first in points."""
    first, names = results[0], _short([result["run"] for result in results])
    models: list[tuple[str, Any]] = []
    for name, result in zip(names, results, strict=True):
        if "teacher" in result and result["teacher"] not in [teacher for _, teacher in models]:
            models.append((f"teacher of {name}", result["teacher"]))
    models += [(name, result["student"]) for name, result in zip(names, results, strict=True)]
    gaps = [
        [f"{name} - {names[0]}, points", *_gaps(first["student"], result["student"], _shown(first))]
        for name, result in zip(names[1:], results[1:], strict=True)
    ]
    _print_models(first, models, gaps)
    for name, pair in zip(names[1:], pairs, strict=False):
        print(_paired(names[0], name, pair, first["pictures"]))
    for name, result in zip(names, results, strict=True):
        for line in _faithful(result.get("fidelity")):
            print(f"{name}: {line}")
        if "robust" in result:
            _print_robust(result["robust"], f"{name}: ")


def _paired(first: str, other: str, pair: tuple[int, int], pictures: int) -> str:
    """How sure the difference is.

    >>> _paired("a", "b", (2, 6), 100)
    'a alone is right on 2 of 100 pictures, b alone on 6: +4.0 ± 2.8 points (standard error, paired by picture)'
    """
    mine, others = pair
    gap = (others - mine) / pictures
    error = (((mine + others) / pictures - gap**2) / pictures) ** 0.5
    text = f"{first} alone is right on {mine} of {pictures} pictures, {other} alone on {others}: {100 * gap:+.1f}"
    return f"{text} ± {100 * error:.1f} points (standard error, paired by picture)"


def _short(names: list[str]) -> list[str]:
    """Names without the folders that all of them share."""
    parts = [Path(name).parts for name in names]
    while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    return [str(Path(*part)) for part in parts]


def _gaps(first: dict[str, float], other: dict[str, float], shown: Sequence[str]) -> list[str]:
    share = f"x {other['params'] / first['params']:.2f}"
    return [
        share,
        *(
            f"{100 * (other[k] - first[k]):+.1f}" if k in first and k in other else ""
            for k in shown
        ),
    ]


def _shown(result: dict[str, Any]) -> list[str]:
    return [name for name in result["student"] if name != "params" and not name.startswith("iou_")]


def _print_models(
    result: dict[str, Any],
    models: Iterable[tuple[str, dict[str, float]]],
    more: Sequence[list[str]] = (),
) -> None:
    shown = _shown(result)
    rows = [
        [name, f"{model['params'] / 1e6:.2f} M", *_figures(model, shown)] for name, model in models
    ]
    title = f"{result['pictures']} pictures: {result['data']}"
    print_table(title, ["", "parameters", *shown], [*rows, *more], left=("",))


def _figures(row: dict[str, float], shown: Sequence[str]) -> list[str]:
    return [format_metric(k, row.get(k)) for k in shown]


def print_table(
    title: str | None,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[str],
    width: int = 120,
) -> None:
    """Prints a table whose columns ``left`` hold text; ``width`` is that of a file."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else width).print(table)


def _faithful(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    if found["kind"] == "numbers":
        of_both = [target for target in found["targets"] if "correlation" in target]
        return [
            f"{target['name']}: student and teacher differ by {target['difference']:.4g} on average, correlation "
            f"{target['correlation']:.3f}"
            for target in of_both
        ]
    lines: list[str] = []
    if "agreement" in found:
        shares = found["outcomes"]
        lines = [
            f"agrees with the teacher: {found['agreement']:.1%}; mean KL divergence {found['kl']:.3f} nats",
            f"both right {shares['both_right']:.1%}, both wrong {shares['both_wrong']:.1%}, "
            f"only the teacher right {shares['only_teacher']:.1%}, only the student {shares['only_student']:.1%}",
        ]
    lines += [
        "expected calibration error: "
        + ", ".join(f"{name} {v:.3f}" for name, v in found["ece"].items())
    ]
    lost = [
        f"{r['name']} {r['teacher']:.0%} -> {r['student']:.0%}"
        for r in lost_classes(found["per_class"])[:5]
    ]
    return lines + (
        [f"classes that lost most ({found['score']}): " + ", ".join(lost)] if lost else []
    )


def _print_robust(found: dict[str, dict[str, list[float]]], whose: str = "") -> None:
    rows = [
        [damage, model, *(f"{value:.1%}" for value in values)]
        for damage, models in found.items()
        for model, values in models.items()
    ]
    print_table(
        f"{whose}on damaged pictures, by strength", ("", "", "1", "2", "3"), rows, left=("",)
    )


def _feature_rows(
    results: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[tuple[str, dict[str, float]]]:
    several, teachers = len(results) > 1, list[tuple[str, dict[str, float]]]()
    for name, result in zip(names, results, strict=True):
        own = [(key, value) for key, value in result.items() if key.startswith("teacher")]
        known = [value for _, value in teachers]
        teachers += [
            (f"{key} of {name}" if several else key, value)
            for key, value in own
            if value not in known
        ]
    students = [
        (name if several else "student", r["student"])
        for name, r in zip(names, results, strict=True)
    ]
    return teachers + students


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    """Prints a table of ``summary.json``, its findings, and where the run is."""
    shown = [name for name in summary["student"]["val"] if in_tables(name)]
    teacher = summary["teacher"]
    rows: list[tuple[str, Any, Any]] = [("teacher", teacher, teacher["val"])] if teacher else []
    for name, student in (summary.get("students") or {"student": summary["student"]}).items():
        best = student["best_val"]
        rows += [(f"{name}, last epoch", student, student["val"])]
        rows += [(f"{name}, best epoch ({best['epoch']})", student, best)] if best else []
    columns = [
        "",
        "model",
        "parameters",
        *(name if name in ("agreement", "kl") else f"val {name}" for name in shown),
    ]
    cells = [
        [name, m["arch"], f"{m['params'] / 1e6:.2f} M", *_figures(val, shown)]
        for name, m, val in rows
    ]
    title = f"{summary['recipe']}: {summary['epochs']} epochs in {duration(summary['wall_s'])}"
    print_table(title, columns, cells, left=("", "model"))
    speed = f"{summary['images_per_s']:,.0f} images/s, " if summary["images_per_s"] else ""
    print(
        f"{speed}{summary['device']}, {summary['precision']}, {summary['world_size']} process(es)"
    )
    for finding in summary.get("findings", []):
        print(f"{finding['rule']}: {finding['text']}; {finding['lever']}")
    if "verdict" in summary:
        print(f"{summary['verdict']['text']} (report.html)")
    where = (
        "students/NAME/student.safetensors" if summary.get("students") else "student.safetensors"
    )
    which = "best" if summary["student"]["best_val"] else "last"
    held = (
        f"{where} holds the {which} epoch"
        if summary["steps"]
        else "nothing was trained, no student is exported"
    )
    print(f"run folder: {folder} ({held})", flush=True)
