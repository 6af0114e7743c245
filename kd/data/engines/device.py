"""The engine ``device``: pictures are decoded and cut in the loader, all else of a view is made on the device.

What is random is drawn in the loader, from the same numbers and in the same order as the engine ``torch`` draws it, and
applied by the same torchvision transforms: the two engines give the same views, up to the device's rounding.
"""

from collections.abc import Callable, Iterator, Sequence
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
from kd.data.transforms import MixPairs, seeded, train_transform
from kd.errors import UserError
from kd.run.settings import Augment

Step = tuple[int, dict[str, Any]]
"""(number of a transform in the chain, its parameters): one that chance has chosen to apply."""


@dataclass
class Recipe:
    """How a view is made of a picture."""

    box: tuple[int, int, int, int]  # top, left, height and width of the crop, in pixels of the picture
    steps: list[Step]  # what follows the crop


@dataclass
class Plan:
    """What the device needs beside the pixels; no collection, so that it stays on the host."""

    recipes: list[Recipe]  # of each view
    keys: list[Key]  # (index, view) of each


def check(augment: Augment, source: Source) -> None:
    """Raises a UserError where the engine can't make these views."""
    check_views(augment, "device")


def check_views(augment: Augment, engine: str) -> None:
    """Raises a UserError: RandAugment draws random numbers while it computes, so only the loader can run it."""
    if augment.rand_augment:
        raise UserError(f"data.augment.rand_augment: needs data.engine=torch, got {engine}")


def draw(chain: Sequence[v2.Transform], height: int, width: int, size: tuple[int, int]) -> Recipe:
    """Draws a view of a picture of ``height`` x ``width`` as ``v2.Compose(chain)`` would."""
    crop = chain[0].make_params([_blank(height, width)])
    view, steps = _blank(*size), []
    for number, transform in enumerate(chain[1:], start=1):
        if hasattr(transform, "p") and torch.rand(1) >= transform.p:
            continue
        steps.append((number, transform.make_params([view])))
    return Recipe((crop["top"], crop["left"], crop["height"], crop["width"]), steps)


def _blank(height: int, width: int) -> Tensor:
    return torch.empty(1, dtype=torch.uint8).expand(3, height, width)  # a shape without memory


class CutSet(Samples):
    """One split, decoded and cut, with the rest of each view as a plan."""

    def __init__(
        self, split: Split, size: tuple[int, int], augment: Augment, seed: int, max_pixels: int = MAX_PIXELS,
        source: Source | None = None,
    ) -> None:  # fmt: skip
        super().__init__(split, seed, source, max_pixels)
        self.size, self.chain = size, chain_of(size, augment)

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
        return self.cut(picture, recipe.box), recipe, target, key

    def opened(self, data: bytes) -> tuple[Any, int, int]:
        """An encoded picture -> what :meth:`cut` takes, its height and its width."""
        picture = decode(data, self.max_pixels)
        return picture, picture.shape[-2], picture.shape[-1]

    def cut(self, picture: Any, box: tuple[int, int, int, int]) -> Any:
        """What is sent of a picture: here the pixels in the box."""
        top, left, height, width = box
        return picture[:, top : top + height, left : left + width]


def chain_of(size: tuple[int, int], augment: Augment) -> list[v2.Transform]:
    """The transforms of the engine ``torch``, one by one."""
    return list(train_transform(size, augment).transforms)


def pack(stack: Callable[..., Tensor], samples: Sequence[tuple[Tensor, Recipe, Any, Key]]) -> dict[str, Any]:
    """Samples -> a batch with all cuts behind each other in one tensor: one transfer. ``stack`` makes its targets."""
    cuts, recipes, targets, keys = zip(*samples, strict=True)
    return {
        "pixels": torch.cat([cut.reshape(-1) for cut in cuts]),
        "plan": Plan(list(recipes), list(keys)),
        "target": stack(targets),
        "index": torch.tensor([index for index, _ in keys]),
        "view": keys[0][1],
    }


class DeviceViews:
    """Makes the views of a packed batch, on the device that the batch is on."""

    def __init__(self, size: tuple[int, int], augment: Augment, mix: MixPairs, kind: Targets | None = None) -> None:
        self.size, self.mix, self.kind = size, mix, kind or Targets()
        self.chain = chain_of(size, augment)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        plan, device = batch["plan"], batch["pixels"].device
        images = torch.empty(len(plan.recipes), 3, *self.size, dtype=torch.uint8, device=device)
        for image, cut in zip(images, self._cuts(batch["pixels"], plan), strict=True):
            image.copy_(tvf.resize(cut, list(self.size), antialias=True))
        target = self.kind.resize(batch["target"], [recipe.box for recipe in plan.recipes], self.size)
        return {**{k: v for k, v in batch.items() if k not in ("pixels", "plan")}, **self.finish(images, target, plan)}

    @staticmethod
    def _cuts(pixels: Tensor, plan: Plan) -> Iterator[Tensor]:
        start = 0
        for recipe in plan.recipes:
            _, _, height, width = recipe.box
            yield pixels[start : start + 3 * height * width].view(3, height, width)
            start += 3 * height * width

    def finish(self, images: Tensor, target: Tensor, plan: Plan) -> dict[str, Tensor]:
        """Resized crops uint8 ``(N, 3, *size)`` -> ``image`` and ``target``: all that follows the crop."""
        for number, transform in enumerate(self.chain[1:], start=1):
            mine = [(i, dict(r.steps)[number]) for i, r in enumerate(plan.recipes) if number in dict(r.steps)]
            if isinstance(transform, v2.RandomHorizontalFlip):
                chosen = torch.tensor([i for i, _ in mine], dtype=torch.long).to(images.device, non_blocking=True)
                images[chosen] = images[chosen].flip(-1)
                self.kind.flip(target, chosen)
                continue
            for i, parameters in mine:
                if parameters.get("v") is not None:  # what fills an erased box
                    parameters["v"] = parameters["v"].to(images.device, non_blocking=True)
                images[i] = transform.transform(images[i], parameters)
        images, target = self.mix(images, target, plan.keys)
        return {"image": images, "target": target}
