"""What caches know of a batch, read in the loader's processes: records of answers, and the pixels of views."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from kd.data.batch import Batch
from kd.data.sampler import Key
from kd.data.samples import PictureSet, Sample
from kd.teachers.answer_codec import CRC_BYTES
from kd.teachers.answer_store import AnswerStore
from kd.teachers.published import PublishedStore

Store = AnswerStore | PublishedStore


def read_records(stores: Sequence[Store], batch: Batch) -> list[Tensor]:
    """The records of a batch, uint8 ``(N, record_bytes)`` of each kind; none where one is missing."""
    found = [store.read(batch["view"], batch["index"].numpy()) for store in stores]
    return (
        [torch.from_numpy(rows) for rows, _ in found]
        if all(there.all() for _, there in found)
        else []
    )


@dataclass
class Reading:
    """How a loader's processes read caches."""

    stores: Mapping[str, Sequence[Store]]
    """Stores of each teacher's answers."""
    pixels: AnswerStore | None = None
    """Store of the views themselves, where they are cached."""

    def __call__(
        self, pictures: Dataset[Any], collate: Callable[..., Batch]
    ) -> tuple[Dataset[Any], "AddRecords"]:
        """What a loader gets in place of pictures and what makes a batch of them."""
        if self.pixels is not None:
            assert isinstance(pictures, PictureSet)  # the only engine that views are kept of
            pictures = KeptViews(pictures, self.pixels)
        return pictures, AddRecords(collate, self.stores)


@dataclass
class AddRecords:
    """Samples -> a batch with the records that are there: the loader pins them with the pictures."""

    collate: Callable[..., Batch]
    stores: Mapping[str, Sequence[Store]]

    def __call__(self, samples: Sequence[Any]) -> Batch:
        batch = self.collate(samples)
        return {
            **batch,
            "records": {name: read_records(stores, batch) for name, stores in self.stores.items()},
        }


class KeptViews(Dataset[Sample]):
    """Training views whose pixels are kept: one that is in the store is neither decoded nor augmented again.

    Mixed pairs are mixed after this, from the same pixels by the same numbers. A mask lies behind its view's pixels.
    """

    def __init__(self, pictures: PictureSet, store: AnswerStore) -> None:
        self.pictures, self.store = pictures, store
        self._full = False

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, key: Key) -> Sample:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> list[Sample]:
        index, view = np.array([i for i, _ in keys]), keys[0][1]
        records, there = self.store.read(view, index)
        made = self.pictures.__getitems__(
            [key for key, is_kept in zip(keys, there, strict=True) if not is_kept]
        )
        if made:
            self._keep(view, index[~there], made)
        new = iter(made)
        return [
            self._kept(record, key) if is_kept else next(new)
            for record, key, is_kept in zip(records, keys, there, strict=True)
        ]

    def _kept(self, record: np.ndarray, key: Key) -> Sample:
        height, width = self.pictures.size
        planes = torch.from_numpy(record[CRC_BYTES:]).view(-1, height, width)
        if self.pictures.kind.cut_with_picture:
            return planes[:3], planes[3:], key
        return planes, self.pictures.split.target(key[0]), key

    def _keep(self, view: int, index: np.ndarray, made: Sequence[Sample]) -> None:
        if self._full:
            return
        records = np.zeros((len(made), self.store.record_bytes), np.uint8)
        for record, (image, target, _) in zip(records, made, strict=True):
            parts = [image, target] if self.pictures.kind.cut_with_picture else [image]
            record[CRC_BYTES:] = torch.cat(
                [part.as_subclass(Tensor).reshape(-1) for part in parts]
            ).numpy()
        try:
            self.store.put(view, index, records)
        except OSError as error:
            self._full = True
            print(
                f"model.teacher.cache_pixels: {self.store.folder}: {os.strerror(error.errno or 0)}; views are made "
                "anew",
                file=sys.stderr,
            )
