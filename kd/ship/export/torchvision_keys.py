"""A backbone under the names of torchvision's detectors: FasterRCNN, MaskRCNN, RetinaNet and FCOS.

timm and torchvision have the same ResNets and MobileNets. The names of a ResNet's tensors are equal, those of a MobileNet
differ, but both list its tensors in the order in which a picture passes its layers. torchvision's own code loads them,
strictly, and must give the student's features.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models.detection import backbone_utils

BODY = "torchvision.safetensors"
PLACE = "backbone.body"
"""The module of a detector that loads the file."""
MOBILENETS = {
    "mobilenetv3_large_100": "mobilenet_v3_large",
    "mobilenetv3_small_100": "mobilenet_v3_small",
}
"""torchvision's names by timm's."""

CLOSE = 1e-3
"""Largest difference of the features, as a share of their largest magnitude."""

SIDE = 96  # pixels of the pictures that the features are compared on


def detector_body(model: nn.Module, arch: str) -> dict[str, Tensor] | None:
    """A student's tensors under the names of :data:`PLACE` of torchvision's detectors.

    None where torchvision has no such network, or where its network computes something else with these weights.

    Args:
        model: a timm model in eval mode on the CPU, with ``forward_features``.
        arch: timm's name of it.
    """
    if arch in MOBILENETS:
        body = _mobilenet_body(MOBILENETS[arch])
    elif re.fullmatch(r"(wide_)?res(net|next)[\w]+", arch) and arch in models.list_models(models):
        body = _resnet_body(arch)
    else:
        return None
    state = _state_for(body, model)
    if state is None:
        return None
    body.load_state_dict(state, strict=True)
    return state if _same_features(body.eval(), model) else None


def _resnet_body(arch: str) -> nn.Module:
    """What FasterRCNN, RetinaNet and their kin run of a ResNet, below their pyramid, with random weights."""
    fpn: Any = backbone_utils.resnet_fpn_backbone(
        backbone_name=arch, weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5
    )
    return fpn.body


def _mobilenet_body(arch: str) -> nn.Module:
    """What FasterRCNN runs of a MobileNetV3, below its pyramid, with random weights."""
    fpn: Any = backbone_utils.mobilenet_backbone(
        backbone_name=arch, weights=None, fpn=True, norm_layer=nn.BatchNorm2d, trainable_layers=6
    )
    return fpn.body


def _state_for(body: nn.Module, model: nn.Module) -> dict[str, Tensor] | None:
    """The model's tensors under the names of ``body``, in order; None where a shape differs, or the model has too few.

    Tensors that the model has beyond those of ``body`` (its classifier's) are left out.

    Args:
        body: torchvision's part of a detector.
        model: timm's.
    """
    expected = body.state_dict()
    tensors = [*model.state_dict().values()]
    state = {}
    for name, value in zip(expected, tensors, strict=False):
        if value.shape != expected[name].shape:
            return None
        state[name] = value.clone()
    return state if len(state) == len(expected) else None


@torch.no_grad()
def _same_features(body: nn.Module, model: Any) -> bool:
    """Whether torchvision's network gives the student's last map, on pictures of noise."""
    generator = torch.Generator().manual_seed(0)
    images_N3HW = torch.randn(2, 3, SIDE, SIDE, generator=generator, device="cpu")
    expected = model.forward_features(images_N3HW)
    last_map = body(images_N3HW)
    if isinstance(last_map, dict):  # of all stages
        *_, last_map = last_map.values()
    if last_map.shape != expected.shape:
        return False
    difference = (last_map - expected).abs().max()
    largest = expected.abs().max()
    return bool(difference <= CLOSE * largest)
