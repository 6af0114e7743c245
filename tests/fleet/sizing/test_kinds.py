"""``kd-size`` for every kind of target: a small run of each."""

from pathlib import Path

import pytest

import kd
from tests import _scenes
from tests._helpers import ARCH, CLASSES, TINY, Command, draw_folder, write_recipe

LARGE = {**TINY, "embed_dim": 64, "depth": 4, "num_heads": 4}
LOSSES = {"map": "BinaryKDLoss", "r2": "RegressionKDLoss", "miou": "PixelKDLoss"}


def _lists(root: Path, metric: str) -> dict:
    """Pictures with several labels, or with a number, each."""
    draw_folder(root)
    for split in ("train", "val"):
        files = sorted((root / split).rglob("*.jpg"))
        targets = [(file.parent.name, CLASSES.index(file.parent.name)) for file in files]
        lines = [f"{name};{CLASSES[i // 2]}" if metric == "map" else 100 * i for name, i in targets]
        rows = [f"{file.relative_to(root)},{line}" for file, line in zip(files, lines, strict=True)]
        (root / f"{split}.csv").write_text("\n".join(["path,label", *rows]))
    given = {"multi_label": True} if metric == "map" else {"targets": ["label"]}
    lists = {split: str(root / f"{split}.csv") for split in ("train", "val")}
    return {"class_path": "Manifest", "init_args": {**lists, **given}}


def _recipe(folder: Path, metric: str) -> tuple[Path, dict]:
    teacher = {"arch": ARCH, "img_size": 32, "kwargs": LARGE}
    if metric == "miou":
        teacher["img_size"] = [24, 32]
        return _scenes.recipe_of(folder, _scenes.draw(folder / "scenes", train=20)), teacher
    source = _lists(folder / "data", metric)
    task = {"map": "MultiLabel", "r2": "Regression"}[metric]
    return write_recipe(
        folder / "tiny.yaml", folder, None, data__source=source, model__task=task
    ), teacher


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["map", "r2", "miou"])
def test_every_kind_of_target_has_a_size(metric: str, tmp_path: Path, refusal: Command) -> None:
    recipe, teacher = _recipe(tmp_path, metric)
    trained = kd.train(recipe, {"model.student": teacher, "trainer.max_epochs": 4})
    given = {
        "model.teacher": {**teacher, "checkpoint": str(trained.folder)}, "candidates": 3,
        "model.student.inherit": "auto", "model.student.kwargs": {**LARGE, "embed_dim": 32}, "preflight": "warn",
        "model.distill_losses": {"kd": {"class_path": LOSSES[metric]}},
    }  # fmt: skip
    rows, choice = kd.size(recipe, given)
    assert (
        choice is not None
        and len(rows) == 3
        and all({"before", "score"} <= row.keys() for row in rows)
    )
    student = (tmp_path / "sizes" / "tiny" / "000" / "student.yaml").read_text()
    assert choice["name"] in student
    assert "model.teacher: the sizes are those of a teacher's students" in refusal(
        "size", [f"recipe={recipe}", "latency_ms=5"]
    )
