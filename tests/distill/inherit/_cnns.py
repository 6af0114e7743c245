"""Small ConvNeXts and ResNets that matter in every layer."""

import timm
import torch
from torch import nn

from kd.models import Preprocess

INPUT = Preprocess(32, (0.5,) * 3, (0.5,) * 3)


def resnet(
    seed: int, channels: tuple[int, ...] = (16, 16, 24, 32), arch: str = "resnet18"
) -> nn.Module:
    """A small ResNet of five classes with random weights and statistics of its norms."""
    torch.manual_seed(seed)
    model = timm.create_model(arch, num_classes=5, channels=channels, zero_init_last=False)
    model.train()
    with torch.no_grad():
        for _ in range(20):
            model(INPUT(pictures(seed=9)))
    return model.eval()


def convnext(seed: int, dims: tuple[int, ...] = (16, 16, 24, 32), **kwargs: object) -> nn.Module:
    """A small ConvNeXt of five classes, all of whose weights are drawn from ``seed``."""
    torch.manual_seed(seed)
    shape = {"dims": dims, "depths": (1, 2, 2, 1), "patch_size": 2, "ls_init_value": 0.5}
    model = timm.create_model("convnext_atto", num_classes=5, **{**shape, **kwargs})
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def pictures(count: int = 64, seed: int = 0) -> torch.Tensor:
    """Soft noise, uint8."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(count, 3, 8, 8, generator=generator)
    return (255 * nn.functional.interpolate(small, (32, 32), mode="bilinear")).byte()
