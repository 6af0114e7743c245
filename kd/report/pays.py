"""Whether a distilled backbone pays: ``kd-eval RUN pays=DIR`` in the terminal and on the run's page."""

from statistics import fmean
from typing import Any

from kd.report.charts import Section, table
from kd.report.records import RunRecords
from kd.storage.of_weights import PAYS, read_of_weights

TITLE = "Does it pay?"
DISTILLED = "distilled"
COLUMNS = ["", "backbone", "mean", "each seed"]
IN_WORDS = {"random": "a random start", "pretrained": "the pre-trained weights"}
"""Names of the starts in sentences."""
NOT_MEASURED = (
    "kd-eval RUN pays=DIR compares the distilled backbone with a random start, by a linear probe on labelled pictures "
    "(DIR/train/<class>/*.jpg, DIR/val/<class>/*.jpg)."
)


def gain_line(gain: dict[str, Any]) -> str:
    """One sentence: whether it pays, and by how much.

    Args:
        gain: ``over``, the start that the distilled backbone is compared with; ``points``, the gain in percentage points
            (above 0: the distilled one is better); ``low`` and ``high``, the ends of its 95 % interval, which decide.

    >>> gain_line({"over": "random", "points": 7.1, "low": 5.2, "high": 9.0})
    'it pays: +7.1 points (5.2 to 9.0) over a random start'
    >>> gain_line({"over": "pretrained", "points": -1.0, "low": -2.5, "high": 0.5})
    'not shown: -1.0 points (-2.5 to 0.5) against the pre-trained weights'
    """
    size = f"{gain['points']:+.1f} points ({gain['low']:.1f} to {gain['high']:.1f})"
    other = IN_WORDS.get(gain["over"], gain["over"])
    if gain["low"] > 0:
        return f"it pays: {size} over {other}"
    if gain["high"] < 0:
        return f"it does not pay: {size} against {other}"
    return f"not shown: {size} against {other}"


def pays_rows(part: dict[str, Any]) -> list[list[str]]:
    """A row of :data:`COLUMNS` for each metric and start of the backbone, in the file's order, in per cent.

    Args:
        part: ``probe`` of ``pays.json``: ``metrics``, names; ``starts``, by start and metric a value in
            [0, 1] for each seed.
    """
    rows = []
    for metric in part["metrics"]:
        for name, by_metric in part["starts"].items():
            of_seeds = by_metric[metric]
            each = ", ".join(f"{100 * value:.1f}" for value in of_seeds)
            rows.append([metric, name, f"{fmean(of_seeds):.1%}", each])
    return rows


def pays_lines(part: dict[str, Any]) -> list[str]:
    """The answers in words, then how they were measured, and what speaks against them.

    Args:
        part: ``probe`` of ``pays.json``.
    """
    return [*(gain_line(gain) for gain in part["gains"]), part["how"], *part["notes"]]


def pays(run: RunRecords) -> list[Section]:
    """The section of the page; for a finished backbone that was not measured, how to.

    Args:
        run: read from its folder.
    """
    content = read_of_weights(run.folder, PAYS, run.notes.append)
    if "probe" in content:
        try:
            part = content["probe"]
            note = ". ".join(_sentence(line) for line in pays_lines(part)) + "."
            return [table(TITLE, COLUMNS, pays_rows(part), note=note)]
        except (KeyError, TypeError, ValueError, AttributeError):
            run.notes.append(f"{PAYS} can't be read")
    return _offer(run)


def _offer(run: RunRecords) -> list[Section]:
    """How to measure it, of a run that has ended well (status ``done``) and whose student has no classifier; else []."""
    student = (run.config.get("model") or {}).get("student") or {}
    if student.get("head", True) or run.summary.get("status") != "done":
        return []
    return [table(TITLE, [""], [[NOT_MEASURED]])]


def _sentence(line: str) -> str:
    """A line with a capital at its start."""
    return line[:1].upper() + line[1:]
