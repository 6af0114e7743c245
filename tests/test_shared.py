"""On real photographs and a real teacher, where KD_SHARED names them."""

import re
from pathlib import Path

import pytest
import torch

from kd.data.datamodule import DistillationDataModule
from kd.data.sources import ImageFolder
from tests._helpers import WITHOUT_TEACHER, Command
from tests._runs import evaluated, summary_of

TEACHER = "models/grocery81_vit_small_patch14_dinov2_112.safetensors"


def grocery(shared: Path, runs: Path, *items: str) -> list[str]:
    return [
        "recipe=grocery_vit", f"data.source.root={shared / 'data' / 'grocery'}",
        f"model.teacher.checkpoint={shared / TEACHER}", f"runs_dir={runs}", *items,
    ]  # fmt: skip


def test_class_ids_of_real_photographs(shared: Path) -> None:
    data = DistillationDataModule(
        ImageFolder(str(shared / "data" / "grocery")), img_size=112, num_workers=0
    )
    info = data.info
    assert (info.train, info.val, len(info.classes)) == (2640, 296, 81)
    assert len(set(data.split("val").targets)) == 60


def test_one_photograph_of_some_classes(shared: Path, tmp_path: Path, prints: Command) -> None:
    """The real teacher in its own order of classes. A student that begins with its layers: the next test."""
    source, few = shared / "data" / "grocery", tmp_path / "data"
    for folder in [*source.glob("train/*"), *sorted(source.glob("val/*"))[::4]]:
        for path in sorted(folder.iterdir())[:1]:
            (few / path.relative_to(source)).parent.mkdir(parents=True)
            (few / path.relative_to(source)).symlink_to(path)
    items = ["trainer.limit_train_batches=1", "trainer.max_epochs=1", "trainer.accelerator=cpu", "data.batch_size=5",
             "model.student.inherit=false", f"data.source.root={few}"]  # fmt: skip
    said = re.search(
        r"right on (\d+ of \d+) validation pictures",
        prints("train", grocery(shared, tmp_path, *items)),
    )
    assert said is not None
    assert said[1] == "12 of 15"
    summary = summary_of(tmp_path / "grocery_vit" / "000")
    assert summary["teacher"]["val"]["acc1"] == pytest.approx(12 / 15, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_short_run_of_the_grocery_recipe_and_its_evaluation(
    shared: Path, tmp_path: Path, prints: Command
) -> None:
    """The preflight's 251 of 296, a student that inherits, and a few steps."""
    items = ["trainer.limit_train_batches=2", "trainer.max_epochs=1", "trainer.accelerator=cpu", "data.batch_size=32",
             "model.student.inherit_pictures=96"]  # fmt: skip
    assert "right on 251 of 296 validation pictures (84.8%)" in prints(
        "train", grocery(shared, tmp_path, *items)
    )
    folder = tmp_path / "grocery_vit" / "000"
    summary = summary_of(folder)
    assert summary["teacher"]["val"]["acc1"] == pytest.approx(251 / 296, abs=1e-5)
    assert summary["student"]["val"]["acc1"] > 0.2  # without its teacher's layers: near 1/81
    found = evaluated(folder)
    assert found["teacher"]["acc1"] == pytest.approx(251 / 296, abs=1e-5)
    best = summary["student"]["best_val"]["acc1"]
    assert found["student"]["acc1"] == pytest.approx(best, abs=0.03)


def test_a_truncated_photograph_is_named(shared: Path, tmp_path: Path, refusal: Command) -> None:
    source = shared / "data" / "grocery"
    for split in ("train", "val"):
        for name in ("Banana", "Lemon"):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for path in sorted((source / split / name).iterdir())[:3]:
                (folder / path.name).write_bytes(path.read_bytes())
    bad = sorted((tmp_path / "data" / "train" / "Lemon").iterdir())[0]
    bad.write_bytes(bad.read_bytes()[:-2000])
    items = [
        "recipe=grocery_vit",
        "config=debug",
        *WITHOUT_TEACHER,
        f"runs_dir={tmp_path / 'runs'}",
    ]
    assert str(bad) in refusal(
        "train", [*items, f"data.source.root={tmp_path / 'data'}", "data.batch_size=2"]
    )
    assert not (tmp_path / "runs").exists()


def test_a_headless_backbone_starts_a_student(shared: Path) -> None:
    """DINOv2's 518 px position embedding is resampled to 112 px."""
    from kd.models import StudentSpec, build_model

    spec = StudentSpec(
        "vit_small_patch14_dinov2",
        112,
        checkpoint=str(shared / "models" / "vit_small_patch14_dinov2.safetensors"),
    )
    model = build_model(spec, 5, "model.student").eval()
    with torch.inference_mode():
        assert torch.isfinite(model(torch.zeros(1, 3, 112, 112))).all()
