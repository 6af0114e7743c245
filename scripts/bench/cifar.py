"""He et al.'s ResNets for 32 x 32 pixels, as ``arms/cifar.yaml`` names them."""

import torch.nn.functional as F
from torch import Tensor, nn

MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Identity()
        if stride > 1 or inside != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """``(N, inside, H, W)`` to ``(N, width, H / stride, W / stride)``."""
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.downsample(x))


class ResNet(nn.Module):
    """He et al.'s ResNet of 6n + 2 layers for 32 x 32 pixels, widths 16, 32, 64, built and named as RepDistiller's."""

    img_size, mean, std = (32, 32), MEAN, STD

    def __init__(self, depth: int, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        widths = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(
                *(
                    Block(*(shape if i == 0 else (shape[1], shape[1], 1)))
                    for i in range((depth - 2) // 6)
                )
            )
            for shape in widths
        )
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
