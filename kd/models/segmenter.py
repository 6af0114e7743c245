"""Dense prediction: a timm backbone with a classifier for every pixel."""

from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from kd.errors import UserError

HEAD_STRIDE = 4
"""Pixels a side for each place of the grid on which the head works: finer costs much and gains little."""
LEVELS = 4
"""Maps of the backbone that the head reads, the last ones."""
TimmModel: TypeAlias = Any  # torch types its parts as bare modules


def backbone_of(model: nn.Module) -> TimmModel:
    """A model's ``backbone``, which a :class:`DenseModel` has; a model without one is returned as it is."""
    return getattr(model, "backbone", model)


class DenseModel(nn.Module):
    """A timm model's intermediate features, fused on one grid, classified and resized to the picture.

    Works on any timm model with ``forward_intermediates``: the last four stages of a convolutional or windowed model,
    four evenly spaced blocks of a ViT (its final norm applied). Each level goes through a 1x1 convolution to ``width``
    channels and is resized to a quarter of the picture; their sum through a 3x3 convolution, batch norm and ReLU to the
    classifier: a feature pyramid (arXiv 1612.03144) in its simplest form.

    Args:
        backbone: a timm model built with ``num_classes=0``.
        num_classes: C.
        width: channels of the fused map.

    Raises:
        UserError: a model that gives no intermediate features.
    """

    def __init__(self, backbone: nn.Module, num_classes: int, width: int = 96) -> None:
        """Chooses the levels of a backbone that the head reads, and drops the layers after them.

        Args:
            backbone: of timm, with ``forward_intermediates``; pruned in place.
            num_classes: of each pixel.
            width: channels that each level is projected to.
        """
        super().__init__()
        self.backbone = backbone
        if not hasattr(backbone, "forward_intermediates"):
            raise UserError(
                f"arch: {type(backbone).__name__} gives no intermediate features for dense prediction"
            )
        info: Any = backbone.feature_info
        count = len(info)
        is_vit = len({level["reduction"] for level in info}) == 1
        last = min(LEVELS, count)
        if is_vit:  # blocks at equal distances, the last among them
            self.indices = [count * (i + 1) // last - 1 for i in range(last)]
        else:
            self.indices = list(range(count - last, count))
        backbone.prune_intermediate_layers(self.indices, prune_norm=not is_vit, prune_head=True)  # type: ignore[operator]
        # timm 1.0.28 leaves a ConvNeXt's last norm there: DDP waits for its gradient
        if not is_vit and list(getattr(backbone, "head", nn.Identity()).parameters()):
            backbone.head = nn.Identity()
        self.norm = is_vit
        self.head = DenseHead([info[i]["num_chs"] for i in self.indices], width, num_classes)
        self.num_classes = num_classes
        self.pretrained_cfg = {**backbone.pretrained_cfg, "classifier": "head"}  # type: ignore[dict-item]
        self.num_prefix_tokens = getattr(backbone, "num_prefix_tokens", 0)

    def get_classifier(self) -> nn.Module:
        """The last layer, a 1x1 convolution, under the name that timm's models use."""
        return self.head.classifier

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turns gradient checkpointing of the backbone on or off."""
        self.backbone.set_grad_checkpointing(enable)  # type: ignore[operator]

    def levels(self, x: Tensor) -> list[Tensor]:
        """Prepared pictures ``(N, 3, H, W)`` -> the backbone's features that the head takes, from the first level to the
        last, ``(N, C_i, H_i, W_i)`` each.
        """
        return self.backbone.forward_intermediates(  # type: ignore[operator]
            x, indices=self.indices, norm=self.norm, output_fmt="NCHW", intermediates_only=True
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(N, 3, H, W)`` -> logits ``(N, C, H, W)``."""
        height, width = x.shape[2:]
        logits = self.head(self.levels(x), (height // HEAD_STRIDE, width // HEAD_STRIDE))
        return F.interpolate(logits, (height, width), mode="bilinear")


class DenseHead(nn.Module):
    """Levels of features -> logits on one grid, see :class:`DenseModel`."""

    def __init__(self, widths: list[int], width: int, num_classes: int) -> None:
        """One 1 x 1 convolution a level, whose sum goes through a 3 x 3 convolution and a classifier.

        Args:
            widths: channels of each level.
            width: channels of the sum.
            num_classes: of each pixel.
        """
        super().__init__()
        self.levels = nn.ModuleList([nn.Conv2d(w, width, 1) for w in widths])
        self.fuse = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Conv2d(width, num_classes, 1)

    def forward(self, features: list[Tensor], size: tuple[int, int]) -> Tensor:
        """Fuses all levels at ``size`` and classifies each pixel.

        Args:
            features: ``(N, C_i, H_i, W_i)`` of each level.
            size: height and width of the grid, a quarter of the picture's.

        Returns:
            Logits ``(N, C, *size)``.
        """
        maps = [
            F.interpolate(level(x), size, mode="bilinear")
            for level, x in zip(self.levels, features, strict=True)
        ]
        return self.classifier(self.fuse(sum(maps[1:], maps[0])))
