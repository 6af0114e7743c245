"""The cascade of a run on its page: accuracy against milliseconds, as ``kd-eval cascade=true`` measured them."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from kd.report.charts import Section, line_chart, table
from kd.report.records import RunRecords
from kd.storage.elsewhere import mapping_of

FILE = "cascade.json"
POINTS = 41
"""Of the chart."""


def cascade_sections(run: RunRecords) -> list[Section | None]:
    """A chart and a table of the curve, with the goal's threshold; none where no cascade was measured.

    Args:
        run: read from its folder.
    """
    found = mapping_of(run.folder / FILE)
    curve, teacher_ms = found.get("curve"), found.get("teacher_ms")
    if not isinstance(curve, list) or not curve or not teacher_ms:
        return []
    times, accuracies, rows = [], [], []
    for point in curve:
        times.append(float(point["ms"]))
        accuracies.append(100 * float(point["accuracy"]))
        cells = [
            f"{point['share']:.1%}",
            f"{point['accuracy']:.1%}",
            f"{point['ms']:.1f}",
            f"{point['ms'] / teacher_ms:.0%}",
        ]
        rows.append(cells)
    title = "The student where it is sure, else the teacher"
    columns = ["teacher answers", "accuracy", "ms a picture", "of the teacher's ms"]
    # The chart's points are at even distances; between two thresholds a share of the pictures takes either one.
    step = (times[-1] - times[0]) / (POINTS - 1)
    even = [times[0] + step * i for i in range(POINTS)]
    between = [round(_between(ms, times, accuracies), 2) for ms in even]
    shown = {"accuracy, %": between}
    return [
        line_chart(title, [round(ms, 2) for ms in even], "ms a picture", shown),
        table("The same in numbers", columns, rows, note=_note(found)),
    ]


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """The value at ``x`` on the line through points, whose ``xs`` rise; the end's value outside of them.

    >>> _between(1.5, [1, 2, 4], [10, 20, 20]), _between(9, [1, 2, 4], [10, 20, 20])
    (15.0, 20)
    """
    right = bisect_left(xs, x)
    if right == 0:
        return ys[0]
    if right == len(xs):
        return ys[-1]
    left = right - 1
    width = xs[right] - xs[left]
    return ys[left] + (ys[right] - ys[left]) * (x - xs[left]) / width


def _note(found: dict[str, Any]) -> str:
    """The teacher alone, and the threshold that was chosen for the goal."""
    alone = f"The teacher alone: {found['teacher']:.1%} in {found['teacher_ms']:.1f} ms."
    goal, sure = found["goal"], f"{100 * found['confidence']:.4g} % confidence"
    if found.get("threshold") is None:
        return f"{alone} {goal}: no threshold is sure to reach it ({sure})."
    checked = found["checked"]
    return (
        f"{alone} {goal} ({sure}): the teacher answers where the {found['score']} is below {found['threshold']:.3g}; on "
        f"{checked['pictures']:,} other pictures {checked['accuracy']:.1%}, {checked['share']:.1%} by the teacher."
    )
