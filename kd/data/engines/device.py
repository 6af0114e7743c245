"""The engine ``device``: pictures are decoded and cut in the loader, all else of a view is made on the device.

What is random is drawn in the loader, from the same numbers and in the same order as the engine ``torch`` draws it. On
a CPU the same torchvision transforms apply it, to the same views. A GPU resizes, flips, erases and mixes a whole batch
in few large steps, within two levels of 255 of these views; colours are jittered picture by picture there too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from kd.data.pictures import MAX_PIXELS, decode
from kd.data.sampler import Key
from kd.data.samples import Samples
from kd.data.sources import Source, Split, named
from kd.data.targets import Targets
from kd.data.transforms import MixPairs, Whole, all_at_once, inside, seeded, train_transform
from kd.errors import UserError
from kd.settings import Augment

Step = tuple[int, dict[str, Any]]
"""(number of a transform in the chain, its parameters): one that chance has chosen to apply."""


@dataclass
class Recipe:
    """How one view is made of one picture."""

    box: tuple[int, int, int, int]
    """Top, left, height and width of the crop, in pixels of the picture."""
    steps: list[Step]
    """What comes before and after the crop."""
    whole: tuple[int, int] = (0, 0)
    """Height and width of the picture."""


class Plan:
    """What the device needs beside the pixels. No dataclass: Lightning would send one to the device piece by piece."""

    def __init__(self, recipes: list[Recipe], keys: list[Key], encoded: Sequence[Any] = ()) -> None:
        self.recipes, self.keys = recipes, keys
        self.encoded = list(encoded)  # the pictures, where the device decodes them


def check(augment: Augment, source: Source, engine: str = "device") -> None:
    """Raises a UserError: RandAugment draws random numbers while it computes, so only the loader can run it."""
    if augment.rand_augment:
        raise UserError(f"data.augment.rand_augment: needs data.engine=torch, got {engine}")
    if augment.before_resize and engine != "device":
        raise UserError(
            f"data.augment.before_resize: needs data.engine=torch or device, got {engine}"
        )


def draw(chain: Sequence[v2.Transform], height: int, width: int, size: tuple[int, int]) -> Recipe:
    """Draws a view of a picture of ``height`` x ``width`` as ``v2.Compose(chain)`` would."""
    first, steps, box = crop_of(chain), list[Step](), (0, 0, height, width)
    for number, transform in enumerate(chain):
        shape = _blank(height, width) if number <= first else _blank(*size)
        if number == first:
            crop = transform.make_params([shape])
            box = crop["top"], crop["left"], crop["height"], crop["width"]
        elif not hasattr(transform, "p") or torch.rand(1) < transform.p:
            steps.append((number, transform.make_params([shape])))
    return Recipe(box, steps, (height, width))


def crop_of(chain: Sequence[v2.Transform]) -> int:
    """The number of the transform that cuts and resizes."""
    return next(
        i
        for i, transform in enumerate(chain)
        if isinstance(transform, v2.RandomResizedCrop | Whole)
    )


def _blank(height: int, width: int) -> Tensor:
    return torch.empty(1, dtype=torch.uint8).expand(3, height, width)  # a shape without memory


class CutSet(Samples):
    """One split, decoded and cut, with the rest of each view as a plan.

    Args:
        split: the pictures.
        size: height and width of a view in pixels.
        augment: the views.
        seed: of the run.
        max_pixels: a picture that claims more is not decoded.
        source: of the split.
    """

    def __init__(
        self,
        split: Split,
        size: tuple[int, int],
        augment: Augment,
        seed: int,
        max_pixels: int = MAX_PIXELS,
        source: Source | None = None,
    ) -> None:
        super().__init__(split, seed, source, max_pixels)
        self.chain: list[v2.Transform] = list(train_transform(size, augment).transforms)
        self.size, self.sends_all = size, augment.before_resize

    def __getitem__(self, key: Key) -> tuple[Any, Recipe, Any, Key]:
        index, view = key
        try:
            picture, height, width = self.opened(self.split.read(index))
            target = self.split.target(index)
        except (RuntimeError, OSError) as error:
            raise RuntimeError(f"{named(self.split, index)} can't be read: {error}") from error
        with seeded(self.seed, index, view):
            recipe = draw(self.chain, height, width, self.size)
        target = self.kind.cut(target, recipe.box, (height, width), self.ignore_index)
        return (
            self.cut(picture, (0, 0, height, width) if self.sends_all else recipe.box),
            recipe,
            target,
            key,
        )

    def opened(self, data: bytes) -> tuple[Any, int, int]:
        """An encoded picture -> what :meth:`cut` takes, its height and its width."""
        picture = decode(data, self.max_pixels)
        return picture, picture.shape[-2], picture.shape[-1]

    def cut(self, picture: Any, box: tuple[int, int, int, int]) -> Any:
        """What is sent of a picture: here the pixels in the box."""
        top, left, height, width = box
        return picture[:, top : top + height, left : left + width]


def pack(
    stack: Callable[..., Tensor],
    samples: Sequence[tuple[Any, Recipe, Any, Key]],
    encoded: bool = False,
) -> dict[str, Any]:
    """Samples -> a batch, all cuts in one tensor: one transfer. Of ``encoded`` pictures the plan holds the files."""
    cuts, recipes, targets, keys = zip(*samples, strict=True)
    pixels = {} if encoded else {"pixels": torch.cat([cut.reshape(-1) for cut in cuts])}
    return {
        **pixels,
        "plan": Plan(list(recipes), list(keys), cuts if encoded else ()),
        "target": stack(targets),
        "index": torch.tensor([index for index, _ in keys]),
        "view": keys[0][1],
    }


class DeviceViews:
    """Makes the views of a packed batch, on the device that the batch is on."""

    def __init__(
        self, size: tuple[int, int], augment: Augment, mix: MixPairs, kind: Targets | None = None
    ) -> None:
        self.size, self.mix, self.kind = size, mix, kind or Targets()
        self.chain = list(train_transform(size, augment).transforms)
        self.first = crop_of(self.chain)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        plan = batch["plan"]
        pixels = self._cut(batch["pixels"], plan) if self.first else batch["pixels"]
        boxes = [recipe.box for recipe in plan.recipes]
        make = resize_together if all_at_once(pixels) else resize_each
        images = make(pixels, [box[2:] for box in boxes], self.size)
        target = self.kind.resize(batch["target"], boxes, self.size)
        return {
            **{k: v for k, v in batch.items() if k not in ("pixels", "plan")},
            **self.finish(images, target, plan),
        }

    def _cut(self, pixels: Tensor, plan: Plan) -> Tensor:
        """Whole pictures -> what the crops leave of them after the transforms before the crop, packed likewise."""
        found = []
        parts = pixels.split(
            [3 * height * width for height, width in (recipe.whole for recipe in plan.recipes)]
        )
        for part, recipe in zip(parts, plan.recipes, strict=True):
            picture = part.view(3, *recipe.whole)
            for number, parameters in recipe.steps:
                picture = (
                    self.chain[number].transform(picture, parameters)
                    if number < self.first
                    else picture
                )
            top, left, height, width = recipe.box
            found.append(picture[:, top : top + height, left : left + width].reshape(-1))
        return torch.cat(found)

    def finish(self, images: Tensor, target: Tensor, plan: Plan) -> dict[str, Tensor]:
        """Resized crops uint8 ``(N, 3, *size)`` -> ``image`` and ``target``: all that follows the crop."""
        for number, transform in enumerate(self.chain[self.first + 1 :], start=self.first + 1):
            mine = [
                (i, dict(r.steps)[number])
                for i, r in enumerate(plan.recipes)
                if number in dict(r.steps)
            ]
            if isinstance(transform, v2.RandomHorizontalFlip | v2.RandomVerticalFlip):
                axis = -1 if isinstance(transform, v2.RandomHorizontalFlip) else -2
                chosen = torch.tensor([i for i, _ in mine], dtype=torch.long).to(
                    images.device, non_blocking=True
                )
                images[chosen] = images[chosen].flip(axis)
                self.kind.flip(target, chosen, axis)
                continue
            if isinstance(transform, v2.RandomErasing) and all_at_once(images):
                images = _erase(
                    [(i, parameters) for i, parameters in mine if parameters["v"] is not None],
                    images,
                )
                continue
            for i, parameters in mine:
                images[i] = transform.transform(images[i], parameters)
        images, target = self.mix(images, target, plan.keys)
        return {"image": images, "target": target}


def resize_each(pixels: Tensor, cuts: Sequence[tuple[int, int]], size: tuple[int, int]) -> Tensor:
    """Cuts of ``(height, width)`` behind each other -> uint8 ``(N, 3, *size)``, a picture at a time, by torchvision."""
    parts = pixels.split([3 * height * width for height, width in cuts])
    images = torch.empty(len(cuts), 3, *size, dtype=torch.uint8, device=pixels.device)
    for image, part, cut in zip(images, parts, cuts, strict=True):
        image.copy_(tvf.resize(part.view(3, *cut), list(size), antialias=True))
    return images


def resize_together(
    pixels: Tensor, cuts: Sequence[tuple[int, int]], size: tuple[int, int]
) -> Tensor:
    """As :func:`resize_each` by two matrix products for as many pictures as :data:`ROOM` holds: of noise 1 to 2% of the
    values differ by one level, none by more than two.
    """
    high, wide = (max(lengths) for lengths in zip(*cuts, strict=True))
    heights, widths = torch.tensor(cuts).to(pixels.device, non_blocking=True)[:, :, None].unbind(1)
    starts = (3 * heights * widths).cumsum(0) - 3 * heights * widths
    y, x = (torch.arange(most, device=pixels.device) for most in (high, wide))
    planes, images = torch.arange(3, device=pixels.device), []
    step = max(1, ROOM // (3 * high * wide))
    for h, w, start in zip(
        heights.split(step), widths.split(step), starts.split(step), strict=True
    ):
        rows = (
            start[:, None]
            + (planes[:, None] * h[:, :, None] + y.minimum(h - 1)[:, None]) * w[:, :, None]
        )
        padded = pixels[
            rows[..., None] + x.minimum(w - 1)[:, None, None]
        ].float()  # (n, 3, high, wide)
        narrow = (
            padded.flatten(1, 2) @ _shares(w, wide, size[1]).mT
        ).round_()  # as torchvision's passes round
        found = _shares(h, high, size[0]) @ narrow.view(len(h), 3, high, size[1]).transpose(
            1, 2
        ).flatten(2)
        images.append(
            found.view(len(h), size[0], 3, size[1]).transpose(1, 2).round_().clamp_(0, 255).byte()
        )
    return torch.cat(images)


ROOM = 2**25
"""Pixels that are resized together: 400 MB of memory."""


def _shares(lengths: Tensor, most: int, size: int) -> Tensor:
    """``(N, size, most)``: the share of each pixel of lines of ``lengths`` ``(N, 1)`` in each of ``size``."""
    scale = lengths[..., None] / size
    at = torch.arange(most, device=lengths.device) + 0.5
    centre = (torch.arange(size, device=lengths.device)[:, None] + 0.5) * scale
    shares = (1 - (at - centre).abs() / scale.clamp_min(1)).clamp_min_(0) * (
        at < lengths[..., None]
    )
    return shares / shares.sum(-1, keepdim=True)


def _erase(drawn: Sequence[Step], images: Tensor) -> Tensor:
    if not drawn:
        return images
    boxes = [[i, p["j"], p["i"], p["j"] + p["w"], p["i"] + p["h"]] for i, p in drawn]
    table = torch.tensor(boxes).to(images.device, non_blocking=True)
    fill = torch.stack([p["v"] for _, p in drawn]).to(
        images.device, images.dtype, non_blocking=True
    )
    chosen = images[table[:, 0]]
    images[table[:, 0]] = torch.where(
        inside(chosen, *table[:, 1:].unbind(1))[:, None], fill, chosen
    )
    return images
