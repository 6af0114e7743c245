"""Damaged views of validation pictures, by torchvision's own transforms."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor
from torchvision.transforms.v2 import functional as tvf

from kd.data.transforms import seeded

if TYPE_CHECKING:
    from kd.data.batch import Batch

STRENGTHS = (1, 2, 3)


def blur(images: Tensor, strength: int) -> Tensor:
    """Gaussian, of 1, 2 or 3 hundredths of the picture's height as standard deviation."""
    sigma = max(0.5, strength * images.shape[-2] / 100)
    return tvf.gaussian_blur(images, [2 * round(3 * sigma) + 1] * 2, [sigma] * 2)


def noise(images: Tensor, strength: int) -> Tensor:
    """Gaussian, of 0.05, 0.1 or 0.15 of the range."""
    with seeded(strength):
        return tvf.gaussian_noise(images, sigma=0.05 * strength)


def jpeg(images: Tensor, strength: int) -> Tensor:
    """Compressed at quality 50, 25 or 10."""
    return tvf.jpeg(images, {1: 50, 2: 25, 3: 10}[strength])


def brightness(images: Tensor, strength: int) -> Tensor:
    """Darkened to 0.7, 0.5 or 0.3."""
    return tvf.adjust_brightness(images, {1: 0.7, 2: 0.5, 3: 0.3}[strength])


CORRUPTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "blur": blur, "noise": noise, "jpeg": jpeg, "brightness": brightness,
}  # fmt: skip


def corrupted(batches: "Iterable[Batch]", name: str, strength: int) -> "Iterator[Batch]":
    """The same batches, their pictures damaged: uint8 ``(N, 3, H, W)`` as before, targets as they are."""
    for batch in batches:
        yield {**batch, "image": CORRUPTIONS[name](batch["image"], strength)}
