"""Each model's own input: teacher and student may differ in size, mean and deviation, and see the same pictures."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import timm
import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as tvf

from kd.errors import UserError
from kd.settings import LARGEST_SIDE, height_width

Images = Tensor  # uint8, (N, 3, H, W)
Size = tuple[int, int]
Out = TypeVar("Out")


class Preprocess:
    """uint8 pictures -> one model's float input: resized to its size and normalised its way, on their device.

    Args:
        img_size: side of the square input in pixels, or height and width.
        mean: per channel, of values in 0..1.
        std: likewise.
        channels_last: the memory order of the output.

    Raises:
        ValueError: ``std`` holds a 0, or a side is above :data:`kd.settings.LARGEST_SIDE`.
    """

    def __init__(
        self,
        img_size: int | Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
        channels_last: bool = False,
    ) -> None:
        """Checks and stores the arguments; these and the errors are the class's."""
        self.size = height_width(img_size)
        if max(self.size) > LARGEST_SIDE:
            raise ValueError(f"img_size must be <= {LARGEST_SIDE} pixels, got {img_size}")
        self.channels_last = channels_last
        self.mean = tuple(mean)
        self.std = tuple(std)
        if not all(self.std):
            raise ValueError(f"std must not be 0, got {std}")
        self.floats: tuple[tuple[float, ...], tuple[float, ...]] | None = None
        """Mean and std with which float pictures come; None: this input's own."""
        self._moments: dict[torch.device, Tensor] = {}

    def __call__(self, images: Images) -> Tensor:
        """uint8 ``(N, 3, H, W)`` -> floats ``(N, 3, *size)``; floats are prepared already, for this model or another's.

        Floats pass as they are, but where :attr:`floats` says that they are normalised with another mean and standard
        deviation, they are brought to this model's, as timm does for its teachers.
        """
        if images.is_floating_point():
            if self.floats not in (None, (self.mean, self.std)):
                images = self._renormalised(images, *self.floats)
            return images.float()
        if images.shape[-2:] != self.size:
            images = tvf.resize(images, list(self.size), antialias=True)
        mean, std = self._moments_on(images.device)
        order = torch.channels_last if self.channels_last else torch.preserve_format
        floats = images.to(torch.float32, memory_format=order)
        return floats.mul_(1 / 255).sub_(mean).div_(std)

    def _renormalised(
        self, images: Tensor, mean_before: Sequence[float], std_before: Sequence[float]
    ) -> Tensor:
        """Float pictures ``(N, 3, H, W)`` of one mean and standard deviation, brought to this input's."""
        std = images.new_tensor(std_before)[:, None, None]
        mean = images.new_tensor(mean_before)[:, None, None]
        return tvf.normalize(images * std + mean, list(self.mean), list(self.std))

    def _moments_on(self, device: torch.device) -> Tensor:
        """Mean and standard deviation ``(2, 3, 1, 1)``, copied to each device once: a copy waits for all that runs."""
        moments = self._moments.get(device)
        if moments is None:
            values = [self.mean, self.std]
            flat = torch.tensor(values, dtype=torch.float32, device=device)
            moments = flat[..., None, None]
            self._moments[device] = moments
        return moments


def preprocess_for(
    model: nn.Module,
    img_size: int | Sequence[int] | None,
    channels_last: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Preprocess:
    """The input that ``model`` wants: by the arguments, else by the size of its patches and its timm configuration.

    Args:
        model: with the configuration of timm (``pretrained_cfg``), if any.
        img_size: in pixels: of both sides, or height and width; None: the model's.
        channels_last: whether :class:`Preprocess` gives pictures in channels-last memory order.
        mean: of each colour (RGB), for pictures in 0..1; None: as the model's configuration names it.
        std: likewise.
    """
    config = timm.data.resolve_model_data_config(model)
    size = img_size or built_size(model) or config["input_size"][-2:]
    return Preprocess(size, mean or config["mean"], std or config["std"], channels_last)


def built_size(model: nn.Module) -> Size | None:
    """Height and width in pixels that a model's patches were made for (``img_size=``); None: it has no patches of a fixed
    size. The model's timm configuration names the architecture's usual size even where it was built for another.
    """
    backbone = getattr(model, "backbone", model)
    for name in ("patch_embed", "stem"):
        embed = getattr(backbone, name, None)
        if isinstance(embed, PatchEmbed) and embed.img_size is not None:
            return embed.img_size[0], embed.img_size[1]
    return None


class Prepare(Protocol):
    """Pictures ``(N, 3, H, W)`` -> a model's input. Float pictures pass as they are: they are prepared already.

    Attributes:
        size: height and width of the model's input in pixels.
    """

    @property
    def size(self) -> Size:
        """Height and width of the model's input in pixels."""

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 or float ``(N, 3, H, W)`` -> float."""


@dataclass(eq=False)
class Given:
    """A function of the user's own, or none."""

    function: Callable[[Tensor], Tensor] | None
    """uint8 pictures ``(N, 3, H, W)`` -> the model's input."""
    name: str
    """Whose input it is, named in errors."""
    argument: str = "prepare"
    """The user's name for :attr:`function`, named in errors."""
    size: Size = (224, 224)
    """Height and width of the newest pictures."""

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 pictures ``(N, 3, H, W)`` through the user's function; float pictures pass as they are. Sets :attr:`size`.

        Raises:
            UserError: uint8 pictures, and no function.
        """
        if images.dtype == torch.uint8:
            if self.function is None:
                raise UserError(
                    f"{self.name}: how it wants uint8 pictures is not known; give float pictures, or "
                    f"{self.argument}=kd.Preprocess(size, mean, std) or a function"
                )
            images = self.function(images)
        self.size = (images.shape[-2], images.shape[-1])
        return images


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Inside, models compute as in evaluation; afterwards each of their modules is in the mode that it was in."""
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model in models:
            model.train(modes[model])
        for module, training in modes.items():  # frozen parts may stay in evaluation
            module.training = training


def in_type_of(model: nn.Module, pictures: Tensor) -> Tensor:
    """Prepared pictures in the type of a model's weights (``trainer.precision=bf16-true``); uint8 ones stay."""
    for weight in model.parameters():
        if weight.is_floating_point() and pictures.is_floating_point():
            return pictures.to(weight.dtype)
    return pictures


def trial(model: Callable[[Tensor], Out], prepare: Prepare, count: int) -> Out:
    """A forward of ``count`` black pictures, to see the shapes that layers give.

    Args:
        model: called once, with what ``prepare`` makes of the pictures.
        prepare: the model's preprocessing; the pictures are uint8, or float for a :class:`Given` without a function.
        count: N of the pictures ``(N, 3, *prepare.size)``, on the CPU.

    Returns:
        What the model gave.

    Raises:
        UserError: no :class:`Preprocess` describes the model's input (:class:`Given`), and pictures of ``prepare.size``, at
            first 224 x 224, do not fit. What a :class:`Preprocess` does not fit is raised as it is.
    """
    unknown = isinstance(prepare, Given) and prepare.function is None
    pictures = torch.zeros(count, 3, *prepare.size, dtype=torch.float32 if unknown else torch.uint8)
    try:
        with torch.compiler.set_stance("force_eager"):  # a graph of two black pictures is of no use
            return model(prepare(pictures))
    except RuntimeError as error:
        if not isinstance(prepare, Given):
            raise
        height, width = prepare.size
        raise UserError(
            f"{prepare.name}: its input size is not known before the first batch and {height} x {width} does not fit, "
            f"but feature losses need it: give {prepare.argument}=kd.Preprocess(size, mean, std)"
        ) from error


def input_of(
    model: nn.Module | Callable[[Tensor], object],
    name: str,
    prepare: Callable[[Tensor], Tensor] | None = None,
    argument: str = "prepare",
) -> Prepare:
    """How a model's pictures are prepared: by ``prepare``, else as timm says of the model.

    A plain function, or none for a model that timm does not describe, becomes a :class:`Given`; without a function it takes
    float pictures alone.

    Args:
        model: the model, or any function of pictures.
        name: of the model, for messages.
        prepare: uint8 pictures ``(N, 3, H, W)`` -> the model's input; called for every batch.
        argument: the user's name for ``prepare``, for messages.

    Raises:
        TypeError: ``prepare`` is not callable.
    """
    if prepare is not None and not callable(prepare):
        raise TypeError(
            f"{argument}: must be a kd.Preprocess or a function of uint8 pictures, got {prepare!r}"
        )
    if isinstance(prepare, Preprocess):
        return prepare
    if prepare is None and isinstance(model, nn.Module) and getattr(model, "pretrained_cfg", None):
        return preprocess_for(model, None)
    return Given(prepare, name, argument)
