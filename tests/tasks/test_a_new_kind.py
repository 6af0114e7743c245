"""A kind of target that kd does not have trains, validates, exports and predicts, with no edit anywhere in kd."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kd.cli import eval_main, export_main, predict_main, train_main
from tests._files import read_json
from tests._helpers import ARCH, TINY, Command, draw_folder, write_recipe
from tests._runs import summary_of

TRUST = "trust=tests._numbers"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    pictures = draw_folder(folder / "pictures")
    source = {"class_path": "tests._numbers.Colours", "init_args": {"root": str(pictures)}}
    task = {"class_path": "tests._numbers.Regression"}
    return write_recipe(
        folder / "numbers.yaml", pictures, None, preflight="stop", recipe="numbers", data__source=source,
        model__task=task, model__task_loss_weight=1.0, optim={"lr": 0.01, "warmup_epochs": 0},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(recipe: Path) -> Path:
    """A student of a teacher that was trained on the numbers."""
    assert train_main([f"recipe={recipe}", TRUST, "trainer.max_epochs=8"]) == 0
    runs = recipe.parent / "runs" / "numbers"
    teacher = {
        "arch": ARCH,
        "img_size": 32,
        "kwargs": {**TINY, "depth": 1},
        "checkpoint": str(runs / "000"),
    }
    loss = {"numbers": {"class_path": "tests._numbers.NumbersLoss"}}
    taught = [f"model.teacher={json.dumps(teacher)}", f"model.distill_losses={json.dumps(loss)}"]
    assert train_main([f"recipe={recipe}", TRUST, *taught, "trainer.max_epochs=4"]) == 0
    return runs / "001"


def test_it_trains_and_validates(run: Path) -> None:
    summary = summary_of(run)
    assert set(summary["student"]["best_val"]) == {"r2", "mae", "epoch", "step"}
    assert summary["teacher"]["val"]["r2"] > 0.5
    assert summary["student"]["best_val"]["r2"] > 0
    assert not (run / "fidelity.json").exists()  # what it compares are classes
    assert (run / "report.html").is_file()


def test_it_is_evaluated(run: Path) -> None:
    assert eval_main([str(run), TRUST]) == 0
    found = read_json(run / "eval_val.json")
    trained = summary_of(run)
    assert found["student"]["r2"] == pytest.approx(trained["student"]["best_val"]["r2"], abs=0.02)
    assert "fidelity" not in found


def test_it_predicts_numbers_under_their_names(run: Path, tmp_path: Path) -> None:
    pictures = run.parents[1].parent / "pictures" / "val"
    assert predict_main([str(run), str(pictures), f"out={tmp_path / 'found.csv'}", TRUST]) == 0
    rows = list(csv.DictReader((tmp_path / "found.csv").open()))
    assert list(rows[0]) == ["file", "red", "green"]
    red = [np.asarray(Image.open(row["file"]))[..., 0].mean() / 255 for row in rows]
    assert np.corrcoef(red, [float(row["red"]) for row in rows])[0, 1] > 0.5


def test_it_is_exported_and_the_export_answers_in_numbers(run: Path) -> None:
    from kd.ship.export.manifest import FILE, manifest_of
    from kd.ship.serving.answers import answer

    pytest.importorskip("onnxruntime")
    assert export_main([str(run), "to=onnx", TRUST]) == 0
    manifest = manifest_of(read_json(run / "export" / "onnx" / FILE))
    assert (manifest.task, manifest.classes) == ("numbers", ["red", "green"])
    assert answer(np.array([0.25, 0.5]), manifest, 5) == {"numbers": {"red": 0.25, "green": 0.5}}
    kept = read_json(run / "export" / "export.json")["onnx"]
    assert kept["kept"] and kept["metric"] == "r2"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            "model.task=Classification",
            "Classification needs one label a picture, data.source gives numbers",
        ),
        ("data.augment.mixup=0.5", "data.augment.mixup: is not defined for numbers"),
        ("data.balance_classes=true", "data.balance_classes: needs one label a picture"),
    ],
)
def test_what_is_not_defined_for_it_is_refused(
    recipe: Path, given: str, reason: str, refusal: Command
) -> None:
    assert reason in refusal("train", [f"recipe={recipe}", TRUST, given])
