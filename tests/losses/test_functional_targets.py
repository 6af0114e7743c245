"""Teachers' features brought to one scale, and shares of several teachers."""

import pytest
import torch

from kd.losses.functional.targets import hadamard, phi_s


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
