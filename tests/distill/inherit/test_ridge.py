"""The ridge regression by which every layer is fitted."""

import pytest
import torch

from kd.distill.inherit.ridge import fit_linear


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_a_fit_is_the_ridge_regression_drawn_to_its_start(bias: bool) -> None:
    """300 inputs: their products are computed in parts."""
    generator = torch.Generator().manual_seed(0)
    x, y, start = (
        torch.randn(*shape, generator=generator) for shape in ((2, 400, 300), (2, 400, 5), (5, 300))
    )
    shares = torch.linspace(0.5, 1.5, 400)
    linear = torch.nn.Linear(300, 5, bias=bias)
    fit_linear(linear, [(x, y)], start, shares, ridge=0.1)
    share = (shares / shares.mean()).repeat(2)[:, None].double()
    x, y = (t.flatten(0, 1).double() for t in (x, y))
    x, y = (t - (share * t).mean(0) * bias for t in (x, y))
    gram = (share * x).T @ x / len(x)
    damped = gram + 0.1 * gram.diagonal().mean() * torch.eye(300)
    expected = (
        start + torch.linalg.solve(damped, (share * x).T @ (y - x @ start.double().T) / len(x)).T
    )
    torch.testing.assert_close(linear.weight.double(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_token_with_a_share_counts_as_so_many_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 4, 6, generator=generator), torch.randn(40, 4, 3, generator=generator)
    start = torch.randn(3, 6, generator=generator)
    weighed, repeated, even = (torch.nn.Linear(6, 3) for _ in range(3))
    fit_linear(weighed, [(x, y)], start, torch.tensor([3.0, 1.0, 1.0, 1.0]))
    fit_linear(repeated, [tuple(torch.cat([t[:, :1], t[:, :1], t], 1) for t in (x, y))], start)
    fit_linear(even, [(x, y)], start, torch.ones(4))
    torch.testing.assert_close(weighed.state_dict(), repeated.state_dict())
    assert not torch.allclose(weighed.weight, even.weight)


@torch.no_grad()
def test_a_fit_in_parts_is_the_fit_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(40, 4, width, generator=generator) + torch.arange(40.0)[:, None, None]
        for width in (6, 3)
    )
    weight, shares = torch.randn(3, 6, generator=generator), torch.tensor([3.0, 1.0, 1.0, 1.0])
    whole, parts = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
    fit_linear(whole, [(x, y)], weight, shares)
    fit_linear(parts, zip(x.split(16), y.split(16), strict=True), weight, shares)
    torch.testing.assert_close(parts.state_dict(), whole.state_dict(), rtol=1e-3, atol=1e-3)
