"""Numbers as targets: a list's columns, the loss, the metrics, the scale of the classifier, whole runs."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torchmetrics import MeanAbsoluteError, R2Score

from kd.cli import eval_main, export_main, predict_main, train_main
from kd.losses.numbers import RegressionKDLoss
from kd.models.output_scale import scale_output, unit_output
from kd.tasks.base import TargetCounts
from kd.tasks.fidelity_numbers import NumbersFidelity
from kd.tasks.regression import Regression
from tests._files import read_json
from tests._helpers import ARCH, TINY, Command, draw_folder, write_recipe
from tests._runs import evaluated, summary_of

NAN = math.nan
OF_RED = 1e6
"""More than float16 holds."""


def _task(
    means: tuple[float, ...] = (0.0, 0.0), deviations: tuple[float, ...] = (1.0, 1.0)
) -> Regression:
    task = Regression(loss="l2")
    task.settle(len(means))
    task.name_metrics(["red", "green"][: len(means)])
    task.scale(means, deviations)
    return task


def test_the_loss_is_of_standardised_targets_and_leaves_missing_ones_out() -> None:
    task = _task((100.0, 0.0), (50.0, 2.0))
    answer, target = (
        torch.tensor([[150.0, 2.0], [100.0, 0.0]]),
        torch.tensor([[100.0, NAN], [NAN, 4.0]]),
    )
    assert task.loss(answer, target).item() == pytest.approx((1.0 + 4.0) / 2)
    assert task.loss(answer, torch.full((2, 2), NAN)).item() == 0


def test_the_metrics_are_those_of_torchmetrics_over_the_known_targets() -> None:
    generator = torch.Generator().manual_seed(0)
    target = 500 + 80 * torch.randn(40, 2, generator=generator)
    answer = target + 30 * torch.randn(40, 2, generator=generator)
    target[::5, 1] = NAN
    task = _task()
    for part in range(0, 40, 16):
        task.update(answer[part : part + 16], target[part : part + 16], None)
    found = task.compute()
    for i, name in enumerate(("red", "green")):
        known = ~target[:, i].isnan()
        pair = answer[known, i], target[known, i]
        assert found[f"r2_{name}"].item() == pytest.approx(R2Score()(*pair).item(), abs=1e-4)
        assert found[f"mae_{name}"].item() == pytest.approx(
            MeanAbsoluteError()(*pair).item(), rel=1e-4
        )
        assert found[f"rmse_{name}"].item() == pytest.approx(
            (pair[0] - pair[1]).square().mean().sqrt().item(), rel=1e-4
        )
    assert found["r2"].item() == pytest.approx((found["r2_red"] + found["r2_green"]).item() / 2)
    assert set(found) == set(task.metric_names(teacher=True))


def test_one_target_has_plain_names() -> None:
    task = _task((0.0,), (1.0,))
    task.update(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [2.0]]), None)
    assert {name: value.item() for name, value in task.compute().items()} == pytest.approx(
        {"r2": -1.0, "mae": 0.5, "rmse": 0.5**0.5}
    )
    task.reset()
    equal = torch.full((50, 1), 70.10802)  # of whose squares rounding leaves a spread
    task.update(equal + 1, equal, None)
    assert task.compute()["r2"] == 0
    seen = TargetCounts(1)
    seen.update(torch.tensor([[-1.0], [3.0], [NAN]]))
    assert seen.of_all_batches()[0].tolist() == [2.0]


def test_the_bounded_loss_is_that_of_the_paper() -> None:
    student, teacher = (
        torch.tensor([[3.0, 1.0], [0.5, 9.0]]),
        torch.tensor([[1.0, 2.0], [1.0, 1.0]]),
    )
    target = torch.tensor([[0.0, 0.0], [0.0, NAN]])
    # squared errors 9 > 1: counts; 1 < 4: does not; .25 < 1: does not; missing: does not
    assert RegressionKDLoss(bounded=True)(student, teacher, target).item() == pytest.approx(9 / 2)
    assert RegressionKDLoss(bounded=True, margin=1.0)(
        student, teacher, target
    ).item() == pytest.approx((9 + 0.25) / 2)
    assert RegressionKDLoss("l1")(student, teacher, target).item() == pytest.approx(
        (2 + 1 + 0.5 + 8) / 2
    )


def test_a_margin_without_a_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="margin must come with bounded=true, got 0.5 alone"):
        RegressionKDLoss(margin=0.5)


@pytest.mark.parametrize("in_units", [True, False])
def test_a_scaled_classifier_is_a_plain_one_outside_the_run(in_units: bool) -> None:
    """In half precision too, where 4,003 would be 4,000."""
    model = timm.create_model(ARCH, img_size=32, num_classes=2, **TINY).eval()
    pictures = torch.randn(3, 3, 32, 32)
    expected = before = model(pictures).detach()
    for _ in range(2):  # as where a user's own model is trained again
        scale_output(model, [(4003.0, 50.0), (3.0, 2.0)], in_units)
    error = 1e-2
    if not in_units:
        expected = before * torch.tensor([50.0, 2.0]) + torch.tensor([4003.0, 3.0])
        error = 1.0
        model, pictures = model.bfloat16(), pictures.bfloat16()
    assert torch.allclose(model(pictures), expected, 0, error)
    plain = timm.create_model(ARCH, img_size=32, num_classes=2, **TINY).eval()
    plain.load_state_dict(unit_output(model.state_dict()))
    assert torch.allclose(plain(pictures.float()), expected, 0, error)


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures whose numbers are :data:`OF_RED` times their mean red, and their mean green with some missing."""
    folder = tmp_path_factory.mktemp("numbers")
    draw_folder(folder)
    draw_folder(folder / "others", train=1, val=8, size=44)
    (folder / "others" / "val").rename(folder / "test")
    for split in ("train", "val", "test"):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["path", "red", "green"])
            for i, path in enumerate(sorted((folder / split).rglob("*.jpg"))):
                red, green, _ = (
                    np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3).mean(0) / 255
                )
                table.writerow(
                    [path.relative_to(folder), OF_RED * red, "" if i % 4 == 3 else green]
                )
    return folder


@pytest.fixture(scope="module")
def run(lists: Path) -> Path:
    """A student that inherits from a teacher of numbers and learns from it."""
    source = {
        "class_path": "kd.data.sources.Manifest",
        "init_args": {
            "train": str(lists / "train.csv"),
            "val": str(lists / "val.csv"),
            "targets": ["red", "green"],
        },
    }
    recipe = write_recipe(
        lists / "numbers.yaml", lists, None, preflight="stop", recipe="numbers", data__source=source,
        model__task={"class_path": "kd.tasks.Regression"}, model__task_loss_weight=1.0,
        optim={"lr": 0.005, "warmup_epochs": 0},
    )  # fmt: skip
    assert train_main([f"recipe={recipe}", "trainer.max_epochs=10"]) == 0
    runs = lists / "runs" / "numbers"
    teacher = {
        "arch": ARCH,
        "img_size": 32,
        "kwargs": {**TINY, "depth": 1},
        "checkpoint": str(runs / "000"),
    }
    taught = [
        f"model.teacher={json.dumps(teacher)}", "model.distill_losses.kd=RegressionKDLoss",
        "model.student.inherit=auto",
        "model.ema_decay=0.5", "model.teacher.cache=on",
    ]  # fmt: skip
    assert train_main([f"recipe={recipe}", *taught, "trainer.max_epochs=2"]) == 0
    return runs / "001"


def test_the_student_answers_in_the_targets_units(run: Path, lists: Path, tmp_path: Path) -> None:
    summary = summary_of(run)
    best, teacher = summary["student"]["best_val"], summary["teacher"]["val"]
    assert teacher["r2"] > 0.5 and best["r2"] > 0.5
    assert summary["cache"]["format"] == "single"
    assert best["mae_red"] < 0.12 * OF_RED and best["mae_green"] < 0.2
    of_red = read_json(run / "fidelity.json")["targets"][0]
    assert of_red["name"] == "red" and of_red["correlation"] > 0.7 and len(of_red["deciles"]) == 10
    assert of_red["mae"]["student"] == pytest.approx(best["mae_red"], rel=0.01)
    assert of_red["mae"]["teacher"] == pytest.approx(teacher["mae_red"], rel=0.01)
    again = evaluated(run)["student"]
    assert again["r2"] == pytest.approx(best["r2"], abs=0.02)
    assert again["mae_green"] == pytest.approx(
        best["mae_green"], rel=0.05
    )  # by the name that training gave it
    assert predict_main([str(run), str(lists / "val"), f"out={tmp_path / 'found.csv'}"]) == 0
    rows = list(csv.DictReader((tmp_path / "found.csv").open()))
    assert list(rows[0]) == ["file", "red", "green"]
    true = [
        OF_RED * np.asarray(Image.open(row["file"]).convert("RGB"))[..., 0].mean() / 255
        for row in rows
    ]
    assert np.corrcoef(true, [float(row["red"]) for row in rows])[0, 1] > 0.7
    model = timm.create_model(
        f"local-dir:{run / 'student'}", pretrained=True
    )  # plain timm takes it
    assert model.get_classifier().out_features == 2


def test_a_checkpoint_of_the_run_teaches_in_units_too(run: Path) -> None:
    from kd.models.weights import read_weights

    read = read_weights(run / "checkpoints" / "best.ckpt", "model.teacher.checkpoint")[1]
    exported = read_weights(run / "student.safetensors", "model.teacher.checkpoint")[1]
    assert read.keys() == exported.keys()
    torch.testing.assert_close(read["head.bias"], exported["head.bias"])


def test_the_export_answers_in_the_same_numbers(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    assert export_main([str(run), "to=onnx"]) == 0
    kept = read_json(run / "export" / "export.json")["onnx"]
    assert kept["kept"] and kept["metric"] == "r2"
    out = capsys.readouterr().out
    assert f" {kept['student']:.3f} " in out  # a share of nothing
    assert f"{100 * kept['student']:.1f}" not in out


def test_a_list_of_test_pictures_certifies(
    run: Path, lists: Path, prints: Command, refusal: Command
) -> None:
    """Against the teacher, and against another run; other lists can't be named for the validation that chose."""
    assert "of lists data.source.test=FILE" in refusal(
        "eval", [str(run), "margin=50", f"data.source.val={lists / 'test.csv'}"]
    )
    words = ["margin=50", f"data.source.test={lists / 'test.csv'}"]
    assert eval_main([str(run), *words]) == 0
    found = read_json(run / "eval_test.json")
    assert found["pictures"] == found["certificate"]["pictures"] == 32
    errors = [
        [found[model][f"mae_{name}"] for name in ("red", "green")]
        for model in ("student", "teacher")
    ]
    gains = 1 - np.array(errors[0]) / np.array(errors[1])
    assert found["certificate"]["difference"] == pytest.approx(gains.mean(), abs=1e-3)
    out = prints("eval", [str(run), str(run.with_name("000")), *words])
    assert "000 not worse than 001 by more than 50 % of mean absolute error: " in out
    assert "alone is right" not in out


def test_a_student_of_nan_is_left_out_of_the_comparison() -> None:
    """Its numbers would be written as NaN, which no JSON has."""
    target = torch.arange(40.0)[:, None]
    for spoilt in (NAN, math.inf):
        student = target.clone()
        student[7] = spoilt
        fidelity = NumbersFidelity()
        fidelity.update(student, target + 1, target, torch.arange(40))
        result = fidelity.result(["red"])
        json.dumps(result, allow_nan=False)
        (of_red,) = result["targets"]
        assert of_red["mae"] == {"teacher": 1.0}
        assert "correlation" not in of_red


def test_fidelity_compares_student_and_teacher_by_tenths_of_the_targets() -> None:
    target = torch.arange(40.0)[:, None]
    teacher, student = target + 1, target + 3
    target[5] = NAN
    found, other = NumbersFidelity(), NumbersFidelity()
    found.update(student[:25], teacher[:25], target[:25], torch.arange(25))
    other.update(student[25:], teacher[25:], target[25:], torch.arange(25, 40))
    found.add(other)
    (of_red,) = found.result(["red"])["targets"]
    assert of_red["mae"] == {"student": 3.0, "teacher": 1.0}
    assert (of_red["correlation"], of_red["difference"]) == (pytest.approx(1.0), 2.0)
    assert [part["from"] for part in of_red["deciles"]][:2] == [0.0, 4.0] and of_red["deciles"][-1][
        "to"
    ] == 39.0
    assert all(part["student"] == 3.0 for part in of_red["deciles"])
