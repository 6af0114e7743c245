"""Views of a picture: torchvision's v2 transforms on uint8 tensors, seeded by (seed, index, epoch) alone."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from kd.run.settings import Augment
from kd.storage.decoding import MAX_PIXELS, frame


def height_width(img_size: int | Sequence[int]) -> tuple[int, int]:
    """A side, or height and width -> ``(height, width)``.

    >>> height_width(224), height_width([168, 224])
    ((224, 224), (168, 224))
    """
    return (img_size, img_size) if isinstance(img_size, int) else (int(img_size[0]), int(img_size[1]))


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Runs a block under torch's CPU generator seeded by ``numbers``, and restores it; GPUs' are not touched."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    try:
        yield
    finally:
        generator.set_state(state)


def train_transform(size: tuple[int, int], augment: Augment) -> v2.Compose:
    """uint8 ``(3, H, W)`` -> uint8 ``(3, *size)``: a random view; of a mask beside it the same (nearest pixel)."""
    shape = size[1] / size[0]
    steps: list[torch.nn.Module] = [
        v2.RandomResizedCrop(size, scale=(augment.scale, 1.0), ratio=(3 / 4 * shape, 4 / 3 * shape), antialias=True),
        v2.RandomHorizontalFlip(augment.hflip),
    ]
    if augment.rand_augment:
        steps.append(v2.RandAugment(num_ops=2, magnitude=augment.rand_augment, fill=[124, 116, 104]))
    if augment.color_jitter:
        j = augment.color_jitter
        steps.append(v2.ColorJitter(j, j, j, min(0.5, j / 4)))
    if augment.random_erasing:
        steps.append(v2.RandomErasing(augment.random_erasing, value=[124.0, 116.0, 104.0]))
    return v2.Compose(steps)


class EvalView(v2.Transform):
    """uint8 ``(3, H, W)`` -> uint8 ``(3, *size)`` by :func:`kd.storage.decoding.frame`; likewise a mask."""

    def __init__(self, size: tuple[int, int], crop_ratio: float | None, max_pixels: int = MAX_PIXELS) -> None:
        super().__init__()
        self.size, self.crop_ratio, self.max_pixels = size, crop_ratio, max_pixels

    def forward(self, *pictures: Tensor) -> Tensor | tuple[Tensor, ...]:
        """A picture, or a picture and its mask."""
        height, width = pictures[0].shape[-2:]
        part, scaled, corner = frame((width, height), self.size, self.crop_ratio, self.max_pixels)
        parts = (tvf.crop(p, part[1], part[0], part[3], part[2]) for p in pictures)
        views = (tvf.resize(p, [scaled[1], scaled[0]], antialias=True) for p in parts)  # bilinear; masks: nearest
        shown = [tvf.crop(p, corner[1], corner[0], *self.size) for p in views]
        return shown[0] if len(shown) == 1 else tuple(shown)


class MixPairs:
    """Mixup and cutmix of neighbours in a batch, by torchvision's own transforms, on uint8 pictures.

    The samples 2k and 2k+1 are mixed. Neighbours, and the ratio, follow from (seed, index, epoch): a worker or a
    resumed run changes nothing.
    """

    def __init__(self, augment: Augment, num_classes: int, seed: int) -> None:
        kinds: list[v2.Transform] = []
        if augment.mixup:
            kinds.append(v2.MixUp(alpha=augment.mixup, num_classes=num_classes))
        if augment.cutmix:
            kinds.append(v2.CutMix(alpha=augment.cutmix, num_classes=num_classes))
        self.mix = v2.RandomApply([v2.RandomChoice(kinds)], augment.mix_probability) if kinds else None
        self.num_classes, self.seed = num_classes, seed

    def __call__(self, images: Tensor, targets: Tensor, keys: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """uint8 ``(N, 3, H, W)``, ids ``(N,)``, (index, epoch) each -> mixed uint8, probabilities ``(N, C)``.

        A picture that has no label (id -1), or is mixed with one, has no label after: all 0.
        """
        if self.mix is None:
            return images, targets
        known = targets >= 0
        targets = targets.clamp_min(0)
        soft = torch.nn.functional.one_hot(targets, self.num_classes).float() * known[:, None]
        mixed = images.clone()
        for i in range(0, len(images) - 1, 2):
            with seeded(self.seed, *keys[i], 1):
                pair, labels = self.mix(tvf.to_dtype(images[i : i + 2], torch.float32), targets[i : i + 2])
            mixed[i : i + 2] = pair.round().clamp(0, 255).to(torch.uint8)
            if labels.ndim == 2:
                soft[i : i + 2] = labels * known[i : i + 2].all()
        return mixed, soft
