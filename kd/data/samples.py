"""One picture of a split as training or validation sees it, and samples as a batch. Runs in the loader's workers."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from torchvision.transforms import v2

from kd.data.batch import Batch
from kd.data.pictures import MAX_PIXELS, decode
from kd.data.sampler import Key
from kd.data.sources import Source, Split, fetch, named
from kd.data.targets import Targets
from kd.data.transforms import MixPairs, seeded

Sample = tuple[Tensor, Any, Key]  # Picture, target (id, ids, or mask), (index, epoch)
KEPT_BYTES = 2**28  # of decoded pictures, the first ones, in a process without loader workers


class Samples(Dataset[Any]):
    """One split by (index, view), with the source's kind of target."""

    def __init__(self, split: Split, seed: int, source: Source | None, max_pixels: int) -> None:
        self.split, self.seed, self.max_pixels = split, seed, max_pixels
        self.kind = source.kind if source else Targets()
        self.ignore_index = source.ignore_index if source else None

    def __len__(self) -> int:
        return len(self.split.targets)

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        fetch(self.split, [index for index, _ in keys])
        return [self[key] for key in keys]


class PictureSet(Samples):
    """One split, decoded and transformed; a view depends on (seed, index, epoch) alone."""

    def __init__(
        self,
        split: Split,
        transform: v2.Transform,
        seed: int,
        source: Source | None = None,
        max_pixels: int = MAX_PIXELS,
        size: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(split, seed, source, max_pixels)
        self.transform, self.size = transform, size  # of a view
        self._kept: dict[int, Tensor] = {}
        self._room = KEPT_BYTES

    def __getitems__(self, keys: Sequence[Key]) -> list[Sample]:
        fetch(self.split, [index for index, _ in keys])
        for (
            index,
            _,
        ) in keys:  # before any view: decoder and views in turn evict each other's code (1.3 times the time)
            if self._room and index not in self._kept and get_worker_info() is None:
                with suppress(RuntimeError, OSError):  # named below
                    self._kept[index] = decode(self.split.read(index), self.max_pixels)
                    self._room = max(0, self._room - self._kept[index].numel())
        return [self[key] for key in keys]

    def __getitem__(self, key: Key) -> Sample:
        index, epoch = key
        try:
            picture = (
                self._kept[index]
                if index in self._kept
                else decode(self.split.read(index), self.max_pixels)
            )
            target = self.split.target(index)
            with seeded(self.seed, index, epoch):
                return (*self.kind.view(self.transform, picture, target, self.ignore_index), key)
        except (RuntimeError, OSError) as error:
            raise RuntimeError(f"{named(self.split, index)} can't be read: {error}") from error


class Collate:
    """Samples -> a batch; mixes pairs where the augmentation says so."""

    def __init__(
        self, mix: MixPairs | None = None, kind: Targets | None = None, classes: int = 0
    ) -> None:
        self.mix, self.kind, self.classes = mix, kind or Targets(), classes

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        images = torch.stack([image for image, _, _ in samples])
        targets = self.kind.stack([target for _, target, _ in samples], self.classes)
        keys = [key for _, _, key in samples]
        real = sum(epoch >= 0 for _, epoch in keys)  # padding comes last
        index = torch.tensor([-1 if epoch < 0 else i for i, epoch in keys])
        if self.mix:
            images, targets = self.mix(images, targets, keys)
        batch: Batch = {"image": images, "target": targets, "index": index}
        return {**batch, "real": real} if self.mix is None else {**batch, "view": keys[0][1]}
