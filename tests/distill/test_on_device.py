"""The fit of a start where the run trains, on a GPU that is not there (:mod:`tests._fake_gpu`)."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import timm
import torch
from torch import Tensor, nn

from kd.data.datamodule import SampledPictures
from kd.data.targets import LabelSets, Numbers, Targets
from kd.distill.classifier import _features_and_targets
from kd.distill.inherit import inherit_together
from kd.distill.on_device import CPU, fitting_on
from kd.models import Preprocess
from kd.models.taps import Taps
from tests._fake_gpu import CUDA, gpu
from tests._helpers import refuses

INPUT = Preprocess(32, (0.5,) * 3, (0.25,) * 3)
THEIRS = Preprocess(32, (0.4,) * 3, (0.2,) * 3)
VIT = {"img_size": 32, "patch_size": 8, "depth": 2}
BLOCKS = {"layers": (1, 1, 2, 1)}
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("vit_tiny_patch16_224", {**VIT, "embed_dim": 64, "num_heads": 4},
              {**VIT, "embed_dim": 32, "num_heads": 2}),
    "heads of another size": ("vit_tiny_patch16_224", {**VIT, "embed_dim": 64, "num_heads": 4},
                              {**VIT, "embed_dim": 32, "num_heads": 4}),
    "rotary": ("vit_small_patch16_dinov3", {**VIT, "embed_dim": 64, "num_heads": 4},
               {**VIT, "embed_dim": 32, "num_heads": 2}),
    "attention pooling": ("vit_base_patch16_siglip_224", {**VIT, "embed_dim": 64, "num_heads": 4},
                          {**VIT, "embed_dim": 32, "num_heads": 2}),
    "convnext": ("convnext_atto", {"patch_size": 4, "depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48)},
                 {"patch_size": 4, "depths": (1, 1, 2, 1), "dims": (8, 12, 16, 24)}),
    "resnet": ("resnet18", {**BLOCKS, "channels": (16, 24, 32, 48)},
               {**BLOCKS, "channels": (8, 12, 16, 24)}),
    "bottleneck": ("resnet26", {**BLOCKS, "channels": (8, 12, 16, 24)},
                   {**BLOCKS, "channels": (4, 6, 8, 12)}),
}  # fmt: skip
"""timm's name, the teacher's arguments, the student's."""


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """As ``model.to(device)``, which can't change a fake weight in its place."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(weight.to(device), weight.requires_grad)
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = value.to(device)
    return model


@pytest.fixture()
def on_gpu() -> Iterator[None]:
    with gpu(), mock.patch.object(nn.Module, "to", moved):
        yield


@pytest.mark.parametrize("name", PAIRS)
def test_each_family_is_fitted_on_the_device_alone(name: str, on_gpu: None) -> None:
    """A tensor of the host in a product with one of the device would raise."""
    sample = torch.zeros(8, 3, 32, 32, dtype=torch.uint8, device=CPU)
    arch, big, small = PAIRS[name]
    teacher = timm.create_model(arch, num_classes=5, **big).eval()
    student = timm.create_model(arch, num_classes=5, **small).eval()
    with fitting_on(CUDA, teacher, student) as place:
        inherit_together([(student, INPUT)], teacher, sample.to(place), THEIRS)
    for model in (teacher, student):
        assert {value.device for value in model.state_dict().values()} == {CPU}


def test_where_the_memory_is_too_small_the_key_is_named(on_gpu: None) -> None:
    layer = nn.Linear(2, 2)
    said = refuses(r"model\.student\.inherit_pictures: .* fewer pictures")
    with said, fitting_on(CUDA, layer):
        raise torch.cuda.OutOfMemoryError
    assert layer.weight.device == CPU


def test_products_keep_all_bits_in_the_fit_and_the_runs_own_after_it(on_gpu: None) -> None:
    torch.set_float32_matmul_precision("high")
    convolutions = torch.backends.cudnn.allow_tf32
    try:
        with fitting_on(CUDA, nn.Linear(2, 2)):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32 == convolutions
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("kind", "targets"),
    [(Targets(), [2, 0]), (LabelSets(), [[2], []]), (Numbers(), [[1.0] * 3] * 2)],
)
def test_what_a_new_classifier_is_fitted_to_is_on_the_host(
    kind: Targets, targets: list[Any], on_gpu: None
) -> None:
    """Features and targets enter one product: targets were made on the GPU, features brought back from it."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    named: Any = model
    named.get_classifier = lambda: model[1]
    taps = Taps(model, [], (2, 2))
    student: Any = SimpleNamespace(model=model, inputs=Tensor.float, taps=taps)
    picture = torch.zeros(3, 2, 2, dtype=torch.uint8, device=CPU)
    pictures: Any = {(number, 0): (picture,) for number in range(2)}
    stack = partial(kind.stack, classes=3)
    chosen = SampledPictures(pictures, targets, range(2), stack)
    with fitting_on(CUDA, model) as place:
        features, stacked = _features_and_targets(student, None, chosen, place)
    assert features.device == stacked.device == CPU and len(features) == len(stacked) == 2
