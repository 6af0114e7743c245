"""Views of a picture: torchvision's v2 transforms on uint8 tensors, seeded by (seed, index, view) alone."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from kd.data.own_transform import OwnTransform
from kd.settings import Augment
from kd.storage.decoding import MAX_PIXELS, frame

MEAN_COLOUR = [124.0, 116.0, 104.0]
"""ImageNet's mean in levels of 255 (RGB): fills what a transform leaves empty."""


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Runs a block under torch's CPU generator seeded by ``numbers``, and restores it; GPUs' are not touched."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)  # 63 bits
    try:
        yield
    finally:
        generator.set_state(state)


def train_transform(size: tuple[int, int], augment: Augment) -> v2.Compose:
    """uint8 ``(3, H, W)`` -> uint8 ``(3, *size)``: a random view; of a mask beside it the same (nearest pixel).

    Args:
        size: height and width of the view in pixels.
        augment: which transforms, and how strong. Flips, rotation, RandAugment and colours are applied ``repeat`` times,
            after the crop or (``before_resize``) before it; the user's transform and the erasing follow, once.

    Raises:
        UserError: the user's transform does not work, see :class:`OwnTransform`.
    """
    crop: list[torch.nn.Module]
    if augment.pad:
        crop = [Whole(size), v2.RandomCrop(size, padding=augment.pad)]
    else:
        aspect = size[1] / size[0]
        ratio = (3 / 4 * aspect, 4 / 3 * aspect)
        scale = (augment.scale, 1.0)
        crop = [v2.RandomResizedCrop(size, scale=scale, ratio=ratio, antialias=True)]

    changes: list[torch.nn.Module] = [v2.RandomHorizontalFlip(augment.hflip)]
    if augment.vflip:
        changes.append(v2.RandomVerticalFlip(augment.vflip))
    if augment.rotation:
        changes.append(v2.RandomRotation(augment.rotation))
    if augment.rand_augment:
        fill = [round(channel) for channel in MEAN_COLOUR]
        changes.append(v2.RandAugment(num_ops=2, magnitude=augment.rand_augment, fill=fill))
    if augment.color_jitter:
        strength = augment.color_jitter
        hue = min(0.5, strength / 4)
        changes.append(v2.ColorJitter(strength, strength, strength, hue))
    changes = changes * augment.repeat

    if augment.before_resize:
        steps = [*changes, *crop]
    else:
        steps = [*crop, *changes]
    if augment.transform is not None:
        steps.append(OwnTransform(augment.transform, size))
    if augment.random_erasing:
        steps.append(v2.RandomErasing(augment.random_erasing, value=MEAN_COLOUR))
    return v2.Compose(steps)


class Whole(v2.Transform):
    """The whole picture, resized to ``size`` (height, width): what a padded random crop is cut from."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = list(size)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """The whole picture as the crop, in the form of ``RandomResizedCrop``: the engine ``device`` reads it."""
        height, width = flat_inputs[0].shape[-2:]
        return {"top": 0, "left": 0, "height": height, "width": width}

    def transform(self, inpt: Tensor, params: dict[str, Any]) -> Tensor:
        """The picture resized to ``size``; its aspect ratio is not kept, and ``params`` are not read."""
        return tvf.resize(inpt, self.size, antialias=True)


class EvalView(v2.Transform):
    """uint8 ``(3, H, W)`` -> uint8 ``(3, *size)`` by :func:`kd.storage.decoding.frame`; likewise a mask."""

    def __init__(
        self, size: tuple[int, int], crop_ratio: float | None, max_pixels: int = MAX_PIXELS
    ) -> None:
        """How a picture becomes a validation view.

        Args:
            size: height and width of the view in pixels.
            crop_ratio: side of the view over that of the scaled picture, in (0, 1]; None: the whole picture, stretched.
            max_pixels: most pixels that scaling may take.
        """
        super().__init__()
        self.size = size
        self.crop_ratio = crop_ratio
        self.max_pixels = max_pixels

    def forward(self, *pictures: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What validation shows: scaled, then the centre cut out, ``(..., *size)``.

        Args:
            pictures: one, or a picture and its mask ``(1, H, W)``, which gets the same crop.

        Raises:
            TooLarge: the picture is so long and narrow that scaling would take more than ``max_pixels``.
        """
        height, width = pictures[0].shape[-2:]
        scaled, corner = frame((width, height), self.size, self.crop_ratio, self.max_pixels)
        scaled_width, scaled_height = scaled
        view_left, view_top = corner
        views = []
        for picture in pictures:
            # Bilinear; masks by nearest pixels.
            resized = tvf.resize(picture, [scaled_height, scaled_width], antialias=True)
            views.append(tvf.crop(resized, view_top, view_left, *self.size))
        if len(views) == 1:
            return views[0]
        return tuple(views)


def blank(height: int, width: int) -> Tensor:
    """A picture ``(3, height, width)`` that takes no memory: transforms that draw parameters read its shape alone."""
    return torch.empty(1, dtype=torch.uint8).expand(3, height, width)


NO_BOX = (0, 0, 0, 0)
"""Of a mixed pair that has no box: it is mixed by mixup."""


class Mix(NamedTuple):
    """How one pair of a batch is mixed."""

    pair: int
    """Its number in the batch: the samples ``2 * pair`` and ``2 * pair + 1``."""
    share: float
    """Of a picture's own label, 0..1; its partner's label has the rest."""
    left: int
    """Of the box that the partner fills (cutmix), in pixels; all four are 0 for mixup."""
    top: int
    right: int
    bottom: int

    @property
    def is_cut(self) -> bool:
        """Whether this is cutmix."""
        return (self.left, self.top, self.right, self.bottom) != NO_BOX


class MixPairs:
    """Mixup and cutmix of neighbours in a batch, by torchvision's own transforms, on uint8 pictures.

    The samples 2k and 2k+1 are mixed; a last one without a partner is not. How follows from the run's seed and the key of
    sample 2k alone. The parameters are drawn as ``v2.RandomApply([v2.RandomChoice([v2.MixUp(...), v2.CutMix(...)])])`` does.

    Args:
        augment: its ``mixup``, ``cutmix`` and ``mix_probability``.
        num_classes: classes of the data.
        seed: of the run.
    """

    def __init__(self, augment: Augment, num_classes: int, seed: int) -> None:
        """Builds the torchvision transforms whose parameters are drawn; the arguments are the class's."""
        self.kinds: list[v2.MixUp | v2.CutMix] = []
        if augment.mixup:
            self.kinds.append(v2.MixUp(alpha=augment.mixup, num_classes=num_classes))
        if augment.cutmix:
            self.kinds.append(v2.CutMix(alpha=augment.cutmix, num_classes=num_classes))
        self.probability = augment.mix_probability
        self.num_classes = num_classes
        self.seed = seed

    def __call__(
        self, images: Tensor, targets: Tensor, keys: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """Mixes the pairs that chance chooses: :meth:`draw`, then :meth:`mixed` and :meth:`labels`.

        Args:
            images: uint8 ``(N, 3, H, W)``.
            targets: class ids ``(N,)``; -1 without a label.
            keys: (index, view) of each picture.

        Returns:
            Mixed uint8 pictures ``(N, 3, H, W)`` and probabilities ``(N, C)``, also of the pairs that stay. Without mixup
            and cutmix in the settings, the arguments.
        """
        if not self.kinds:
            return images, targets
        _, _, height, width = images.shape
        mixes = self.draw(keys, (height, width))
        return self.mixed(images, mixes), soft_labels(self.labels(targets, mixes), self.num_classes)

    def draw(self, keys: Sequence[tuple[int, int]], size: tuple[int, int]) -> list[Mix]:
        """Chooses by chance which pairs of a batch are mixed, and how; the others are not in the list.

        Args:
            keys: (index, view) of each picture.
            size: height and width of the pictures in pixels.
        """
        mixes = []
        for pair in range(len(keys) // 2 if self.kinds else 0):
            mix = self._draw(pair, keys[2 * pair], size)
            if mix is not None:
                mixes.append(mix)
        return mixes

    def mixed(self, images: Tensor, mixes: Sequence[Mix]) -> Tensor:
        """Pictures mixed as it was drawn, a pair after the other: a pair stays in the CPU's cache.

        Args:
            images: uint8 ``(N, 3, H, W)``, on the CPU; not changed.
            mixes: of different pairs.

        Returns:
            Mixed uint8 pictures ``(N, 3, H, W)``.
        """
        mixed = images.clone()
        for mix in mixes:
            rows = slice(2 * mix.pair, 2 * mix.pair + 2)
            pair = images[rows]
            if mix.is_cut:
                box = (..., slice(mix.top, mix.bottom), slice(mix.left, mix.right))
                mixed[rows][box] = pair.flip(0)[box]
            else:
                mixed[rows] = _blend(pair, mix.share)
        return mixed

    def labels(self, targets: Tensor, mixes: Sequence[Mix]) -> Tensor:
        """Which classes a picture has once pairs are mixed, and how much of each.

        Args:
            targets: class ids ``(N,)``; -1 without a label.
            mixes: of different pairs.

        Returns:
            float64 ``(N, 2, 2)``: its own class and its share, its partner's class and its share. A picture that has no
            label, or is mixed with one, has no label after: both shares are 0.
        """
        count = len(targets)
        partners = torch.arange(count) ^ 1  # 2k and 2k + 1; a last one without a partner is its own
        partners[count // 2 * 2 :] = count - 1
        shares = torch.ones(count, dtype=torch.float64)
        is_mixed = torch.zeros(count, dtype=torch.bool)
        for mix in mixes:
            rows = slice(2 * mix.pair, 2 * mix.pair + 2)
            shares[rows] = mix.share
            is_mixed[rows] = True
        is_known = targets >= 0
        is_known &= is_known[partners] | ~is_mixed
        ids = targets.clamp_min(0)
        own = torch.stack([ids, shares * is_known], dim=1)
        others = torch.stack([ids[partners], (1.0 - shares) * is_known], dim=1)
        return torch.stack([own, others], dim=1)

    def _draw(self, pair: int, key: tuple[int, int], size: tuple[int, int]) -> Mix | None:
        """How a pair is mixed; None where it stays as it is.

        Args:
            pair: its number in the batch.
            key: (index, view) of its first sample, which seeds what is drawn.
            size: height and width of a picture, for the box of a cutmix.
        """
        picture = blank(*size)
        equal_chances = torch.ones(len(self.kinds))
        with seeded(self.seed, *key, 1):  # other numbers than those of the sample's view
            if torch.rand(1) >= self.probability:
                return None
            kind = int(torch.multinomial(equal_chances, 1))
            parameters = self.kinds[kind].make_params([picture])
        if "box" in parameters:
            return Mix(pair, parameters["lam_adjusted"], *parameters["box"])
        return Mix(pair, parameters["lam"], *NO_BOX)


def soft_labels(labels_N22: Tensor, classes: int) -> Tensor:
    """Labels of :meth:`MixPairs.labels` as float32 probabilities ``(N, classes)``, on their device."""
    ids_N2, shares_N2 = labels_N22.unbind(2)
    soft = torch.zeros(len(ids_N2), classes, device=ids_N2.device)
    return soft.scatter_add_(1, ids_N2.long(), shares_N2.float())


def _blend(pair: Tensor, share: float) -> Tensor:
    """Mixup: ``share * x + (1 - share) * partner`` of a pair, uint8 ``(2, 3, H, W)``."""
    values = pair.float()
    of_partner = values.flip(0).mul_(1.0 - share)
    mixed = of_partner.add_(values * share)
    return mixed.round_().clamp_(0, 255).to(pair.dtype)
