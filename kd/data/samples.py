"""One picture of a split as training or validation sees it, and samples as a batch. Runs in the loader's workers."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from torchvision.transforms import v2

from kd.data.batch import Batch
from kd.data.pictures import MAX_PIXELS, decode
from kd.data.sampler import Key
from kd.data.sources import Source, Split, named
from kd.data.targets import Targets
from kd.data.transforms import MixPairs, seeded

Sample = tuple[Tensor, Any, Key]
"""View uint8 ``(3, H, W)``, target (id, ids, numbers or mask), key (index, view)."""
DECODED_BYTES = 2**28
"""Of decoded pictures that each :class:`PictureSet` of a process without loader workers keeps: the first that it reads."""


class Samples(Dataset[Any]):
    """One split by (index, view), with the source's kind of target. Base of the samples of each engine.

    Args:
        split: the pictures.
        seed: of the run; views depend on it.
        source: of the split; None: pictures with one label each.
        max_pixels: a picture that claims more is not decoded.
    """

    def __init__(self, split: Split, seed: int, source: Source | None, max_pixels: int) -> None:
        """Stores what all sets of samples share.

        Args:
            split: pictures and labels.
            seed: of the run.
            source: decides the kind of target and the label to ignore; None: class ids.
            max_pixels: a larger picture is refused.
        """
        self.split = split
        self.seed = seed
        self.max_pixels = max_pixels
        source = source or Source()
        self.kind = source.kind
        self.ignore_index = source.ignore_index

    def __len__(self) -> int:
        return len(self.split.targets)

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        """The samples of one batch, in the order of ``keys``; torch's loader calls it."""
        return [self[key] for key in keys]


class PictureSet(Samples):
    """One split, decoded and transformed; a view depends on (seed, index, view) alone.

    Args:
        split: the pictures.
        transform: uint8 ``(3, H, W)`` -> a view, uint8 ``(3, *size)``.
        seed: of the run.
        source: of the split; None: pictures with one label each.
        max_pixels: a picture that claims more is not decoded.
        size: height and width of a view in pixels, for a cache of views; ``transform`` has its own.
    """

    def __init__(
        self,
        split: Split,
        transform: v2.Transform,
        seed: int,
        source: Source | None = None,
        max_pixels: int = MAX_PIXELS,
        size: tuple[int, int] = (0, 0),
    ) -> None:
        """Stores the arguments, which are the class's."""
        super().__init__(split, seed, source, max_pixels)
        self.transform = transform
        self.size = size
        self._decoded: dict[int, Tensor] = {}
        self._room = DECODED_BYTES

    def __getitems__(self, keys: Sequence[Key]) -> list[Sample]:
        """The samples of one batch, in the order of ``keys``; decoded together first where this process loads them."""
        if get_worker_info() is None:
            self._decode_ahead([index for index, _ in keys])
        return super().__getitems__(keys)

    def _decode_ahead(self, indices: Sequence[int]) -> None:
        """Decodes a batch's pictures, by their ``indices``, before any of its views is made, and keeps them for all epochs.

        Once :data:`DECODED_BYTES` are kept it does nothing: each further picture is decoded as its view is made. A picture
        that can't be decoded is left to :meth:`__getitem__`, which raises the error.

        Decoding and making views by turns takes 1.3 times as long: each evicts the other's code from the processor's cache.
        """
        for index in indices:
            if not self._room or index in self._decoded:
                continue
            with suppress(RuntimeError, OSError):  # __getitem__ reports it
                picture = decode(self.split.read(index), self.max_pixels)
                self._decoded[index] = picture
                self._room = max(0, self._room - picture.numel())

    def __getitem__(self, key: Key) -> Sample:
        """One sample of a key (index, view): the view, uint8 ``(3, H, W)``, its target, and the key.

        Raises:
            RuntimeError: the picture can't be read; the message names it.
        """
        index, view_number = key
        try:
            picture = self._decoded.get(index)
            if picture is None:
                picture = decode(self.split.read(index), self.max_pixels)
            target = self.split.target(index)
            with seeded(self.seed, index, view_number):
                view, view_target = self.kind.view(
                    self.transform, picture, target, self.ignore_index
                )
        except (RuntimeError, OSError) as error:
            raise RuntimeError(f"{named(self.split, index)} can't be read: {error}") from error
        return view, view_target, key


@dataclass(eq=False)
class Collate:
    """Samples -> a batch."""

    mix: MixPairs | None = None
    """Mixes pairs of a training batch, or none of them where the settings have no mixup and cutmix; None: a validation
    batch."""
    kind: Targets = field(default_factory=Targets)
    """Of the targets: class ids, unless it says otherwise."""
    classes: int = 0
    """How many the source has, for targets ``(N, C)``."""

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """A batch of N samples; the training step, teachers and caches read its parts by name.

        Returns:
            "image" uint8 ``(N, 3, H, W)``, "target" as :meth:`Targets.stack` gives it (mixed: probabilities ``(N, C)``),
            "index" ``(N,)`` (-1 for padding) and, for validation, "real", the number of pictures before the padding; for
            training, "view", that of its first sample (with a fixed number of views all samples have the same).
        """
        pictures = [picture for picture, _, _ in samples]
        labels = [target for _, target, _ in samples]
        keys = [key for _, _, key in samples]
        images = torch.stack(pictures)
        targets = self.kind.stack(labels, self.classes)
        numbers = []
        padding = 0  # it comes last
        for number, view in keys:
            is_padding = view < 0
            padding += is_padding
            numbers.append(-1 if is_padding else number)
        if self.mix is not None:
            images, targets = self.mix(images, targets, keys)
        batch: Batch = {"image": images, "target": targets, "index": torch.tensor(numbers)}
        if self.mix is None:
            batch["real"] = len(keys) - padding
        else:
            _, batch["view"] = keys[0]
        return batch
