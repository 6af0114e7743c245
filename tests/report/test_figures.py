"""The numbers below a page's charts and tables, from records written by hand."""

import math
import time
from pathlib import Path
from typing import Any

import pytest

from kd.proof.paired import PairedCounts, tango_interval
from kd.report.card import card
from kd.report.charts import by_epoch, heat, metric_lines, phase_chart
from kd.report.comparison import label
from kd.report.evaluated import exports_parts, labels_alone_table
from kd.report.facts import Facts
from kd.report.learning import headline
from kd.report.records import RunRecords
from kd.report.sections import _cards, notes, status
from kd.report.tables import write_parts


def test_no_records_no_chart() -> None:
    run = RunRecords(Path("runs/food/007"))
    assert (
        phase_chart(Facts(run))
        is heat(Facts(run))
        is Facts(run).tier
        is headline(Facts(run))
        is notes(run)
        is None
    )
    assert not [chart for chart in metric_lines(run) if chart]
    assert status(run) == "ended early"
    assert label(Facts(run)) == "food/007"


def test_a_run_before_its_first_step_is_running() -> None:
    run = RunRecords(Path("runs/food/007"), headers={0: {"t": time.time() - 60}})
    assert status(run) == "running"
    run.headers[0]["t"] -= 3600
    assert status(run) == "ended early"
    run.samples["a"] = [{"t": time.time() - 60, "cpu": [], "mem": 1.0}]  # in a long validation
    assert status(run) == "running"


def test_an_epoch_s_last_step_may_have_fewer_batches() -> None:
    """Four of its ten batches a step: three steps an epoch."""
    header = {"max_epochs": -1, "max_steps": 30, "accumulate": 4, "batches_per_epoch": 10}
    assert Facts(RunRecords(Path("food/7"), headers={0: header})).epochs == 10


def test_epochs_of_a_run_that_was_resumed_on_twice_the_processes() -> None:
    """Five epochs of 100 batches, then 60 batches in epochs of 50."""
    steps: Any = [{"step": n, "epoch": n // 100, "p": {}} for n in range(500)]
    steps += [{"step": 500 + n, "epoch": 5 + n // 50, "p": {}} for n in range(60)]
    run = RunRecords(Path("food/7"), headers={0: {"batches_per_epoch": 50}}, steps={0: steps})
    assert Facts(run).epochs_done == 7


def test_a_metric_that_was_nan_at_first_is_no_best_one() -> None:
    rows = [{"epoch": n, "val/r2": value} for n, value in enumerate([math.nan, 0.5, 0.6])]
    run = RunRecords(Path("food/7"), summary={"primary": "r2"}, metrics=rows)
    assert Facts(run).best_val() == 0.6
    assert by_epoch(run, "val/r2") == {1: 0.5, 2: 0.6}


def test_the_share_of_the_teacher_that_a_student_keeps() -> None:
    run = RunRecords(Path("x"))
    run.summary = {"recipe": "food", "status": "done", "primary": "acc1", "teacher": {"val": {"acc1": 0.8}},
                   "student": {"best_val": {"acc1": 0.6}}}  # fmt: skip
    assert (
        "The student keeps 75.0% of its teacher's acc1 (60.0% of 80.0%)"
        in headline(Facts(run))["text"]
    )
    run.summary["student"]["best_val"]["acc1"] = 0.9
    assert "is better than its teacher: acc1 90.0% against 80.0%" in headline(Facts(run))["text"]
    assert (status(run), label(Facts(run))) == ("done", "food/x")
    run.summary["teacher"]["val"]["acc1"] = math.nan
    assert headline(Facts(run))["text"] == "The student reaches acc1 90.0%"
    run.summary["student"]["best_val"]["acc1"] = math.nan
    assert headline(Facts(run)) is None


def test_a_run_without_a_teacher_has_no_student() -> None:
    run = RunRecords(Path("x"), summary={"primary": "acc1", "student": {"best_val": {"acc1": 0.9}}})
    run.summary["status"] = "done"
    assert headline(Facts(run))["text"] == "The model reaches acc1 90.0%"


def test_validation_begins_with_the_student_before_its_first_step() -> None:
    run = RunRecords(Path("x"), summary={"student": {"start_val": {"acc1": 0.5}}})
    run.metrics = [{"epoch": 0.0, "step": 5.0, "val/acc1": 0.7}]
    (chart,) = [one for one in metric_lines(run) if one]
    assert list(chart.x) == [0.0, 5.0] and chart.series == {"val/acc1": [0.5, 0.7]}


def test_two_starts_are_not_compared() -> None:
    found = {
        "gain": (0.0, 0.0, 0.25),
        "measure": "accuracy",
        "metric": "acc1",
        "pictures": 9,
        "rates": {"0.1": 0.5},
    }
    assert (
        labels_alone_table(found)
        .rows[0][0]
        .startswith("+0.0 points (0.0 to 25.0) over labels alone")
    )
    (line,), *_ = labels_alone_table({**found, "of_start": True}).rows
    assert line.startswith("not compared with labels alone: neither training made the start better")


def test_a_small_learning_rate_is_drawn_as_it_is() -> None:
    rows = [{"step": float(step), "train/lr": 3e-5 * (1 - step / 800)} for step in range(400)]
    (chart,) = [one for one in metric_lines(RunRecords(Path("x"), metrics=rows)) if one]
    (rates,) = chart.series.values()
    assert len(rates) < 200
    assert rates[0] == pytest.approx(3e-5, rel=0.01) and rates[-1] == pytest.approx(
        1.5e-5, rel=0.01
    )


@pytest.mark.parametrize(
    ("pictures", "only_teacher", "only_student", "score", "said"),
    [
        (77, 3, 2, 0.84, "can't be told from its teacher by these pictures: acc1 84.0% against 85.0%, -1.3 points ("),
        (77, 6, 2, 0.80, "can't be told from its teacher by these pictures: acc1 80.0% against 85.0%, -5.2 points ("),
        (900, 60, 8, 0.80, "keeps 94.1% of its teacher's acc1 (80.0% of 85.0%, -5.8 points (-7.7 to -4.1) on 900 pictures"),
        (900, 8, 60, 0.90, "is better than its teacher: acc1 90.0% against 85.0%, +5.8 points (4.1 to 7.7) on 900 pictures"),
    ],
)  # fmt: skip
def test_a_headline_claims_what_the_pictures_bear(
    pictures: int, only_teacher: int, only_student: int, score: float, said: str, tmp_path: Path
) -> None:
    run = RunRecords(tmp_path)
    run.summary = {"recipe": "food", "status": "done", "primary": "acc1", "teacher": {"val": {"acc1": 0.85}},
                   "student": {"best_val": {"acc1": score}}}  # fmt: skip
    pair = PairedCounts(pictures, only_teacher, only_student)
    low, high = tango_interval(pair, 0.95)
    gap = {"pictures": pictures, "difference": pair.difference, "low": low, "high": high}
    run.fidelity = {"kind": "classification", "gap": gap}
    assert f"The student {said}" in headline(Facts(run))["text"]


@pytest.mark.parametrize(
    ("student", "said"),
    [
        (76.5, "The student has mae_kcal 76.5, its teacher 75"),
        (70.0, "is better than its teacher: mae_kcal 70 against 75"),
    ],
)
def test_errors_in_units_are_no_shares(student: float, said: str, tmp_path: Path) -> None:
    run = RunRecords(tmp_path)
    run.config = {"model": {"task": {"class_path": "kd.tasks.Regression"}}}
    best = {"mae_kcal": student, "mae": student, "r2": 0.8}
    run.summary = {"recipe": "food", "status": "done", "primary": "mae_kcal", "data": {"classes": 1},
                   "teacher": {"arch": "t", "params": 2e6, "val": {"mae_kcal": 75.0, "mae": 75.0, "r2": 0.9}},
                   "student": {"params": 1e6, "best_val": best}}  # fmt: skip
    assert said in headline(Facts(run))["text"]
    assert [title for title, *_ in _cards(Facts(run))["cards"]] == ["status", "student", "teacher"]
    export = {
        "size_mb": 4.0,
        "agreement": 1.0,
        "max_difference": 0.0,
    }
    (tmp_path / "student.safetensors").write_bytes(b"weights")
    write_parts(
        tmp_path, "exports", exports_parts({"onnx": {**export, "metric": "r2", "export": 0.8}})
    )
    page = card(run)
    assert "| onnx | 4 | 100.00% | 0.800 |  | 0 |" in page
    page = page.replace("100.00%", "")
    assert "It gives 1 number a picture." in page and "image-regression" in page and "%" not in page
    assert (
        f"| mean absolute error | 75 | {student:.4g} |" in page and "| R2 | 0.900 | 0.800 |" in page
    )


def test_a_card_names_the_start_that_the_student_had(tmp_path: Path) -> None:
    """``inherit: auto`` of a recipe may have fallen back to random weights."""
    run = RunRecords(tmp_path)
    run.config = {"model": {"student": {"inherit": "auto"}}}
    starts = {}
    for start in ("inherited", "scratch", "pre-trained"):
        run.summary = {"student": {"start": start}}
        starts[start] = "from the teacher's layers" in card(run)
    assert starts == {"inherited": True, "scratch": False, "pre-trained": False}


def hot_cores(use: list[list[float]]) -> str:
    """What is said of cores whose use is known."""
    facts = Facts(RunRecords(Path("x")))
    facts.core_use_after_start = use
    return facts.hot_cores


def test_few_full_cores_beside_idle_ones_are_hot() -> None:
    one = [[99.0, 5.0, 5.0, 5.0]] * 60
    assert hot_cores(one) == "1 of 4 cores are full while all average 28 %"
    assert not hot_cores([[99.0] * 4] * 60), "a busy machine"
    assert not hot_cores([[10.0] * 4] * 60), "an idle one"
    assert not hot_cores([[99.0, 99.0, 5.0, 5.0]] * 60), "half of them"
    assert not hot_cores([[0.0, 100.0] * 4] * 60), "too many"
