"""The engine ``device``: pictures are decoded, cut and resized in the loader, all else of a view is made on the device.

What is random is drawn in the loader, from the same numbers and in the same order as the engine ``torch`` draws it. On
a CPU the same torchvision transforms apply it, to the same views. A GPU changes a whole batch in few large steps
(:mod:`kd.data.engines.at_once`); before the colours change its views differ from these in nothing but the rounding of mixup.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from kd.data.engines import at_once
from kd.data.pictures import MAX_PIXELS, decode
from kd.data.sampler import Key
from kd.data.samples import Samples
from kd.data.sources import Source, Split, named
from kd.data.transforms import (
    Mix,
    MixPairs,
    Whole,
    blank,
    seeded,
    soft_labels,
    train_transform,
)
from kd.errors import UserError
from kd.settings import Augment

Step = tuple[int, dict[str, Any]]
"""(number of a transform in the chain, its parameters): one that chance has chosen to apply. Tensors among them are
arrays of NumPy: the loader would send each tensor through a socket of its own, which takes a millisecond.
"""


@dataclass
class Recipe:
    """How one view is made of one picture: what :func:`draw` has drawn."""

    box: tuple[int, int, int, int]
    """Top, left, height and width of the crop, in pixels of the picture."""
    steps: list[Step]
    """The transforms before and after the crop that chance has chosen, in order."""


class Plan:
    """What the device needs beside the pixels. No dataclass: Lightning would send one to the device piece by piece.

    Args:
        recipes: of each view in the batch, in order.
        mixes: of the pairs that are mixed.
        labels: the batch's, as :meth:`~kd.data.transforms.MixPairs.labels` gives them, float32; None: nothing is mixed.
        encoded: each picture's file as uint8 ``(bytes,)``, for the engine ``dali``; else empty.
    """

    def __init__(
        self,
        recipes: list[Recipe],
        mixes: list[Mix],
        labels: np.ndarray | None = None,
        encoded: Sequence[Any] = (),
    ) -> None:
        """Stores the arguments, which are the class's."""
        self.recipes = recipes
        self.mixes = mixes
        self.labels = labels
        self.encoded = list(encoded)


def check(augment: Augment, engine: str = "device") -> None:
    """Checks that the device can make these views; called when the data module is made.

    Raises:
        UserError: a transform of the user's, which takes pictures in the loader; or RandAugment, which draws random
            numbers while it computes, so only the loader can run it.
    """
    if augment.transform is not None:
        raise UserError(f"data.augment.transform: needs data.engine=torch, got {engine}")
    if augment.rand_augment:
        raise UserError(f"data.augment.rand_augment: needs data.engine=torch, got {engine}")


def draw(chain: Sequence[v2.Transform], height: int, width: int, size: tuple[int, int]) -> Recipe:
    """Draws a view of a picture as ``v2.Compose(chain)`` would: the same random numbers, from torch's CPU generator, in the
    same order.

    Args:
        chain: transforms of :func:`kd.data.transforms.train_transform`.
        height: of the picture in pixels.
        width: of the picture in pixels.
        size: height and width of the view in pixels.
    """
    crop_number = crop_of(chain)
    box = (0, 0, height, width)
    steps: list[Step] = []
    for number, transform in enumerate(chain):
        if number <= crop_number:
            shape = blank(height, width)
        else:
            shape = blank(*size)
        if number == crop_number:
            crop = transform.make_params([shape])
            box = (crop["top"], crop["left"], crop["height"], crop["width"])
            continue
        is_applied = not hasattr(transform, "p") or torch.rand(1) < transform.p
        if is_applied:
            steps.append(
                (number, apply_to_collection(transform.make_params([shape]), Tensor, Tensor.numpy))
            )
    return Recipe(box, steps)


def crop_of(chain: Sequence[v2.Transform]) -> int:
    """The place in a chain (from 0) of the transform that cuts and resizes; those before it change whole pictures."""
    for number, transform in enumerate(chain):
        if isinstance(transform, v2.RandomResizedCrop | Whole):
            return number
    raise AssertionError("every chain has a crop")


class CutSet(Samples):
    """One split, decoded, cut and resized, with the rest of each view as a plan.

    Args:
        split: the pictures.
        size: height and width of a view in pixels.
        augment: the views.
        seed: of the run.
        max_pixels: a picture that claims more is not decoded.
        source: of the split; None: class ids.
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
        """Builds the chain of transforms whose parameters are drawn; the arguments are the class's."""
        super().__init__(split, seed, source, max_pixels)
        self.chain: list[v2.Transform] = list(train_transform(size, augment).transforms)
        self.size = size
        self.crop_number = crop_of(self.chain)

    def __getitem__(self, key: Key) -> tuple[Any, Recipe, Any, Key]:
        """One sample: what is sent of the picture (:meth:`cut`), the recipe of its view, the target, its key.

        The recipe is drawn under (seed, index, view) alone, as the engine ``torch`` draws it.

        Raises:
            RuntimeError: the picture or its target can't be read; the message names the picture.
        """
        index, view = key
        try:
            picture, height, width = self.opened(self.split.read(index))
            target = self.split.target(index)
        except (RuntimeError, OSError) as error:
            raise RuntimeError(f"{named(self.split, index)} can't be read: {error}") from error
        with seeded(self.seed, index, view):
            recipe = draw(self.chain, height, width, self.size)
        return self.cut(picture, recipe), recipe, target, key

    def opened(self, data: bytes) -> tuple[Any, int, int]:
        """An encoded picture -> what :meth:`cut` takes, its height and its width."""
        picture = decode(data, self.max_pixels)
        return picture, picture.shape[-2], picture.shape[-1]

    def cut(self, picture: Any, recipe: Recipe) -> Any:
        """What is sent of a picture: here its view as it is after the crop, uint8 ``(3, *size)``."""
        for number, parameters in recipe.steps:
            if number < self.crop_number:
                change = self.chain[number]
                picture = change.transform(picture, at_once.tensors(parameters))
        return tvf.resized_crop(picture, *recipe.box, list(self.size), antialias=True)


def pack(
    stack: Callable[..., Tensor],
    mix: MixPairs,
    size: tuple[int, int],
    samples: Sequence[tuple[Any, Recipe, Any, Key]],
    encoded: bool = False,
) -> dict[str, Any]:
    """Samples -> a batch for :class:`DeviceViews`.

    Args:
        stack: targets -> one tensor, as :meth:`kd.data.targets.Targets.stack` does.
        mix: draws which pairs are mixed, and how.
        size: height and width of a view in pixels.
        samples: of a :class:`CutSet`.
        encoded: the samples hold files, which the plan carries; there is no ``image`` then.

    Returns:
        ``image``, the resized crops, uint8 ``(N, 3, H, W)``, ``plan``, ``target``, ``index`` ``(N,)`` and ``view``, that of
        the first sample.
    """
    cuts, recipes, targets, keys = zip(*samples, strict=True)
    target = stack(targets)
    plan = Plan(list(recipes), mix.draw(keys, size))
    if mix.kinds:
        plan.labels = mix.labels(target, plan.mixes).float().numpy()
    batch: dict[str, Any] = {"plan": plan}
    if encoded:
        plan.encoded = list(cuts)
    else:
        batch["image"] = torch.stack(cuts)
    numbers, views = zip(*keys, strict=True)
    batch["target"] = target
    batch["index"] = torch.tensor(numbers)
    batch["view"] = views[0]
    return batch


class DeviceViews:
    """Makes the views of a batch, on the device that the batch is on.

    Args:
        size: height and width of a view in pixels.
        augment: the transforms.
        mix: applied to the finished views.
    """

    def __init__(self, size: tuple[int, int], augment: Augment, mix: MixPairs) -> None:
        """Stores the arguments, which are the class's, and finds the crop in the chain of transforms."""
        self.size = size
        self.mix = mix
        self.chain = list(train_transform(size, augment).transforms)
        self.crop_number = crop_of(self.chain)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch from the loader with its views made: without "plan", and with its views as "image", uint8
        ``(N, 3, H, W)``.

        ``target`` is mixed as :meth:`MixPairs.apply` returns it. The batch itself is not changed.
        """
        plan = batch["plan"]
        images = self.crops(batch)
        finished = dict(batch)
        del finished["plan"]
        finished.update(self.finish(images, batch["target"], plan))
        return finished

    def crops(self, batch: dict[str, Any]) -> Tensor:
        """The resized crops of a batch, uint8 ``(N, 3, *size)``."""
        images: Tensor = batch["image"]
        return images

    def finish(self, images: Tensor, target: Tensor, plan: Plan) -> dict[str, Tensor]:
        """Everything that follows the crop.

        Args:
            images: resized crops, uint8 ``(N, 3, *size)``; not changed.
            target: of the pictures, ``(N, ...)``.
            plan: of the batch.

        Returns:
            ``image`` and ``target``.
        """
        if images.device.type != "cpu":
            return self._at_once(images, target, plan)
        return self._one_by_one(images, target, plan)

    def _at_once(self, images: Tensor, target: Tensor, plan: Plan) -> dict[str, Tensor]:
        """:meth:`finish` in steps that each change the whole batch."""
        views, mixed = at_once.finish(
            images, self._changes(plan), plan.mixes, plan.labels, self.mix.num_classes
        )
        return {"image": views, "target": target if mixed is None else mixed}

    def _one_by_one(self, images: Tensor, target: Tensor, plan: Plan) -> dict[str, Tensor]:
        """:meth:`finish` by torchvision's transforms, picture by picture."""
        images = images.clone()
        for transform, drawn in self._changes(plan):
            for place, parameters in drawn:
                images[place] = transform.transform(images[place], at_once.tensors(parameters))
        if plan.labels is not None:
            images = self.mix.mixed(images, plan.mixes)
            target = soft_labels(torch.from_numpy(plan.labels), self.mix.num_classes)
        return {"image": images, "target": target}

    def _changes(self, plan: Plan) -> list[tuple[v2.Transform, list[Step]]]:
        """The transforms that follow the crop, each with the pictures' places in the batch and their parameters."""
        steps_of_pictures = [dict(recipe.steps) for recipe in plan.recipes]
        changes = []
        for number in range(self.crop_number + 1, len(self.chain)):
            drawn: list[Step] = []
            for place, steps in enumerate(steps_of_pictures):
                if number in steps:
                    drawn.append((place, steps[number]))
            if drawn:
                changes.append((self.chain[number], drawn))
        return changes


SAMPLES = CutSet
"""The samples of this engine: the loader's part."""
VIEWS = DeviceViews
"""The views of this engine: the device's part."""
