"""What ``kd-size`` writes and prints: the table, ``sizes.json``, ``sizes.html`` and ``student.yaml``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kd.fleet.sizing.plan import EVIDENCE, Conditions
from kd.report.html import write_page
from kd.report.metric import duration, format_metric, is_share
from kd.report.sized import FILE, SETTINGS
from kd.report.terminal import print_table
from kd.storage.writing import write_json, write_text


def write(found: Mapping[str, Any], folder: Path) -> Path:
    """Writes ``sizes.json``, ``sizes.html`` and, where there is a choice, ``student.yaml`` into ``folder``; returns
    it.
    """
    write_json(folder / FILE, found)
    if found["choice"]:
        write_text(folder / "student.yaml", _overlay(found, folder))
    write_page(folder / "sizes.html", f"{found['recipe']}: sizes of the student", sections(found))
    return folder


def _overlay(found: Mapping[str, Any], folder: Path) -> str:
    """The YAML of ``student.yaml``: the settings of the choice."""
    row = _chosen(found)
    assert row is not None
    conditions = Conditions(**found["conditions"])
    student = {key: row[key] for key in SETTINGS}
    comment = f"# {row['name']}, chosen by kd-size: {row['latency_ms']:g} ms ({conditions})\n"
    return comment + yaml.safe_dump({"model": {"student": student}}, sort_keys=False)


def _chosen(found: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The candidate that was chosen; None where none was."""
    return next((row for row in found["candidates"] if row["name"] == found["choice"]), None)


def headline(found: Mapping[str, Any]) -> str:
    """One sentence: the chosen size with its score, latency in ms and millions of parameters."""
    bounds = ", ".join(f"{key} <= {value:g}" for key, value in found["budget"].items())
    within = f" within {bounds}" if bounds else ""
    row = _chosen(found)
    if row is None:
        return f"No candidate was scored{within}."
    score = format_metric(found["metric"], row["score"])
    return (
        f"{row['name']} is the most accurate{within}: {found['metric']} {score}, "
        f"{row['latency_ms']:g} ms, {row['params_m']:.2f} M."
    )


def table(found: Mapping[str, Any], front_alone: bool = False) -> tuple[list[str], list[list[str]]]:
    """Columns and rows, the teacher last; a column that is empty in every row is left out.

    Args:
        found: the content of ``sizes.json``.
        front_alone: leave out candidates that are neither on the front, nor the recipe's, nor the choice.
    """
    rows = list(found["candidates"])
    if front_alone:
        rows = [
            row for row in rows if row["front"] or row.get("own") or row["name"] == found["choice"]
        ]
    if found["teacher"]:
        rows.append({**found["teacher"], "front": True})
    cells = [_cells(row, found) for row in rows]
    columns = [
        "size",
        "latency (ms)",
        "rounds (ms)",
        "before training",
        f"after {found['steps']} steps",
        "predicted",
        "parameters (M)",
        "file (MB)",
        "",
    ]
    filled = [
        i for i, name in enumerate(columns) if not name or any(row_cells[i] for row_cells in cells)
    ]
    return [columns[i] for i in filled], [[row_cells[i] for i in filled] for row_cells in cells]


def _cells(row: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """A candidate's row of the table, "" for what is not known of it."""
    metric = found["metric"]
    latency = rounds = ""
    if "latency_ms" in row:
        latency = f"{row['latency_ms']:.2f}"
        bounds = [row[key] for key in ("fastest_round_ms", "slowest_round_ms") if key in row]
        rounds = " to ".join(f"{ms:.2f}" for ms in bounds)
    return [
        row["name"],
        latency,
        rounds,
        format_metric(metric, row["before"]) if "before" in row else "",
        format_metric(metric, row["after"]) if "after" in row else "",
        " ".join(format_metric(metric, value) for value in row.get("predicted", [])),
        f"{row['params_m']:.2f}",
        f"{row['mb']:.1f}" if "mb" in row else "",
        _remarks(row, found),
    ]


def _remarks(row: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    remarks = {
        "chosen": row["name"] == found["choice"],
        "on the front": row["front"] and "score" in row,
        "the recipe's student": row.get("own"),
        "over the budget": row.get("within") is False,
        "does not inherit": row.get("inherits") is False and row["name"] != "teacher",
    }
    return ", ".join(text for text, holds in remarks.items() if holds)


def sections(found: Mapping[str, Any]) -> list[dict[str, Any] | None]:
    """The sections of the page, from the content of ``sizes.json``."""
    conditions = Conditions(**found["conditions"])
    columns, rows = table(found)
    return [
        {
            "kind": "verdict",
            "bound": "size",
            "text": headline(found),
            "others": _how(found, conditions),
        },
        _trained(found),
        _scores_over_latency(found, conditions),
        {"kind": "table", "title": "Candidates", "columns": columns, "rows": rows},
    ]


def _scores_over_latency(found: Mapping[str, Any], conditions: Conditions) -> dict[str, Any] | None:
    """The chart of scored candidates and the teacher; None without any."""
    scale = 100 if is_share(found["metric"]) else 1
    points = []  # x, y, name, marked, label
    for row in found["candidates"]:
        if "score" in row:
            score = round(scale * row["score"], 4)
            chosen = row["name"] == found["choice"]
            points.append([row["latency_ms"], score, row["name"], chosen, _label(row, found)])
    teacher = found["teacher"]
    if "latency_ms" in teacher and "before" in teacher:
        score = round(scale * teacher["before"], 4)
        points.append([teacher["latency_ms"], score, "teacher", False, "teacher"])
    if not points:
        return None
    when = f"after {found['steps']} steps of distillation" if found["steps"] else "before training"
    return {
        "kind": "points",
        "title": f"{found['metric']} {when} over latency ({conditions})",
        "points": points,
        "log": True,
        "labels": None,
        "x_name": "ms",
        "y_name": found["metric"],
        "note": "Held-out training pictures, which the teacher may have been trained on: to compare sizes by.",
    }


def _label(row: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The text beside a point: "" for most that are not on the front, whose labels would cover each other."""
    words = [row["name"]]
    if row["name"] == found["choice"]:
        words.append("chosen")
    if row["own"]:
        words.append("the recipe's")
    return ", ".join(words) if row["front"] or len(words) > 1 else ""


def _how(found: Mapping[str, Any], conditions: Conditions) -> list[str]:
    """How the numbers were measured, a line each."""
    lines = [
        f"latency: {conditions}, on {found['machine']}; drawn weights; all candidates in turns, medians of the rounds",
        f"accuracy: {found['held_out']} labelled pictures that no candidate was made or trained with",
    ]
    if "fitted_on" in found:
        lines.append(f"inherited layers are fitted on {found['fitted_on']} others, at most")
    left_out = sum("score" not in row for row in found["candidates"])
    if left_out:
        lines.append(f"not scored, since over a budget: {left_out}")
    if found["evidence"] >= EVIDENCE:
        lines.append(
            f"predicted: median, lowest and highest gain of {found['evidence']} earlier runs of the recipe"
        )
    lines.append(f"it took {duration(found['took_s'])}")
    return lines


def _trained(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """The table of trained students that ``kd-size RUN_FOLDER`` has compared; None without any."""
    rows = []
    for run in found.get("trained", []):
        score = run.get("score")
        rows.append(
            [
                run["run"],
                run["name"],
                f"{run['latency_ms']:.2f}",
                f"{found['budget'].get('latency_ms', '')}",
                "" if score is None else format_metric(found["metric"], score),
                run["verdict"],
            ]
        )
    if not rows:
        return None
    columns = ["run", "size", "latency (ms)", "budget (ms)", found["metric"], ""]
    return {"kind": "table", "title": "Trained", "columns": columns, "rows": rows}


def show(found: Mapping[str, Any]) -> None:
    """Prints the table, the front of candidates alone, and the headline."""
    conditions = Conditions(**found["conditions"])
    title = f"{found['recipe']}: {len(found['candidates'])} sizes, {conditions}"
    print_table(title, *table(found, front_alone=True), left=("", "size"), width=140)
    print(headline(found))
