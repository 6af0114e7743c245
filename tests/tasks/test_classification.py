"""What a guesser reaches: the preflight's limit."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from kd.tasks import Classification, Segmentation
from tests._helpers import ARCH, TINY, Command, draw_folder, refuses, write_recipe
from tests._runs import losses, run, run_folders


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


def test_a_perfect_teacher_passes_on_eight_pictures(tmp_path: Path, prints: Command) -> None:
    root = draw_folder(tmp_path / "two")
    for folder in [
        *root.glob("*/bread"),
        *root.glob("*/cake"),
    ]:  # the other two differ much in colour
        shutil.rmtree(folder)
    one = {"arch": ARCH, "img_size": 32, "kwargs": {**TINY, "depth": 1}}
    recipe = write_recipe(tmp_path / "tiny.yaml", root, None)
    run(recipe, "trainer.max_epochs=12", "optim.lr=0.003")
    teacher = {**one, "checkpoint": str(run_folders(recipe)[0])}
    recipe = write_recipe(
        tmp_path / "tiny.yaml", root, Path("unused"), model__teacher=teacher, preflight="stop"
    )
    out = prints("train", [f"recipe={recipe}", "trainer.max_epochs=1"])
    assert "is right on 8 of 8 validation pictures (100.0%)" in out
    assert "TeacherNearChance" not in out


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_classes_count_by_their_weights(epsilon: float) -> None:
    """Weight times the smoothed cross-entropy, over the number of labelled pictures; of mixes too."""
    rng, weights = np.random.RandomState(0), np.array([0.5, 2.0, 0.0])
    logits, target = rng.normal(size=(6, 3)), np.array([0, 1, 2, 1, -1, 0])
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    # the loss of each possible label
    of_class = -(1 - epsilon) * log_p - epsilon * log_p.mean(1, keepdims=True)
    task = Classification(3, epsilon, weights.tolist())
    task.weigh(["a", "b", "c"], None)
    known = target >= 0
    wanted = (weights * of_class)[np.arange(6), target][known].mean()
    given = torch.tensor(logits)
    assert task.loss(given, torch.tensor(target)).item() == pytest.approx(wanted, rel=1e-5)
    halves = [task.loss(given[i : i + 2], torch.tensor(target[i : i + 2])).item() for i in (0, 2)]
    both = task.loss(given[:4], torch.tensor(target[:4])).item()
    assert both == pytest.approx(np.mean(halves), rel=1e-5)
    mixed = rng.dirichlet(np.ones(3), size=6)
    wanted = (weights * mixed * of_class).sum(1).mean()
    mixes = torch.tensor(mixed, dtype=torch.float32)
    assert task.loss(given, mixes).item() == pytest.approx(wanted, rel=1e-4)
    silent = given[:2].clone().requires_grad_()
    task.loss(silent, torch.tensor([2, 2])).backward()  # a class of weight 0 trains nothing
    assert silent.grad is not None
    assert silent.grad.abs().max() < 1e-7
    with refuses("model.task.class_weights: 3 numbers for 2 classes"):
        task.weigh(["a", "b"], None)
    assert not task.state_dict()  # a checkpoint holds none of it


def test_classes_of_pixels_count_by_their_weights() -> None:
    logits = torch.randn(1, 3, 6, 1, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([0, 1, 2, 1, 0, 0])[None, :, None]
    maps = Segmentation(3, class_weights={"b": 2.0})
    maps.weigh(["a", "b", "c"], None)
    of_pixel = torch.nn.functional.cross_entropy(logits, ids, reduction="none")
    weights = torch.tensor([1.0, 2.0, 1.0])[ids]
    torch.testing.assert_close(maps.loss(logits, ids), (weights * of_pixel).mean())


def test_class_weights_by_key(
    tmp_path: Path, teacher: Path, capsys: pytest.CaptureFixture[str], refusal: Command
) -> None:
    """Of 12, 12, 12 and 4 pictures ``auto`` gives 40 / (4 n), what the same numbers by name give."""
    root = draw_folder(tmp_path / "data")
    for picture in sorted((root / "train" / "dates").iterdir())[4:]:
        picture.unlink()
    recipe = write_recipe(tmp_path / "tiny.yaml", root, teacher)
    items = ["trainer.max_epochs=1", "data.augment.mixup=0.2"]
    auto = run(recipe, *items, "model.task.class_weights=auto")
    most, least = 40 / 48, 40 / 16
    named = f"{{apple: {most}, bread: {most}, cake: {most}, dates: {least}}}"
    assert losses(auto) == losses(run(recipe, *items, f"model.task.class_weights={named}"))
    assert losses(auto) != losses(run(recipe, *items))
