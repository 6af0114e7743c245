"""Each model's own input."""

from collections.abc import Sequence

import timm
import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as tvf

Images = Tensor  # uint8, (N, 3, H, W)


class Preprocess:
    """uint8 pictures -> one model's float input: resized to its size and normalised its way, on their device.

    Args:
        img_size: side of the square input in pixels, or height and width.
        mean: per channel, of values in 0..1.
        std: likewise.
        channels_last: the memory order of the output.
    """

    def __init__(
        self,
        img_size: int | Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
        channels_last: bool = False,
    ) -> None:
        self.size = (img_size, img_size) if isinstance(img_size, int) else (int(img_size[0]), int(img_size[1]))
        self.channels_last = channels_last
        self.mean, self.std = tuple(mean), tuple(std)
        self.dtype = torch.float32  # of the output; that of the weights where a run trains in half precision throughout

    def __call__(self, images: Images) -> Tensor:
        """uint8 ``(N, 3, H, W)`` -> floats ``(N, 3, *size)``."""
        if images.shape[-2:] != self.size:
            images = tvf.resize(images, list(self.size), antialias=True)
        pictures = tvf.normalize(tvf.to_dtype(images, torch.float32, scale=True), self.mean, self.std)
        pictures = pictures.to(self.dtype)
        return pictures.contiguous(memory_format=torch.channels_last) if self.channels_last else pictures


def preprocess_for(
    model: nn.Module,
    img_size: int | Sequence[int] | None,
    channels_last: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Preprocess:
    """The input that ``model`` wants, by its timm configuration; what is given counts instead."""
    config = timm.data.resolve_model_data_config(model)
    size = img_size or config["input_size"][-2:]
    return Preprocess(size, mean or config["mean"], std or config["std"], channels_last)
