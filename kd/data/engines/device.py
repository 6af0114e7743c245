"""The engine ``device``: pictures are decoded and cut in the loader, all else of a view is made on the device.

What is random is drawn in the loader, from the same numbers and in the same order as the engine ``torch`` draws it. On
a CPU the same torchvision transforms apply it, to the same views. A GPU resizes, flips, erases and mixes a whole batch
in few large steps, and changes its colours; its views lie within two levels of 255 of these before the colours change.

Pictures are packed: uint8, one after another in a row of pixels, as they differ in size.
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

from kd.data.engines import colours
from kd.data.pictures import MAX_PIXELS, decode
from kd.data.sampler import Key
from kd.data.samples import Samples
from kd.data.sources import Source, Split, named
from kd.data.targets import Targets
from kd.data.transforms import (
    Mix,
    MixPairs,
    Whole,
    all_at_once,
    blank,
    pixels_inside,
    seeded,
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
    picture_size: tuple[int, int] = (0, 0)
    """Height and width of the picture in pixels."""


class Plan:
    """What the device needs beside the pixels. No dataclass: Lightning would send one to the device piece by piece.

    Args:
        recipes: of each view in the batch, in order.
        mixes: of the pairs that are mixed.
        encoded: each picture's file as uint8 ``(bytes,)``, for the engine ``dali``; else empty.
    """

    def __init__(
        self, recipes: list[Recipe], mixes: list[Mix], encoded: Sequence[Any] = ()
    ) -> None:
        """Stores the arguments, which are the class's."""
        self.recipes = recipes
        self.mixes = mixes
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
    return Recipe(box, steps, (height, width))


def _tensors(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters as torchvision's transforms take them: tensors in place of arrays (:data:`Step`)."""
    return apply_to_collection(parameters, np.ndarray, torch.from_numpy)


def crop_of(chain: Sequence[v2.Transform]) -> int:
    """The place in a chain (from 0) of the transform that cuts and resizes; those before it change whole pictures."""
    for number, transform in enumerate(chain):
        if isinstance(transform, v2.RandomResizedCrop | Whole):
            return number
    raise AssertionError("every chain has a crop")


class CutSet(Samples):
    """One split, decoded and cut, with the rest of each view as a plan.

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
        self.sends_whole_pictures = augment.before_resize  # the device changes them before it cuts

    def __getitem__(self, key: Key) -> tuple[Any, Recipe, Any, Key]:
        """One sample: the picture cut to what its view shows, the recipe for the rest, the target cut likewise, its key.

        With ``augment.before_resize`` the picture stays whole, as it is changed before it is cut.

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
        target = self.kind.cut(target, recipe.box, (height, width), self.ignore_index)
        sent_box = recipe.box
        if self.sends_whole_pictures:
            sent_box = (0, 0, height, width)
        cut = self.cut(picture, sent_box)
        return cut, recipe, target, key

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
    draw_mixes: Callable[[Sequence[Key]], list[Mix]],
    samples: Sequence[tuple[Any, Recipe, Any, Key]],
    encoded: bool = False,
) -> dict[str, Any]:
    """Samples -> a batch for :class:`DeviceViews`, all cuts in one tensor: one transfer.

    Args:
        stack: targets -> one tensor, as :meth:`kd.data.targets.Targets.pack` does.
        draw_mixes: keys of the samples -> which pairs are mixed, and how.
        samples: of a :class:`CutSet`.
        encoded: the samples hold files, which the plan carries; there is no ``pixels`` then.

    Returns:
        ``pixels`` uint8 ``(sum of 3 height width,)``, ``plan``, ``target``, ``index`` ``(N,)`` and ``view``, that of the
        first sample.
    """
    cuts, recipes, targets, keys = zip(*samples, strict=True)
    plan = Plan(list(recipes), draw_mixes(keys))
    batch: dict[str, Any] = {"plan": plan}
    if encoded:
        plan.encoded = list(cuts)
    else:
        rows = [cut.reshape(-1) for cut in cuts]
        batch["pixels"] = torch.cat(rows)
    numbers, views = zip(*keys, strict=True)
    batch["target"] = stack(targets)
    batch["index"] = torch.tensor(numbers)
    batch["view"] = views[0]
    return batch


class DeviceViews:
    """Makes the views of a packed batch, on the device that the batch is on.

    Args:
        size: height and width of a view in pixels.
        augment: the transforms.
        mix: applied to the finished views.
        kind: of the targets, which follow the views; None: class ids.
    """

    def __init__(
        self, size: tuple[int, int], augment: Augment, mix: MixPairs, kind: Targets | None = None
    ) -> None:
        """Stores the arguments, which are the class's, and finds the crop in the chain of transforms."""
        self.size = size
        self.mix = mix
        self.kind = kind or Targets()
        self.chain = list(train_transform(size, augment).transforms)
        self.crop_number = crop_of(self.chain)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch from the loader with its views made: "plan" is replaced by "image" ``(N, 3, H, W)``, uint8.

        ``target`` becomes that of the views, mixed as :meth:`MixPairs.apply` returns it. The batch itself is not changed.
        """
        plan = batch["plan"]
        images = self.crops(batch)
        boxes = [recipe.box for recipe in plan.recipes]
        target = self.kind.resize(batch["target"], boxes, self.size)
        finished = dict(batch)
        finished.pop("pixels", None)  # of this engine alone
        del finished["plan"]
        finished.update(self.finish(images, target, plan))
        return finished

    def crops(self, batch: dict[str, Any]) -> Tensor:
        """The resized crops of a batch, uint8 ``(N, 3, *size)``, from its "pixels" and "plan"."""
        pixels = batch["pixels"]
        plan = batch["plan"]
        if self.crop_number > 0:  # whole pictures arrive
            pixels = self._change_and_cut(pixels, plan)
        cut_sizes = [recipe.box[2:] for recipe in plan.recipes]
        resize = resize_together if all_at_once(pixels) else resize_each
        return resize(pixels, cut_sizes, self.size)

    def _change_and_cut(self, pixels: Tensor, plan: Plan) -> Tensor:
        """Packed whole pictures -> packed crops, after the transforms that come before the crop; uint8, one row.

        Args:
            pixels: of all pictures, uint8 ``(n,)``.
            plan: sizes, boxes and what was drawn.
        """
        picture_sizes = [recipe.picture_size for recipe in plan.recipes]
        pictures = pictures_in_row(pixels, picture_sizes)
        crops = []
        for picture, recipe in zip(pictures, plan.recipes, strict=True):
            for number, parameters in recipe.steps:
                if number < self.crop_number:
                    transform = self.chain[number]
                    picture = transform.transform(picture, _tensors(parameters))
            top, left, height, width = recipe.box
            crop = picture[:, top : top + height, left : left + width]
            crops.append(crop.reshape(-1))
        return torch.cat(crops)

    def finish(self, images: Tensor, target: Tensor, plan: Plan) -> dict[str, Tensor]:
        """Everything that follows the crop.

        Args:
            images: resized crops, uint8 ``(N, 3, *size)``; changed in place.
            target: as :meth:`kd.data.targets.Targets.resize` gives it, ``(N, ...)``.
            plan: of the batch.

        Returns:
            ``image`` and ``target``.
        """
        steps_of_pictures = [dict(recipe.steps) for recipe in plan.recipes]
        for number in range(self.crop_number + 1, len(self.chain)):
            transform = self.chain[number]
            drawn: list[Step] = []  # (number of a picture in the batch, parameters)
            for i, steps in enumerate(steps_of_pictures):
                if number in steps:
                    drawn.append((i, steps[number]))
            if isinstance(transform, v2.RandomHorizontalFlip):
                self._flip(images, target, drawn, axis=-1)
            elif isinstance(transform, v2.RandomVerticalFlip):
                self._flip(images, target, drawn, axis=-2)
            elif isinstance(transform, v2.RandomErasing) and all_at_once(images):
                _erase(images, drawn)
            elif isinstance(transform, v2.ColorJitter) and all_at_once(images):
                colours.jitter(images, drawn)
            else:
                for i, parameters in drawn:
                    images[i] = transform.transform(images[i], _tensors(parameters))
        images, target = self.mix.apply(images, target, plan.mixes)
        return {"image": images, "target": target}

    def _flip(self, images: Tensor, target: Tensor, drawn: Sequence[Step], axis: int) -> None:
        """Mirrors the drawn pictures and their targets, in place.

        Args:
            images: ``(N, 3, H, W)``.
            target: of the batch, ``(N, ...)``; class ids stay as they are.
            drawn: the pictures' places in the batch, with parameters that a flip does not have.
            axis: -1 mirrors left and right, -2 top and bottom.
        """
        numbers = []
        for number, _ in drawn:
            numbers.append(number)
        chosen = torch.tensor(numbers, dtype=torch.long)
        chosen = chosen.to(images.device, non_blocking=True)
        pictures = images[chosen]
        images[chosen] = pictures.flip(axis)
        self.kind.flip(target, chosen, axis)


def pictures_in_row(pixels: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Pictures that lie one after another in a row of pixels, as ``(3, height, width)`` each, by their sizes."""
    lengths = [3 * height * width for height, width in sizes]
    rows = pixels.split(lengths)
    pictures = []
    for row, (height, width) in zip(rows, sizes, strict=True):
        picture = row.view(3, height, width)
        pictures.append(picture)
    return pictures


def resize_each(pixels: Tensor, cuts: Sequence[tuple[int, int]], size: tuple[int, int]) -> Tensor:
    """Resizes packed pictures one at a time, by torchvision.

    Args:
        pixels: uint8 ``(sum of 3 height width,)``.
        cuts: height and width of each picture.
        size: height and width of all results.

    Returns:
        uint8 ``(N, 3, *size)``.
    """
    sizes = list(size)
    images = torch.empty(len(cuts), 3, *sizes, dtype=torch.uint8, device=pixels.device)
    pictures = pictures_in_row(pixels, cuts)
    for image, picture in zip(images, pictures, strict=True):
        resized = tvf.resize(picture, sizes, antialias=True)
        image.copy_(resized)
    return images


def resize_together(
    pixels: Tensor, cuts: Sequence[tuple[int, int]], size: tuple[int, int]
) -> Tensor:
    """As :func:`resize_each`, by two matrix products for as many pictures as :data:`ROOM` holds.

    Measured on pictures of random pixels: 1 to 2% of the values differ by one level (of 255) from torchvision's, none
    by more than two.

    Args:
        pixels: uint8 ``(sum of 3 height width,)``, the pictures one after another, each ``(3, height, width)``.
        cuts: height and width of each picture.
        size: height and width of all results.

    Returns:
        uint8 ``(N, 3, *size)``.
    """
    most_rows = max(height for height, _ in cuts)
    most_columns = max(width for _, width in cuts)
    sizes = torch.tensor(cuts).to(pixels.device, non_blocking=True)  # (N, 2)
    all_heights, all_widths = sizes[:, :, None].unbind(1)  # (N, 1) each
    lengths = 3 * all_heights * all_widths
    all_starts = lengths.cumsum(0) - lengths  # of each picture in the row of pixels

    images = []
    together = max(1, ROOM // (3 * most_rows * most_columns))
    for heights, widths, starts in zip(
        all_heights.split(together),
        all_widths.split(together),
        all_starts.split(together),
        strict=True,
    ):
        padded = _padded(pixels, heights, widths, starts, (most_rows, most_columns))
        images.append(_resize_padded(padded, heights, widths, size))
    return torch.cat(images)


ROOM = 2**25
"""Values, 3 a pixel, that are resized together; padding to the batch's largest picture counts too. 400 MB of GPU memory."""


def _padded(
    pixels: Tensor, heights: Tensor, widths: Tensor, starts: Tensor, size: tuple[int, int]
) -> Tensor:
    """Packed pictures as float ``(n, 3, *size)``, each continued beyond its edge by its last row and column.

    Args:
        pixels: uint8, all pictures one after another.
        heights: of n pictures, ``(n, 1)``.
        widths: likewise.
        starts: the place of each one's first pixel in ``pixels``, ``(n, 1)``.
        size: height and width of the largest picture.
    """
    # Suffixes: n pictures; R rows, C columns and 3 channels of the result.
    rows, columns = size
    device = pixels.device
    # The pixel of the picture that each pixel of the result shows.
    row_R = torch.arange(rows, device=device)
    column_C = torch.arange(columns, device=device)
    y_nR = row_R.minimum(heights - 1)
    x_nC = column_C.minimum(widths - 1)
    channel_31 = torch.arange(3, device=device)[:, None]
    heights_n11 = heights[:, :, None]
    widths_n11 = widths[:, :, None]
    # Pixel (channel, y, x) lies at start + (channel * height + y) * width + x.
    line_number_n3R = channel_31 * heights_n11 + y_nR[:, None]
    line_start_n3R = starts[:, None] + line_number_n3R * widths_n11
    place_n3RC = line_start_n3R[..., None] + x_nC[:, None, None]
    padded = pixels[place_n3RC]
    return padded.float()


def _resize_padded(
    padded: Tensor, heights: Tensor, widths: Tensor, size: tuple[int, int]
) -> Tensor:
    """Pictures ``(n, 3, rows, columns)`` of ``heights`` x ``widths`` (``(n, 1)`` each) -> uint8 ``(n, 3, *size)``.

    Bilinear with antialiasing (:func:`_shares`), of floats 0..255 as :func:`_padded` gives them; what lies beyond a
    picture's edge does not count.

    First the columns, then the rows are resized; values are rounded after each, as torchvision's passes do.
    """
    n, _, rows, columns = padded.shape
    new_height, new_width = size
    most_old, most_new = max(rows, columns), max(size)
    scales = torch.cat([widths / new_width, heights / new_height])  # old pixels to a new one
    shares = _shares(torch.cat([widths, heights]), scales, most_old, most_new)
    column_shares = shares[:n, :new_width, :columns]
    row_shares = shares[n:, :new_height, :rows]
    lines = padded.flatten(1, 2)  # (n, 3 rows, columns)
    narrow = lines @ column_shares.mT  # (n, 3 rows, new_width)
    narrow.round_()
    channels_first = narrow.view(n, 3, rows, new_width)
    rows_first = channels_first.transpose(1, 2).flatten(2)  # (n, rows, 3 new_width)
    resized = row_shares @ rows_first  # (n, new_height, 3 new_width)
    resized = resized.view(n, new_height, 3, new_width)
    images = resized.transpose(1, 2)
    return images.round_().clamp_(0, 255).byte()


def _shares(lengths: Tensor, scales: Tensor, most: int, size: int) -> Tensor:
    """The share of each old pixel of a line in each new one: antialiased bilinear, a triangle around its centre.

    Args:
        lengths: pixels of each old line, ``(N, 1)``.
        scales: old pixels to a new one, likewise.
        most: pixels of the longest old line.
        size: pixels of the longest new line.

    Returns:
        ``(N, size, most)``; the shares in a new pixel add up to 1, and those of padding are 0.
    """
    # Suffixes: N lines, S new pixels, M old pixels.
    lengths_N11 = lengths[..., None]
    scale_N11 = scales[..., None]
    old_pixel_M = torch.arange(most, device=lengths.device)
    new_pixel_S1 = torch.arange(size, device=lengths.device)[:, None]
    old_centre_M = old_pixel_M + 0.5
    new_centre_NS1 = (new_pixel_S1 + 0.5) * scale_N11
    # share = max(0, 1 - |old - new| / max(scale, 1))
    distance_NSM = (old_centre_M - new_centre_NS1).abs()
    relative_NSM = distance_NSM / scale_N11.clamp_min(1)
    triangle_NSM = (1 - relative_NSM).clamp_min_(0)
    is_picture_N1M = old_centre_M < lengths_N11
    shares_NSM = triangle_NSM * is_picture_N1M
    sums_NS1 = shares_NSM.sum(-1, keepdim=True)
    return shares_NSM / sums_NS1


def _erase(images: Tensor, drawn: Sequence[Step]) -> None:
    """Fills a box in each of some pictures, all at once and in place.

    Args:
        images: uint8 ``(N, 3, H, W)``.
        drawn: a picture's number in the batch with RandomErasing's parameters: top ``i``, left ``j``, height ``h``,
            width ``w`` and the fill ``v``, which is None where no box has fitted.
    """
    # number, left, top, right, bottom of each box
    rows = []
    fills = []
    for number, box in drawn:
        if box["v"] is None:
            continue
        left = box["j"]
        top = box["i"]
        rows.append([number, left, top, left + box["w"], top + box["h"]])
        fills.append(torch.from_numpy(box["v"]))
    if not rows:
        return
    # One transfer for the integers, one for the fills.
    table = torch.tensor(rows).to(images.device, non_blocking=True)
    fill = torch.stack(fills).to(images.device, images.dtype, non_blocking=True)
    pictures = table[:, 0]
    boxes = table[:, 1:]
    before = images[pictures]
    is_erased = pixels_inside(before, boxes)[:, None]
    images[pictures] = torch.where(is_erased, fill, before)


SAMPLES = CutSet
"""The samples of this engine: the loader's part."""
VIEWS = DeviceViews
"""The views of this engine: the device's part."""
