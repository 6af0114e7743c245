"""The cascade on the page."""

import json
from pathlib import Path

from kd.report.proven_cascade import cascade_sections
from kd.report.records import RunRecords
from tests._pages import CASCADE, write_run


def test_the_curve_is_drawn_over_milliseconds(tmp_path: Path) -> None:
    """At even distances, as the page draws them, and with the numbers that were measured below."""
    run = RunRecords(write_run(tmp_path / "run", steps=4, samples=4))
    assert cascade_sections(run) == []
    (tmp_path / "run" / "cascade.json").write_text(json.dumps(CASCADE))  # no student beside it
    chart, numbers = cascade_sections(run)
    assert chart is not None
    assert numbers is not None
    steps = {round(b - a, 1) for a, b in zip(chart["x"], chart["x"][1:], strict=False)}
    assert max(steps) - min(steps) < 0.11
    accuracies = chart["series"]["accuracy, %"]
    assert (accuracies[0], accuracies[-1]) == (77.6, 86.7)
    assert numbers["rows"][1] == ["10.0%", "80.6%", "126.90", "44%"]
    assert "no threshold is sure to reach it" in numbers["note"]
