"""What losses share: checks of shapes, precision, ranks, and targets brought to one scale."""

import math

import pytest
import torch

from kd.losses.functional import dkd_loss
from kd.losses.functional._checks import matmul, positive, same_shape, wide
from kd.losses.functional.targets import hadamard, phi_s, teacher_shares
from kd.losses.ranks import in_parallel, of_all_ranks, own_rows, without_gather


def test_half_precision_is_widened_and_float64_stays() -> None:
    assert wide(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
    assert wide(torch.ones(2, dtype=torch.float64)).dtype == torch.float64


def test_products_keep_their_precision_under_autocast() -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    exact = a.double() @ b.double()
    with torch.autocast("cpu", torch.bfloat16):
        found, rounded = matmul(a, b), a @ b
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 1e-5 < (rounded - exact).abs().max()


def test_wrong_shapes_and_targets_name_what_was_given() -> None:
    same_shape(torch.zeros(2, 3), torch.zeros(2, 3), "logits")
    with pytest.raises(
        ValueError, match=r"student_logits and teacher_logits .* \(2, 3\) and \(2, 4\)"
    ):
        same_shape(torch.zeros(2, 3), torch.zeros(2, 4), "logits")
    with pytest.raises(ValueError, match=r"class ids \(N,\) for DKD"):
        dkd_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3))
    for value in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature must be > 0"):
            positive("temperature", value)


@pytest.mark.parametrize("order", [1, 2, 4, 12, 20, 28, 36, 192, 384, 768, 1024, 1152])
def test_hadamard_matrices_are_orthogonal_with_equal_entries(order: int) -> None:
    h = hadamard(order)
    assert (h @ h.T - torch.eye(order, dtype=h.dtype)).abs().max() < 1e-10
    assert (h.abs() - order**-0.5).abs().max() < 1e-12


@pytest.mark.parametrize("order", [3, 6, 92])
def test_orders_without_a_known_matrix_are_refused(order: int) -> None:
    with pytest.raises(ValueError, match=f"order {order}"):
        hadamard(order)


def test_phi_s_is_a_rotation_with_one_scale() -> None:
    x = torch.randn(512, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x @ torch.diag(torch.logspace(-2, 2, 12, dtype=torch.float64))
    a = phi_s(x.T.cov())
    assert torch.allclose((x @ a.T).T.cov().diagonal(), torch.ones(12, dtype=torch.float64))
    scale = (a @ a.T).diagonal().mean()
    assert torch.allclose(
        a @ a.T, scale * torch.eye(12, dtype=torch.float64), atol=1e-9 * float(scale)
    )
    with pytest.raises(ValueError, match="variance"):
        phi_s(torch.zeros(4, 4))


def test_the_hardest_teacher_always_counts() -> None:
    losses = torch.tensor([[3.0, 1.0, 2.0], [2.0, 2.0, 1.0]])
    for drop in (0.0, 0.5, 1.0):
        shares = teacher_shares(losses, drop)
        assert torch.isclose(shares.sum(), torch.tensor(1.0))
        assert (shares.gather(0, losses.argmax(0, keepdim=True)) > 0).all()
    assert (teacher_shares(losses, 0.0) == 1 / 6).all()
    with pytest.raises(ValueError, match="drop must be"):
        teacher_shares(losses, 1.5)


def test_one_process_compares_its_own_batch() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert not in_parallel()
    assert of_all_ranks(x)[0] is x
    assert own_rows(3) == slice(0, 3)
    with without_gather():
        assert not in_parallel()
