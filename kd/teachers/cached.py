"""A teacher that answers from a cache where it can, and fills it where it can't."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kd.data.batch import Batch
from kd.data.tier.schedule import device_of_a_maker
from kd.errors import UserError
from kd.models import Images
from kd.teachers.answer import ALL, Answer, Wanted
from kd.teachers.answer_codec import AnswerCodec, MapCodec, described
from kd.teachers.answer_store import AnswerStore
from kd.teachers.base import RunTeacher
from kd.teachers.reading import Reading, Store, read_records


@dataclass
class CacheEntry:
    """One kind of answers: where the records are, and how they are written."""

    store: Store
    codec: AnswerCodec


class CachedTeacher(RunTeacher):
    """Answers by (sample, view): read from stores, or computed and stored. See :class:`kd.teachers.base.RunTeacher`.

    What it computes goes through the stores' rounding before it is used, so a run that fills its cache and one that
    reads it learn from the same numbers. A batch that names no view (validation) is answered live.

    Args:
        live: the model whose answers are cached.
        kept: the answers, each kind in a store of its own; all of equally many pictures and views.
        only: never run the model in training; a missing answer is an error.
    """

    def __init__(self, live: RunTeacher, kept: Sequence[CacheEntry], only: bool = False) -> None:
        self.live, self.kept, self.only = live, list(kept), only
        self.arch, self.model, self.spec = live.arch, live.model, live.spec
        self.views, self.samples = self.kept[0].store.views, self.kept[0].store.samples
        self.record_bytes = sum(entry.codec.record_bytes for entry in kept)
        self.pixels: AnswerStore | None = None  # of the views that it answers
        self.read = self.computed = 0
        self._full = False

    @property
    def members(self) -> Mapping[str, RunTeacher]:
        """The members of the model whose answers are cached."""
        return self.live.members

    def identity(self) -> dict[str, Any]:
        """Of the model whose answers are cached: a cache changes no answer's identity."""
        return self.live.identity()

    def __call__(self, images: Images) -> Tensor:
        """Always live: pictures alone name no view."""
        return self.live(images)

    # -- what there is -----------------------------------------------------------------------------------------------
    @property
    def place(self) -> str:
        """The folder of all kinds of answers, for messages."""
        folders = [str(kept.store.folder) for kept in self.kept]
        return folders[0] if len(folders) == 1 else folders[0].rpartition("/")[0]

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk once all views are filled, stored pixels included."""
        return self.record_bytes * self.views * self.samples + (
            self.pixels.disk_bytes if self.pixels else 0
        )

    def error(self, which: str = "error") -> dict[str, float]:
        """The relative error of each kind of answer, as measured when the cache was begun; ``worst``: of a picture."""
        return {
            name: e for kept in self.kept for name, e in kept.store.measured.get(which, {}).items()
        }

    def present(self, view: int, index: np.ndarray) -> np.ndarray:
        """Which of the samples ``index`` have whole answers: bool, the shape of ``index``."""
        return np.logical_and.reduce([kept.store.present(view, index) for kept in self.kept])

    # -- answering ---------------------------------------------------------------------------------------------------
    def fetch(self, batch: Batch, name: str = ALL) -> Batch:
        """On the host: adds the records, where all are there and the loader has not read them."""
        known = batch.get("records", {})
        if "view" not in batch or name in known:
            return batch
        return {
            **batch,
            "records": {**known, name: read_records([kept.store for kept in self.kept], batch)},
        }

    def answer(self, batch: Batch, wanted: Wanted, name: str = ALL) -> Answer:
        """The answers from the records of the batch; missing ones are computed and stored first.

        A batch without ``view`` (validation) is always computed. Records come from :meth:`fetch` where the loader ran
        it.

        Raises:
            UserError: with ``cache=only`` an answer is missing; or the model gives NaN or infinity.
        """
        if "view" not in batch:
            return self.live.answer(batch, wanted, name)
        answer = Answer()
        for kept, records in zip(self.kept, self._records(batch, name), strict=True):
            logits, features = kept.codec.decode(records)
            if logits is not None:
                answer.logits[name] = logits
            answer.features |= {(name, *key): x for key, x in features.items()}
        return answer

    def _records(self, batch: Batch, name: str) -> list[Tensor]:
        if found := batch.get("records", {}).get(name):
            self.read += len(batch["index"])
            return found
        view, numbers, device = batch["view"], batch["index"].cpu().numpy(), batch["index"].device
        stored = [kept.store.read(view, numbers) for kept in self.kept]
        missing = ~np.logical_and.reduce([there for _, there in stored])
        if self.only:
            raise UserError(
                f"{self.live.key}.cache: only, but {missing.sum()} of {len(numbers)} answers of a batch are missing in "
                f"{self.place}; kd-cache fills it"
            )
        self.computed += int(missing.sum())
        self.read += int((~missing).sum())
        places = torch.from_numpy(np.flatnonzero(missing)).to(device)
        if "made" in batch:
            encoded = [batch["made"][_entry(name, i)][places] for i in range(len(self.kept))]
        else:
            images = batch["image"]
            encoded = self.ask(images if missing.all() else images[places], numbers[missing])
        whole = [torch.from_numpy(rows).to(device) for rows, _ in stored]
        for kept, records, fresh in zip(self.kept, whole, encoded, strict=True):
            records[places] = self._kept(kept.store, view, numbers[missing], fresh)
        return whole

    def ask(self, images: Images, numbers: np.ndarray) -> list[Tensor]:
        """Computes answers as records, uint8 ``(N, record_bytes)``, one for each kind.

        Args:
            images: as the model takes them.
            numbers: of the pictures, ``(N,)``, named in errors.
        """
        return records_of(self.live, [kept.codec for kept in self.kept], images, numbers)

    def _kept(self, store: Store, view: int, numbers: np.ndarray, encoded: Tensor) -> Tensor:
        """Stores; gives what is stored now, which for some samples may be another process's answer."""
        if self._full:
            return encoded
        try:
            store.put(view, numbers, encoded.cpu().numpy())
        except OSError as error:
            self._full = True
            print(
                f"{self.live.key}.cache: {store.folder}: {error.strerror}; the teacher answers live",
                file=sys.stderr,
            )
            return encoded
        rows, there = store.read(view, numbers)
        found = torch.from_numpy(there).to(encoded.device)[:, None]
        return torch.where(found, torch.from_numpy(rows).to(encoded.device), encoded)

    def report(self) -> dict[str, Any]:
        """The cache's part of ``summary.json``: place, format, size in MB, measured errors, answers read and
        computed.
        """
        return {
            "folder": self.place,
            **described([kept.codec for kept in self.kept]),
            "views": self.views,
            "disk_mb": round(self.disk_bytes / 1e6, 1),
            "pixels": str(self.pixels.folder) if self.pixels else None,
            "error": {name: round(error, 6) for name, error in self.error().items()},
            "worst_error": {name: round(error, 6) for name, error in self.error("worst").items()},
            "answers_read": self.read,
            "answers_computed": self.computed,
        }


def caches_of(teacher: RunTeacher | None) -> dict[str, CachedTeacher]:
    """The caches among the teachers that are asked, by the teacher's name."""
    if isinstance(teacher, CachedTeacher):
        return {ALL: teacher}
    members = teacher.members if teacher is not None else {}
    return {name: member for name, member in members.items() if isinstance(member, CachedTeacher)}


def reading_of(teacher: RunTeacher | None) -> Reading | None:
    """How loaders read the caches among the teachers that are asked; None without any."""
    caches = caches_of(teacher)
    stores = {name: [kept.store for kept in cache.kept] for name, cache in caches.items()}
    pixels = next((cache.pixels for cache in caches.values() if cache.pixels is not None), None)
    return Reading(stores, pixels) if caches else None


def records_of(
    live: RunTeacher, codecs: Sequence[AnswerCodec], images: Images, numbers: np.ndarray
) -> list[Tensor]:
    """A model's answers as records, uint8 ``(N, record_bytes)`` of each kind; errors name the pictures' ``numbers``.

    Args:
        live: the model.
        codecs: of each kind of answer.
        images: as the model takes them, ``(N, 3, H, W)``.
        numbers: of the pictures, ``(N,)``, named in errors.

    Returns:
        uint8 ``(N, record_bytes)`` of each kind.

    Raises:
        UserError: an answer that is not finite, or not one a picture.
    """
    logits, found = live.look(images, [(ALL, *key) for codec in codecs for key in codec.features])
    if logits.ndim != 2 and any(
        codec.logits and not isinstance(codec.logits, MapCodec) for codec in codecs
    ):
        raise UserError(
            f"{live.key}.cache: holds one answer a picture, the teacher gives {tuple(logits.shape)}"
        )
    features = {(path, tokens): x for (_, path, tokens), x in found.items()}
    finite = (
        torch.stack([x.flatten(1).isfinite().all(1) for x in (logits, *features.values())])
        .all(0)
        .cpu()
    )
    if not finite.all():
        raise UserError(
            f"{live.key}: its answer to training picture {numbers[~finite.numpy()][0]} is not finite"
        )
    return [codec.encode(logits, features) for codec in codecs]


class AnsweringCollate:
    """Samples -> their numbers and the teachers' records: what a data tier makes where it fills caches.

    Args:
        collate: samples -> a batch of pictures.
        caches: to be filled, by teacher.
    """

    def __init__(self, collate: Callable[..., Batch], caches: Mapping[str, CachedTeacher]) -> None:
        self.collate = collate
        self.asked = {
            name: (cache.live, [kept.codec for kept in cache.kept])
            for name, cache in caches.items()
        }

    def __call__(self, samples: Sequence[Any]) -> Batch:
        """The batch without its pictures. Each teacher is put on this process's device first, in its own precision."""
        batch, device = self.collate(samples), device_of_a_maker()
        made: dict[str, Tensor] = {}
        for name, (live, codecs) in self.asked.items():
            live.to(device, live.dtype)
            found = records_of(live, codecs, batch["image"], batch["index"].numpy())
            made |= {_entry(name, i): records for i, records in enumerate(found)}
        return {"index": batch["index"], "view": batch["view"], "made": made}


def _entry(name: str, kind: int) -> str:
    return f"{name}/{kind}"
