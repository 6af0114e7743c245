"""timm's list: a copy at full size answers as its teacher does, or the model is refused by name.

A fourth of the names by default; ``pytest -m slow`` walks over all.
"""

from collections.abc import Callable

import pytest
import timm
import torch
from torch import nn

from kd.distill.inherit import check_pair, inherit_together
from kd.models import Preprocess
from tests.distill.inherit._vits import correlation

SIZES = {
    "eva": {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8},
    "convnext": {"dims": (8, 16, 16, 24), "depths": (1, 1, 2, 1)},
    "resnet": {"channels": (8, 16, 16, 24)},
}
"""How a model of timm's is made small, by its module."""
SIZES["vision_transformer"] = SIZES["eva"]
SHARES = [4, pytest.param(1, marks=pytest.mark.slow)]


def prepared(side: int) -> Preprocess:
    return Preprocess(side, (0.5,) * 3, (0.5,) * 3)


def small(arch: str, module: str, seed: int, side: int) -> nn.Module:
    """A model of timm's in small, all of whose weights are drawn from ``seed``; norms have seen pictures."""
    torch.manual_seed(seed)
    pooling = {"attn_pool_num_heads": 4} if "_pe_" in arch else {}
    model = timm.create_model(arch, num_classes=5, **SIZES[module], **pooling)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    pictures = torch.randint(256, (64, 3, side, side), dtype=torch.uint8)
    with torch.no_grad():
        model.train()(prepared(side)(pictures))
    return model.eval()


def one_of_each_shape(module: str, share: int, side: int) -> dict[str, Callable[[int], nn.Module]]:
    """One model's name of each shape in a share of a module of timm's, and what makes it from a seed."""
    names: dict[str, str] = {}
    for arch in timm.list_models(module=module)[::share]:
        with torch.device("meta"):
            if module == "resnet" and len(timm.create_model(arch).layer3) > 2:
                continue  # the same code, for a minute
        try:
            model = small(arch, module, 0, side)
        except (AssertionError, RuntimeError, TypeError, ValueError):
            continue  # it takes no such sizes: its class is another
        extras = [
            getattr(model, name, None) for name in ("rope", "global_pool", "num_prefix_tokens")
        ]
        parameters = sorted(dict(model.named_parameters()))
        names.setdefault(f"{model} {extras} {parameters}", arch)
    return {
        arch: lambda seed, arch=arch: small(arch, module, seed, side) for arch in names.values()
    }


@torch.no_grad()
@pytest.mark.timeout(1200)  # a walk over a whole list: how long it takes says nothing
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    ("module", "side"), [("eva", 32), ("vision_transformer", 32), ("convnext", 64), ("resnet", 64)]
)
def test_a_copy_answers_as_its_teacher_does(module: str, side: int, share: int) -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (128, 3, side, side), dtype=torch.uint8, generator=generator)
    taken, refused, prepare = [], {}, prepared(side)
    for arch, make in one_of_each_shape(module, share, side).items():
        teacher, student = make(0), make(1)
        try:
            check_pair(student, teacher)
        except ValueError as error:
            refused[arch] = str(error)
            continue
        inherit_together([(student, prepare)], teacher, pictures[:96], prepare)
        found = correlation(student, teacher, pictures[96:], prepare, prepare)
        assert found >= 0.98, f"{arch}: {found:.3f}"
        taken.append(arch)
    print(f"{module}: taken {taken}, refused {refused}")
    assert len(taken) > (10 if side == 32 else 3) // share
    for arch, reason in refused.items():
        assert "can't be inherited" in reason or "must be" in reason, f"{arch}: {reason}"
