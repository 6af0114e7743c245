"""He et al.'s ResNets for 32 x 32 pixels, as ``arms/cifar.yaml`` names them."""

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, conv1x1

MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)


def stage(inside: int, width: int, stride: int, blocks: int) -> nn.Sequential:
    """Blocks of two 3 x 3 convolutions beside a shortcut; the first one strides."""
    shortcut = None
    if stride > 1:
        shortcut = nn.Sequential(conv1x1(inside, width, stride), nn.BatchNorm2d(width))
    rest = [BasicBlock(width, width) for _ in range(blocks - 1)]
    return nn.Sequential(BasicBlock(inside, width, stride, shortcut), *rest)


class ResNet(nn.Module):
    """He et al.'s ResNet of 6n + 2 layers for 32 x 32 pixels, widths 16, 32, 64, built and named as RepDistiller's."""

    img_size, mean, std = (32, 32), MEAN, STD

    def __init__(self, depth: int, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        blocks = (depth - 2) // 6
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = stage(16, 16, 1, blocks)
        self.layer2 = stage(16, 32, 2, blocks)
        self.layer3 = stage(32, 64, 2, blocks)
        self.fc = nn.Linear(64, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Float pictures ``(N, 3, 32, 32)`` to logits ``(N, C)``."""
        maps = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.fc(maps.mean((2, 3)))


class CifarResNet:
    """Builder of a :class:`ResNet` (``model.student.builder=cifar.CifarResNet``)."""

    def __init__(self, depth: int = 20) -> None:
        self.depth = depth

    def build(self, num_classes: int, img_size: tuple[int, int] | None) -> nn.Module:
        """A model of 32 x 32 pixels."""
        return ResNet(self.depth, num_classes)
