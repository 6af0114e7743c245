"""What ``kd-size`` writes and prints: the table, ``sizes.json``, ``sizes.html`` and ``student.yaml``.

``sizes`` is the content of ``sizes.json`` in all functions, ``row`` one of its candidates: ``mb``, ``params``,
``latency_ms``, where it was timed, and ``score``, where it was scored: the metric in its own unit, of accuracies a share in
[0, 1]. Other programs read that file: its keys stay.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kd.fleet.sizing.plan import Conditions
from kd.report.html import write_page
from kd.report.metric import duration, format_metric, is_share
from kd.report.sized import FILE, SETTINGS
from kd.report.tables import Cell, Table
from kd.report.terminal import print_parts
from kd.storage.writing import write_json, write_text


def write(sizes: Mapping[str, Any], folder: Path) -> Path:
    """Writes ``sizes.json``, ``sizes.html`` and, where there is a choice, ``student.yaml``; returns ``folder``."""
    write_json(folder / FILE, sizes)
    if sizes["choice"]:
        write_text(folder / "student.yaml", _overlay(sizes))
    write_page(folder / "sizes.html", f"{sizes['recipe']}: sizes of the student", sections(sizes))
    return folder


def _overlay(sizes: Mapping[str, Any]) -> str:
    """The YAML of ``student.yaml``: the settings of the choice, an overlay for ``kd-train config=FILE``; needs one."""
    row = _chosen(sizes)
    assert row is not None
    conditions = Conditions(**sizes["conditions"])
    student = {key: row[key] for key in SETTINGS}
    settings = {"model": {"student": student}}
    comment = f"# {row['name']}, chosen by kd-size: {row['latency_ms']:g} ms ({conditions})\n"
    return comment + yaml.safe_dump(settings, sort_keys=False)


def _chosen(sizes: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The candidate that was chosen; None where none was."""
    return next((row for row in sizes["candidates"] if row["name"] == sizes["choice"]), None)


def headline(sizes: Mapping[str, Any]) -> str:
    """One sentence: the chosen size with its score, latency in ms and millions of parameters, or that none was scored."""
    bounds = ", ".join(f"{key} <= {value:g}" for key, value in sizes["budget"].items())
    within = f" within {bounds}" if bounds else ""
    row = _chosen(sizes)
    if row is None:
        return f"No candidate was scored{within}."
    score = format_metric(sizes["metric"], row["score"])
    return (
        f"{row['name']} is the most accurate{within}: {sizes['metric']} {score}, "
        f"{row['latency_ms']:g} ms, {row['params_m']:.2f} M."
    )


def table(sizes: Mapping[str, Any], front_alone: bool = False) -> Table:
    """The candidates, the teacher last; a named column that is empty in every row is left out.

    Args:
        sizes: the content of ``sizes.json``.
        front_alone: leave out candidates that are neither on the front, nor the recipe's, nor the choice.
    """
    rows = list(sizes["candidates"])
    if front_alone:
        rows = [
            row for row in rows if row["front"] or row.get("own") or row["name"] == sizes["choice"]
        ]
    if sizes["teacher"]:
        # several teachers, and one that can't be timed, have a score alone
        rows.append({"name": "teacher", **sizes["teacher"], "front": True})
    columns: dict[str, list[Cell]] = {
        "size": [row["name"] for row in rows],
        "latency (ms)": [_fixed(row, "latency_ms", 2) for row in rows],
        "rounds (ms)": [_rounds(row) for row in rows],
        "before training": [format_metric(sizes["metric"], row.get("before")) for row in rows],
        f"after {sizes['steps']} steps": [
            format_metric(sizes["metric"], row.get("after")) for row in rows
        ],
        "parameters (M)": [_fixed(row, "params_m", 2) for row in rows],
        "file (MB)": [_fixed(row, "mb", 1) for row in rows],
        "": [_remarks(row, sizes) for row in rows],
    }
    filled = {name: cells for name, cells in columns.items() if not name or any(cells)}
    title = (
        f"{sizes['recipe']}: {len(sizes['candidates'])} sizes, {Conditions(**sizes['conditions'])}"
    )
    return Table(title, list(filled), list(zip(*filled.values(), strict=True)))


def _fixed(row: Mapping[str, Any], key: str, digits: int) -> str:
    """A number of a candidate with so many digits after the point; "" where it is not known."""
    return f"{row[key]:.{digits}f}" if key in row else ""


def _rounds(row: Mapping[str, Any]) -> str:
    """The fastest and the slowest round of a candidate in ms; "" where it was not timed."""
    bounds = [_fixed(row, key, 2) for key in ("fastest_round_ms", "slowest_round_ms") if key in row]
    return " to ".join(bounds)


def _remarks(row: Mapping[str, Any], sizes: Mapping[str, Any]) -> str:
    """What is particular about a candidate, in words, for the table's last column.

    Args:
        row: the candidate in ``sizes.json``.
        sizes: the whole file.
    """
    remarks = {
        "chosen": row["name"] == sizes["choice"],
        "on the front": row["front"] and "score" in row,
        "the recipe's student": row.get("own"),
        "over the budget": row.get("within") is False,
        "does not inherit": row.get("inherits") is False and row["name"] != "teacher",
    }
    return ", ".join(text for text, holds in remarks.items() if holds)


def sections(sizes: Mapping[str, Any]) -> list[dict[str, Any] | Table | None]:
    """The sections of the page, from the content of ``sizes.json``, for :func:`kd.report.html.write_page`.

    None stands for one without content, which the page leaves out.
    """
    conditions = Conditions(**sizes["conditions"])
    return [
        {
            "kind": "verdict",
            "bound": "size",  # an attribute of the box in HTML
            "text": headline(sizes),
            "others": _how(sizes, conditions),
        },
        _trained(sizes),
        _scores_over_latency(sizes, conditions),
        table(sizes),
    ]


def _scores_over_latency(sizes: Mapping[str, Any], conditions: Conditions) -> dict[str, Any] | None:
    """The chart of scored candidates and the teacher; None without any. Shares are drawn in per cent."""
    scale = 1
    if is_share(sizes["metric"]):
        scale = 100
    points = []  # x, y, name, marked, label
    for row in sizes["candidates"]:
        if "score" in row:
            score = round(scale * row["score"], 4)
            chosen = row["name"] == sizes["choice"]
            points.append([row["latency_ms"], score, row["name"], chosen, _label(row, sizes)])
    teacher = sizes["teacher"]
    if "latency_ms" in teacher and "before" in teacher:
        score = round(scale * teacher["before"], 4)
        points.append([teacher["latency_ms"], score, "teacher", False, "teacher"])
    if not points:
        return None
    when = "before training"
    if sizes["steps"]:
        when = f"after {sizes['steps']} steps of distillation"
    return {
        "kind": "points",
        "title": f"{sizes['metric']} {when} over latency ({conditions})",
        "points": points,
        "log": True,  # the axis of x is logarithmic
        "labels": None,  # names of places on x; here x is a number
        "x_name": "ms",
        "y_name": sizes["metric"],
        "note": "Held-out training pictures, which the teacher may have been trained on: to compare sizes by.",
    }


def _label(row: Mapping[str, Any], sizes: Mapping[str, Any]) -> str:
    """The text beside a candidate's point in the chart.

    "" for one that is neither on the front, nor chosen, nor the recipe's: so many labels would cover each other.

    Args:
        row: the candidate in ``sizes.json``.
        sizes: the whole file.
    """
    words = [row["name"]]
    if row["name"] == sizes["choice"]:
        words.append("chosen")
    if row["own"]:
        words.append("the recipe's")
    if row["front"] or len(words) > 1:
        return ", ".join(words)
    return ""


def _how(sizes: Mapping[str, Any], conditions: Conditions) -> list[str]:
    """How the numbers were measured, a line each, below the headline."""
    lines = [
        f"latency: {conditions}, on {sizes['machine']}; drawn weights; all candidates in turns, medians of the rounds",
        f"accuracy: {sizes['held_out']} labelled pictures that no candidate was made or trained with",
    ]
    if "fitted_on" in sizes:
        lines.append(f"inherited layers are fitted on {sizes['fitted_on']} others, at most")
    not_scored = [row for row in sizes["candidates"] if "score" not in row]
    over_budget = sum(not row["within"] for row in not_scored)
    drawn = len(not_scored) - over_budget
    if over_budget:
        lines.append(f"not scored, since over a budget: {over_budget}")
    if drawn:
        lines.append(
            f"not scored, since they inherit nothing (steps=N distils them first): {drawn}"
        )
    lines.append(f"it took {duration(sizes['took_s'])}")
    return lines


def _trained(sizes: Mapping[str, Any]) -> Table | None:
    """The table of trained students that ``kd-size RUN_FOLDER`` has compared; None without any.

    ``score`` is on the run's own validation split; the candidates' are on held-out training pictures, or on the probe's.
    """
    trained = sizes.get("trained")
    if not trained:
        return None
    rows: list[list[Cell]] = []
    for run in trained:
        cells = [
            run["run"],
            run["name"],
            run["latency_ms"],
            sizes["budget"].get("latency_ms"),
            format_metric(sizes["metric"], run.get("score")),
            run["verdict"],
        ]
        rows.append(cells)
    columns = ["run", "size", "latency (ms)", "budget (ms)", sizes["metric"], ""]
    return Table("Trained", columns, rows)


def show(sizes: Mapping[str, Any]) -> None:
    """Prints the table, of candidates only those that ``front_alone`` of :func:`table` leaves, and the headline."""
    print_parts([table(sizes, front_alone=True)])
    print(headline(sizes))
