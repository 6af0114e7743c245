"""What features are worth, against formulas written from the definitions."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kd.tasks import MultiLabel, Regression, features
from kd.tasks.features import (
    knn_accuracy,
    rank_of_gram,
    ridge_accuracy,
    ridge_classifier,
    starting_classifier,
)
from tests._files import read_json
from tests._helpers import ARCH, TINY, Command, save_teacher, write_recipe


def clusters(n: int, seed: int, width: int = 12, classes: int = 4, noise: float = 2.0):
    """Features that tell classes apart, but not all."""
    centres = np.random.RandomState(0).normal(size=(classes, width)) * np.geomspace(3, 0.1, width)
    rng = np.random.RandomState(seed)
    labels = rng.randint(0, classes, n)
    x = centres[labels] + noise * rng.normal(size=(n, width)) * np.geomspace(2, 0.3, width) + 1
    return torch.tensor(x).float(), torch.tensor(labels)


def test_knn_against_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "CHUNK", 7)
    (bank, names), (asked, labels) = clusters(150, 1), clusters(40, 2)
    unit = [x.numpy() / np.linalg.norm(x.numpy(), axis=1, keepdims=True) for x in (bank, asked)]
    for k, temperature in ((20, 0.07), (1, 1.0), (500, 0.5)):
        right = 0
        for x, wanted in zip(unit[1], labels.tolist(), strict=True):
            cosines = unit[0] @ x
            votes = np.zeros(4)
            for i in np.argsort(-cosines)[:k]:
                votes[names[i]] += np.exp(cosines[i] / temperature)
            right += votes.argmax() == wanted
        assert knn_accuracy(bank, names, asked, labels, k, temperature) == right / 40
    assert 0.4 < knn_accuracy(bank, names, asked, labels) < 1


def test_ridge_against_the_normal_equations_and_refits() -> None:
    """The strength by really leaving each picture out, the weights by solving with an intercept column."""
    (bank, names), (asked, labels) = clusters(60, 3), clusters(50, 4)
    x, y = bank.double().numpy(), np.eye(4)[names]
    scale = x.std(0)

    def fit(rows: np.ndarray, strength: float) -> np.ndarray:
        a = np.hstack([x[rows] / scale, np.ones((len(rows), 1))])
        penalty = strength * len(x) * np.diag([*np.ones(12), 0.0])
        return np.linalg.solve(a.T @ a + penalty, a.T @ y[rows])

    scores = {}
    for strength in features.STRENGTHS:
        right = 0
        for i in range(60):
            answer = np.append(x[i] / scale, 1) @ fit(np.delete(np.arange(60), i), strength)
            right += answer.argmax() == names[i]
        scores[strength] = right
    assert len(set(scores.values())) > 1  # the choice matters here
    best = max(features.STRENGTHS, key=lambda s: (scores[s], s))
    whole = fit(np.arange(60), best)
    weight, bias, _ = ridge_classifier(bank, names, 4)
    np.testing.assert_allclose(weight.numpy(), whole[:-1].T / scale, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(bias.numpy(), whole[-1], rtol=1e-6, atol=1e-9)
    answers = (np.hstack([asked.numpy() / scale, np.ones((50, 1))]) @ whole).argmax(1)
    assert ridge_accuracy(bank, names, asked, labels) == (answers == labels.numpy()).mean()


def test_a_probe_of_more_directions_than_pictures_and_of_dead_ones() -> None:
    bank, names = clusters(10, 5, width=32, noise=0.1)
    bank[:, 3] = 7.0
    assert ridge_accuracy(bank, names, bank, names) == 1.0


@pytest.mark.parametrize("shape", [(50, 12), (12, 50)])
def test_rank_me_is_the_entropy_of_singular_values(shape: tuple[int, int]) -> None:
    x = np.random.RandomState(0).normal(size=shape) * np.geomspace(5, 0.01, shape[1])
    s = np.linalg.svd(x, compute_uv=False)
    p = s / s.sum() + 1e-7
    found = rank_of_gram(torch.tensor(x.T @ x if len(x) > x.shape[1] else x @ x.T))
    assert found == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-4)
    assert rank_of_gram(torch.zeros(3, 3)) == 0
    assert np.isnan(rank_of_gram(torch.full((3, 3), torch.nan)))


def test_a_classifier_to_start_from_is_the_ridge_one_at_the_scale_that_cross_entropy_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its accuracy by really leaving each picture out; a class that the bank lacks is never named."""
    bank, names = clusters(60, 3)
    weight, bias, right = starting_classifier(bank, names, 5)
    plain, offset, _ = ridge_classifier(bank, names, 4)
    scale = float(weight[0, 0] / plain[0, 0])
    torch.testing.assert_close(weight[:4], scale * plain)
    torch.testing.assert_close(bias[:4], scale * offset)
    assert not weight[4].any()
    (asked, labels) = clusters(400, 5)

    def cross_entropy(factor: float) -> float:
        return float(
            torch.nn.functional.cross_entropy(factor * (asked.double() @ plain.T + offset), labels)
        )

    assert scale > 1
    assert cross_entropy(scale) < min(cross_entropy(1.0), cross_entropy(4 * scale))
    others = [[j for j in range(60) if j != i] for i in range(60)]
    monkeypatch.setattr(features, "STRENGTHS", (0.01,))
    fits = [ridge_classifier(bank[rows], names[rows], 4) for rows in others]
    left_out = [int((bank[i].double() @ w.T + b).argmax()) for i, (w, b, _) in enumerate(fits)]
    assert right == pytest.approx(np.mean(np.array(left_out) == names.numpy()), abs=0.1)


def test_the_first_weights_for_numbers_are_in_their_units_and_leave_missing_ones_out() -> None:
    bank, _ = clusters(60, 3)
    slopes = torch.linspace(-2, 2, 24).reshape(2, 12)
    targets = 100 + 50 * bank @ slopes.T
    targets[::7, 1] = float("nan")
    first = Regression(2).first_classifier(bank, targets)
    assert first is not None
    known = ~targets.isnan().any(dim=1)
    answers = bank.double() @ first.weight.T + first.bias
    torch.testing.assert_close(answers[known], targets[known].double(), rtol=0.02, atol=2.0)
    assert first.score.startswith("R2 0.99") or first.score == "R2 1.000"
    assert Regression(2).first_classifier(bank[:1], targets[:1]) is None


def test_the_first_weights_for_labels_say_yes_above_a_half_by_leaving_each_picture_out() -> None:
    bank, names = clusters(120, 3, noise=0.3)
    targets = torch.stack([names == 0, names < 2, names == 9], 1).float()  # nobody has the last
    targets[5] = float("nan")  # without a label
    first = MultiLabel(3).first_classifier(bank, targets)
    assert first is not None
    known = ~targets.isnan().any(dim=1)
    logits = bank.double() @ first.weight.T + first.bias
    says_yes = (logits > 0)[known]
    assert (says_yes == (targets[known] > 0)).double().mean() > 0.95
    assert logits.abs().median() > 1  # not the half of 0 and 1
    assert float(first.score.removeprefix("F1 ").removesuffix("%")) > 90


def test_a_run_begins_with_the_first_weights_for_numbers(
    tmp_path: Path, pictures: Path, prints: Command
) -> None:
    rows = ["path,brightness"]
    for i, path in enumerate(sorted((pictures / "train").rglob("*.jpg"))):
        rows.append(f"{path},{1000 + 10 * (i % 5)}")
    (tmp_path / "numbers.csv").write_text("\n".join(rows))
    backbone = save_teacher(tmp_path / "backbone.safetensors", num_classes=0)
    recipe = write_recipe(tmp_path / "own.yaml", pictures, None, trainer__max_epochs=1)
    student = {"arch": ARCH, "img_size": 32, "kwargs": TINY, "checkpoint": str(backbone)}
    words = [f"recipe={recipe}", f"data.source={tmp_path / 'numbers.csv'}"]
    words += ["data.source.targets=brightness", f"model.student={json.dumps(student)}", "optim.lr=1e-9"]  # fmt: skip
    assert "starts as a ridge regression" in prints("train", words)
    summary = read_json(tmp_path / "runs/tiny/000/summary.json")
    assert summary["student"]["val"]["rmse"] < 30  # in units: 1000 to 1040
