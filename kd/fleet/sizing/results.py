"""What ``kd-size`` writes and prints: a table, ``sizes.json`` and ``student.yaml``.

``sizes`` is the content of ``sizes.json`` in all functions, ``row`` one of its candidates: ``mb``, ``params``,
``latency_ms``, where it was timed, and ``score``, where it was scored: the metric in its own unit, of accuracies a share in
[0, 1]. Other programs read that file: its keys stay.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kd.fleet.sizing.candidates import SETTINGS
from kd.fleet.sizing.plan import Conditions
from kd.report.metric import duration, format_metric
from kd.report.tables import Cell, Table
from kd.storage.writing import write_json, write_text

STUDENT = "student.yaml"
"""The overlay of the choice."""


def write_sizes(sizes: Mapping[str, Any], folder: Path) -> Path:
    """Writes ``sizes.json`` and, where there is a choice, ``student.yaml``; returns ``folder``."""
    write_json(folder / "sizes.json", sizes)
    if sizes["choice"]:
        write_text(folder / STUDENT, _overlay(sizes))
    return folder


def _overlay(sizes: Mapping[str, Any]) -> str:
    """The YAML of ``student.yaml``: the settings of the chosen size, an overlay for ``kd-train config=FILE``.

    A size must have been chosen.
    """
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


def sizes_headline(sizes: Mapping[str, Any]) -> str:
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


def sizes_table(sizes: Mapping[str, Any]) -> Table:
    """The candidates, the teacher last, and how they were measured."""
    rows = list(sizes["candidates"])
    if sizes["teacher"]:
        # several teachers, and one that can't be timed, have a score alone
        rows.append({"name": "teacher", **sizes["teacher"], "front": True})
    metric = sizes["metric"]
    columns = ["size", "latency (ms)", "fastest round", "slowest round", "before training",
               "parameters (M)", "file (MB)", ""]  # fmt: skip
    lines: list[list[Cell]] = []
    for row in rows:
        times = [
            _fixed(row, f"{which}_ms") for which in ("latency", "fastest_round", "slowest_round")
        ]
        score = format_metric(metric, row.get("before"))
        sizes_of = [_fixed(row, "params_m"), _fixed(row, "mb")]
        lines.append([row["name"], *times, score, *sizes_of, _remarks(row, sizes)])
    conditions = Conditions(**sizes["conditions"])
    title = f"{sizes['recipe']}: {len(sizes['candidates'])} sizes, {conditions}"
    note = (
        f"latency: on {sizes['machine']}, drawn weights, all in turns, medians of the rounds; accuracy: "
        f"{sizes['held_out']} labelled pictures that no candidate was made or trained with, but the teacher may have been\n"
        f"it took {duration(sizes['took_s'])}\n"
        f"{sizes_headline(sizes)}"
    )
    return Table(title, columns, lines, note)


def _fixed(row: Mapping[str, Any], key: str) -> str:
    """A number of a candidate with two digits after the point; "" where it is not known."""
    return f"{row[key]:.2f}" if key in row else ""


def _remarks(row: Mapping[str, Any], sizes: Mapping[str, Any]) -> str:
    """What is particular about a candidate, in words, for the table's last column."""
    remarks = {
        "chosen": row["name"] == sizes["choice"],
        "on the front": row["front"] and "score" in row,
        "the recipe's student": row.get("own"),
        "over the budget": row.get("within") is False,
        "does not inherit": row.get("inherits") is False and row["name"] != "teacher",
    }
    return ", ".join(text for text, holds in remarks.items() if holds)
