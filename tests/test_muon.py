"""Muon's step with the weights of each shape together: timm's numbers in a tenth of the calls."""

import pytest
import timm
import torch
from timm.optim import muon
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kd.muon import own_muon, step_by_shapes
from kd.optim import OptimSpec, build_optimizer

SETTINGS = {
    "lr": 0.1, "weight_decay": 0.05, "momentum": 0.95, "nesterov": False, "ns_steps": 5, "ns_coefficients": "quintic",
    "eps": 1e-7, "safety_factor": 1.0, "adjust_lr_fn": "match_rms_adamw", "conv_mode": "flatten",
    "normalize_spatial": True, "scale_eps": False, "capturable": False,
}  # fmt: skip
SHAPES = [(8, 12), (12, 8), (8, 12), (8, 3, 4, 4), (8, 12), (8, 3, 4, 4), (5, 7)]


class Calls(TorchDispatchMode):
    """Counts calls of operators."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return function(*args, **(kwargs or {}))


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"nesterov": True}, {"adjust_lr_fn": None}, {"adjust_lr_fn": "original"}, {"ns_coefficients": "polar_express"},
    ],
)  # fmt: skip
def test_it_is_timms_step(changed: dict[str, object]) -> None:
    module = own_muon().__module__ and __import__("sys").modules[muon.__name__]
    settings = SETTINGS | changed
    ours, theirs = tensors(0), tensors(0)
    our_momenta, their_momenta = tensors(1), tensors(1)
    as_float32 = iteration_in_float32()
    for seed in (2, 3):
        step_by_shapes(as_float32, ours, tensors(seed), our_momenta, **settings)
        as_float32.muon(theirs, tensors(seed), their_momenta, **settings)
    for own, their in zip(ours + our_momenta, theirs + their_momenta, strict=True):
        torch.testing.assert_close(own, their, rtol=2e-5, atol=2e-6)
    assert (
        module.zeropower_via_newtonschulz(torch.eye(2), 1, [(1.0, 0.0, 0.0)]).dtype
        == torch.bfloat16
    )


def iteration_in_float32():  # type: ignore[no-untyped-def]
    """The copy of timm's module that :func:`own_muon` makes, its step one by one."""
    import sys
    from importlib.util import module_from_spec

    spec = sys.modules[muon.__name__].__spec__
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    original = module.zeropower_via_newtonschulz
    module.zeropower_via_newtonschulz = lambda *args, **kwargs: original(
        *args, dtype=torch.float32, **kwargs
    )
    return module


def test_a_vits_step_takes_a_tenth_of_the_calls() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=10, depth=12, embed_dim=24, num_heads=3
    )
    weights = [p.detach().clone() for p in model.parameters() if p.ndim == 2]
    grads = [torch.randn_like(weight) for weight in weights]
    counts = []
    module = iteration_in_float32()
    for step in (lambda *args, **kw: step_by_shapes(module, *args, **kw), module.muon):
        with Calls() as calls:
            step(list(weights), grads, [torch.zeros_like(w) for w in weights], **SETTINGS)
        counts.append(calls.count)
    assert counts[0] * 5 < counts[1], counts


def test_on_a_cpu_the_weights_are_stepped_one_by_one_and_iterated_in_float32() -> None:
    """There the calls cost nothing, numbers of earlier runs stay, and bfloat16 would be off by 8e-4."""
    torch.manual_seed(0)
    model = torch.nn.Linear(24, 48, bias=False)
    expected, momentum = model.weight.detach().clone(), torch.zeros(48, 24)
    settings = {**SETTINGS, "weight_decay": 0.0}
    optimizer = build_optimizer([model], OptimSpec("muon", lr=0.1, weight_decay=0.0))
    for gradient in torch.randn(3, 48, 24):
        model.weight.grad = gradient
        optimizer.step()
        iteration_in_float32().muon([expected], [gradient.clone()], [momentum], **settings)
    torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=1e-5)
