"""Students without a classifier, taught by the features of teachers on pictures without labels."""

import csv
import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from kd.cli import main
from tests._helpers import ARCH, CLASSES, TINY, draw_folder, save_teacher, write_recipe

HEADLESS = {"arch": ARCH, "img_size": 32, "kwargs": {**TINY, "depth": 1}, "head": False}


def label_free_recipe(path: Path, pictures: Path, teachers: dict[str, dict], **changes: object) -> Path:
    """A summary and a patch loss for each teacher."""
    losses: dict[str, dict] = {}
    taps: dict[str, dict] = {}
    for name in teachers:
        losses[f"{name}_summary"] = {"class_path": "CosineLoss"}
        losses[f"{name}_patches"] = {"class_path": "RADIOLoss", "init_args": {"standardize": "variance"}}
        taps[f"{name}_summary"] = {"student": "prelogits", "teacher": "prelogits"}
        taps[f"{name}_patches"] = {"student": "norm", "teacher": "norm"}
    return write_recipe(path, pictures, None, **{
        "data__source": {"class_path": "kd.data.sources.Pictures", "init_args": {"root": str(pictures)}},
        "model__teachers": teachers, "model__student": HEADLESS, "model__distill_losses": losses,
        "model__taps": taps, "model__teacher_of": {name: name.split("_")[0] for name in losses}, **changes,
    })  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with one teacher (``tiny.yaml``) and its finished run, on pictures at any depth."""
    root = tmp_path_factory.mktemp("label_free")
    draw_folder(root / "pictures" / "some" / "where")
    weights = save_teacher(root / "dino.safetensors", seed=1)
    teachers = {"dino": {"arch": ARCH, "img_size": 32, "kwargs": TINY, "checkpoint": str(weights)}}
    recipe = label_free_recipe(root / "tiny.yaml", root / "pictures", teachers, model__ema_decay=0.9)
    assert main("train", [f"recipe={recipe}"]) == 0
    return root


def folder(made: Path) -> Path:
    return made / "runs" / "tiny" / "000"


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_without_labels_is_measured_on_held_out_pictures(made: Path) -> None:
    summary = json.loads((folder(made) / "summary.json").read_text())
    assert (summary["data"]["train"], summary["data"]["val"], summary["data"]["classes"]) == (58, 6, 0)
    val = summary["student"]["val"]
    assert set(val) == {"feature_loss", "dino_summary_loss", "dino_patches_loss", "rankme"}
    assert val["feature_loss"] == pytest.approx(val["dino_summary_loss"] + val["dino_patches_loss"], rel=1e-4)
    assert 1 <= val["rankme"] <= TINY["embed_dim"]
    measured = [float(row["val/feature_loss"]) for row in rows(folder(made)) if row["val/feature_loss"]]
    assert summary["student"]["best_val"]["feature_loss"] == pytest.approx(min(measured), abs=1e-5)
    assert measured[-1] < measured[0]
    assert {"train/dino_summary_loss", "train/dino_patches_loss"} <= set(rows(folder(made))[0])


def test_the_student_is_its_features_in_plain_timm(made: Path) -> None:
    run = folder(made)
    state = load_file(run / "student.safetensors")
    plain = timm.create_model(ARCH, num_classes=0, img_size=32, **{**TINY, "depth": 1}).eval()
    plain.load_state_dict(state)
    from_folder = timm.create_model(f"local-dir:{run / 'student'}", pretrained=True).eval()
    with torch.no_grad():
        features = plain(torch.ones(1, 3, 32, 32))
        assert features.shape == (1, TINY["embed_dim"])
        assert torch.equal(features, from_folder(torch.ones(1, 3, 32, 32)))
    assert timm.create_model(f"local-dir:{run / 'student'}", pretrained=True, num_classes=3).num_classes == 3


def test_labels_on_top(made: Path, pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fine-tuning and the linear probe: a new classifier on the distilled backbone."""
    recipe = write_recipe(made / "labels.yaml", pictures, None, model__student={"arch": ""}, model__ema_decay=0.5)
    items = [f"recipe={recipe}", f"model.student.checkpoint={folder(made)}", "trainer.max_epochs=1"]
    assert main("train", items) == 0
    assert "has no classifier: its backbone is taken, the classifier is new" in capsys.readouterr().out
    assert main("train", [*items, "model.student.freeze=backbone", "model.student.kwargs.drop_path_rate=0.5"]) == 0
    before = load_file(folder(made) / "student.safetensors")
    tuned, probed = (load_file(made / "runs" / "tiny" / f"{i:03d}" / "student.safetensors") for i in (1, 2))
    assert set(tuned) == set(probed) == {*before, "head.weight", "head.bias"}
    assert probed["head.weight"].shape == (len(CLASSES), TINY["embed_dim"])
    assert all(torch.equal(probed[name], before[name]) for name in before)
    assert not all(torch.equal(tuned[name], before[name]) for name in before)
    checkpoint = torch.load(made / "runs/tiny/002/checkpoints/last.ckpt", weights_only=True)
    trained = [p for group in checkpoint["optimizer_states"][0]["param_groups"] for p in group["params"]]
    assert len(trained) == 2


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["model.student.head=true"], "data.source: its pictures have no labels"),
        (["model.distill_losses={kd: {class_path: KDLoss}}", "model.taps={}", "model.teacher_of={}"],
         "model.distill_losses.kd: KDLoss compares logits, and the student has no classifier"),
        (["model.task=Segmentation"], "model.task: Segmentation needs a classifier"),
        (["model.student.freeze=backbone"], "model.student.freeze: must be null where head=false"),
        (["checkpoint.monitor=val/acc1"], "checkpoint.monitor: must be one of val/feature_loss,"),
        (["model.distill_losses={}", "model.taps={}", "model.teacher_of={}"], "model.student.head: without a classif"),
        (["model.taps.dino_patches.student=prelogits"], "model.taps.dino_patches: no projection leads from"),
    ],
)  # fmt: skip
def test_mistakes(items: list[str], message: str, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("train", [f"recipe={made / 'tiny.yaml'}", *items]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_random_weights_can_not(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("train", [f"recipe={recipe}", "model.student.freeze=backbone"]) == 2
    assert "model.student.freeze: backbone keeps its first weights, which would be random" in capsys.readouterr().err
