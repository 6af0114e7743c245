"""What ``kd-size`` writes and prints: the table, ``sizes.json``, ``sizes.html`` and ``student.yaml``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kd.fleet.sizing.plan import Conditions
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
    row = next(row for row in found["candidates"] if row["name"] == found["choice"])
    head = f"# {row['name']}, chosen by kd-size: {row['latency_ms']:g} ms ({Conditions(**found['conditions'])})\n"
    return head + yaml.safe_dump(
        {"model": {"student": {key: row[key] for key in SETTINGS}}}, sort_keys=False
    )


def headline(found: Mapping[str, Any]) -> str:
    """One sentence: the chosen size with its score, latency in ms and millions of parameters."""
    budget = ", ".join(f"{key} <= {value:g}" for key, value in found["budget"].items())
    row = next((row for row in found["candidates"] if row["name"] == found["choice"]), None)
    if row is None:
        return f"No candidate was scored{f' within {budget}' if budget else ''}."
    most = f"the most accurate within {budget}" if budget else "the most accurate"
    score = format_metric(found["metric"], row["score"])
    return f"{row['name']} is {most}: {found['metric']} {score}, {row['latency_ms']:g} ms, {row['params_m']:.2f} M."


def table(found: Mapping[str, Any], front_alone: bool = False) -> tuple[list[str], list[list[str]]]:
    """Columns and rows, the teacher last; without evidence there is no column of predictions."""
    metric, rows = found["metric"], []
    for row in [
        *found["candidates"],
        *([{**found["teacher"], "front": True}] if found["teacher"] else []),
    ]:
        if front_alone and not (row["front"] or row.get("own") or row["name"] == found["choice"]):
            continue
        shown = [
            format_metric(metric, row[key]) if key in row else "" for key in ("before", "after")
        ]
        band = " ".join(format_metric(metric, value) for value in row.get("predicted", []))
        rounds = [
            f"{row[key]:.2f}" for key in ("fastest_round_ms", "slowest_round_ms") if key in row
        ]
        timed = (
            [f"{row['latency_ms']:.2f}", " to ".join(rounds)] if "latency_ms" in row else ["", ""]
        )
        rows.append(
            [
                row["name"],
                *timed,
                *shown,
                band,
                f"{row['params_m']:.2f}",
                f"{row['mb']:.1f}" if "mb" in row else "",
                _remarks(row, found),
            ]
        )
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
    kept = [i for i, name in enumerate(columns) if not name or any(row[i] for row in rows)]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


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
    given, teacher = Conditions(**found["conditions"]), found["teacher"]
    scored = [row for row in found["candidates"] if "score" in row]
    scale = 100 if is_share(found["metric"]) else 1
    points = [
        [
            row["latency_ms"],
            round(scale * row["score"], 4),
            row["name"],
            row["name"] == found["choice"],
            _label(row, found),
        ]
        for row in scored
    ]
    if "latency_ms" in teacher and "before" in teacher:
        points.append(
            [
                teacher["latency_ms"],
                round(scale * teacher["before"], 4),
                "teacher",
                False,
                "teacher",
            ]
        )
    columns, rows = table(found)
    when = f"after {found['steps']} steps of distillation" if found["steps"] else "before training"
    return [
        {"kind": "verdict", "bound": "size", "text": headline(found), "others": _how(found, given)},
        _trained(found),
        {
            "kind": "points",
            "title": f"{found['metric']} {when} over latency ({given})",
            "points": points,
            "log": True,
            "labels": None,
            "x_name": "ms",
            "y_name": found["metric"],
            "note": "Held-out training pictures, which the teacher may have been trained on: to compare sizes by.",
        }
        if points
        else None,
        {"kind": "table", "title": "Candidates", "columns": columns, "rows": rows},
    ]


def _label(row: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    words = [
        row["name"],
        *["chosen"] * (row["name"] == found["choice"]),
        *["the recipe's"] * row["own"],
    ]
    return ", ".join(words) if row["front"] or len(words) > 1 else ""


def _how(found: Mapping[str, Any], given: Conditions) -> list[str]:
    left = sum("score" not in row for row in found["candidates"])
    predicted = found["evidence"] >= 3
    return [
        f"latency: {given}, on {found['machine']}; drawn weights; all candidates in turns, medians of the rounds",
        f"accuracy: {found['held_out']} labelled pictures that no candidate was made or trained with",
        *(
            [f"inherited layers are fitted on {found['fitted_on']} others, at most"]
            if "fitted_on" in found
            else []
        ),
        *([f"not scored, since over a budget: {left}"] if left else []),
        *(
            [
                f"predicted: median, lowest and highest gain of {found['evidence']} earlier runs of the recipe"
            ]
            if predicted
            else []
        ),
        f"it took {duration(found['took_s'])}",
    ]


def _trained(found: Mapping[str, Any]) -> dict[str, Any] | None:
    rows = [
        [
            run["run"],
            run["name"],
            f"{run['latency_ms']:.2f}",
            f"{found['budget'].get('latency_ms', '')}",
            format_metric(found["metric"], run["score"]) if run.get("score") is not None else "",
            run["verdict"],
        ]
        for run in found.get("trained", [])
    ]
    columns = ["run", "size", "latency (ms)", "budget (ms)", found["metric"], ""]
    return {"kind": "table", "title": "Trained", "columns": columns, "rows": rows} if rows else None


def show(found: Mapping[str, Any]) -> None:
    """Prints the table, the front of candidates alone, and the headline."""
    title = (
        f"{found['recipe']}: {len(found['candidates'])} sizes, {Conditions(**found['conditions'])}"
    )
    print_table(title, *table(found, front_alone=True), left=("", "size"), width=140)
    print(headline(found))
