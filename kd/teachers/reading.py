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


def read_records(stores: Sequence[AnswerStore], batch: Batch) -> list[Tensor]:
    """The records of a batch on the host, uint8 ``(N, record_bytes)`` of each store; [] where any record is missing.

    The batch names its ``view`` (one number) and its pictures (``index``, ``(N,)``).
    """
    numbers = batch["index"].numpy()
    records_of_kinds = []
    for store in stores:
        records, is_whole = store.read(batch["view"], numbers)
        if not is_whole.all():
            return []
        records_of_kinds.append(torch.from_numpy(records))
    return records_of_kinds


@dataclass
class Reading:
    """How a loader's processes read caches."""

    stores: Mapping[str, Sequence[AnswerStore]]
    """Stores of each teacher's answers."""
    pixels: AnswerStore | None = None
    """Store of the views themselves, where they are cached."""

    def __call__(
        self, pictures: Dataset[Any], collate: Callable[..., Batch]
    ) -> tuple[Dataset[Any], "AddRecords"]:
        """What a loader of training pictures gets in place of ``pictures`` and ``collate``.

        Args:
            pictures: views by key.
            collate: samples -> a batch of pictures.
        """
        if self.pixels is not None:
            assert isinstance(pictures, PictureSet)  # the only engine that views are kept of
            pictures = CachedViews(pictures, self.pixels)
        return pictures, AddRecords(collate, self.stores)


@dataclass
class AddRecords:
    """Samples -> a batch with the stored records (``records``): the loader pins them with the pictures."""

    collate: Callable[..., Batch]
    """Samples -> a batch of pictures."""
    stores: Mapping[str, Sequence[AnswerStore]]
    """Stores of each teacher's answers."""

    def __call__(self, samples: Sequence[Any]) -> Batch:
        """The batch of pictures, and under ``records`` what :func:`read_records` reads, by teacher."""
        batch = self.collate(samples)
        records = {name: read_records(stores, batch) for name, stores in self.stores.items()}
        return {**batch, "records": records}


class CachedViews(Dataset[Sample]):
    """Training views whose pixels are stored: one that is in the store is neither decoded nor augmented again.

    Mixed pairs are mixed after this, from the same pixels by the same numbers. A mask follows its view's pixels.

    Args:
        pictures: makes the views that are missing.
        store: a record is a checksum, uint8 ``(3, H, W)``, and a mask ``(1, H, W)`` where there are masks.
    """

    def __init__(self, pictures: PictureSet, store: AnswerStore) -> None:
        self.pictures = pictures
        self.store = store
        self._disk_is_full = False

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, key: Key) -> Sample:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> list[Sample]:
        """The samples of one batch, in the order of ``keys``: from stored pixels, else made and then stored.

        Args:
            keys: (picture's number, view); all of one view, as the sampler gives them.
        """
        _, view = keys[0]
        index = np.array([number for number, _ in keys])
        records, is_stored = self.store.read(view, index)

        # make and store the missing ones
        missing = [key for key, stored in zip(keys, is_stored, strict=True) if not stored]
        new_samples = self.pictures.__getitems__(missing)
        if new_samples:
            self._store(view, index[~is_stored], new_samples)

        # in the order of the keys
        remaining = iter(new_samples)
        samples = []
        for record, key, stored in zip(records, keys, is_stored, strict=True):
            if stored:
                sample = self._sample(record, key)
            else:
                sample = next(remaining)
            samples.append(sample)
        return samples

    def _sample(self, record: np.ndarray, key: Key) -> Sample:
        """The view ``(3, H, W)`` in a record, its target (its mask where it has one) and its key."""
        height, width = self.pictures.size
        content = torch.from_numpy(record[CRC_BYTES:])
        planes = content.view(-1, height, width)
        if self.pictures.kind.cut_with_picture:
            picture = planes[:3]
            mask = planes[3:]
            return picture, mask, key
        number, _ = key
        return planes, self.pictures.split.target(number), key

    def _store(self, view: int, index: np.ndarray, samples: Sequence[Sample]) -> None:
        """Stores new views. Where the disk refuses (it is full), this process prints a message and stores no more.

        Args:
            view: its number.
            index: numbers of the pictures, ``(N,)``.
            samples: of each the view, uint8 ``(3, H, W)``, its target (stored where it is a mask, uint8 ``(1, H, W)``)
                and its key.
        """
        if self._disk_is_full:
            return
        records = np.zeros((len(samples), self.store.record_bytes), np.uint8)
        for record, (image, target, _) in zip(records, samples, strict=True):
            if self.pictures.kind.cut_with_picture:
                parts = [image, target]
            else:
                parts = [image]
            flat = [part.as_subclass(Tensor).reshape(-1) for part in parts]
            record[CRC_BYTES:] = torch.cat(flat).numpy()
        try:
            self.store.put(view, index, records)
        except OSError as error:
            self._disk_is_full = True
            print(
                f"model.teacher.cache_pixels: {self.store.kind.place}: {os.strerror(error.errno or 0)}; views are made "
                "anew",
                file=sys.stderr,
            )
