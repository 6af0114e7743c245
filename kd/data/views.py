"""What a loader gives of a split: training views, made by an engine, or validation's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from kd.data.batch import Batch, Target
from kd.data.sampler import TrainBatches
from kd.data.samples import Collate, PictureSet
from kd.data.sources import Source, Split
from kd.data.transforms import EvalView, MixPairs, train_transform
from kd.run.settings import Augment

Finish = Callable[[Batch], Batch]  # Makes the views of a packed batch on the device


@dataclass
class Views:
    """How pictures are looked at. See :class:`kd.data.datamodule.DistillationDataModule` for the settings."""

    source: Source
    size: tuple[int, int]
    crop_ratio: float
    augment: Augment
    engine: str
    seed: int
    max_pixels: int

    def __post_init__(self) -> None:
        self._engine = None if self.engine in ("torch", "ray") else import_module(f"kd.data.engines.{self.engine}")

    def check(self) -> None:
        """Raises a UserError where the engine can't make these views."""
        if self._engine is not None:
            self._engine.check(self.augment, self.source)

    def training(self, split: Split) -> tuple[Dataset[Any], Callable[..., Any], Finish | None]:
        """Random views: samples, how they become a batch, and what is left to the device."""
        mix = MixPairs(self.augment, max(1, len(self.source.classes)), self.seed)
        kind, classes = self.source.kind, len(self.source.classes)
        collate = Collate(mix, kind, classes)
        if self._engine is None:
            return self._pictures(split, train_transform(self.size, self.augment)), collate, None
        cuts = self._engine.CutSet(split, self.size, self.augment, self.seed, self.max_pixels, self.source)
        finish = self._engine.DeviceViews(self.size, self.augment, mix, kind)
        return cuts, partial(self._engine.pack, partial(kind.pack, classes=classes)), finish

    def evaluation(self, split: Split, of_source: bool = True) -> tuple[PictureSet, Collate]:
        """Centre crops: samples, and how they become a batch; others than the source's have one label a picture."""
        view = EvalView(self.size, self.crop_ratio, self.max_pixels)
        if not of_source:
            return PictureSet(split, view, self.seed, max_pixels=self.max_pixels), Collate()
        return self._pictures(split, view), Collate(None, self.source.kind, len(self.source.classes))

    def sample(self, split: Split, count: int, labelled: bool) -> Iterator[tuple[Tensor, Target]]:
        """The first ``count`` pictures of a fixed shuffle, or of those with a class id: uint8 ``(3, H, W)``, as
        validation sees them, with their targets.
        """
        (pictures, _), targets = self.evaluation(split), split.targets
        order = map(int, TrainBatches(len(targets), 1, self.seed).order(0))
        wanted = (i for i in order if not labelled or _is_class(targets[i]))
        return ((pictures[i, 0][0], targets[i]) for i in islice(wanted, count))

    def _pictures(self, split: Split, transform: v2.Transform) -> PictureSet:
        return PictureSet(split, transform, self.seed, self.source, self.max_pixels, self.size)


def _is_class(target: Target) -> bool:
    return isinstance(target, int | np.integer) and int(target) >= 0
