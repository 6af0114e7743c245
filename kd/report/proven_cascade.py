"""The cascade of a run on its page: accuracy against milliseconds, as ``kd-eval cascade=true`` measured them."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from kd.report.charts import Section, line_chart, table
from kd.report.records import RunRecords
from kd.storage.of_weights import CASCADE, read_of_weights

POINTS = 41
"""Of the chart."""
COLUMNS = ["teacher answers", "accuracy", "ms a picture", "of the teacher's ms"]
"""Of the curve's table."""


def cascade_sections(run: RunRecords) -> list[Section | None]:
    """A chart and a table of the curve, with the goal's threshold; none where no cascade was measured.

    Args:
        run: read from its folder.
    """
    found = read_of_weights(run.folder, CASCADE, run.notes.append)
    curve = found.get("curve")
    teacher_ms = found.get("teacher_ms")
    if not isinstance(curve, list) or not curve or not teacher_ms:
        return []
    alone = f"The teacher alone: {found['teacher']:.1%} in {teacher_ms:.1f} ms"
    sentences = [alone, *threshold_lines(found)]
    note = ". ".join(sentences) + "."
    numbers = table("The same in numbers", COLUMNS, curve_rows(found), note=note)
    return [_chart(curve), numbers]


def _chart(curve: Sequence[dict[str, float]]) -> Section | None:
    """Accuracy in % over ms a picture, at :data:`POINTS` even distances.

    Between two points of the curve it is a line: a share of the pictures can be decided by either threshold.

    Args:
        curve: ``ms`` and ``accuracy`` (in [0, 1]) of each threshold, by rising ``ms``.
    """
    times = [float(point["ms"]) for point in curve]
    accuracies = [100 * float(point["accuracy"]) for point in curve]
    first, last = times[0], times[-1]
    step = (last - first) / (POINTS - 1)
    x = []
    y = []
    for number in range(POINTS):
        ms = first + step * number
        accuracy = _between(ms, times, accuracies)
        x.append(round(ms, 2))
        y.append(round(accuracy, 2))
    title = "The student where it is sure, else the teacher"
    return line_chart(title, x, "ms a picture", {"accuracy, %": y})


def curve_rows(found: dict[str, Any]) -> list[list[str]]:
    """A cascade's curve as rows of :data:`COLUMNS`: shares in per cent, ms of one picture.

    Args:
        found: the content of ``cascade.json``.
    """
    rows = []
    for point in found["curve"]:
        ms = point["ms"]
        of_teacher = ms / found["teacher_ms"]
        cells = [
            f"{point['share']:.1%}",
            f"{point['accuracy']:.1%}",
            f"{ms:.2f}",
            f"{of_teacher:.0%}",
        ]
        rows.append(cells)
    return rows


def threshold_lines(found: dict[str, Any]) -> list[str]:
    """The threshold that was chosen for the goal, and what it gives on other pictures, in words.

    Args:
        found: the content of ``cascade.json``.
    """
    goal = found["goal"]
    certain = f"{100 * found['confidence']:.4g} % confidence on {found['chosen_on']:,} pictures"
    threshold = found["threshold"]
    if threshold is None:
        sentences = [f"{goal}: no threshold is sure to reach it with {certain}"]
        if "kept_goal" in found:
            sentences.append(f"{CASCADE} keeps the rule for {found['kept_goal']}, found before")
        return sentences
    cautions = found.get("cautions", [])
    sure = "reached on these pictures" if cautions else "guaranteed"
    chosen = found["chosen"]
    checked = found["checked"]
    low, high = found["share_interval"]
    return [
        f"{goal}: threshold {threshold:.4f}, {sure} with {certain} "
        f"({chosen['accuracy']:.1%}, {chosen['share']:.1%} asked)",
        f"checked on {checked['pictures']:,} others: {checked['accuracy']:.1%} (the teacher {checked['teacher']:.1%}), "
        f"{checked['share']:.1%} asked, {checked['ms']:.2f} ms a picture",
        f"share asked on such pictures: {low:.1%} to {high:.1%}",
        *cautions,
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
    distance = x - xs[left]
    width = xs[right] - xs[left]
    rise = ys[right] - ys[left]
    return ys[left] + rise * distance / width
