"""The cascade's threshold: its guarantee over many splits, the curve, and who is asked."""

import numpy as np
import pytest
import torch

from kd.proof.cascade import (
    THRESHOLDS,
    Goal,
    Measured,
    choose_threshold,
    curve,
    threshold_of,
)
from kd.run.cascade import Sureness
from kd.ship.cascade_rule import CascadeRule


def drawn(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities of a calibrated student of ten classes, and who is right: 86 % and 91 %."""
    random = np.random.default_rng(seed)
    sure = 1 / (1 + np.exp(-random.normal(3, 2, count)))
    probabilities = np.repeat((1 - sure)[:, None] / 9, 10, axis=1)
    probabilities[:, 0] = sure
    student = random.random(count) < sure
    teacher = random.random(count) < np.where(student, 0.97, 0.55)
    return probabilities, student, teacher


def test_the_curve_begins_with_the_student_and_ends_with_the_teacher() -> None:
    probabilities, student, teacher = drawn(4000)
    measured = Measured(probabilities.max(1), student, teacher)
    rows = curve(measured)
    assert (rows[0]["share"], rows[-1]["share"]) == (0, 1)
    assert rows[0]["accuracy"] == pytest.approx(student.mean())
    assert rows[-1]["accuracy"] == pytest.approx(teacher.mean())
    tenth = measured.at(threshold_of(measured.scores, 0.1))
    assert tenth["share"] == pytest.approx(0.1)
    assert tenth["accuracy"] > 0.9 * student.mean() + 0.1 * teacher.mean() + 0.01


def _holds(goal: Goal, accuracy: float, teacher: float, share: float) -> bool:
    if goal.accuracy is not None:
        return accuracy >= goal.accuracy
    if goal.of_teacher is not None:
        return accuracy > teacher - goal.of_teacher
    if goal.share_of_teacher is not None:
        return accuracy > goal.share_of_teacher * teacher
    assert goal.share is not None
    return share <= goal.share


@pytest.mark.parametrize(
    "goal",
    [Goal(accuracy=0.89), Goal(share=0.15), Goal(of_teacher=0.02), Goal(share_of_teacher=0.97)],
)
def test_over_200_splits_the_goal_is_missed_as_seldom_as_promised(goal: Goal) -> None:
    """100,000 pictures stand for all there are; 800 of them choose the threshold, with 90 % confidence."""
    probabilities, student, teacher = drawn(100_000)
    everything = Measured(probabilities.max(1), student, teacher)
    random = np.random.default_rng(0)
    missed = found = 0
    for _ in range(200):
        part = everything.part(random.choice(100_000, 800, replace=False))
        threshold = goal.choose(part, 0.9)
        if threshold is None:
            continue
        found += 1
        true = everything.at(threshold)
        missed += not _holds(goal, true["accuracy"], float(teacher.mean()), true["share"])
    assert found >= 150
    assert 0 < missed <= 20 + 13  # a tenth of 200, and three standard errors


def test_too_few_pictures_give_no_threshold() -> None:
    probabilities, student, teacher = drawn(200)
    measured = Measured(probabilities.max(1), student, teacher)
    assert Goal(of_teacher=0.01).choose(measured, 0.95) is None  # 0.99^200 > 0.05
    assert Goal(accuracy=0.99).choose(measured, 0.95) is None


def test_what_is_chosen_on_one_half_is_checked_on_the_other() -> None:
    probabilities, student, teacher = drawn(4000)
    measured = Measured(probabilities.max(1), student, teacher)
    found = choose_threshold(measured, Goal(of_teacher=0.02), 0.95)
    assert found["chosen_on"] == found["checked"]["pictures"] == 2000
    low, high = found["share_interval"]
    assert low < found["asked"] / 4000 < high
    assert found["checked"]["accuracy"] > found["checked"]["teacher"] - 0.03
    assert np.diff(found["scores"]).min() >= 0
    assert choose_threshold(measured, Goal(of_teacher=0.02), 0.95) == found


def test_a_student_that_answers_nan_asks_the_teacher() -> None:
    """In the measurement, where its answer is wrong, and by the rule that is served."""
    logits = torch.tensor([[9.0, 0.0, 0.0], [torch.nan, 0.0, 0.0], [0.0, 9.0, 0.0]])
    sureness = Sureness()
    target = torch.tensor([0, 0, 0])
    sureness.update(logits, logits, target, torch.arange(3))
    assert sureness.student[0].tolist() == sureness.teacher[0].tolist() == [True, False, False]
    assert sureness.scores[0][1] == 0
    assert CascadeRule(0.3).asks(logits.softmax(1).numpy()).tolist() == [False, True, False]


def test_a_budget_for_every_picture_is_met_by_asking_always() -> None:
    random = np.random.default_rng(0)
    right = random.random(80) < 0.5
    measured = Measured(random.random(80), right, right)
    assert Goal(share=1.0).choose(measured, 0.95) == THRESHOLDS[-1]
