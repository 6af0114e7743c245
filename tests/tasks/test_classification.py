"""What a guesser reaches: the preflight's limit."""

import math
import shutil
from pathlib import Path

import pytest
import torch

from kd.cli import train_main
from kd.tasks import Classification
from tests._helpers import ARCH, TINY, draw_folder, write_recipe
from tests.test_train import run_folders


@pytest.mark.parametrize("counts", [[4, 4], [9, 1], [90, 10], [50, 48, 2]])
def test_chance_is_the_binomial_test(counts: list[int]) -> None:
    task = Classification()
    task.build(len(counts))
    total = sum(counts)
    share = max(counts) / total
    tail = [sum(math.comb(total, i) * share**i * (1 - share) ** (total - i) for i in range(k, total + 1))
            for k in range(total + 1)]  # fmt: skip
    enough = next((k for k, p in enumerate(tail) if p < 0.00135), total)
    limit = task.chance(torch.tensor(counts, dtype=torch.float), total)
    assert (enough - 1) / total < limit < enough / total <= 1
    assert max(counts) / total < limit  # who always names the most frequent class is no better


def test_a_perfect_teacher_passes_on_eight_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = draw_folder(tmp_path / "two")
    for folder in [*root.glob("*/bread"), *root.glob("*/cake")]:  # the other two differ much in colour
        shutil.rmtree(folder)
    one = {"arch": ARCH, "img_size": 32, "kwargs": {**TINY, "depth": 1}}
    recipe = write_recipe(tmp_path / "tiny.yaml", root, None)
    assert train_main([f"recipe={recipe}", "trainer.max_epochs=12", "optim.lr=0.003"]) == 0
    teacher = {**one, "checkpoint": str(run_folders(recipe)[0])}
    recipe = write_recipe(tmp_path / "tiny.yaml", root, Path("unused"), model__teacher=teacher, preflight="stop")
    capsys.readouterr()
    assert train_main([f"recipe={recipe}", "trainer.max_epochs=1"]) == 0
    out = capsys.readouterr().out
    assert "is right on 8 of 8 validation pictures (100.0%)" in out
    assert "TeacherNearChance" not in out
