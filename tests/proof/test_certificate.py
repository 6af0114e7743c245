"""Certificates in numbers and words, and the bootstrap behind those that are no counts."""

from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import multilabel_average_precision

from kd.module.outcomes import PictureOutcomes
from kd.proof.certificate import (
    Outcomes,
    ProofMargin,
    bound_in_points,
    by_class,
    certify,
    gain_interval,
)
from kd.proof.resample import (
    error_gain,
    iou_gain,
    mean_precision,
    smallest_gain,
)
from kd.tasks import Classification, MultiLabel, Regression, Segmentation

NAMES = ("the teacher", "the student")


def answers(b: int, c: int, both: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether reference and candidate are right, ``(N,)`` each."""
    reference = np.zeros(n)
    candidate = np.zeros(n)
    reference[: both + b] = 1
    candidate[:both] = 1
    candidate[both + b : both + b + c] = 1
    return reference, candidate


def accuracy(reference: np.ndarray, candidate: np.ndarray, **more: object) -> dict:
    ids = more.pop("class_ids", None)
    first = Outcomes("accuracy", reference, ids)  # type: ignore[arg-type]
    second = Outcomes("accuracy", candidate, ids)  # type: ignore[arg-type]
    wanted = more.pop("wanted", ProofMargin(0.01))
    return certify(first, second, wanted, NAMES, **more)  # type: ignore[arg-type]


def test_the_words() -> None:
    found = accuracy(*answers(40, 34, 1056, 1265))
    assert found["shown"] is False
    first, second = found["text"]
    assert first.startswith(
        "the student not worse than the teacher by more than 1 point of accuracy: not shown: a loss of 1.6 points "
        "can't be excluded (95 % confidence); about "
    )
    assert first.endswith(" pictures would do, 1,265 are here")
    assert second.startswith(
        "of 1,265 pictures the teacher alone is right on 40, the student alone on 34 (-0.5 points; McNemar's mid-p "
    )
    shown = accuracy(*answers(40, 34, 1056, 1265), wanted=ProofMargin(0.02))
    assert (
        "2 points of accuracy: shown: it loses at most 1.7 points (95 % confidence)"
        in shown["text"][0]
    )
    better = accuracy(*answers(5, 80, 900, 1265))
    assert ": shown: it is better by " in better["text"][0]
    worse = accuracy(*answers(80, 10, 900, 1265))
    assert "it is worse by 5.5 points here, more pictures would not help" in worse["text"][0]


def test_classes_proven_worse_and_those_that_can_not_be_told() -> None:
    """One class lost all of 40, one lost 3 of 5 (too few), one nothing of 40."""
    ids = np.repeat([0, 1, 2], [40, 5, 40])
    reference, candidate = np.ones(85), np.ones(85)
    candidate[:40], candidate[40:43] = 0, 0
    found = accuracy(reference, candidate, class_ids=ids, classes=["milk", "kiwi", "pear"])
    classes = found["classes"]
    assert [row["name"] for row in classes["worse"]] == ["milk"]
    assert classes["worse"][0]["p_value"] == pytest.approx(3 * 0.5**40)
    assert (classes["tested"], classes["too_few"]) == (3, 1)
    assert "classes proven worse (of 3, Holm): milk 100% -> 0%" in found["text"][-1]
    few = accuracy(np.ones(8), np.zeros(8), class_ids=np.arange(8) % 4, classes=list("abcd"))
    assert (few["classes"]["worse"], few["classes"]["too_few"]) == ([], 4)


def test_a_class_that_is_proven_worse_has_pictures_enough() -> None:
    """Alone five pictures would be too few for two classes; after the first Holm tests it alone."""
    ids = np.repeat([0, 1], [40, 5])
    found = accuracy(np.ones(45), np.zeros(45), class_ids=ids, classes=["cat", "dog"])
    assert [row["name"] for row in found["classes"]["worse"]] == ["cat", "dog"]
    assert found["classes"]["too_few"] == 0
    kept = accuracy(np.ones(45), ids, class_ids=ids, classes=["cat", "dog"])
    assert [row["name"] for row in kept["classes"]["worse"]] == ["cat"]
    assert kept["classes"]["too_few"] == 0


@pytest.mark.parametrize("pictures", [1, 4])
def test_few_pictures_show_no_gain(pictures: int) -> None:
    """All of them gain alike: a bootstrap of these would have no spread."""
    errors = np.ones((pictures, 1))
    pair = [Outcomes("mean absolute error", scale * errors) for scale in (1.0, 0.9)]
    assert gain_interval(*pair, NAMES) == (pytest.approx(0.1), -np.inf, np.inf)


@pytest.mark.parametrize("loss", [0.0001, 0.00141, 0.00451, 0.0098, 0.00999999])
def test_no_bound_is_better_in_words_than_in_truth(loss: float) -> None:
    """What is shown is rounded up, a gain and what can't be excluded are rounded down."""
    shown = float(bound_in_points(loss, 0.01, True, "accuracy").split()[0])
    assert loss <= shown / 100 <= 0.01
    gain = float(bound_in_points(-loss, 0.01, True, "accuracy").split()[0])
    assert gain / 100 <= loss
    excluded = float(bound_in_points(0.01 + loss, 0.01, False, "accuracy").split()[0])
    assert excluded / 100 <= 0.01 + loss + 1e-12


def test_no_class_is_alarmed_where_nothing_is_wrong() -> None:
    """Of 200 pairs of equal models with 20 classes hardly more than five in a hundred name a class."""
    random = np.random.default_rng(0)
    alarms = 0
    ids = np.repeat(np.arange(20), 30)
    for _ in range(200):
        reference = (random.random(600) < 0.8).astype(float)
        flipped = random.random(600) < 0.1
        candidate = np.where(flipped, (random.random(600) < 0.8).astype(float), reference)
        outcomes = [Outcomes("accuracy", values, ids) for values in (reference, candidate)]
        alarms += bool(by_class(*outcomes, ProofMargin(0.01), ())["worse"])
    assert alarms <= 10


def test_a_bound_is_never_above_the_gain() -> None:
    """A statistic whose resampled values all lie above that of the whole."""

    def statistic(weights: np.ndarray) -> np.ndarray:
        is_whole = (weights == 1).all(1)
        return np.where(is_whole, 0.0, 1.0)

    assert smallest_gain(statistic, 50, 0.95) == 0.0


def test_pictures_of_one_kind_count_as_one() -> None:
    """Each picture ten times over: by picture it would be sure, by group it is as unsure as before."""
    reference, candidate = answers(6, 3, 80, 100)
    group = np.repeat(np.arange(100), 10)
    ten = accuracy(np.repeat(reference, 10), np.repeat(candidate, 10), group=group)
    alone = accuracy(reference, candidate)
    naive = accuracy(np.repeat(reference, 10), np.repeat(candidate, 10))
    assert ten["largest_loss"] == pytest.approx(alone["largest_loss"], abs=0.01)
    assert naive["largest_loss"] < 0.6 * ten["largest_loss"]
    assert "1,000 pictures in 100 groups, resampled by group" in ten["text"]
    same = accuracy(np.ones(1000), np.ones(1000), group=group)
    assert same["largest_loss"] == pytest.approx(1 - 0.05 ** (1 / 100))
    with pytest.raises(ValueError, match="needs 20 groups of pictures or more, got 10"):
        accuracy(np.ones(100), np.ones(100), group=np.arange(100) // 10)


def test_tasks_count_what_their_metrics_say() -> None:
    torch.manual_seed(0)
    one = np.ones((1, 30))
    group = np.arange(30)

    task = Segmentation(4, 255)
    task.build(4, 255)
    target = torch.randint(0, 4, (30, 6, 6), dtype=torch.uint8)
    target[:, 0] = 255
    logits = [torch.randn(30, 4, 6, 6) for _ in range(2)]
    counts = [task.outcome(each, target).numpy() for each in logits]
    iou = []
    for each in logits:
        task.reset()
        task.update(each, target, None)
        iou.append(float(task.compute()["miou"]))
    assert iou_gain(*counts, group)(one)[0] == pytest.approx(iou[1] - iou[0], abs=1e-6)

    labels = (torch.rand(30, 5) < 0.4).float()
    scores = torch.randn(30, 5)
    both = MultiLabel(5).outcome(scores, labels).numpy()
    expected = multilabel_average_precision(scores.sigmoid(), labels.long(), 5, thresholds=None)
    assert mean_precision(one, both[:, 0], both[:, 1])[0] == pytest.approx(
        float(expected), abs=1e-6
    )

    numbers = torch.rand(30, 2)
    numbers[3, 1] = torch.nan
    errors = [Regression(2).outcome(numbers + shift, numbers).numpy() for shift in (0.1, 0.2)]
    assert error_gain(*errors, group)(one)[0] == pytest.approx(-1, abs=1e-5)

    ids = torch.tensor([0, 1, -1])
    right = Classification(2).outcome(torch.eye(2)[[0, 0, 0]], ids)
    assert right[:2].tolist() == [1, 0]
    assert right[2].isnan()


def test_mean_precision_of_weights_is_that_of_repeated_pictures() -> None:
    """With equal scores too, which count together."""
    random = np.random.default_rng(0)
    labels = (random.random((80, 3)) < 0.3).astype(int)
    scores = np.round(random.random((80, 3)), 1)
    weights = random.multinomial(80, np.full(80, 1 / 80), 2)
    for row in weights:
        places = np.repeat(np.arange(80), row)
        expected = multilabel_average_precision(
            torch.tensor(scores[places]), torch.tensor(labels[places]), 3, thresholds=None
        )
        found = mean_precision(row[None].astype(float), scores, labels)[0]
        assert found == pytest.approx(float(expected), abs=1e-6)


def test_rounding_is_no_proof_of_the_same_order_or_error() -> None:
    """24 pictures on which two models differ by rounding alone exclude 11.7 points, as equal ones do, and not 5."""
    random = np.random.default_rng(0)
    labels = (random.random((24, 3)) < 0.5).astype(float)
    scores = random.normal(size=(24, 3))
    ranked = [np.stack([scores + shift, labels], 1) for shift in (0.0, 6e-8)]
    errors = [np.abs(scores) + shift for shift in (0.0, 6e-8)]
    for measure, (first, second) in (
        ("mean average precision", ranked),
        ("mean absolute error", errors),
    ):
        outcomes = (Outcomes(measure, first), Outcomes(measure, second))  # type: ignore[arg-type]
        found = certify(*outcomes, ProofMargin(0.05), NAMES)
        assert not found["shown"]
        assert found["largest_loss"] == pytest.approx(1 - 0.05 ** (1 / 24))


def test_a_number_without_targets_is_left_out_of_the_mean() -> None:
    """Of two numbers the second has no target: the gain is that of the first."""
    random = np.random.default_rng(0)
    first = random.random((40, 2))
    first[:, 1] = np.nan
    second = 1.5 * first
    group = np.arange(40)
    assert error_gain(first, second, group)(np.ones((1, 40)))[0] == pytest.approx(-0.5)
    alone = error_gain(first[:, :1], second[:, :1], group)
    weights = random.multinomial(40, np.full(40, 1 / 40), size=5).astype(float)
    np.testing.assert_allclose(error_gain(first, second, group)(weights), alone(weights))


@pytest.mark.parametrize(
    ("task", "target"),
    [
        (Classification(), torch.zeros(32, dtype=torch.long)),
        (MultiLabel(), (torch.arange(96).reshape(32, 3) % 2).float()),
        (Regression(), torch.ones(32, 3)),
    ],
)
def test_an_answer_of_nan_is_never_left_out(
    task: Classification | MultiLabel | Regression, target: torch.Tensor
) -> None:
    """Left out, or taken for class 0, a model that fails would be certified."""
    task.build(3)
    good = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    bad = good.clone()
    bad[:5, 1] = torch.nan
    for student, teacher, name in ((bad, good, "the student"), (good, bad, "the teacher")):
        outcomes = PictureOutcomes(task)
        outcomes.update(student, teacher, target, torch.arange(32))
        pair: Any = outcomes.of("teacher"), outcomes.of("student")
        ways: Any = (certify, ProofMargin(0.05), NAMES), (gain_interval, NAMES)
        for measure, *words in ways:
            with pytest.raises(ValueError, match=f"{name} answers NaN or infinity on 5 pictures"):
                measure(*pair, *words)
