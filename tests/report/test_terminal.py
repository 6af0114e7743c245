"""What the terminal shows of models side by side."""

import math
from pathlib import Path
from typing import Any

import pytest

from kd.report.evaluated import evaluation_parts
from kd.report.tables import Result
from kd.report.terminal import next_steps, print_parts, print_result


def _regression(name: str, r2: float, mae: float) -> dict[str, Any]:
    """Figures of a model of numbers."""
    student = {"params": 1_000_000, "r2": r2, "mae_calories": mae}
    return {"run": name, "pictures": 10, "data": "pictures (val)", "student": student}


def test_errors_in_units_differ_in_units_and_not_in_points(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_parts(
        evaluation_parts([_regression("a", 0.8, 30.0), _regression("b", 0.9, 28.5)], [], [])
    )
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "b - a" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["b - a", "x 1.00", "+0.1", "-1.5"]


def test_what_json_lacks_is_null_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(Result([math.nan, 0.5]), as_json=True)
    assert capsys.readouterr().out == "[\n  null,\n  0.5\n]\n"


@pytest.mark.parametrize(
    ("val", "commands"),
    [
        ({"acc1": 0.9}, ["kd-eval R folder=DIR", "kd-export R to=onnx", "kd-report R --open"]),
        ({"miou": 0.4}, ["kd-export R to=onnx", "kd-report R --open"]),
        (
            {"feature_loss": 0.1, "rankme": 9.0},
            [
                "kd-train recipe=finetune data.source.root=DIR model.student.checkpoint=R",
                "kd-eval R pays=DIR",
                "kd-report R --open",
            ],
        ),
    ],
)
def test_a_run_names_what_makes_sense_next(val: dict[str, float], commands: list[str]) -> None:
    head, *lines = next_steps({"steps": 5, "student": {"val": val}}, Path("R"))
    assert head == "next:"
    assert [line.split("  # ")[0].strip() for line in lines] == commands
    assert next_steps({"steps": 0, "student": {"val": val}}, Path("R")) == []
