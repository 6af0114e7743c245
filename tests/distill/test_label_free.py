"""Students without a classifier, taught by the features of teachers on pictures without labels."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from kd.cli import main
from kd.fleet.tuning.plan import _objectives
from kd.losses import targets
from kd.run.request import translate
from kd.run.run import Run
from kd.tasks.features import rank_of_gram
from kd.tasks.label_free import HeldOut
from tests._forks import run_ranks
from tests._helpers import (
    ARCH,
    CLASSES,
    TINY,
    Command,
    draw_folder,
    refuses,
    save_teacher,
    write_recipe,
)
from tests._runs import evaluated, run_of, student_of, summary_of

HEADLESS = {"arch": ARCH, "img_size": 32, "kwargs": {**TINY, "depth": 1}, "head": False}


def label_free_recipe(
    path: Path, pictures: Path, teachers: dict[str, dict], **changes: object
) -> Path:
    """A summary and a patch loss for each teacher."""
    losses: dict[str, dict] = {}
    taps: dict[str, dict] = {}
    for name in teachers:
        losses[f"{name}_summary"] = {"class_path": "CosineLoss"}
        losses[f"{name}_patches"] = {
            "class_path": "RADIOLoss",
            "init_args": {"standardize": "variance"},
        }
        taps[f"{name}_summary"] = {"student": "prelogits", "teacher": "prelogits"}
        taps[f"{name}_patches"] = {"student": "norm", "teacher": "norm"}
    return write_recipe(path, pictures, None, **{
        "data__source": {"class_path": "kd.data.sources.Pictures", "init_args": {"root": str(pictures)}},
        "model__teachers": teachers, "model__student": HEADLESS, "model__distill_losses": losses,
        "model__task_loss_weight": 0.0, "model__taps": taps,
        "model__teacher_of": {name: name.split("_")[0] for name in losses}, **changes,
    })  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with one teacher (``tiny.yaml``) and its finished run, on pictures at any depth."""
    root = tmp_path_factory.mktemp("label_free")
    draw_folder(root / "pictures" / "some" / "where")
    weights = save_teacher(root / "dino.safetensors", seed=1)
    teachers = {"dino": {"arch": ARCH, "img_size": 32, "kwargs": TINY, "checkpoint": str(weights)}}
    recipe = label_free_recipe(
        root / "tiny.yaml", root / "pictures", teachers, model__ema_decay=0.9
    )
    assert main("train", [f"recipe={recipe}"]) == 0
    return root


def folder(made: Path) -> Path:
    return made / "runs" / "tiny" / "000"


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_without_labels_is_measured_on_held_out_pictures(made: Path) -> None:
    summary = summary_of(folder(made))
    assert (summary["data"]["train"], summary["data"]["val"], summary["data"]["classes"]) == (
        43,  # a folder that is called val names validation pictures
        5,
        0,
    )
    val = summary["student"]["val"]
    assert set(val) == {"feature_loss", "dino_summary_loss", "dino_patches_loss", "rankme"}
    assert val["feature_loss"] == pytest.approx(
        val["dino_summary_loss"] + val["dino_patches_loss"], rel=1e-4
    )
    assert 1 <= val["rankme"] <= TINY["embed_dim"]
    measured = [
        float(row["val/feature_loss"]) for row in rows(folder(made)) if row["val/feature_loss"]
    ]
    assert summary["student"]["best_val"]["feature_loss"] == pytest.approx(min(measured), abs=1e-5)
    assert measured[-1] < measured[0]
    assert {"train/dino_summary_loss", "train/dino_patches_loss"} <= set(rows(folder(made))[0])


def test_the_student_is_its_features_in_plain_timm(made: Path) -> None:
    run = folder(made)
    state = student_of(run)
    plain = timm.create_model(ARCH, num_classes=0, img_size=32, **{**TINY, "depth": 1}).eval()
    plain.load_state_dict(state)
    from_folder = timm.create_model(f"local-dir:{run / 'student'}", pretrained=True).eval()
    with torch.no_grad():
        features = plain(torch.ones(1, 3, 32, 32))
        assert features.shape == (1, TINY["embed_dim"])
        assert torch.equal(features, from_folder(torch.ones(1, 3, 32, 32)))
    assert (
        timm.create_model(
            f"local-dir:{run / 'student'}", pretrained=True, num_classes=3
        ).num_classes
        == 3
    )


def test_what_is_inherited_begins_beside_its_teacher(made: Path) -> None:
    """Projections are fitted, targets settled, before the first step: a copy of the teacher has its features."""
    weights = made / "dino.safetensors"
    teachers = {"dino": {"arch": ARCH, "img_size": 32, "kwargs": TINY, "checkpoint": str(weights)}}
    student = {**HEADLESS, "kwargs": TINY, "inherit": True, "inherit_pictures": 58}
    (made / "copy").mkdir()
    recipe = label_free_recipe(
        made / "copy" / "tiny.yaml", made / "pictures", teachers, model__student=student
    )
    standard = [
        f"model.distill_losses.dino_{level}.init_args.standardize=phi_s"
        for level in ("summary", "patches")
    ]
    for number, kind in enumerate(("Projection", "OrthogonalProjection")):
        items = [
            *standard,
            f"model.distill_losses.dino_summary.init_args.projection={kind}",
            "optim.lr=1e-9",
        ]
        assert main("train", [f"recipe={recipe}", *items, "trainer.max_epochs=1"]) == 0
        run = made / "copy" / "runs" / "tiny" / f"{number:03d}"
        val = summary_of(run)["student"]["val"]
        assert val["dino_summary_loss"] < 0.1
        assert val["dino_patches_loss"] < 0.1


def test_labels_on_top(made: Path, pictures: Path, prints: Command) -> None:
    """Fine-tuning and the linear probe: a new classifier on the distilled backbone."""
    recipe = write_recipe(
        made / "labels.yaml", pictures, None, model__student={"arch": ""}, model__ema_decay=0.5
    )
    items = [
        f"recipe={recipe}", f"model.student.checkpoint={folder(made)}", "trainer.max_epochs=1",
        "trainer.precision=32-true",  # with bfloat16 one picture more is wrong
    ]  # fmt: skip
    said = prints("train", [*items, "optim.lr=1e-6"])
    assert "has no classifier: its backbone is taken, the classifier is new" in said
    assert (
        "student: the new classifier starts as a ridge regression on the features of 48 training pictures (leave"
        in said
    )
    assert (
        main(
            "train",
            [*items, "model.student.freeze=backbone", "model.student.kwargs.drop_path_rate=0.5"],
        )
        == 0
    )
    before = student_of(folder(made))
    tuned, probed = (student_of(made / "runs" / "tiny" / f"{i:03d}") for i in (1, 2))
    assert set(tuned) == set(probed) == {*before, "head.weight", "head.bias"}
    assert probed["head.weight"].shape == (len(CLASSES), TINY["embed_dim"])
    assert all(torch.equal(probed[name], before[name]) for name in before)
    assert not all(torch.equal(tuned[name], before[name]) for name in before)
    started = prints("train", [*items, "optim.lr=0"]).rpartition("leave-one-out accuracy ")[2]
    right = float(started.partition("%")[0]) / 100
    assert right > 0.8  # the classes differ in colour
    rows_of = rows(made / "runs" / "tiny" / "003")
    assert float(next(row["val/acc1"] for row in rows_of if row.get("val/acc1"))) > 0.8
    checkpoint = torch.load(made / "runs/tiny/002/checkpoints/last.ckpt", weights_only=True)
    trained = [
        p for group in checkpoint["optimizer_states"][0]["param_groups"] for p in group["params"]
    ]
    assert len(trained) == 2


# -- measured by labelled pictures that nothing is trained with --------


@pytest.fixture(scope="module")
def probed(made: Path) -> Path:
    """A run with two teachers of other sizes, measured on labelled pictures too."""
    draw_folder(made / "labelled", val=8)
    big = save_teacher(made / "big.safetensors", seed=2, embed_dim=48)
    teachers = {
        "dino": {"arch": ARCH, "img_size": 32, "kwargs": TINY, "checkpoint": str(made / "dino.safetensors")},
        "big": {"arch": ARCH, "img_size": 48, "kwargs": {**TINY, "embed_dim": 48}, "checkpoint": str(big),
                "mean": [0.5] * 3, "std": [0.25] * 3},
    }  # fmt: skip
    recipe = label_free_recipe(
        made / "two.yaml", made / "pictures", teachers, recipe="two", data__img_size=48
    )
    items = [f"recipe={recipe}", f"data.probe.root={made / 'labelled'}"]
    assert main("train", items) == 0
    return made / "runs" / "two" / "000"


def test_pictures_to_measure_by_are_not_those_to_fit_to(made: Path, refusal: Command) -> None:
    draw_folder(made / "again", classes=CLASSES[:2])
    shutil.rmtree(made / "again" / "val")
    (made / "again" / "val").symlink_to(made / "again" / "train")
    words = [f"recipe={made / 'tiny.yaml'}", f"data.probe.root={made / 'again'}"]
    assert "data.probe.root: 24 pictures of" in refusal("train", words)


def test_teachers_and_student_are_measured_by_their_features(probed: Path) -> None:
    summary = summary_of(probed)
    val = summary["student"]["val"]
    assert summary["primary"] == "knn1"
    assert summary["teacher"]["val"].keys() == {"knn1", "probe1"}
    assert set(summary["teacher"]["members"]) == {"dino", "big"}
    assert (
        summary["teacher"]["members"]["big"]["val"]["knn1"] > 0.25
    )  # colours tell the classes apart
    assert val["knn1"] > 0.25 and val["probe1"] > 0.25
    losses = {
        name: val[f"{name}_loss"]
        for name in ("dino_summary", "dino_patches", "big_summary", "big_patches")
    }
    assert val["feature_loss"] == pytest.approx(sum(losses.values()), rel=1e-4)
    page = (probed / "report.html").read_text()
    assert "Accuracy of the features" in page and "teacher big knn1" in page


def test_kd_eval_finds_what_training_found(
    probed: Path, made: Path, prints: Command, refusal: Command
) -> None:
    """The best epoch's student, from its file alone; and two runs side by side."""
    found = evaluated(probed)
    best = summary_of(probed)["student"]["best_val"]
    assert {k: found["student"][k] for k in ("knn1", "probe1")} == {
        k: best[k] for k in ("knn1", "probe1")
    }
    assert found["student"]["rankme"] == pytest.approx(best["rankme"], rel=0.05)
    assert {"teacher dino", "teacher big"} <= set(found)
    assert "data.probe.root=DIR" in prints("eval", [str(folder(made)), str(folder(made))])
    assert "out: needs a classifier" in refusal("eval", [str(probed), "out=rows.csv"])


def test_features_of_pictures_and_the_files_beside(probed: Path, made: Path) -> None:
    out = made / "features.npz"
    assert main("predict", [str(probed), str(made / "labelled" / "val"), f"out={out}"]) == 0
    with np.load(out) as found:
        assert found["features"].shape == (32, TINY["embed_dim"])
    assert main("card", [str(probed)]) == 0
    assert "image-feature-extraction" in (probed / "README.md").read_text()
    assert main("runs", [str(made / "runs")]) == 0


# -- as everything else: several processes, killed runs, cached answers --------


def last_val(run: Path) -> dict[str, float]:
    return summary_of(run)["student"]["val"]


def test_two_processes_measure_and_learn_as_one(probed: Path, made: Path) -> None:
    """With the optimizer sharded, an odd number of validation pictures, and standardised targets."""
    runs = made / "runs" / "two"
    items = [f"recipe={made / 'two.yaml'}", f"data.probe.root={made / 'labelled'}", "trainer.precision=32-true",
             "trainer.max_epochs=1", "data.val_fraction=0.11"]  # fmt: skip
    assert main("train", [*items, "name=alone"]) == 0
    run_ranks(
        [
            *items,
            "name=both",
            "trainer.devices=2",
            "trainer.strategy=ddp",
            "optim.zero=true",
            "data.batch_size=4",
        ],
        made / "log.txt",
    )
    assert last_val(runs / "both") == pytest.approx(last_val(runs / "alone"), rel=1e-3)


@pytest.mark.parametrize("head", [False, True])
def test_targets_do_not_move_while_training(
    head: bool, recipe: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student from random weights that learns nothing: its held-out loss stays, past as many batches as a loop of
    one's own takes its statistics of."""
    monkeypatch.setattr(targets, "BATCHES", 4)
    loss = {"class_path": "MSELoss", "init_args": {"standardize": "phi_s"}}
    changes: dict[str, object] = {"model.task_loss_weight": 0, "model.student.head": head, "optim.lr": 0,
                                 "trainer.precision": "32-true", "matmul_precision": "highest"}  # fmt: skip
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of a GPU
    taps = {"f": {"student": "prelogits", "teacher": "prelogits"}}
    changes |= {"model.distill_losses": json.dumps({"f": loss}), "model.taps": json.dumps(taps)}
    items = [f"{key}={value}" for key, value in changes.items()]
    assert main("train", [f"recipe={recipe}", *items]) == 0
    run = run_of(recipe)
    if not head:
        assert (
            len({row["val/feature_loss"] for row in rows(run) if row.get("val/feature_loss")}) == 1
        )
    kept = torch.load(run / "checkpoints" / "last.ckpt", map_location="cpu")["state_dict"]
    assert kept["student.objective.losses.f.targets.rows"] == 48


def test_a_search_knows_what_is_measured(made: Path) -> None:
    config = Run.of(translate([f"recipe={made / 'tiny.yaml'}"])).config
    assert [(o.name, o.maximize) for o in _objectives(None, config, ())] == [
        ("val/feature_loss", False)
    ]
    assert _objectives("val/dino_summary_loss", config, ())[0].name == "val/dino_summary_loss"
    with refuses("objective: no run reports 'val/knn1'"):
        _objectives("val/knn1", config, ())


def test_what_is_held_out_adds_up_in_full_precision() -> None:
    """Also in a run whose modules are in half precision."""
    held = HeldOut(["feature_loss"], 8).to(torch.bfloat16)
    features = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    for part, loss in zip(features.split(10), (1.0, 2.0, 3.0, 6.0), strict=True):
        held.update(part, {"feature_loss": torch.tensor(loss)})
    held.update(features[:0], {})
    found = held.compute()
    assert found["feature_loss"] == 3
    assert float(found["rankme"]) == pytest.approx(
        rank_of_gram((features.T @ features).double()), rel=1e-4
    )
