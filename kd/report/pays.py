"""Whether a distilled backbone pays: ``kd-eval RUN pays=DIR`` in the terminal and on the run's page."""

from typing import Any

from kd.report.charts import Section, table
from kd.report.records import RunRecords
from kd.storage.elsewhere import mapping_of

FILE = "pays.json"
"""In the run's folder: what ``kd-eval pays=`` has measured."""
TITLE = "Does it pay?"
DISTILLED = "distilled"
IN_WORDS = {"random": "a random start", "pretrained": "the pre-trained weights"}
"""Names of the starts in sentences."""
COLUMNS = ["backbone", "accuracy, mean", "each seed", "distilled is ahead by (95 %)"]
NOT_MEASURED = (
    "kd-eval RUN pays=DIR compares the distilled backbone with a random start, by a linear probe on your labelled "
    "pictures: DIR/train/<class>/*.jpg, DIR/val/<class>/*.jpg."
)


def gain_line(gain: dict[str, Any]) -> str:
    """One sentence: whether it pays, and by how much.

    Args:
        gain: ``over`` (a start), ``points``, ``low`` and ``high``.

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


def pays_rows(probe: dict[str, Any]) -> list[list[str]]:
    """A row of :data:`COLUMNS` for each start, those that the distilled one is compared with first.

    Args:
        probe: of ``pays.json``.
    """
    ahead = {}
    for gain in probe["gains"]:
        ahead[gain["over"]] = f"{gain['points']:+.1f} ({gain['low']:.1f} to {gain['high']:.1f})"
    rows = []
    for name, start in probe["starts"].items():
        each = ", ".join(f"{100 * accuracy:.1f}" for accuracy in start["seeds"])
        rows.append([name, f"{start['mean']:.1%}", each, ahead.get(name, "")])
    return rows


def pays_lines(probe: dict[str, Any]) -> list[str]:
    """The answers in words, then how they were measured.

    Args:
        probe: of ``pays.json``.
    """
    seeds = len(probe["starts"][DISTILLED]["seeds"])
    how = (
        f"linear probe on frozen features ({', '.join(probe['features'])}): {seeds} fits, each to another half of "
        f"{probe['labelled']:,} labelled pictures of {probe['classes']} classes, judged by {probe['judged']:,} others"
    )
    return [*(gain_line(gain) for gain in probe["gains"]), how, *probe["notes"]]


def pays(run: RunRecords) -> list[Section]:
    """The section of the page; for a finished backbone that was not measured, how to.

    Args:
        run: read from its folder.
    """
    content = mapping_of(run.folder / FILE)
    try:
        probe = content["probe"]
        rows = pays_rows(probe)
        note = ". ".join(_sentence(line) for line in pays_lines(probe)) + "."
    except (KeyError, TypeError, ValueError, AttributeError):
        if content:
            run.notes.append(f"{FILE} can't be read")
        return _offer(run)
    return [table(TITLE, COLUMNS, rows, note=note)]


def _offer(run: RunRecords) -> list[Section]:
    """How to measure it, of a run that has ended and whose student has no classifier."""
    student = (run.config.get("model") or {}).get("student") or {}
    if student.get("head", True) or run.summary.get("status") != "done":
        return []
    return [table(TITLE, [""], [[NOT_MEASURED]])]


def _sentence(line: str) -> str:
    return line[:1].upper() + line[1:]
