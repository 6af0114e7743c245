"""Attention of a model that trains in bfloat16 on a CPU: in float32 where torch's own gradient is slow and coarse."""

from contextlib import nullcontext

import pytest
import timm
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention

from kd.models import attention as rule
from kd.models.attention import InFloat32, training_attention


@pytest.fixture(autouse=True)
def no_matrix_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "MATRIX_INSTRUCTIONS", False)


def vit(**kwargs: object) -> torch.nn.Module:
    small = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 32,
        "depth": 1,
        "num_heads": 2,
        "num_classes": 3,
    }
    return timm.create_model("vit_tiny_patch16_224", **small, **kwargs)


def kind(model: torch.nn.Module, dtype: torch.dtype | None = torch.bfloat16) -> type:
    with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
        return type(training_attention(model, torch.zeros(2, 3, 32, 32)))


def gradients(dtype: torch.dtype, tokens: int = 64) -> list[Tensor]:
    torch.manual_seed(0)
    parts = [
        torch.randn(2, 2, tokens, 16).bfloat16().to(dtype, copy=True).requires_grad_()
        for _ in range(3)
    ]
    found = attention(*parts)
    assert found.dtype == dtype
    found.backward(torch.randn(found.shape).bfloat16().to(dtype))
    return [found.detach().double(), *(part.grad.double() for part in parts)]


def errors(found: list[Tensor], true: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, true, strict=True)]


def test_within_it_products_are_more_exact_and_the_type_stays() -> None:
    true, plain = gradients(torch.float64), gradients(torch.bfloat16)
    with InFloat32():
        wide = gradients(torch.bfloat16)
    assert max(errors(wide, true)) < 0.0025 < max(errors(plain, true))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        InFloat32(),
    ):  # autocast would make it narrow again
        assert errors(gradients(torch.bfloat16), true) == errors(wide, true)


def test_many_tokens_stay_as_they_are() -> None:
    plain = gradients(torch.bfloat16, rule.LONGEST + 1)
    with InFloat32():
        assert all(
            torch.equal(a, b)
            for a, b in zip(gradients(torch.bfloat16, rule.LONGEST + 1), plain, strict=True)
        )


def test_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind(vit()) is InFloat32
    assert kind(vit(), None) is nullcontext, "float32"
    assert kind(vit(), torch.float16) is nullcontext
    again, compiled = vit(), vit()
    again.set_grad_checkpointing()
    compiled.compile()
    assert [kind(again), kind(compiled)] == [nullcontext, nullcontext]
    assert kind(torch.nn.Linear(2, 2)) is nullcontext, (
        "may compute its forward again in the backward pass"
    )
    monkeypatch.setattr(rule, "MATRIX_INSTRUCTIONS", True)
    assert kind(vit()) is nullcontext
