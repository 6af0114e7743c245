"""Standardised targets and what several teachers share, against their definitions."""

import numpy as np
import pytest
import torch

from kd.losses import (
    CosineLoss,
    GramKLLoss,
    MSELoss,
    PseudoClassLoss,
    RADIOLoss,
    SmoothL1Loss,
    targets,
)
from kd.losses.regression import cosine_loss, smooth_l1_loss
from kd.losses.targets import Standardizer, hadamard, phi_s


def spread_features(n: int = 4000, width: int = 12) -> torch.Tensor:
    """Features with one strong direction across the channels, and a mean."""
    rng = np.random.RandomState(0)
    mixed = (
        rng.normal(size=(n, width))
        * np.geomspace(20, 0.05, width)
        @ rng.normal(size=(width, width))
    )
    return torch.tensor(mixed + 5 * rng.normal(size=width))


@pytest.mark.parametrize(
    "order", [1, 2, 4, 12, 28, 36, 92 - 8, 96, 192, 320, 384, 512, 768, 1024, 1152, 1280, 2048]
)
def test_hadamard_matrices_are_orthogonal_with_entries_of_one_size(order: int) -> None:
    h = hadamard(order)
    assert torch.allclose(h @ h.T, torch.eye(order, dtype=torch.float64), atol=1e-10)
    assert torch.allclose(h.abs(), torch.full_like(h, order**-0.5))


@pytest.mark.parametrize("order", [3, 6, 50, 92])
def test_an_order_without_a_construction_is_refused(order: int) -> None:
    with pytest.raises(ValueError, match=f"no Hadamard matrix .*{order}"):
        hadamard(order)


def test_phi_s_is_isotropic_with_unit_variance_everywhere() -> None:
    """Its definition: one number times a rotation, after which every channel has the variance 1."""
    x = spread_features()
    covariance = torch.tensor(np.cov(x.numpy().T, bias=True))
    a = phi_s(covariance)
    scale = np.sqrt(np.linalg.eigvalsh(covariance.numpy()).mean())
    assert torch.allclose(a @ a.T * scale**2, torch.eye(12, dtype=torch.float64), atol=1e-9)
    after = (x - x.mean(0)) @ a.T
    np.testing.assert_allclose(after.numpy().var(0), 1, rtol=1e-9)
    # distances keep their ratios, which dividing by each channel's deviation would not
    pairs = torch.pdist(x[:50]) / torch.pdist(after[:50])
    np.testing.assert_allclose(pairs, scale, rtol=1e-9)
    with pytest.raises(ValueError, match="variance > 0"):
        phi_s(torch.zeros(4, 4))


@pytest.mark.parametrize("kind", ["variance", "phi_s"])
def test_the_running_statistics_are_those_of_all_that_was_seen(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "BATCHES", 5)
    x = spread_features(600).float()
    maps = x.reshape(6, 10, 10, 12).movedim(-1, 1)  # (N, C, H, W)
    standardizer = Standardizer(12, kind)
    for one in maps[:5]:
        standardizer(one[None])
    seen = x[:500].double()
    if kind == "variance":
        wanted = (x.double() - seen.mean(0)) / seen.std(0, correction=0)
    else:
        wanted = (x.double() - seen.mean(0)) @ phi_s(torch.cov(seen.T, correction=0)).T
    kept = {name: value.clone() for name, value in standardizer.state_dict().items()}
    found = standardizer(maps).movedim(1, -1).reshape(600, 12)  # the sixth is no longer counted
    agree = (
        found.double() if kind == "variance" else found.double() * (found * wanted).sum(0).sign()
    )
    torch.testing.assert_close(agree, wanted, rtol=1e-3, atol=1e-3)
    assert all(torch.equal(value, kept[name]) for name, value in standardizer.state_dict().items())
    again = Standardizer(12, kind).eval()
    again.load_state_dict(kept)
    assert torch.equal(again(maps), standardizer(maps))
    assert torch.equal(
        again(x.reshape(6, 100, 12)).reshape(600, 12), again(x)
    )  # tokens and vectors alike


def test_statistics_rest_while_evaluating() -> None:
    standardizer = Standardizer(12, "variance").eval()
    standardizer(spread_features(8).float())
    assert standardizer.batches == 0


@pytest.mark.parametrize("kind", ["variance", "phi_s"])
def test_statistics_stay_exact_in_half_precision(kind: str) -> None:
    """``trainer.precision=bf16-true`` turns a run's modules into bfloat16, where a sum of 100 batches stands still."""
    exact, half = Standardizer(12, kind), Standardizer(12, kind).to(torch.bfloat16)
    for x in spread_features(100 * 40).bfloat16().float().split(40):
        exact(x), half(x.bfloat16())
    assert {value.dtype for value in half.state_dict().values()} == {torch.float32, torch.int64}
    assert all(
        torch.equal(value, half.state_dict()[name]) for name, value in exact.state_dict().items()
    )


def test_a_width_without_rotation_is_refused_where_the_loss_is_built() -> None:
    with pytest.raises(
        ValueError, match="standardize=phi_s: no Hadamard matrix .* standardize=variance takes any"
    ):
        CosineLoss(standardize="phi_s").build((2, 8), (2, 50))


def test_the_mixture_and_its_parts_on_the_students_grid() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(3, 8, 4, 4), torch.randn(3, 16, 8, 8)
    on_grid = torch.nn.functional.avg_pool2d(teacher, 2)
    smooth = torch.nn.functional.interpolate(teacher, (4, 4), mode="bilinear", antialias=True)
    assert not torch.allclose(on_grid, smooth, atol=1e-3)
    losses = {kind: kind() for kind in (CosineLoss, SmoothL1Loss, MSELoss, RADIOLoss)}
    for loss in losses.values():
        torch.manual_seed(1)
        loss.build(student.shape, teacher.shape)
    projected = losses[MSELoss].projection(student)
    parts = {
        CosineLoss: cosine_loss(projected, smooth), SmoothL1Loss: smooth_l1_loss(projected, smooth),
        MSELoss: (projected - smooth).square().mean((1, 2, 3)),
    }  # fmt: skip
    parts[RADIOLoss] = 0.9 * parts[CosineLoss] + 0.1 * parts[SmoothL1Loss]
    for kind, wanted in parts.items():
        torch.testing.assert_close(losses[kind](student, teacher, torch.zeros(3)), wanted.mean())


def test_gram_kl_pools_the_finer_grid() -> None:
    x = torch.randn(2, 5, 4, 4)
    fine = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert GramKLLoss()(3 * fine, x, torch.zeros(2)) < 1e-5
    assert GramKLLoss()(torch.randn(2, 5, 4, 4), x, torch.zeros(2)) > 0.01


def test_the_queue_holds_the_newest_of_the_teacher() -> None:
    torch.manual_seed(0)
    loss = PseudoClassLoss(queue_size=6)
    loss.build((2, 3), (2, 5))
    seen = torch.randn(10, 5)
    for i in range(0, 10, 2):
        student = torch.randn(2, 3)
        value = loss(student, seen[i : i + 2], torch.zeros(2))
        newest = seen[max(0, i - 4) : i + 2]  # with this batch's
        torch.testing.assert_close(
            value, loss.over(newest, loss.projection(student), seen[i : i + 2]).mean()
        )
    before = loss.queue.clone()
    loss.eval()(student, seen[:2], torch.zeros(2))
    assert torch.equal(loss.queue, before)
    again = PseudoClassLoss(queue_size=6)
    again.build((2, 3), (2, 5))
    again.load_state_dict(loss.state_dict())
    torch.testing.assert_close(
        again.train()(student, seen[:2], None), loss.train()(student, seen[:2], None)
    )
    loss(torch.randn(9, 3), torch.arange(45.0).reshape(9, 5), torch.zeros(9))  # more than it holds
    assert loss.queue.norm(dim=1).allclose(torch.ones(6))
    with pytest.raises(ValueError, match="PseudoClassLoss compares vectors"):
        PseudoClassLoss().build((2, 3, 4, 4), (2, 5, 4, 4))
