"""timm's whole list: a copy at full size answers as its teacher does, or the model is refused by name."""

import functools

import pytest
import timm
import torch
from torch import nn

from kd.distill.inherit import check_pair, inherit_together
from kd.models import Preprocess

SHAPE = {"embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
SIDE = 32
"""Pixels of a picture; patches are of a quarter of it."""
INPUT = Preprocess(SIDE, (0.5,) * 3, (0.5,) * 3)


def small(arch: str, seed: int) -> nn.Module:
    """A model of timm's in small, all of whose weights are drawn from ``seed``."""
    torch.manual_seed(seed)
    sizes = {**SHAPE, "img_size": SIDE, "patch_size": SIDE // 4}
    if "_pe_" in arch:
        sizes["attn_pool_num_heads"] = 4
    model = timm.create_model(arch, **sizes)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


@functools.cache
def shapes_of(module: str) -> dict[str, str]:
    """One model's name of each shape in a module of timm's, and its class."""
    names: dict[str, str] = {}
    for arch in timm.list_models(module=module):
        try:
            model = small(arch, 0)
        except (AssertionError, RuntimeError, TypeError, ValueError):
            continue  # it takes no such sizes: its class is another
        extras = getattr(model, "rope", None), getattr(model, "global_pool", None)
        key = f"{model} {extras} {model.num_prefix_tokens} {sorted(dict(model.named_parameters()))}"
        names.setdefault(key, arch)
    return {arch: key for key, arch in names.items()}


@torch.no_grad()
@pytest.mark.parametrize("module", ["eva", "vision_transformer"])
def test_a_copy_answers_as_its_teacher_does(module: str, sample: torch.Tensor) -> None:
    taken, refused = [], {}
    for arch in shapes_of(module):
        teacher, student = small(arch, 0), small(arch, 1)
        try:
            check_pair(student, teacher)
        except ValueError as error:
            refused[arch] = str(error)
            continue
        inherit_together([(student, INPUT)], teacher, sample[:96], INPUT)
        answers = [model(INPUT(sample[96:])) for model in (student, teacher)]
        ours, theirs = (each - each.mean(0) for each in answers)
        correlation = float((ours * theirs).sum() / ours.norm() / theirs.norm())
        assert correlation >= 0.98, f"{arch}: {correlation:.3f}"
        taken.append(arch)
    print(f"{module}: taken {taken}, refused {refused}")
    assert len(taken) > 10
    for arch, reason in refused.items():
        assert "can't be inherited" in reason or "must be" in reason, f"{arch}: {reason}"


CNN = {
    "convnext": {"dims": (8, 16, 16, 24), "depths": (1, 1, 2, 1)},
    "resnet": {"channels": (8, 16, 16, 24)},
}
"""How a convolutional network of timm's is made small, by its module."""
CNN_INPUT = Preprocess(64, (0.5,) * 3, (0.5,) * 3)


def small_cnn(arch: str, module: str, seed: int) -> nn.Module:
    """A convolutional network in small, all of whose weights are drawn from ``seed``, with statistics of its norms."""
    torch.manual_seed(seed)
    model = timm.create_model(arch, num_classes=5, **CNN[module])
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    pictures = torch.randint(256, (64, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        model.train()(CNN_INPUT(pictures))
    return model.eval()


def depth_of_third_stage(arch: str) -> int:
    """Blocks of a ResNet's third stage, of the model at full size; no weights are made."""
    with torch.device("meta"):
        return len(timm.create_model(arch).layer3)


@torch.no_grad()
@pytest.mark.timeout(1200)  # a walk over a whole list: how long it takes says nothing
@pytest.mark.parametrize("module", ["convnext", "resnet"])
def test_a_copy_of_a_cnn_answers_as_its_teacher_does(module: str) -> None:
    names, taken, refused = {}, [], {}
    for arch in timm.list_models(module=module):
        try:
            names.setdefault(str(small_cnn(arch, module, 0)), arch)
        except (AssertionError, RuntimeError, TypeError, ValueError):
            continue  # it takes no such sizes
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (96, 3, 64, 64), dtype=torch.uint8, generator=generator)
    for arch in names.values():
        if module == "resnet" and depth_of_third_stage(arch) > 2:
            continue  # the same code, for a minute
        teacher, student = small_cnn(arch, module, 0), small_cnn(arch, module, 1)
        try:
            check_pair(student, teacher)
        except ValueError as error:
            refused[arch] = str(error)
            continue
        inherit_together([(student, CNN_INPUT)], teacher, pictures[:64], CNN_INPUT)
        answers = [model(CNN_INPUT(pictures[64:])) for model in (student, teacher)]
        ours, theirs = (each - each.mean(0) for each in answers)
        correlation = float((ours * theirs).sum() / ours.norm() / theirs.norm())
        assert correlation >= 0.98, f"{arch}: {correlation:.3f}"
        taken.append(arch)
    print(f"{module}: taken {taken}, refused {refused}")
    assert len(taken) > 3
    for arch, reason in refused.items():
        assert "can't be inherited" in reason or "must be" in reason, f"{arch}: {reason}"
