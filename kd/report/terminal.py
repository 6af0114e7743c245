"""What the terminal shows: parts of results, and a run's end."""

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table as RichTable

from kd.report.evaluated import (
    certificate_table,
    differences,
    fidelity_parts,
    in_millions,
    lost_line,
    model_name,
    models_table,
    paired,
)
from kd.report.metric import counted, duration, format_metric, in_tables
from kd.report.tables import Part, Table, is_text, sentences, text_of_cell
from kd.storage.shown import on_terminal

WIDTH_OF_A_FILE = 120
"""Columns of a table that is not printed to a terminal."""
MOST_ROWS = 30
"""Of a table that the page folds; other tables are printed whole."""


def print_parts(parts: Iterable[Part]) -> None:
    """Prints tables with their notes; charts and pictures are for the page."""
    for part in parts:
        if isinstance(part, Table):
            _print(part)


def _print(table: Table) -> None:
    """Prints one table; of a single column its lines alone."""
    shown = table.rows[:MOST_ROWS] if table.folded else table.rows
    rows = [[text_of_cell(cell) for cell in row] for row in shown]
    if len(table.columns) == 1:
        for (line,) in rows:
            print(on_terminal(line))
    else:
        left = [name for place, name in enumerate(table.columns) if is_text(table, place)]
        print_table(table.title or None, table.columns, rows, left)
        more = len(table.rows) - len(shown)
        if more:
            print(f"and {more} more rows (report.html)")
    for line in table.note.splitlines():
        print(on_terminal(line))


def print_table(
    title: str | None,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Sequence[str],
    width: int = WIDTH_OF_A_FILE,
) -> None:
    """Prints a table; cells that are too long are folded. Where not even the names fit the terminal, lines ``name: value``.

    Args:
        title: above it; None: none.
        columns: names.
        rows: cells as text.
        left: columns that hold text; all others are aligned to the right.
        width: characters of a line where the output is no terminal.
    """
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    if not fits(columns, width):
        for line in [title or "", *named_values(columns, rows)]:
            print(on_terminal(line))
        return
    table = RichTable(title=title and on_terminal(title))
    for column in columns:
        justify: Literal["left", "right"] = "left" if column in left else "right"
        table.add_column(on_terminal(column), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(on_terminal, row))

    # names may come from files: neither rich's markup nor its words for pictures are looked for in them
    console = Console(width=width, force_terminal=False, markup=False, emoji=False, highlight=False)
    console.print(table)


def fits(columns: Sequence[str], width: int) -> bool:
    """Whether the names of a table's columns fit a terminal, each with a space on both sides and a line."""
    return 1 + sum(max(4, len(name)) + 3 for name in columns) <= width


def named_values(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The cells of a table's ``rows`` as lines ``name: value``, below the first cell of each row; names are
    ``columns``.

    >>> named_values(["", "parameters", "val acc1"], [["student", "0.16 M", "87.2 %"]])
    ['student', '  parameters: 0.16 M', '  val acc1: 87.2 %']
    """
    lines: list[str] = []
    for first, *cells in rows:
        lines.append(first)
        named = zip(columns[1:], cells, strict=True)
        lines += [f"  {name}: {cell}" for name, cell in named if cell]
    return lines


# -- kd-eval -----------------------------------------------------------------------------------------------------------
def evaluation_parts(
    results: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[int, int]], parts: Sequence[Part]
) -> list[Part]:
    """The metrics of all models and of each teacher once, and what else was measured of them.

    Args:
        results: of ``kd-eval``, one a model.
        pairs: of each model after the first: pictures on which the first alone is right, and on which it alone is; [] of
            tasks whose answers are not names of classes.
        parts: of a cascade, of disputed labels or of a backbone's starts.
    """
    first = results[0]
    names = without_common_folders([result["run"] for result in results])
    by_name = dict(zip(names, results, strict=True))
    shown: list[Part] = []
    if "student" in first:
        first_name, *other_names = names
        others = {name: by_name[name] for name in other_names}
        shown.append(models_table(first, _models(by_name), differences(first, first_name, others)))
        lines = [
            paired(first_name, name, pair, first["pictures"])
            for name, pair in zip(other_names, pairs, strict=False)
        ]
        shown.append(sentences("", lines))
    if "rankme" in first.get("student", {}) and "probe" not in first:
        hint = "k-NN and ridge probe need labelled pictures: data.probe.root=DIR (DIR/train/<class>, DIR/val/<class>)"
        shown.append(sentences("", [hint]))
    for name, result in by_name.items():
        whose = f"{name}: " if len(results) > 1 else ""
        if "fidelity" in result:
            shown += fidelity_parts({**result["fidelity"], "per_class": [], "confusions": []})
            lost = lost_line(result["fidelity"])
            shown.append(sentences("", [whose + lost] if lost else []))
        if "certificate" in result:
            shown.append(certificate_table(result["certificate"], name))
    return [*shown, *parts]


def _models(by_name: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, float]]]:
    """Name and figures of each teacher once, then of all students."""
    several = len(by_name) > 1
    teachers: list[tuple[str, Mapping[str, float]]] = []
    students = []
    for name, result in by_name.items():
        for key, figures in result.items():
            known = [metrics for _, metrics in teachers]
            if not key.startswith("teacher") or figures in known:
                continue
            teacher = key
            if several:
                teacher = f"{key} of {name}"
            teachers.append((teacher, figures))
        student = "student"
        if several:
            student = name
        figures = result["student"]
        students.append((student, figures))
    return teachers + students


def without_common_folders(names: list[str]) -> list[str]:
    """Names without the leading folders that all of them share, and files of one name by their folders."""
    paths = [Path(name).parts for name in names]
    while all(len(path) > 1 for path in paths):
        first_folders = {path[0] for path in paths}
        if len(first_folders) > 1:
            break
        paths = [path[1:] for path in paths]
    files = {path[-1] for path in paths}
    if len(files) == 1 and len(paths) > 1 and Path(*files).suffix and min(map(len, paths)) > 1:
        paths = [path[:-1] for path in paths]  # a file by its folder
    shorter = [Path(*path) for path in paths]
    return [str(path) for path in shorter]


# -- a run's end -------------------------------------------------------------------------------------------------------
def run_table(summary: Mapping[str, Any], of_teacher: bool = False) -> Table:
    """The models of a run, as its ``summary.json`` has them; ``of_teacher``: it has trained the teacher of another run."""
    student = summary["student"]
    teacher = summary["teacher"]
    best = student["best_val"]
    trained = "teacher" if of_teacher else "student"
    models = []
    if teacher:
        models.append(("teacher", teacher, teacher["val"]))
    models.append((f"{trained}, last epoch", student, student["val"]))
    if best:
        which = "the start (the best)"
        if best["epoch"]:
            which = f"best epoch ({best['epoch']})"
        models.append((f"{trained}, {which}", student, best))
    shown = [name for name in student["val"] if in_tables(name)]
    names = [name if name in ("agreement", "kl") else f"val {name}" for name in shown]
    rows = []
    for name, model, values in models:
        figures = [format_metric(metric, values.get(metric)) for metric in shown]
        rows.append([name, model_name(model), in_millions(model["params"]), *figures])
    epochs = counted(summary["epochs"], "epoch")
    title = f"{summary['recipe']}: {epochs} in {duration(summary['wall_s'])}"
    return Table(title, ["", "model", "parameters", *names], rows)


def print_summary(summary: dict[str, Any], folder: Path, of_teacher: bool = False) -> None:
    """Prints a table of ``summary.json``, its findings, and where the run is.

    Args:
        summary: of the run.
        folder: of the run.
        of_teacher: it has trained the teacher of another run, which names its place.
    """
    print_parts([run_table(summary, of_teacher)])
    held = "the last epoch"
    best = summary["student"]["best_val"]
    if best:
        held = "the best epoch" if best["epoch"] else "the start: no epoch was as good"
    speed = f"{summary['images_per_s']:,.0f} images/s, " if summary["images_per_s"] else ""
    processes = counted(summary["world_size"], "process", "processes")
    print(f"{speed}{summary['device']}, {summary['precision']}, {processes}")
    if "headline" in summary:
        print(on_terminal(summary["headline"]))
    print_diagnosis(summary.get("findings", []), summary.get("verdict"))
    if of_teacher:
        return
    exported = f"student.safetensors holds {held}"
    if not summary["steps"]:
        exported = "nothing was trained, no student is exported"
    print(f"run folder: {folder} ({exported})")
    for line in next_steps(summary, folder):
        print(line)
    sys.stdout.flush()


def next_steps(summary: Mapping[str, Any], folder: Path) -> list[str]:
    """The commands that make sense after a run, as lines with what each gives; [] where nothing was trained.

    Args:
        summary: of the run.
        folder: of the run.
    """
    if not summary["steps"]:
        return []
    commands = {
        f"kd-eval {folder} folder=DIR": "other pictures, in DIR/<class>",
        f"kd-export {folder} to=onnx": "a file that runs without torch",
    }
    if "rankme" in summary["student"]["val"]:  # it has features and no classes
        finetune = (
            f"kd-train recipe=finetune data.source.root=DIR model.student.checkpoint={folder}"
        )
        commands = {
            finetune: "the classes of labelled pictures, in DIR/<class>",
            f"kd-eval {folder} pays=DIR": "whether the backbone pays, on labelled pictures",
        }
    commands[f"kd-report {folder} --open"] = "the page"
    return ["next:", *(f"  {command}  # {what}" for command, what in commands.items())]


def print_diagnosis(findings: list[dict[str, str]], verdict: dict[str, Any] | None) -> None:
    """Prints what went wrong in a run, a line for each rule that fired, and last what limits its speed.

    Args:
        findings: ``rule``, ``text`` and ``lever`` of each, as in ``summary.json``.
        verdict: of :attr:`kd.report.rules.Explained.verdict`; None: the run has none.
    """
    for finding in findings:
        line = "{rule}: {text}; {lever}".format(**finding)
        print(on_terminal(line))
    if verdict is not None:
        print(on_terminal(f"{verdict['text']} (report.html)"))
