"""A student of its teacher's own size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kd.models.segmenter import DenseModel
from tests.distill.inherit._cnns import convnext, resnet
from tests.distill.inherit._vits import OURS, THEIRS, answers, inherit, vit


def dense(seed: int) -> nn.Module:
    """A segmenter on a small ViT."""
    return DenseModel(vit(seed), 3, width=8).eval()


MODELS: dict[str, Callable[[int], Any]] = {
    "vit": vit,
    "layer scales": lambda seed: vit(seed, init_values=0.1),
    "rotary": lambda seed: vit(seed, arch="vit_small_patch16_dinov3"),
    "attention pooling": lambda seed: vit(seed, arch="vit_base_patch16_siglip_224"),
    "perception": lambda seed: vit(seed, arch="vit_pe_core_tiny_patch16_384"),
    "dense": dense,
    "convnext": convnext,
    "resnet": resnet,
}


@pytest.mark.parametrize("family", MODELS)
def test_it_begins_as_its_teacher(family: str, sample: torch.Tensor) -> None:
    teacher, student = MODELS[family](0), MODELS[family](1)
    inherit(student, teacher, sample, OURS)
    for name, value in teacher.state_dict().items():
        assert student.state_dict()[name].equal(value), name


def test_one_that_computes_otherwise_is_fitted(sample: torch.Tensor) -> None:
    """Another input, or another activation with weights of the same shapes."""
    for seed, act_layer, theirs in ((0, "gelu", THEIRS), (0, "relu", OURS)):
        teacher = vit(seed)
        student = vit(1, act_layer=act_layer)
        inherit(student, teacher, sample, theirs)
        weights = teacher.state_dict()
        assert not all(x.equal(weights[name]) for name, x in student.state_dict().items())
        ours, wanted = answers(student, sample), answers(teacher, sample, theirs)
        assert torch.corrcoef(torch.stack([ours.flatten(), wanted.flatten()]))[0, 1] > 0.9
