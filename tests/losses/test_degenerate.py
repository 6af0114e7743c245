"""Every loss where features or logits are zero, constant, alike or a batch of one: finite, and no gradient explodes."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kd import losses
from kd.losses import (
    ATLoss,
    DistillLoss,
    DISTLoss,
    FeatureLoss,
    KDLoss,
    LogitLoss,
    RegressionKDLoss,
    StandardizedLoss,
)

BASES = {"DistillLoss", "FeatureLoss", "LogitLoss", "FeatureRegression"}
NAMES = [name for name in losses.__all__ if name.endswith("Loss") and name not in BASES]
CLASSES, SIDE, WIDTH = 5, 4, 5
LARGEST = 1e4
"""Gradients of an element. ReviewKD's BatchNorm of a constant map has some 2,000, a vanishing length had 1e10."""

VARIANTS = {
    "ATLoss, p = 0.5": lambda: ATLoss(p=0.5),
    "ATLoss, p = 1": lambda: ATLoss(p=1.0),
    "RegressionKDLoss, bounded": lambda: RegressionKDLoss(bounded=True),
    "StandardizedLoss of DIST": lambda: StandardizedLoss(DISTLoss()),
}


def make(
    name: str, count: int, dtype: torch.dtype = torch.float32
) -> tuple[DistillLoss, tuple[int, ...]]:
    """A loss bound and built, and the shape of what it compares, for ``count`` pictures."""
    torch.manual_seed(0)
    if name in VARIANTS:
        loss: DistillLoss = VARIANTS[name]()
    elif name == "StandardizedLoss":
        loss = StandardizedLoss(KDLoss(2.0))
    else:
        loss = getattr(losses, name)()
    loss.bind(CLASSES, 20, 255)
    if isinstance(loss, LogitLoss):
        return loss, (count, CLASSES, SIDE, SIDE) if loss.for_maps else (count, CLASSES)
    shape = (count, WIDTH, SIDE, SIDE) if loss.over_maps else (count, WIDTH)
    assert isinstance(loss, FeatureLoss)
    layers = 2 if loss.joint else 1
    loss.build_layers([shape] * layers, [shape] * layers)
    return loss.to(dtype), shape


def value_of(loss: DistillLoss, student: Tensor, teacher: Tensor) -> Tensor:
    count, rest = len(student), student.shape[2:]
    targets = torch.zeros((count, *rest), dtype=torch.long)
    if isinstance(loss, LogitLoss) and loss.for_numbers:
        targets = torch.zeros(count, CLASSES)
    extra = {"index": torch.arange(count)} if loss.needs_index else {}
    if getattr(loss, "joint", False):
        return loss([student, student], [teacher, teacher], targets, **extra)
    return loss(student, teacher, targets, **extra)


def degenerate(shape: tuple[int, ...]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What the student and the teacher give, by name."""
    torch.manual_seed(1)
    teacher, student = torch.randn(shape), torch.randn(shape)
    alike, teachers_alike = student.clone(), teacher.clone()
    alike[1:2], teachers_alike[1:2] = student[:1], teacher[:1]
    dark = torch.relu(student)
    dark[:2] = 0
    yield "zeros", torch.zeros(shape), teacher
    yield "both zeros", torch.zeros(shape), torch.zeros(shape)
    yield "zeros of the teacher", student, torch.zeros(shape)
    yield "one number", torch.full(shape, 0.3), teacher
    yield "one number of the teacher", student, torch.full(shape, 0.3)
    yield "all pictures alike", student[:1].expand(shape), teacher
    yield "all channels alike", student[:, :1].expand(shape), teacher
    if len(shape) == 4:
        yield "all positions alike", student[..., :1, :1].expand(shape), teacher
        yield "all positions of the teacher alike", student, teacher[..., :1, :1].expand(shape)
    yield "equal to the teacher", teacher, teacher
    yield "after a ReLU, two pictures dark", dark, torch.relu(teacher)
    yield "two pictures alike", alike, teacher
    yield "two pictures of the teacher alike", student, teachers_alike
    yield "two pictures of both alike", alike, teachers_alike
    yield "large", 60 * student.sign(), teacher


@pytest.mark.parametrize("count", [6, 1])
@pytest.mark.parametrize("name", [*NAMES, *VARIANTS])
def test_no_gradient_is_infinite_or_outweighs_all_others(name: str, count: int) -> None:
    loss, shape = make(name, count)
    for what, given, teacher in degenerate(shape):
        student = given.clone().requires_grad_()
        loss.zero_grad()
        value = value_of(loss, student, teacher)
        value.backward()
        gradients = [x.grad for x in (student, *loss.parameters()) if x.grad is not None]
        assert torch.isfinite(value), (what, value)
        for gradient in gradients:
            assert torch.isfinite(gradient).all(), what
            assert gradient.abs().max() < LARGEST, (what, gradient.abs().max())


def test_a_constant_row_has_no_correlation_and_no_gradient() -> None:
    for classes in (4, 100):
        logits = torch.zeros(8, classes, requires_grad=True)
        value = DISTLoss()(logits, 3 * torch.randn(8, classes), torch.zeros(8, dtype=torch.long))
        value.backward()
        assert value.item() == pytest.approx(2)
        assert not logits.grad.any()


@pytest.mark.parametrize("name", [*NAMES, *VARIANTS])
def test_every_loss_learns_in_half_precision_throughout(name: str) -> None:
    """Of a run with ``trainer.precision=bf16-true``: the student's side is bfloat16, as are a loss's parameters."""
    loss, shape = make(name, 6, torch.bfloat16)
    torch.manual_seed(2)
    student = torch.randn(shape).bfloat16().requires_grad_()
    value = value_of(loss, student, torch.randn(shape))
    value.backward()
    assert value.dtype == torch.float32
    assert torch.isfinite(value)
    assert torch.isfinite(student.grad).all()
    assert student.grad.any() or name.endswith("bounded")
