"""What losses share: precision, shapes and settings."""

import pytest
import torch

from kd.losses.numerics import both, matmul, wide


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


def test_wrong_shapes_name_what_was_given() -> None:
    with pytest.raises(
        ValueError, match=r"student_logits and teacher_logits .* \(2, 3\) and \(2, 4\)"
    ):
        both(torch.zeros(2, 3), torch.zeros(2, 4), "logits")
