"""Answers beside a packed data set: written once, read by many machines, from a folder or an object store.

``OUT/answers/<teacher>-<digest>/<kind of answer>/`` has a file a view for each shard of the pack,
``train-00000.view-0003.bin``: the records of its pictures, in its order. Where the pictures are in no shards the files are
parts of equal size, ``part-00000.view-0003.bin``. ``fingerprint.json`` is written last.
"""

import errno
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kd.data.sources import Split, cache_dir
from kd.data.sources.shards import ShardSplit
from kd.errors import UserError, first_line
from kd.storage.elsewhere import LARGEST_DATA, json_of, open_regular, text_of
from kd.storage.objects import Ranged, file_system, in_one_line, is_url, small_file, tried
from kd.teachers.answer_store import FINGERPRINT, AnswerStore, WholeRecords, compare

PART_BYTES = 256 * 10**6  # where the pictures are in no shards, so much goes into a file


def publish(store: AnswerStore, split: Split, out: str, views: Iterable[int]) -> int:
    """Writes a cache's answers of one kind beside a pack; returns the bytes of all records written.

    Rank 0 of ``kd-cache out=`` calls it once the cache is filled.

    Args:
        store: holds the answers, all of them.
        split: that was answered.
        out: folder or URL of this kind of answers.
        views: numbers of all views of ``store``; advanced as they are written, so that a bar around them moves.

    Raises:
        UserError: an answer is missing in ``store``, or the place can't be written.
    """
    shards = _shards(split, store.samples, store.record_bytes)
    files, path = file_system(out, "out")
    written = 0
    with in_one_line(f"out: {out} can't be written"):
        files.makedirs(path, exist_ok=True)
        for view in views:
            first = 0
            for name, count in shards:
                records, there = store.read(view, np.arange(first, first + count))
                if not there.all():
                    raise UserError(
                        f"out: {int((~there).sum())} answers of view {view} are missing in {store.folder}"
                    )
                written += _put(f"{out}/{name}.view-{view:04d}.bin", records.tobytes())
                first += count
        noted = json_of(text_of(store.folder / FINGERPRINT))
        whole = {
            **noted,
            "views": store.views,
            "record_bytes": store.record_bytes,
            "shards": shards,
        }
        _put(f"{out}/{FINGERPRINT}", json.dumps(whole, indent=1).encode())
    return written


def _put(place: str, data: bytes) -> int:
    """Writes ``data`` to a path or url and compares the size there, with retries; returns the number of bytes.

    Raises:
        OSError: the last try failed.
    """

    def put() -> int:
        """One try of :func:`_put`; raises OSError where the size differs."""
        files, path = file_system(place, "out")
        files.pipe_file(path, data)
        files.invalidate_cache()
        if files.info(path)["size"] != len(data):
            raise OSError(f"{path} has not the {len(data)} bytes that were written")
        return len(data)

    return tried(put, f"{place} can't be written")


def _shards(split: Split, samples: int, record_bytes: int) -> list[tuple[str, int]]:
    """Names of the files of answers, with the number of pictures in each: the pack's shards, or parts of equal size, the
    last of which may be smaller.

    Args:
        split: that was answered.
        samples: its pictures.
        record_bytes: of one answer.
    """
    # The pack's shards, where the pictures lie in them in order.
    if isinstance(split, ShardSplit) and split.shards and len(split.samples) == samples:
        shard_of_picture = [shard for shard, _, _ in split.samples]
        names = [Path(name).stem for name in split.shards]
        are_in_order = shard_of_picture == sorted(shard_of_picture)
        are_different = len(set(names)) == len(names)
        if are_in_order and are_different:
            counts = sorted(Counter(shard_of_picture).items())
            return [(names[shard], count) for shard, count in counts]

    # Parts of equal size.
    pictures_a_part = max(1, PART_BYTES // record_bytes)
    parts: list[tuple[str, int]] = []
    for first in range(0, samples, pictures_a_part):
        name = f"part-{len(parts):05d}"
        count = min(pictures_a_part, samples - first)
        parts.append((name, count))
    return parts


class PublishedStore:
    """Reads what :func:`publish` has written, like :class:`kd.teachers.answer_store.AnswerStore`.

    Args:
        url: folder or URL of one kind of answer.
        fingerprint: what the answers must depend on.
        samples: pictures in the training set.
        views: views a picture that are wanted; more may be published.
        record_bytes: size of a record.
        usable: which whole records ``(N, record_bytes)`` hold an answer.
        key: the teacher's configuration key, named in errors.
        limit: most bytes of remote answers that are kept on the local disk; None: all.

    Raises:
        UserError: nothing there, something else, or fewer views.
    """

    def __init__(
        self,
        url: str,
        fingerprint: dict[str, dict[str, Any]],
        samples: int,
        views: int,
        record_bytes: int,
        usable: Callable[[np.ndarray], np.ndarray],
        key: str,
        limit: int | None = None,
    ) -> None:
        """Reads the fingerprint and compares it; the arguments are the class's. Records are read on demand.

        Of a url, records are kept below ``cache_dir()/shards``, named by the fingerprint's digest.

        Raises:
            UserError: the place is missing, has another fingerprint, or holds fewer views.
        """
        self.folder = url
        self.samples = samples
        self.views = views
        self.record_bytes = record_bytes
        text = _text(url, key)
        stored = compare(text, fingerprint, url, key)
        self.measured: dict[str, Any] = stored.get("measured") or {}
        self._shards = _checked_shards(stored, url, samples, record_bytes, key)
        if stored.get("views", 0) < views:
            raise UserError(
                f"{key}.cache_views: {url} holds {stored.get('views')} view(s), got {views}"
            )
        counts = [count for _, count in self._shards]
        self._starts = np.cumsum([0, *counts])  # the first picture of each shard, and the end
        self._remote: Ranged | None = None
        if is_url(url):
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            local = cache_dir() / "shards" / f"answers-{digest}"
            self._remote = Ranged(url, local, samples * views * record_bytes, limit)
        self._whole = WholeRecords(samples, views, usable)

    def read(self, view: int, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads records.

        Args:
            view: number of the view.
            index: numbers of the pictures, ``(N,)``.

        Returns:
            The records, uint8 ``(N, record_bytes)``, and which of them are whole (their checksum fits,
            :class:`WholeRecords`) and usable, bool ``(N,)``.

        Raises:
            OSError: a file is missing, or one of a URL can't be fetched or is cut off.
        """
        records = np.zeros((len(index), self.record_bytes), dtype=np.uint8)
        for place, number in enumerate(index.tolist()):
            record = self._record(view, number)
            records[place] = np.frombuffer(record, np.uint8)
        is_whole = self._whole.among(view, index, records)
        return records, is_whole

    def _record(self, view: int, i: int) -> bytes:
        """The bytes of the record of picture ``i``, from its place in its shard; in a folder one that is cut off ends
        in zeros, and of a URL it is an OSError.
        """
        shard = int(np.searchsorted(self._starts, i, "right")) - 1
        shard_name, _ = self._shards[shard]
        first_picture = int(self._starts[shard])
        name = f"{shard_name}.view-{view:04d}.bin"
        size = self.record_bytes
        offset = (i - first_picture) * size
        if self._remote is not None:
            return self._remote.read(name, offset, size)
        with open_regular(Path(self.folder, name), LARGEST_DATA) as file:
            data = os.pread(file.fileno(), size, offset)
        return data.ljust(size, b"\0")  # one that was cut counts as missing

    def present(self, view: int, index: np.ndarray) -> np.ndarray:
        """All of them, by the fingerprint; those that are damaged are found when they are read."""
        return np.ones(index.shape, dtype=bool)

    written = present

    def put(self, view: int, index: np.ndarray, records: np.ndarray) -> None:
        """Raises an OSError: nothing is written here."""
        raise OSError(errno.EROFS, "published answers are only read")


def _text(url: str, key: str) -> str:
    """The text of a place's fingerprint file; a user's error where there is none.

    ``key`` names the teacher's settings.
    """
    files, path = file_system(url, f"{key}.cache_dir")
    try:
        return small_file(files, f"{path}/{FINGERPRINT}", f"{url} can't be read").decode()
    except FileNotFoundError as error:
        raise UserError(
            f"{key}.cache_dir: {url} not found: no such answers of this teacher to these pictures and views; "
            "kd-cache --describe PLACE recipe=NAME says what differs"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{key}.cache_dir: {first_line(error)}") from error


def _checked_shards(
    stored: dict[str, Any], url: str, samples: int, record_bytes: int, key: str
) -> Sequence[tuple[str, int]]:
    """The shards' names and numbers of pictures, checked: a fingerprint may come from anywhere, and names files.

    Args:
        stored: content of the fingerprint's file.
        url: of the folder, for messages.
        samples: pictures that the shards must hold.
        record_bytes: of one answer.
        key: of the teacher's settings, for messages.

    Raises:
        UserError: names that are not plain file names, or other numbers.
    """
    shards = stored.get("shards")
    if (
        not isinstance(shards, list)
        or not all(_is_shard(shard) for shard in shards)
        or stored.get("record_bytes") != record_bytes
        or sum(count for _, count in shards) != samples
    ):
        raise UserError(
            f"{key}.cache_dir: {url}/{FINGERPRINT} is damaged: its shards are not {samples} records of "
            f"{record_bytes} bytes"
        )
    return [(str(name), int(count)) for name, count in shards]


def _is_shard(value: object) -> bool:
    """Whether a value of a fingerprint is a pair: a plain file name, and a number of pictures."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    name, count = value
    is_plain = re.fullmatch(r"[\w.-]+", str(name)) is not None
    return is_plain and type(count) is int and count > 0
