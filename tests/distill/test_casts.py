"""Weights that are rounded together give what autocast gives, to the bit, in far fewer operations."""

import copy
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils._python_dispatch import TorchDispatchMode

import kd
from kd.distill import casts
from kd.distill.casts import AttentionInFloat32, CastTogether

STEPS = 3


@pytest.fixture(autouse=True)
def matrix_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "MATRIX_INSTRUCTIONS", True)


class Dispatched(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


def model_of(arch: str) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(arch, num_classes=4)


def trained(model: nn.Module, together: CastTogether | None, side: int) -> tuple[list[float], int]:
    """The losses of some steps under bfloat16 autocast, gradients of two batches accumulated; casts of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    dispatched = Dispatched()
    for step in range(STEPS):
        dispatched.counts.clear()
        for half in range(2):
            torch.manual_seed(10 * step + half)
            images = torch.randn(3, 3, side, side)
            with dispatched, torch.autocast("cpu", torch.bfloat16):
                if together is None:
                    loss = model(images).float().logsumexp(1).mean()
                else:
                    with together(images):
                        output = model(images)
                    loss = output.float().logsumexp(1).mean()
            with dispatched:
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, dispatched.counts["_to_copy"]


@pytest.mark.parametrize(
    ("arch", "side"), [("test_vit", 160), ("test_convnext", 32), ("test_resnet", 32)]
)
def test_a_training_is_equal_to_autocasts(
    arch: str, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(casts, "GROUP", 20_000)  # several groups
    model = model_of(arch)
    other = copy.deepcopy(model)
    losses, by_layer = trained(model, None, side)
    together = CastTogether(other)
    same_losses, at_once = trained(other, together, side)
    assert losses == same_losses
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert at_once < by_layer / 3
    assert not any("weight" in module.__dict__ for module in other.modules())


def test_frozen_layers_and_layers_without_a_gradient_stay_so() -> None:
    model = model_of("test_vit")
    model.blocks[0].requires_grad_(False)  # type: ignore[index, union-attr]
    images = torch.randn(2, 3, 160, 160)
    together = CastTogether(model)
    with torch.autocast("cpu", torch.bfloat16):
        with together(images):
            features = model.forward_features(images)  # type: ignore[operator]
        features.float().mean().backward()
    assert model.blocks[0].mlp.fc1.weight.grad is None  # type: ignore[index, union-attr]
    assert model.head.weight.grad is None  # type: ignore[union-attr]
    assert model.blocks[1].mlp.fc1.weight.grad.dtype == torch.float32  # type: ignore[index, union-attr]


def test_a_gradient_of_gradients_is_autocasts() -> None:
    """A penalty on gradients reaches the weights, to the bit."""
    model = model_of("test_resnet")
    other = copy.deepcopy(model)
    images = torch.randn(3, 3, 32, 32)
    for each, together in ((model, nullcontext()), (other, CastTogether(other)(images))):
        with torch.autocast("cpu", torch.bfloat16), together:
            sums = each(images).float().logsumexp(1).sum()
        first = torch.autograd.grad(sums, list(each.parameters()), create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()  # type: ignore[union-attr]
    for weight, same in zip(model.parameters(), other.parameters(), strict=True):
        assert (weight.grad is None) == (same.grad is None)
        assert weight.grad is None or torch.equal(weight.grad, same.grad)  # type: ignore[arg-type]


class Reads(nn.Module):
    """A model that computes with a layer's weight itself, in float32 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1)) * self.head.weight.double().sum()


def held(model: nn.Module, side: int) -> bool:
    """Whether the model's linear layers hold rounded weights while it is called."""
    images = torch.randn(2, 3, side, side)
    with torch.autocast("cpu", torch.bfloat16), CastTogether(model)(images):
        return any("weight" in module.__dict__ for module in model.modules())


def test_what_may_differ_is_left_to_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    assert held(model_of("test_vit"), 160)
    anew = model_of("test_vit")
    anew.set_grad_checkpointing()  # type: ignore[operator]
    assert not held(anew, 160)
    own = Reads()
    assert not held(own, 2)  # not of timm
    monkeypatch.setattr(Reads, "__module__", "timm.models.own")
    assert not held(own, 2)  # its first call differs
    model = model_of("test_vit")
    rounded: list[bool] = []
    model.register_forward_hook(
        lambda *_: rounded.append(any("weight" in module.__dict__ for module in model.modules()))
    )
    step = kd.Distillation(model, task=kd.Classification(model.num_classes))  # type: ignore[arg-type]
    step(torch.randn(2, 3, 160, 160), torch.zeros(2, dtype=torch.long))  # without autocast
    assert rounded == [False]


def gradients(dtype: torch.dtype, tokens: int = 64) -> list[Tensor]:
    """What an attention in ``dtype`` gives, and the gradients of its three inputs, which are the same in every type."""
    torch.manual_seed(0)
    parts = [
        torch.randn(2, 2, tokens, 16).bfloat16().to(dtype, copy=True).requires_grad_()
        for _ in range(3)
    ]
    found = attention(*parts)
    assert found.dtype == dtype
    found.backward(torch.randn(found.shape).bfloat16().to(dtype))
    return [found.detach().double(), *(part.grad.double() for part in parts)]  # type: ignore[union-attr]


def largest_error(found: list[Tensor], true: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, true, strict=True))


def test_attention_in_float32_is_more_exact_and_its_type_stays() -> None:
    true, plain = gradients(torch.float64), gradients(torch.bfloat16)
    with AttentionInFloat32():
        wide = gradients(torch.bfloat16)
    assert largest_error(wide, true) < 0.0025 < largest_error(plain, true)
    with torch.autocast("cpu", torch.bfloat16), AttentionInFloat32():  # which would make it narrow
        assert largest_error(gradients(torch.bfloat16), true) == largest_error(wide, true)
    many = casts.LONGEST + 1
    plain = gradients(torch.bfloat16, many)
    with AttentionInFloat32():
        assert largest_error(gradients(torch.bfloat16, many), plain) == 0


def attention_types(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> set[torch.dtype]:
    """The types of the queries that a training step's attention multiplies."""
    seen = set()

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(
            self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "attention" in operation.overloadpacket.__name__:
                seen.add(args[0].dtype)
            return operation(*args, **(kwargs or {}))

    images = torch.randn(2, 3, 160, 160)
    with torch.autocast("cpu", dtype), CastTogether(model)(images), Sees():
        model(images)
    return seen


def test_attention_is_in_float32_where_bfloat16_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_types(model_of("test_vit")) == {torch.bfloat16}
    monkeypatch.setattr(casts, "MATRIX_INSTRUCTIONS", False)
    assert attention_types(model_of("test_vit")) == {torch.float32}
    assert attention_types(model_of("test_vit"), torch.float16) == {torch.float16}
    anew = model_of("test_vit")
    anew.set_grad_checkpointing()  # type: ignore[operator]
    assert attention_types(anew) == {torch.bfloat16}
