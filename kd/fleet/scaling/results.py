"""What ``kd-scale`` has measured: ``scale.json`` and its tables.

``scale`` is the content of ``scale.json``; other programs read that file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kd.fleet.scaling.measure import Case, all_reduces, reading
from kd.report.costs import ERROR, Change, outlook_of
from kd.report.facts import Facts
from kd.report.records import RunRecords
from kd.report.tables import Table

ASSUMES = (
    "as kd-report --what-if gpus=N predicts it: the wait for gradients grows as a ring's traffic, (n - 1) / n, over a "
    "network as fast as between the measured processes; each process keeps its batch and has as many cores as now; "
    f"give or take {ERROR:.0%}"
)
"""What the prediction takes for granted."""


def content(
    recipe: str, measured: Sequence[tuple[Case, RunRecords]], wanted: int
) -> dict[str, Any]:
    """The content of ``scale.json``: what was measured, and the prediction for ``wanted`` processes of ddp.

    Of a measured run ``efficiency`` is the speed of a process over that of the first run, 1 where nothing is lost; its
    ``kind`` is ``weak`` where it has that run's batch, else ``strong``.

    Args:
        recipe: its name.
        measured: the runs; the first has one process and strategy ``ddp``.
        wanted: processes to predict.
    """
    rows = [reading(case, run) for case, run in measured]
    alone = rows[0]
    for row in rows:
        speed_of_one = row["images_per_s"] / row["processes"]
        row["efficiency"] = speed_of_one / alone["images_per_s"]
        row["kind"] = "weak" if row["batch"] == alone["batch"] else "strong"

    # the runs of ddp in which each process has its whole batch
    weak = []
    for case, run in measured:
        if case.strategy == "ddp" and case.batch == alone["batch"]:
            weak.append((case.processes, run))
    most, largest = max(weak, key=lambda of_run: of_run[0])
    reduces = []
    for _, run in weak:
        reduces += all_reduces(run)

    outlook = outlook_of(Facts(largest), Change(gpus=wanted, epochs=1))
    speed_of_one = outlook.images_per_s / wanted
    predicted = {
        "from_processes": most,
        "processes": wanted,
        "step_ms": outlook.step_ms,
        "images_per_s": outlook.images_per_s,
        "efficiency": speed_of_one / alone["images_per_s"],
        "assumes": ASSUMES,
    }
    return {
        "recipe": recipe,
        "measured": rows,
        "all_reduce": reduces,
        "predicted": predicted,
    }


def scaling_headline(scale: Mapping[str, Any]) -> str:
    """The prediction in one line, with what it takes for granted."""
    predicted = scale["predicted"]
    return (
        f"{predicted['processes']} processes would train {predicted['images_per_s']:.0f} images/s, efficiency "
        f"{predicted['efficiency']:.0%}, predicted from {predicted['from_processes']} {predicted['assumes']}"
    )


def tables(scale: Mapping[str, Any]) -> list[Table]:
    """Speed and efficiency, where a step's time and memory go, and the all-reduces; the prediction is a note."""
    speed = []
    steps = []
    for m in scale["measured"]:
        name = f"{m['strategy']} {m['processes']} x {m['batch']}"
        speed.append(
            [name, m["kind"], m["images_per_s"], 100 * m["efficiency"], m["step_ms"]],
        )
        ms = m["parts_ms"]
        student_ms = ms["forward"] + ms["backward"]
        times = [ms["teacher"], student_ms, ms["rest"], m["communication_ms"]]
        steps.append([name, *times, m["memory_mb"], m["state_mb"]])
    reduces = [[a["processes"], a["mb"], a["ms"]] for a in scale["all_reduce"]]
    note = (
        "weak: each process keeps the batch; strong: all processes share it; efficiency is against one process\n"
        f"{scaling_headline(scale)}"
    )
    of_speed = ["processes x batch", "scaling", "images/s", "efficiency (%)", "step ms"]
    of_steps = ["processes x batch", "teacher ms", "student ms", "rest ms", "communication ms",
                "memory MB", "state MB"]  # fmt: skip
    state = "state: weights, gradients and optimizer of a process"
    return [
        Table("Measured here", of_speed, speed, note),
        Table("A step", of_steps, steps, state),
        Table("All-reduces", ["processes", "MB", "ms"], reduces),
    ]
