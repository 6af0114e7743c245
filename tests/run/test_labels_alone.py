"""``labels_alone=true``: the same student from the same start without its teacher's answers."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kd.cli import card_main, train_main
from kd.report.tables import Table
from kd.run.eval_options import EvalOptions
from kd.run.labels_alone import compare_with_labels_alone
from kd.run.measure import evaluate_models
from kd.run.request import translate
from kd.storage.checkpoints import lock_run
from kd.storage.elsewhere import mapping_of
from tests._files import read_yaml, write_json
from tests._forks import ForkedRun
from tests._helpers import draw_folder, save_teacher, write_recipe
from tests._runs import resumed

RATES = ("0.001", "0.00033")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of a student that inherits its teacher's layers, with the comparison."""
    home = tmp_path_factory.mktemp("labels_alone")
    recipe = write_recipe(
        home / "r.yaml",
        draw_folder(home / "data"),
        save_teacher(home / "t.safetensors"),
        labels_alone=True,
        monitor={"max_hours": 9},
        model__student__inherit=True,
        model__distill_losses={"f": {"class_path": "kd.losses.MSELoss"}, "kd": {"class_path": "kd.losses.KDLoss"}},
        model__taps={"f": {"student": "maps", "teacher": "maps"}},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kd.run.train_first.start_kd_train", ForkedRun)
        assert train_main([f"recipe={recipe}"]) == 0
        yield home / "runs" / "tiny" / "000"


def students(run: Path) -> list[Path]:
    return [run / "labels_alone" / f"lr_{rate}" / "tiny" / "000" for rate in RATES]


def first_line(run: Path) -> str:
    (table,) = mapping_of(run / "tables" / "labels_alone.json")["parts"]
    return table["rows"][0][0]


def test_the_same_student_learns_from_labels_at_two_rates(compared: Path) -> None:
    own = mapping_of(compared / "summary.json")
    assert own["student"]["start"] == "inherited"
    for folder, rate in zip(students(compared), RATES, strict=True):
        summary = mapping_of(folder / "summary.json")
        assert summary["student"]["start"] == "inherited"
        assert summary["student"]["start_val"]["acc1"] == own["student"]["start_val"]["acc1"]
        assert (summary["epochs"], summary["steps"]) == (own["epochs"], own["steps"])
        config = read_yaml(folder / "config.yaml")
        assert config["optim"]["lr"] == pytest.approx(float(rate), rel=0.02)
        assert config["model"]["distill_losses"] == config["model"]["taps"] == {}
        assert config["model"]["task_loss_weight"] == 1
        assert config["monitor"]["max_hours"] is None
        assert not (folder / "checkpoints").exists()


def test_the_difference_is_that_of_the_better_one_by_picture(compared: Path) -> None:
    scores = {}
    for folder in students(compared):
        scores[folder] = mapping_of(folder / "summary.json")["student"]["best_val"]["acc1"]
    better = max(scores, key=lambda folder: scores[folder])
    request = translate([str(better), str(compared)])
    parts = evaluate_models(request, EvalOptions(split="val")).parts
    (said,) = [
        row[0]
        for part in parts
        if isinstance(part, Table)
        for row in part.rows
        if "alone is right" in f"{row[0]}"
    ]
    gap, _, _ = first_line(compared).partition(" over labels alone")
    assert f": {gap}, paired" in f"{said}"


def test_headline_page_and_card_have_it(compared: Path) -> None:
    line = first_line(compared)
    assert line in mapping_of(compared / "summary.json")["headline"]
    page = (compared / "report.html").read_text()
    assert page.count(line) >= 2 and "Not compared with labels alone" not in page
    assert card_main([str(compared)]) == 0
    (card,) = compared.glob("*.md")
    assert "over labels alone" in card.read_text()


def test_a_finished_run_is_compared_afterwards_and_nothing_is_trained_twice(
    compared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = first_line(compared)
    (compared / "tables" / "labels_alone.json").unlink()
    before = [(folder / "student.safetensors").stat().st_mtime_ns for folder in students(compared)]
    with lock_run(compared / "labels_alone"):  # by a second command at the same time
        assert train_main([f"resume={compared}", "labels_alone=true"]) == 2
    resumed(compared, "labels_alone=true")
    after = [(folder / "student.safetensors").stat().st_mtime_ns for folder in students(compared)]
    assert before == after
    assert line in capsys.readouterr().out


def test_a_run_that_was_stopped_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its students by labels alone would train for all epochs, and its budget is spent."""
    write_json(tmp_path / "summary.json", {"status": "stopped: BudgetSpent", "primary": "acc1"})
    run: Any = SimpleNamespace(config={"labels_alone": True})
    compare_with_labels_alone(run, tmp_path)
    assert "not compared, as the run has not come to its end" in capsys.readouterr().out
    assert not (tmp_path / "labels_alone").exists()


def test_a_page_says_what_was_not_compared(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    assert "Not compared with labels alone. kd-train resume=RUN labels_alone=true" in page
