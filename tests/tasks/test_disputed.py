"""Labels that features dispute: against fits that really leave each picture out, and against labels known to be wrong."""

import pytest
import torch
from torch import Tensor

from kd.tasks import disputed
from kd.tasks.disputed import disputed_labels
from kd.tasks.features import STRENGTHS, ridge_classifier


def clusters(count: int, classes: int, width: int = 8) -> tuple[Tensor, Tensor]:
    """Features of overlapping clusters, and their true classes."""
    generator = torch.Generator().manual_seed(1)
    centres = 2.2 * torch.randn(classes, width, generator=generator)
    truth = torch.arange(count) % classes
    return centres[truth] + torch.randn(count, width, generator=generator), truth


def test_each_picture_is_judged_by_a_fit_without_it() -> None:
    """Left out by hand: the standardisation of all pictures, then a ridge fit of all others with an intercept."""
    features, labels = clusters(40, 3)
    _, _, left_out = ridge_classifier(features, labels, 3)
    deviation, mean = torch.std_mean(features.double(), dim=0, correction=0)
    x = (features.double() - mean) / deviation
    one_hot = torch.nn.functional.one_hot(labels, 3).double()
    misfits = []
    for strength in STRENGTHS:
        by_hand = torch.empty_like(left_out)
        for i in range(40):
            others = torch.arange(40) != i
            rows = torch.cat([x[others], torch.ones(39, 1)], dim=1)
            penalty = strength * 40 * torch.eye(9, dtype=torch.float64)
            penalty[8, 8] = 0  # of the intercept
            fit = torch.linalg.solve(rows.T @ rows + penalty, rows.T @ one_hot[others])
            by_hand[i] = torch.cat([x[i], torch.ones(1)]) @ fit
        misfits.append(float((by_hand - left_out).abs().max()))
    assert min(misfits) < 1e-9
    assert max(misfits) > 1e-3


@pytest.mark.parametrize("share", [0.05, 0.25, 0.4])
def test_planted_labels_are_found(share: float) -> None:
    features, truth = clusters(1000, 5)
    generator = torch.Generator().manual_seed(2)
    is_wrong = torch.rand(1000, generator=generator) < share
    labels = torch.where(is_wrong, (truth + 1) % 5, truth)
    answers = 5.0 * torch.nn.functional.one_hot(labels, 5)  # knows every label by heart
    found = disputed_labels(features, answers, labels)
    recall = found.flagged[is_wrong].double().mean()
    assert recall > 0.8
    assert (found.suggested == truth)[is_wrong & found.flagged].double().mean() > 0.9
    first = found.worst_first[: int(is_wrong.sum()) // 2]
    assert is_wrong[first].double().mean() > 0.9


def test_right_labels_of_separate_classes_are_not_disputed() -> None:
    features, truth = clusters(300, 3)
    apart = 10 * torch.nn.functional.one_hot(truth, 3) + 0.1 * features[:, :3]
    found = disputed_labels(apart, apart, truth)
    assert not found.flagged.any()
    assert found.accuracy == 1.0
    assert (found.of_label > 0.5).all()


def test_a_class_without_pictures_is_never_suggested_as_certain() -> None:
    features, truth = clusters(60, 2)
    found = disputed_labels(features, torch.zeros(60, 4), truth)
    assert not (found.flagged & (found.suggested >= 2)).any()


def test_too_many_pictures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    features, truth = clusters(60, 2)
    monkeypatch.setattr(disputed, "MOST_NUMBERS", 500)
    with pytest.raises(ValueError, match="at most 50 pictures with 8 features, got 60"):
        disputed_labels(features, torch.zeros(60, 2), truth)
    with pytest.raises(ValueError, match="no pictures with labels"):
        disputed_labels(features[:0], torch.zeros(0, 2), truth[:0])
