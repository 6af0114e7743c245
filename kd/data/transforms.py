"""Views of a picture: torchvision's v2 transforms on uint8 tensors, seeded by (seed, index, epoch) alone."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from kd.data.batch import Batch
from kd.settings import Augment
from kd.storage.decoding import MAX_PIXELS, frame


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
    crop: list[torch.nn.Module] = [
        v2.RandomResizedCrop(
            size, scale=(augment.scale, 1.0), ratio=(3 / 4 * shape, 4 / 3 * shape), antialias=True
        )
    ]
    crop = [Whole(size), v2.RandomCrop(size, padding=augment.pad)] if augment.pad else crop
    unit: list[torch.nn.Module] = [v2.RandomHorizontalFlip(augment.hflip)]
    if augment.vflip:
        unit.append(v2.RandomVerticalFlip(augment.vflip))
    if augment.rotation:
        unit.append(v2.RandomRotation(augment.rotation))
    if augment.rand_augment:
        unit.append(v2.RandAugment(num_ops=2, magnitude=augment.rand_augment, fill=[124, 116, 104]))
    if augment.color_jitter:
        j = augment.color_jitter
        unit.append(v2.ColorJitter(j, j, j, min(0.5, j / 4)))
    load = unit * augment.repeat
    steps = [*load, *crop] if augment.before_resize else [*crop, *load]
    if augment.random_erasing:
        steps.append(v2.RandomErasing(augment.random_erasing, value=[124.0, 116.0, 104.0]))
    return v2.Compose(steps)


class Whole(v2.Transform):
    """The whole picture, resized: what a padded random crop is cut from."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = list(size)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """The whole picture as the crop."""
        height, width = flat_inputs[0].shape[-2:]
        return {"top": 0, "left": 0, "height": height, "width": width}

    def transform(self, inpt: Tensor, params: dict[str, Any]) -> Tensor:
        """The picture resized to ``size``; its aspect ratio is not kept."""
        return tvf.resize(inpt, self.size, antialias=True)


class EvalView(v2.Transform):
    """uint8 ``(3, H, W)`` -> uint8 ``(3, *size)`` by :func:`kd.storage.decoding.frame`; likewise a mask."""

    def __init__(
        self, size: tuple[int, int], crop_ratio: float | None, max_pixels: int = MAX_PIXELS
    ) -> None:
        super().__init__()
        self.size, self.crop_ratio, self.max_pixels = size, crop_ratio, max_pixels

    def forward(self, *pictures: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What validation shows: scaled, then the centre cut out, ``(..., *size)``. A mask beside the picture gets
        the same crop.
        """
        height, width = pictures[0].shape[-2:]
        part, scaled, corner = frame((width, height), self.size, self.crop_ratio, self.max_pixels)
        parts = (tvf.crop(p, part[1], part[0], part[3], part[2]) for p in pictures)
        views = (
            tvf.resize(p, [scaled[1], scaled[0]], antialias=True) for p in parts
        )  # bilinear; masks: nearest
        shown = [tvf.crop(p, corner[1], corner[0], *self.size) for p in views]
        return shown[0] if len(shown) == 1 else tuple(shown)


NO_BOX = (0, 0, 0, 0)


class MixPairs:
    """Mixup and cutmix of neighbours in a batch, by torchvision's own transforms, on uint8 pictures.

    The samples 2k and 2k+1 are mixed. Neighbours, and the ratio, follow from (seed, index, epoch) alone.

    Args:
        augment: its ``mixup``, ``cutmix`` and ``mix_probability``.
        num_classes: classes of the data.
        seed: of the run.
    """

    def __init__(self, augment: Augment, num_classes: int, seed: int) -> None:
        strengths = {v2.MixUp: augment.mixup, v2.CutMix: augment.cutmix}
        self.kinds = [
            kind(alpha=alpha, num_classes=num_classes) for kind, alpha in strengths.items() if alpha
        ]
        self.probability = augment.mix_probability
        self.num_classes, self.seed = num_classes, seed

    def __call__(
        self, images: Tensor, targets: Tensor, keys: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """uint8 ``(N, 3, H, W)``, ids ``(N,)``, (index, epoch) each -> mixed uint8, probabilities ``(N, C)``.

        A picture that has no label (id -1), or is mixed with one, has no label after: all 0.
        """
        if not self.kinds:
            return images, targets
        known, mixed = targets >= 0, images.clone()
        hot = torch.nn.functional.one_hot(targets.clamp_min(0), self.num_classes).float()
        soft = hot * known[:, None]
        even = len(images) // 2 * 2
        before, after, label, learnt, is_known = (
            x[:even].view(-1, 2, *x.shape[1:]) for x in (images, mixed, hot, soft, known)
        )
        drawn = [
            (i, *found) for i in range(even // 2) if (found := self._draw(keys[2 * i], images[0]))
        ]
        at_once = all_at_once(images)
        step = len(images) if at_once else 1
        for is_cut, change in ((False, _blend), (True, _paste)):
            rows = [row for row in drawn if (row[2:] != NO_BOX) is is_cut]
            for part in (rows[first : first + step] for first in range(0, len(rows), step)):
                table = torch.tensor(part, dtype=torch.float64).to(images.device, non_blocking=True)
                share, *box = table[:, 1:].unbind(1)
                pairs = table[:, 0].long() if at_once else slice(part[0][0], part[0][0] + 1)
                learnt[pairs] = _blend(label[pairs], share) * is_known[pairs].all(1)[:, None, None]
                after[pairs] = change(before[pairs], share, *box)
        return mixed, soft

    def _draw(
        self, key: tuple[int, int], picture: Tensor
    ) -> tuple[float, int, int, int, int] | None:
        """As ``RandomApply([RandomChoice(kinds)])`` draws: the share of a picture's own label, and the box (left, top,
        right, bottom) that its partner fills; None where the pair stays."""
        with seeded(self.seed, *key, 1):
            if torch.rand(1) >= self.probability:
                return None
            found = self.kinds[int(torch.multinomial(torch.ones(len(self.kinds)), 1))].make_params(
                [picture]
            )
        return (found["lam_adjusted"], *found["box"]) if "box" in found else (found["lam"], *NO_BOX)


def all_at_once(images: Tensor) -> bool:
    """A GPU takes few large steps; a CPU a pair at a time, whose pixels stay in its cache."""
    return images.is_cuda


def _blend(pairs: Tensor, share: Tensor, *box: Tensor) -> Tensor:
    """``share`` of each and the rest of its partner, of pairs ``(P, 2, ...)``, float or uint8."""
    share, own = share.view(-1, *[1] * (pairs.ndim - 1)), pairs.float()
    mixed = own.flip(1).mul_((1.0 - share).float()).add_(own * share.float())
    return mixed if pairs.is_floating_point() else mixed.round_().clamp_(0, 255).to(pairs.dtype)


def _paste(pairs: Tensor, share: Tensor, *box: Tensor) -> Tensor:
    """Pictures ``(P, 2, 3, H, W)`` with their partners in a box each."""
    return torch.where(inside(pairs, *box)[:, None, None], pairs.flip(1), pairs)


def inside(images: Tensor, *box: Tensor) -> Tensor:
    """bool ``(P, H, W)``: the pixels in each picture's box, of left, top, right and bottom edges ``(P,)``."""
    left, top, right, bottom = (edge[:, None] for edge in box)
    x, y = (torch.arange(n, device=images.device) for n in (images.shape[-1], images.shape[-2]))
    across, down = (x >= left) & (x < right), (y >= top) & (y < bottom)
    return across[:, None, :] & down[:, :, None]


# -- damaged views of validation pictures ------------------------------------------------------------------------------
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


def corrupted(batches: Iterable[Batch], name: str, strength: int) -> Iterator[Batch]:
    """The same batches, their pictures damaged: uint8 ``(N, 3, H, W)`` as before, targets as they are."""
    for batch in batches:
        yield {**batch, "image": CORRUPTIONS[name](batch["image"], strength)}
