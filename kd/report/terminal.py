"""What the terminal shows: parts of results, and a run's end."""

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table as RichTable

from kd.errors import RunError
from kd.report.evaluated import run_table
from kd.report.metric import counted
from kd.report.tables import Part, Result, Table, is_text, sentences, text_of_cell
from kd.storage.elsewhere import Json
from kd.storage.shown import on_terminal
from kd.storage.writing import json_text

WIDTH_OF_A_FILE = 160
"""Columns of a table that is not printed to a terminal."""
MOST_ROWS = 5
"""Of a table that the page folds; other tables are printed whole."""


def print_result(result: Result, as_json: bool) -> None:
    """Prints what a command has found and where it was written to; the content alone where JSON is wanted.

    Raises:
        RunError: the command has failed all the same.
    """
    if as_json:
        print(json_text(result.content), end="")
    else:
        print_parts([*result.parts, sentences("", result.notes)])
        if result.files:
            print(f"written to {', '.join(map(str, result.files))}")
    if result.problem:
        raise RunError(result.problem)


def print_parts(parts: Iterable[Part]) -> None:
    """Prints tables with their notes; charts and pictures are for the page."""
    for part in parts:
        if isinstance(part, Table):
            _print(part)


def _print(table: Table) -> None:
    """Prints one table: of a single column its lines alone, of a folded table the first :data:`MOST_ROWS` rows.

    Of a table without rows, :attr:`Table.empty`, where it has one.
    """
    shown = table.rows[:MOST_ROWS] if table.folded else table.rows
    rows = [[text_of_cell(cell) for cell in row] for row in shown]
    if table.empty and not rows:
        print(f"{table.title}: {table.empty}")
    elif len(table.columns) == 1:
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
) -> None:
    """Prints a table; cells that are too long are folded.

    Args:
        title: above it; None: none.
        columns: names.
        rows: cells as text.
        left: columns that hold text; all others are aligned to the right.
    """
    width = WIDTH_OF_A_FILE
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    table = RichTable(title=title and on_terminal(title))
    for column in columns:
        justify: Literal["left", "right"] = "left" if column in left else "right"
        table.add_column(on_terminal(column), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(on_terminal, row))

    # names may come from files: neither rich's markup nor its words for pictures are looked for in them
    console = Console(width=width, force_terminal=False, markup=False, emoji=False, highlight=False)
    console.print(table)


# -- a run's end -------------------------------------------------------------------------------------------------------
def print_summary(summary: Json, folder: Path, of_teacher: bool = False) -> None:
    """Prints a table of ``summary.json``, its findings, and where the run is.

    Args:
        summary: of the run.
        folder: of the run.
        of_teacher: it has trained the teacher of another run; then its folder and the next commands are not printed.
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
    print_parts([sentences("", diagnosis(summary))])
    if of_teacher:
        return
    exported = f"student.safetensors holds {held}"
    if not summary["steps"]:
        exported = "nothing was trained, no student is exported"
    print(f"run folder: {folder} ({exported})")
    for line in next_steps(summary, folder):
        print(line)
    sys.stdout.flush()


def next_steps(summary: Json, folder: Path) -> list[str]:
    """The commands that make sense after a run, as lines with what each gives; [] where nothing was trained.

    Args:
        summary: of the run.
        folder: of the run.
    """
    if not summary["steps"]:
        return []
    commands = {}
    if "acc1" in summary["student"]["val"]:  # one class a picture, as folders name them
        commands[f"kd-eval {folder} folder=DIR"] = "other pictures, in DIR/<class>"
    commands[f"kd-export {folder} to=onnx"] = "a file that runs without torch"
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


def diagnosis(summary: Json) -> list[str]:
    """What went wrong in a run, a line for each rule that fired, and last what limits its speed.

    Args:
        summary: with ``verdict`` and ``findings``, each with ``rule``, ``text`` and ``lever``, as in ``summary.json``.
    """
    lines = ["{rule}: {text}; {lever}".format(**finding) for finding in summary.get("findings", [])]
    if summary.get("verdict"):
        lines.append(f"{summary['verdict']['text']} (report.html)")
    return lines
