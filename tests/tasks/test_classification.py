"""What a guesser reaches: the preflight's limit."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from kd.cli import train_main
from kd.errors import UserError
from kd.tasks import Classification, Segmentation
from tests._helpers import ARCH, TINY, draw_folder, write_recipe
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


def test_a_perfect_teacher_passes_on_eight_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = draw_folder(tmp_path / "two")
    for folder in [
        *root.glob("*/bread"),
        *root.glob("*/cake"),
    ]:  # the other two differ much in colour
        shutil.rmtree(folder)
    one = {"arch": ARCH, "img_size": 32, "kwargs": {**TINY, "depth": 1}}
    recipe = write_recipe(tmp_path / "tiny.yaml", root, None)
    assert train_main([f"recipe={recipe}", "trainer.max_epochs=12", "optim.lr=0.003"]) == 0
    teacher = {**one, "checkpoint": str(run_folders(recipe)[0])}
    recipe = write_recipe(
        tmp_path / "tiny.yaml", root, Path("unused"), model__teacher=teacher, preflight="stop"
    )
    capsys.readouterr()
    assert train_main([f"recipe={recipe}", "trainer.max_epochs=1"]) == 0
    out = capsys.readouterr().out
    assert "is right on 8 of 8 validation pictures (100.0%)" in out
    assert "TeacherNearChance" not in out


def test_classes_count_by_their_weights() -> None:
    """Against the definition: weight times -log p, over the number of labelled pictures; of mixes and maps too."""
    rng = np.random.RandomState(0)
    logits, target, weights = (
        rng.normal(size=(6, 3)),
        np.array([0, 1, 2, 1, -1, 0]),
        np.array([0.5, 2.0, 3.0]),
    )
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    task = Classification(3, class_weights=weights.tolist())
    task.weigh(["a", "b", "c"], None)
    known = target >= 0
    wanted = -(weights[target] * log_p[np.arange(6), target])[known].sum() / known.sum()
    given = torch.tensor(logits)
    assert task.loss(given, torch.tensor(target)).item() == pytest.approx(wanted, rel=1e-5)
    halves = [task.loss(given[i : i + 2], torch.tensor(target[i : i + 2])).item() for i in (0, 2)]
    assert task.loss(given[:4], torch.tensor(target[:4])).item() == pytest.approx(
        np.mean(halves), rel=1e-5
    )
    mixed = rng.dirichlet(np.ones(3), size=6)
    wanted = -(weights * mixed * log_p).sum(1).mean()
    assert task.loss(given, torch.tensor(mixed, dtype=torch.float32)).item() == pytest.approx(
        wanted, rel=1e-4
    )
    maps = Segmentation(3, class_weights={"b": 2.0})
    maps.weigh(["a", "b", "c"], None)
    dense, ids = (
        torch.tensor(logits.T[None, :, :, None]),
        torch.tensor(target.clip(0)[None, :, None]),
    )
    wanted = -(
        np.array([1.0, 2.0, 1.0])[target.clip(0)] * log_p[np.arange(6), target.clip(0)]
    ).mean()
    assert maps.loss(dense, ids).item() == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(UserError, match="model.task.class_weights: 3 numbers for 2 classes"):
        task.weigh(["a", "b"], None)
    assert not task.state_dict()  # a checkpoint holds none of it


def test_a_smoothed_label_counts_by_its_own_classs_weight() -> None:
    """Weight times the smoothed cross-entropy, of a class id and of a mix: a class of weight 0 trains nothing."""
    rng, epsilon, weights = np.random.RandomState(0), 0.1, np.array([1.0, 5.0, 0.0])
    logits, ids = rng.normal(size=(6, 3)), np.array([0, 1, 2, 0, 1, -1])
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    of_class = -(1 - epsilon) * log_p - epsilon * log_p.mean(
        1, keepdims=True
    )  # the loss of each possible label
    task = Classification(3, epsilon, weights.tolist())
    task.weigh(["a", "b", "c"], None)
    wanted = (weights * of_class)[np.arange(5), ids[:5]].mean()
    assert task.loss(torch.tensor(logits), torch.tensor(ids)).item() == pytest.approx(
        wanted, rel=1e-5
    )
    mixed = rng.dirichlet(np.ones(3), size=6)
    wanted = (weights * mixed * of_class).sum(1).mean()
    given = torch.tensor(mixed, dtype=torch.float32)
    assert task.loss(torch.tensor(logits), given).item() == pytest.approx(wanted, rel=1e-5)
    silent = torch.tensor(logits[:2], requires_grad=True)
    task.loss(silent, torch.tensor([2, 2])).backward()
    assert silent.grad is not None
    assert silent.grad.abs().max() < 1e-7


def test_class_weights_by_key(
    tmp_path: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
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
    capsys.readouterr()
    for items, told in (
        (
            ["model.task.class_weights={aple: 2}"],
            "model.task.class_weights: no class 'aple'; did you mean 'apple'?",
        ),
        (["model.task.class_weights=[1, 2, 3, -1]"], "model.task.class_weights: must be >= 0"),
        (
            ["model.task.class_weights=auto", "data.balance_classes=true"],
            "model.task.class_weights: auto needs",
        ),
    ):
        assert train_main([f"recipe={recipe}", *items]) == 2
        err = capsys.readouterr().err
        assert told in err
        assert err.count("\n") == 1
