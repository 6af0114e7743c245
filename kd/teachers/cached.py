"""A teacher that answers from a cache where it can, and fills it where it can't.

The *live* teacher is the model that the cache stands in front of. An answer is known by (sample, view): the picture's
number in the training split, and the number of the random crop and changes that it is shown with.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kd.data.batch import Batch
from kd.errors import UserError
from kd.models import Images
from kd.teachers.answer import ALL, Answer, Wanted
from kd.teachers.answer_store import AnswerStore, describe_kinds, shared_place
from kd.teachers.base import RunTeacher
from kd.teachers.reading import Reading, read_records


class CachedTeacher(RunTeacher):
    """Answers by (sample, view): read from stores, or computed and stored. See :class:`kd.teachers.base.RunTeacher`.

    What it computes goes through the stores' rounding before it is used, so a run that fills its cache and one that
    reads it learn from the same numbers. A batch that names no view (validation) is answered live. Each process has one,
    over the same stores.

    Args:
        live: the model whose answers are cached.
        stores: each kind of answers, at least one, all of equally many pictures and views; last the views' pixels, where
            they are stored too.
        only: never run the model in training; a missing answer is an error.
    """

    def __init__(self, live: RunTeacher, stores: Sequence[AnswerStore], only: bool = False) -> None:
        """Takes over what messages and reports read of the live teacher; the arguments are the class's."""
        self.live = live
        self.stores = [store for store in stores if store.kind.codec is not None]
        self.pixels = next((store for store in stores if store.kind.codec is None), None)
        self.kinds = [store.kind for store in self.stores]
        self.only = only
        self.arch = live.arch
        self.model = live.model
        self.spec = live.spec
        first = self.stores[0]
        self.views = None if first.kind.every_view else first.views  # None: any view
        self.samples = first.samples
        self.place = shared_place(self.kinds)
        """Folder or URL that holds all kinds of answers; with one kind, that kind's own."""
        self.disk_bytes = sum(store.disk_bytes for store in stores)
        """Bytes of all answers once all views are filled, stored pixels included."""
        self.read = 0  # answers, in this process
        self.computed = 0
        self._disk_is_full = False

    @property
    def members(self) -> Mapping[str, RunTeacher]:
        """The members of the model whose answers are cached."""
        return self.live.members

    def identity(self) -> dict[str, Any]:
        """Of the model whose answers are cached: a cache changes no answer's identity."""
        return self.live.identity()

    def present(self, view: int, index: np.ndarray) -> np.ndarray:
        """Which of the samples ``index`` ``(N,)`` have answers of all kinds, bool ``(N,)``; pixels of views don't count."""
        return np.logical_and.reduce([store.present(view, index) for store in self.stores])

    def written(self, view: int, index: np.ndarray) -> np.ndarray:
        """As :meth:`present`, without reading whole records: a damaged one counts too."""
        return np.logical_and.reduce([store.written(view, index) for store in self.stores])

    # -- answering ---------------------------------------------------------------------------------------------------
    def fetch(self, batch: Batch, name: str = ALL) -> Batch:
        """A copy of the batch with this teacher's records in ``batch["records"][name]``; called on the host.

        [] is added where any record is missing: :meth:`answer` computes it. A batch that names no view, or whose records the
        loader has read, is returned as it is.
        """
        records_by_teacher = batch.get("records", {})
        if "view" not in batch or name in records_by_teacher:
            return batch
        records = read_records(self.stores, batch)
        return {**batch, "records": {**records_by_teacher, name: records}}

    def answer(self, batch: Batch, wanted: Wanted, name: str = ALL) -> Answer:
        """The answers from the records of the batch; missing ones are computed and stored first.

        Records were read by the loader or by :meth:`fetch`; of a batch with a missing one they are read here.

        Args:
            batch: without ``view`` (validation) it is answered by the live model.
            wanted: of the live model; from records all that the cache holds is answered.
            name: of the teacher, under which the answers are returned.

        Raises:
            UserError: with ``cache=only`` an answer is missing; or the model gives NaN or infinity.
        """
        if "view" not in batch:
            return self.live.answer(batch, wanted, name)
        answer = Answer()
        for kind, records in zip(self.kinds, self._records(batch, name), strict=True):
            decoded: Any = kind.codec.decode(records)  # type: ignore[union-attr]
            if kind.feature is None:
                answer.logits[name] = decoded
            else:
                answer.features[name, *kind.feature] = decoded
        return answer

    def _records(self, batch: Batch, name: str) -> list[Tensor]:
        """The records of a batch, uint8 ``(N, record_bytes)`` of each kind, on the device of ``batch["index"]``.

        Counts in :attr:`read` and :attr:`computed`. A batch that lacks an answer is computed as a whole, so that a fill
        that was killed gives what an undisturbed one does; of the answers that were there the stored ones are used.

        Raises:
            UserError: with ``cache=only`` an answer is missing; or a computed one is not finite.
        """
        records_by_teacher = batch.get("records", {})
        if records_by_teacher.get(name):  # read by the loader or by fetch
            self.read += len(batch["index"])
            return records_by_teacher[name]

        # which answers are missing
        view = batch["view"]
        device = batch["index"].device
        numbers = batch["index"].cpu().numpy()
        stored = [store.read(view, numbers) for store in self.stores]
        are_whole = [is_whole for _, is_whole in stored]
        present = int(np.logical_and.reduce(are_whole).sum())
        missing = len(numbers) - present
        if missing and self.only:
            raise UserError(
                f"{self.live.key}.cache: only, but {missing} of {len(numbers)} answers of a batch are missing in "
                f"{self.place}; kd-cache fills it"
            )
        self.read += present
        self.computed += missing
        if not missing:  # another process has stored them after the fetch
            return [torch.from_numpy(records).to(device) for records, _ in stored]

        # compute and store them
        new = self._compute(batch["image"], numbers)
        pairs = zip(self.stores, new, strict=True)
        return [self._store(store, view, numbers, records) for store, records in pairs]

    def _compute(self, images: Images, numbers: np.ndarray) -> list[Tensor]:
        """Computes answers as records, uint8 ``(N, record_bytes)``, one for each kind, by one forward for all.

        Args:
            images: of the batch, uint8 ``(N, 3, H, W)``.
            numbers: of the pictures, ``(N,)``, named in errors.

        Raises:
            UserError: an answer that is not finite, or of another shape than the codec's.
        """
        layers = {(ALL, *kind.feature): () for kind in self.kinds if kind.feature is not None}
        answer = self.live.answer({"image": images}, Wanted({ALL: ()}, layers))
        answers: list[Any] = []
        for kind in self.kinds:
            if kind.feature is None:
                answers.append(answer.logits[ALL])
            else:
                answers.append(answer.features[ALL, *kind.feature])

        # one copy from the device for all kinds of answers
        are_finite = [x.flatten(1).isfinite().all(1) for x in answers]
        finite_N = torch.stack(are_finite).all(0).cpu().numpy()
        if not finite_N.all():
            first = numbers[~finite_N][0]
            raise UserError(
                f"{self.live.key}: its answer to training picture {first} is not finite"
            )
        records = []
        for kind, x in zip(self.kinds, answers, strict=True):
            codec: Any = kind.codec
            shape = tuple(x.shape[1:])
            if shape != codec.shape:
                raise UserError(
                    f"{self.live.key}.cache: holds {codec.shape} a picture, the teacher gives {shape}"
                )
            records.append(codec.encode(x))
        return records

    def _store(self, store: AnswerStore, view: int, numbers: np.ndarray, encoded: Tensor) -> Tensor:
        """Stores records; gives what is stored now, which for some samples may be another process's answer.

        Args:
            store: of one kind of answers.
            view: number of the view.
            numbers: of the pictures, ``(N,)``.
            encoded: uint8 ``(N, record_bytes)``.

        Returns:
            uint8 ``(N, record_bytes)`` on the device of ``encoded``; ``encoded`` where the store can't be written (a
            full disk, published answers): this process then prints a message and stores no more.
        """
        if self._disk_is_full:
            return encoded
        try:
            store.put(view, numbers, encoded.cpu().numpy())
        except OSError as error:
            self._disk_is_full = True
            print(
                f"{self.live.key}.cache: {store.kind.place}: {error.strerror}; the teacher answers live",
                file=sys.stderr,
            )
            return encoded
        stored, is_whole = store.read(view, numbers)
        is_whole_N1 = torch.from_numpy(is_whole).to(encoded.device)[:, None]
        return torch.where(is_whole_N1, torch.from_numpy(stored).to(encoded.device), encoded)

    def report(self) -> dict[str, Any]:
        """The cache's part of ``summary.json``: place, format, size in MB once filled, and the answers that this process
        has read and computed.
        """
        return {
            "folder": self.place,
            **describe_kinds(self.kinds),
            "views": self.views,
            "disk_mb": round(self.disk_bytes / 1e6, 1),
            "pixels": self.pixels.kind.place if self.pixels else None,
            "answers_read": self.read,
            "answers_computed": self.computed,
        }


def caches_of(teacher: RunTeacher | None) -> dict[str, CachedTeacher]:
    """The caches among the answering teachers, by the teacher's name; a single teacher has the name :data:`ALL`."""
    if teacher is None:
        return {}
    if isinstance(teacher, CachedTeacher):
        return {ALL: teacher}
    members = teacher.members.items()
    return {name: member for name, member in members if isinstance(member, CachedTeacher)}


def reading_of(teacher: RunTeacher | None) -> Reading | None:
    """How loaders read the caches among the answering teachers; None without any.

    ``DistillationDataModule.reading`` is set to it; where a data tier makes the batches it has no effect.
    """
    caches = caches_of(teacher)
    if not caches:
        return None
    pixels = next((cache.pixels for cache in caches.values() if cache.pixels), None)
    return Reading({name: cache.stores for name, cache in caches.items()}, pixels)
