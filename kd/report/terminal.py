"""What the terminal shows: a run's end, and the tables of ``kd-eval``."""

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from kd.report.metric import (
    counted,
    difference,
    duration,
    format_metric,
    in_tables,
    lost_classes,
)
from kd.report.pays import COLUMNS as COLUMNS_OF_PAYS
from kd.report.pays import pays_lines, pays_rows
from kd.report.proven_cascade import COLUMNS, curve_rows, threshold_lines
from kd.storage.shown import on_terminal

WIDTH_OF_A_FILE = 120
"""Columns of a table that is not printed to a terminal."""


def print_features(results: list[dict[str, Any]]) -> None:
    """Prints k-NN, ridge probe and RankMe of models without a classifier.

    Args:
        results: the content of ``eval_*.json``, one for each model.
    """
    names = without_common_folders([result["run"] for result in results])
    _print_models(results[0], _feature_rows(results, names))
    if "probe" not in results[0]:
        print(
            "k-NN and ridge probe need labelled pictures: data.probe.root=DIR (DIR/train/<class>, DIR/val/<class>)"
        )


def print_pays(result: dict[str, Any]) -> None:
    """Prints the accuracies of each start, and whether the distilled one pays.

    Args:
        result: the content of ``pays.json``.
    """
    part = result["probe"]
    print_table(None, COLUMNS_OF_PAYS, pays_rows(part), left=COLUMNS_OF_PAYS[:2])
    for line in pays_lines(part):
        print(line)


def print_evaluation(result: dict[str, Any]) -> None:
    """Prints the metrics of student and teacher, and what else was measured: fidelity, certificate, cascade, disputed
    labels, damaged pictures.

    Args:
        result: the content of ``eval_*.json``.
    """
    _print_models(
        result, [(name, result[name]) for name in ("teacher", "student") if name in result]
    )
    for line in _faithful(result.get("fidelity")):
        print(line)
    print_certificate(result.get("certificate"))
    print_cascade(result.get("cascade"))
    print_disputed(result.get("disputed"))
    if "robust" in result:
        _print_robust(result)


def print_side_by_side(results: list[dict[str, Any]], pairs: list[tuple[int, int]]) -> None:
    """Prints each model, each teacher once, and the differences to the first: of shares in points, else in their units.

    Args:
        results: of ``kd-eval``, one a run.
        pairs: of each run after the first: pictures on which the first alone is right, and on which it alone is; [] of
            tasks whose answers are not names of classes.
    """
    first = results[0]
    names = without_common_folders([result["run"] for result in results])

    named = list(zip(names, results, strict=True))
    first_name, *other_names = names

    # Each teacher once, then all students.
    teachers: list[Any] = []
    models: list[tuple[str, Any]] = []
    for name, result in named:
        teacher = result.get("teacher")
        if teacher is not None and teacher not in teachers:
            teachers.append(teacher)
            models.append((f"teacher of {name}", teacher))
    for name, result in named:
        models.append((name, result["student"]))

    # Below them each other student's difference to the first.
    shown = _shown(first)
    gaps = []
    for name, result in named[1:]:
        row = _gaps(first["student"], result["student"], shown)
        gaps.append([f"{name} - {first_name}", *row])
    _print_models(first, models, gaps)

    for name, pair in zip(other_names, pairs, strict=False):
        print(_paired(first_name, name, pair, first["pictures"]))
    for name, result in named:
        for line in _faithful(result.get("fidelity")):
            print(f"{name}: {line}")
        print_certificate(result.get("certificate"))
        if "robust" in result:
            _print_robust(result, f"{name}: ")


def print_certificate(certificate: dict[str, Any] | None) -> None:
    """Prints a certificate, its answer first.

    Args:
        certificate: of :func:`kd.proof.certificate.certify`; None: nothing is printed.
    """
    for line in (certificate or {}).get("text", []):
        print(line)


def _paired(first: str, other: str, pair: tuple[int, int], pictures: int) -> str:
    """How sure the difference of two models is, as a line.

    Args:
        first: name of the first model.
        other: of the other.
        pair: pictures on which the first alone is right, and on which the other alone is.
        pictures: all.

    >>> _paired("a", "b", (2, 6), 100)
    'a alone is right on 2 of 100 pictures, b alone on 6: +4.0 ± 2.8 points (standard error, paired by picture)'
    """
    # Of N pictures b and c are right for one model alone. Their difference d is -1, 0 or 1 a picture, so that its
    # mean is (c - b) / N and its variance (b + c) / N - mean^2; the standard error is the root of variance / N.
    first_alone, other_alone = pair
    gap = (other_alone - first_alone) / pictures
    variance = (first_alone + other_alone) / pictures - gap**2
    error = (variance / pictures) ** 0.5
    return (
        f"{first} alone is right on {first_alone} of {pictures} pictures, {other} alone on {other_alone}: "
        f"{100 * gap:+.1f} ± {100 * error:.1f} points (standard error, paired by picture)"
    )


def without_common_folders(names: list[str]) -> list[str]:
    """Names without the leading folders that all of them share; each keeps its last part."""
    paths = [Path(name).parts for name in names]
    while all(len(path) > 1 for path in paths):
        first_folders = {path[0] for path in paths}
        if len(first_folders) > 1:
            break
        paths = [path[1:] for path in paths]
    shorter = [Path(*path) for path in paths]
    return [str(path) for path in shorter]


def _gaps(first: dict[str, float], other: dict[str, float], shown: Sequence[str]) -> list[str]:
    """Cells: the quotient of the parameters, and of each shown metric the difference (other - first).

    "" where one of the models lacks it.

    Args:
        first: figures of the first model: parameters, and metrics, shares in [0, 1].
        other: those of the model in this row.
        shown: metrics, one a column.
    """
    cells = [""]
    if first["params"]:
        cells = [f"x {other['params'] / first['params']:.2f}"]
    for metric in shown:
        cells.append(difference(metric, first.get(metric), other.get(metric)))
    return cells


def _shown(result: dict[str, Any]) -> list[str]:
    return [name for name in result["student"] if name != "params" and not name.startswith("iou_")]


def _print_models(
    result: dict[str, Any],
    models: Iterable[tuple[str, dict[str, float]]],
    more: Sequence[list[str]] = (),
) -> None:
    """Prints the table of ``kd-eval``: a row for each model, its parameters in millions and its metrics.

    Args:
        result: whose ``pictures`` and ``data`` head the table.
        models: name and figures.
        more: rows that follow.
    """
    shown = _shown(result)
    rows = []
    for name, model in models:
        figures = _figures(model, shown)
        rows.append([name, in_millions(model["params"]), *figures])
    rows += more
    title = f"{result['pictures']} pictures: {result['data']}"
    print_table(title, ["", "parameters", *shown], rows, left=("",))


def in_millions(parameters: float) -> str:
    """A number of parameters as tables show it; "-" where none are known, as of a teacher whose answers are read.

    >>> in_millions(161_234), in_millions(0)
    ('0.16 M', '-')
    """
    if not parameters:
        return "-"
    return f"{parameters / 1e6:.2f} M"


def _figures(row: dict[str, float], shown: Sequence[str]) -> list[str]:
    return [format_metric(metric, row.get(metric)) for metric in shown]


def print_table(
    title: str | None,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[str],
    width: int = WIDTH_OF_A_FILE,
) -> None:
    """Prints a table; cells that are too long for the terminal are folded.

    Args:
        title: above it; None: none.
        columns: names.
        rows: cells as text.
        left: columns that hold text; all others are aligned to the right.
        width: characters of a line where the output is no terminal.
    """
    table = Table(title=title and on_terminal(title))
    for column in columns:
        justify: Literal["left", "right"] = "left" if column in left else "right"
        table.add_column(on_terminal(column), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(on_terminal, row))

    # names may come from files: neither rich's markup nor its words for pictures are looked for in them
    shown_width = None if sys.stdout.isatty() else width
    console = Console(
        width=shown_width, force_terminal=False, markup=False, emoji=False, highlight=False
    )
    console.print(table)


def _faithful(fidelity: dict[str, Any] | None) -> list[str]:
    """How faithful the student is to its teacher, in lines, from the content of ``fidelity.json``."""
    if fidelity is None:
        return []
    lines: list[str] = []
    if fidelity["kind"] == "numbers":
        for target in fidelity["targets"]:
            if "correlation" in target:
                lines.append(
                    f"{target['name']}: student and teacher differ by {target['difference']:.4g} on average, "
                    f"correlation {target['correlation']:.3f}"
                )
        return lines
    if "agreement" in fidelity:
        shares = fidelity["outcomes"]
        lines += [
            f"agrees with the teacher: {fidelity['agreement']:.1%}; mean KL divergence {fidelity['kl']:.3f} nats",
            f"both right {shares['both_right']:.1%}, both wrong {shares['both_wrong']:.1%}, "
            f"only the teacher right {shares['only_teacher']:.1%}, only the student {shares['only_student']:.1%}",
        ]
    errors = ", ".join(f"{name} {error:.3f}" for name, error in fidelity["ece"].items())
    lines.append(f"expected calibration error: {errors}")
    lost: list[str] = []
    for row in lost_classes(fidelity["per_class"])[:5]:
        lost.append(f"{row['name']} {row['teacher']:.0%} -> {row['student']:.0%}")
    if lost:
        lines.append(f"classes that lost most ({fidelity['score']}): {', '.join(lost)}")
    return lines


def _print_robust(result: dict[str, Any], whose: str = "") -> None:
    """Prints the table of the task's main metric on damaged pictures.

    Args:
        result: of ``kd-eval``; ``robust`` has the metric that ``robust_metric`` names, by kind of damage and model, for
            each of three strengths.
        whose: begins the title, ``NAME: ``; "" for a single run.
    """
    metric = result["robust_metric"]
    rows: list[list[str]] = []
    for damage, models in result["robust"].items():
        for model, values in models.items():
            cells = [damage, model]
            for value in values:
                cells.append(format_metric(metric, value))
            rows.append(cells)
    title = f"{whose}{metric} on damaged pictures, by strength"
    print_table(title, ("", "", "1", "2", "3"), rows, left=("",))


def _feature_rows(
    results: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[tuple[str, dict[str, float]]]:
    """Name and metrics of each model: each teacher once, then the students.

    Args:
        results: of ``kd-eval``, one a run.
        names: of the runs.
    """
    several = len(results) > 1
    teachers: list[tuple[str, dict[str, float]]] = []
    students = []
    for name, result in zip(names, results, strict=True):
        of_earlier_runs = [metrics for _, metrics in teachers]
        for key, metrics in result.items():
            if key.startswith("teacher") and metrics not in of_earlier_runs:
                teacher = f"{key} of {name}" if several else key
                teachers.append((teacher, metrics))
        student = name if several else "student"
        students.append((student, result["student"]))
    return teachers + students


WITH_MODEL = 98
"""Columns of a terminal from which on the closing table names the models."""


def without_column(
    name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Names and rows of a table without one of its columns.

    >>> without_column("model", ["", "model", "acc1"], [["student", "vit", "87 %"]])
    (['', 'acc1'], [['student', '87 %']])
    """
    place = [*columns].index(name)
    shorter = []
    for row in (columns, *rows):
        cells = list(row)
        del cells[place]
        shorter.append(cells)
    return shorter[0], shorter[1:]


def fits(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether a table is at most ``width`` characters wide: each cell has a space on both sides and a line.

    Args:
        columns: names.
        rows: cells, as many as columns.
        width: of the terminal.
    """
    total = 1  # the first line
    for cells in zip(columns, *rows, strict=True):
        longest = max(map(len, cells))
        total += longest + 3
    return total <= width


def named_values(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The cells of a table's ``rows`` as lines ``name: value``, below the first cell of each row; names are
    ``columns``.

    >>> named_values(["", "parameters", "val acc1"], [["student", "0.16 M", "87.2 %"]])
    ['student', '  parameters: 0.16 M', '  val acc1: 87.2 %']
    """
    lines: list[str] = []
    for first, *cells in rows:
        lines.append(first)
        lines += [
            f"  {name}: {cell}" for name, cell in zip(columns[1:], cells, strict=True) if cell
        ]
    return lines


def print_summary(summary: dict[str, Any], folder: Path, of_teacher: bool = False) -> None:
    """Prints a table of ``summary.json``, its findings, and where the run is.

    Args:
        summary: of the run.
        folder: of the run.
        of_teacher: it has trained the teacher of another run, which names its place.
    """
    shown = [name for name in summary["student"]["val"] if in_tables(name)]
    teacher = summary["teacher"]
    rows: list[tuple[str, Any, Any]] = [("teacher", teacher, teacher["val"])] if teacher else []
    trained = "teacher" if of_teacher else "student"
    student = summary["student"]
    best = student["best_val"]
    rows.append((f"{trained}, last epoch", student, student["val"]))
    if best:
        which = f"best epoch ({best['epoch']})" if best["epoch"] else "the start (the best)"
        rows.append((f"{trained}, {which}", student, best))
    columns = [
        "",
        "model",
        "parameters",
        *(name if name in ("agreement", "kl") else f"val {name}" for name in shown),
    ]
    cells = [
        [name, m["arch"], in_millions(m["params"]), *_figures(val, shown)] for name, m, val in rows
    ]
    epochs = counted(summary["epochs"], "epoch")
    title = f"{summary['recipe']}: {epochs} in {duration(summary['wall_s'])}"
    terminal = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_OF_A_FILE
    if terminal < WITH_MODEL:
        columns, cells = without_column("model", columns, cells)
    if fits(columns, cells, terminal):
        print_table(title, columns, cells, left=("", "model"))
    else:
        for line in [title, *named_values(columns, cells)]:
            print(on_terminal(line))
    speed = f"{summary['images_per_s']:,.0f} images/s, " if summary["images_per_s"] else ""
    processes = counted(summary["world_size"], "process", "processes")
    print(f"{speed}{summary['device']}, {summary['precision']}, {processes}")
    print_diagnosis(summary.get("findings", []), summary.get("verdict"))
    if of_teacher:
        return
    which = "the best epoch" if best else "the last epoch"
    if best and not best["epoch"]:
        which = "the start: no epoch was as good"
    held = (
        f"student.safetensors holds {which}"
        if summary["steps"]
        else "nothing was trained, no student is exported"
    )
    print(f"run folder: {folder} ({held})", flush=True)


def print_diagnosis(findings: list[dict[str, str]], verdict: dict[str, Any] | None) -> None:
    """Prints what went wrong in a run, a line for each rule that fired, and last what limits its speed.

    Args:
        findings: ``rule``, ``text`` and ``lever`` of each, as in ``summary.json``.
        verdict: of :attr:`kd.report.rules.Explained.verdict`; None: the run has none.
    """
    for finding in findings:
        print(on_terminal(f"{finding['rule']}: {finding['text']}; {finding['lever']}"))
    if verdict is not None:
        print(on_terminal(f"{verdict['text']} (report.html)"))


def print_cascade(found: dict[str, Any] | None) -> None:
    """Prints a cascade's table, and the threshold with what is guaranteed.

    Args:
        found: of :func:`kd.run.cascade.cascade_of`; None: nothing is printed.
    """
    if found is None:
        return
    measured = f"{found['score']}; {found['pictures']:,} pictures"
    print(f"student where it is sure, else teacher ({measured})")
    print_table(None, COLUMNS, curve_rows(found), left=())
    for line in threshold_lines(found):
        print(line)
    gains = ", ".join(f"{name} {100 * gain:.2f}" for name, gain in found["compared"].items())
    print(f"points gained over asking at random, mean over all shares: {gains}")


DISPUTED_ROWS = 10  # in the terminal; all are in the run's disputed_labels.csv


def print_disputed(found: dict[str, Any] | None) -> None:
    """Prints how many labels are disputed, and the first of them.

    Args:
        found: of :meth:`kd.run.disputes.Disputes.found`; None: nothing is printed.
    """
    if found is None:
        return
    print(disputed_line(found))
    rows = []
    for row in found["labels"][:DISPUTED_ROWS]:
        label = f"{row['label']} ({row['p_label']:.0%})"
        suggested = f"{row['suggested']} ({row['p_suggested']:.0%})"
        rows.append([row["picture"], label, suggested])
    if rows:
        print_table(
            None, ["picture", "its label", "rather"], rows, left=("picture", "its label", "rather")
        )


def disputed_line(found: dict[str, Any]) -> str:
    """How many labels of a split are disputed, by which model's features, and how many are likely wrong.

    Args:
        found: of :meth:`kd.run.disputes.Disputes.found`, or the content of ``disputed.json``.
    """
    share = found["disputed"] / found["pictures"]
    return (
        f"{found['disputed']:,} of {found['pictures']:,} labels of {found['split']} ({share:.1%}) are disputed: a fit of "
        f"the {found['judge']}'s features to the other pictures names another class; some {found['likely_wrong']:,} are "
        "likely wrong (confident learning)"
    )
