"""Weights of classes in the loss on the labels."""

import pytest
import torch

from kd.tasks.weights import check_class_weights, weights_of
from tests._helpers import refuses


@pytest.mark.parametrize("given", ["balanced", [1.0, -1.0], {"a": float("inf")}, {"a": -1.0}])
def test_weights_that_no_classes_can_have(given: object) -> None:
    with pytest.raises(ValueError, match="class_weights must be"):
        check_class_weights(given)  # type: ignore[arg-type]


def test_automatic_weights_give_all_classes_the_same_say() -> None:
    counts = [30, 10, 0]
    weights = weights_of("auto", ["a", "b", "c"], counts)
    assert weights is not None
    says = weights * torch.tensor(counts)
    assert torch.allclose(says[:2], says[:1].expand(2))
    assert torch.isclose(says.sum() / sum(counts), torch.tensor(1.0)), (
        "the mean over the pictures is 1"
    )


@pytest.mark.parametrize(("given", "counts", "message"), [
    ("auto", None, "auto needs .* no data.sampler"), ({"a": 0.0, "b": 0.0}, None, "not all 0"),
    ([0.0, 0.0], None, "not all 0"),
    ([1.0], None, "1 numbers for 2 classes"), ({"aa": 2.0}, None, "did you mean 'a'"),
])  # fmt: skip
def test_weights_that_do_not_fit_the_data(
    given: object, counts: list[int] | None, message: str
) -> None:
    with refuses(f"model.task.class_weights.*{message}"):
        weights_of(given, ["a", "b"], counts)  # type: ignore[arg-type]


def test_one_class_may_weigh_nothing() -> None:
    check_class_weights({"a": 0.0})
    weights = weights_of({"a": 0.0}, ["a", "b"], None)
    assert weights is not None
    assert weights.tolist() == [0.0, 1.0]


def test_no_weights_are_none() -> None:
    assert weights_of(None, ["a", "b"], [1, 2]) is None
