"""Records on disk by (sample, view): checksummed, safe to kill at any moment, and the same files behind a URL.

A folder holds ``fingerprint.json`` (what the answers depend on) and one file for each view, ``view-0003.bin``, with a
record of fixed size for each sample. A record starts with the CRC-32 of the rest; without the right one it counts as
missing and is written again. So the half of a record that a killed process has written is never used.
"""

import errno
import json
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from kd.errors import UserError, first_line
from kd.storage.elsewhere import json_of, text_of
from kd.storage.objects import (
    fetched,
    file_system,
    in_one_line,
    is_url,
    put_whole,
    small_file,
)
from kd.storage.writing import file_for, make_folder, write_text
from kd.teachers.answer_codec import CRC_BYTES, Codec, Feature
from kd.teachers.fingerprint import FINGERPRINT, PIXELS, Parts, compare_fingerprints

BEGUN = (".lock", f"{FINGERPRINT}.part")
"""What a cache's folder holds before its fingerprint."""
DEPTH = 4
"""Folders that are searched: the given one, and those of a pack, a teacher and a kind of answer below it."""
AT_ONCE = 2**24
"""Bytes of records that are read at once where a whole file is."""


@dataclass
class Kind:
    """One kind of what a cache keeps, with its place: logits, a layer's features, or the views' pixels."""

    parts: Parts
    """What it depends on."""
    place: str
    """Folder of this machine; of a published one (:func:`publish`) the folder or URL."""
    record_bytes: int
    """Size of a record."""
    codec: Codec | None = None
    """How an answer is written; None: the records are pixels."""
    feature: Feature | None = None
    """The layer; None: the answers are logits."""
    published: bool = False
    """It is only read, whatever it lacks."""
    every_view: bool = False
    """There is one record a picture, which is read for whichever view."""

    @property
    def folder(self) -> Path:
        """The place as a folder."""
        return Path(self.place)

    @property
    def name(self) -> str:
        """``logits``, ``layer:tokens`` or :data:`PIXELS`."""
        if self.codec is None:
            return PIXELS
        return ":".join(self.feature) if self.feature else "logits"


def shared_place(kinds: Sequence[Kind]) -> str:
    """The folder or URL in which several kinds of answers lie side by side; of a single kind its own place."""
    place = kinds[0].place
    return place if len(kinds) == 1 else place.rpartition("/")[0]


def describe_kinds(kinds: Iterable[Kind]) -> dict[str, Any]:
    """What several kinds of answers hold together, for ``summary.json`` and the terminal; ``kinds`` are without pixels.

    Returns:
        ``format`` of the logits (or "features alone") with what else describes them, and, where there are features,
        ``features``: their shapes by ``layer:tokens``.
    """
    whole: dict[str, Any] = {"format": "features alone"}
    features = {}
    for kind in kinds:
        assert kind.codec is not None
        if kind.feature is None:
            whole = kind.codec.describe()
        else:
            features[kind.name] = list(kind.codec.shape)
    return {**whole, "features": features} if features else whole


class AnswerStore:
    """Records of one kind for ``samples`` pictures in ``views`` views each, for any number of processes.

    A whole record is never overwritten, and a writer holds the folder's lock. Files are read by ``pread``, so that a
    truncated file loses records but ends no run. The files of a URL are copied to the local disk first.

    Args:
        kind: what is kept and where; a folder of this machine is made where it is missing.
        samples: pictures in the split.
        views: views a picture; 0 (of a published store alone): all that there are.
        key: the teacher's configuration key, named in errors.
    """

    def __init__(
        self,
        kind: Kind,
        samples: int,
        views: int,
        key: str = "model.teacher",
    ) -> None:
        """Opens the folder's files, or makes them; the arguments are the class's.

        Raises:
            UserError: the folder holds other files or another fingerprint, fewer views are published, a published
                store is not whole, the disk has no room, or it can't be written.
        """
        self.kind = kind
        self.samples = samples
        self.views = views
        self.record_bytes = kind.record_bytes
        self._key = key
        self._files: dict[int, int] = {}  # descriptors by view
        try:
            if kind.published:
                self._open_published()
            else:
                self._begin()
        except OSError as error:
            raise UserError(
                f"{key}.cache_dir: {kind.place} can't be used: {error.strerror or error}"
            ) from error
        # checksums of the records that were found whole, by view and picture; 0: not yet
        self._checksums = np.zeros((self.views, samples), dtype="<u4")

    def _open_published(self) -> None:
        """Opens a published store: compares its fingerprint, takes over its number of views where none is asked for.

        Raises:
            UserError: another fingerprint, a store that is not whole, or fewer views than asked for.
        """
        place = self.kind.place
        text = fingerprint_text(place, self._key)
        there = compare_fingerprints(text, self.kind.parts, place, self._key).get("views")
        if not isinstance(there, int):
            raise UserError(
                f"{self._key}.cache_dir: {place} is not whole yet: run kd-cache again to resume"
            )
        self.views = self.views or there
        if there < self.views:
            raise UserError(
                f"{self._key}.cache_views: {place} holds {there} view(s), got {self.views}"
            )
        self._open()

    def _begin(self) -> None:
        """Makes what is missing of a cache on this machine, under its lock, compares its fingerprint and opens its files.

        Raises:
            UserError: the folder holds other files or another fingerprint, or the disk has no room.
            OSError: it can't be written.
        """
        folder = self.kind.folder
        file = folder / FINGERPRINT
        if not os.path.lexists(file):
            # looked for again at each file: another process may just have begun this cache
            refuse_strangers(
                folder, lambda path: path.name in BEGUN or os.path.lexists(file), self._key
            )
        what = f"{self.views} view(s) of {self.samples} pictures"
        check_room({folder: self.disk_bytes}, what, self._key)
        make_folder(folder)
        with self._locked():
            if not os.path.lexists(file):
                write_text(file, json.dumps(self.kind.parts, indent=1))
            os.close(_plain_file(file, os.O_RDONLY))  # refuses a link before it is read
            compare_fingerprints(
                text_of(file, errors="replace"), self.kind.parts, str(folder), self._key
            )
            self._open()

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk once all records of all views are filled."""
        return self.views * self.samples * self.record_bytes

    def _open(self) -> None:
        """Opens the file of each view; behind a URL, its local copy. Files of a cache of this machine are made where they
        are missing, and lengthened to their whole size.
        """
        published = self.kind.published
        flags = os.O_RDWR | os.O_CREAT
        if published:
            flags = os.O_RDONLY
        for view in range(self.views):
            path = self.kind.folder / view_file(view)
            if is_url(self.kind.place):
                path = fetched(f"{self.kind.place}/{view_file(view)}", f"{self._key}.cache_dir")
            self._files[view] = _plain_file(path, flags)
            if not published:
                self._grow(view)

    def _grow(self, view: int) -> None:
        """Lengthens a view's file to its whole size and reserves the disk, so that a full disk raises here (an OSError).

        A last record that was cut gets an empty checksum: the zeros after it must not complete it.
        """
        file = self._files[view]
        whole_size = self.samples * self.record_bytes
        size = os.fstat(file).st_size
        if size >= whole_size:
            return
        truncated = size % self.record_bytes  # bytes of the last record, where it is not whole
        if truncated:
            _write_all(file, bytes(min(CRC_BYTES, truncated)), size - truncated)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, whole_size)
        else:  # macOS
            os.truncate(file, whole_size)

    def __getstate__(self) -> dict[str, Any]:
        """For spawned loader processes, which open the files themselves."""
        return {**self.__dict__, "_files": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a spawned loader process: opens the files of all views anew."""
        self.__dict__.update(state)
        self._open()

    def _locked(self) -> FileLock:
        """A new lock each time: a loader process must not use one that it inherited."""
        return FileLock(file_for(self.kind.folder / ".lock"))

    def close(self) -> None:
        """Closes the files of all views."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def read(self, view: int, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads records.

        Args:
            view: number of the view; ignored where one record is for all views (:attr:`Kind.every_view`).
            index: numbers of the pictures, ``(N,)``.

        Returns:
            The records, uint8 ``(N, record_bytes)``, and which of them are whole (their checksum fits) and usable, bool
            ``(N,)``.
        """
        if self.kind.every_view:
            view = 0
        size = self.record_bytes
        records = np.empty((len(index), size), dtype=np.uint8)
        for record, number in zip(records, index.tolist(), strict=True):
            offset = number * size
            bytes_read = os.preadv(self._files[view], [record.data], offset)
            if bytes_read < size:  # the file was cut
                record[:] = 0
        return records, self._are_whole(view, index, records)

    def _are_whole(self, view: int, index: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Which of the records ``(N, record_bytes)`` of a view are whole and usable, bool ``(N,)``.

        The checksum of a record found whole is remembered, and not computed again while the record's head holds the same.
        """
        heads_N4 = records[:, :CRC_BYTES].copy()
        checksums_N = heads_N4.view("<u4")[:, 0]
        is_written_N = checksums_N != 0
        is_whole_N = is_written_N & (checksums_N == self._checksums[view, index])
        agreeing = [
            i
            for i in np.flatnonzero(is_written_N & ~is_whole_N)
            if checksum(records[i]) == checksums_N[i]
        ]
        newly_whole = np.array(agreeing, dtype=np.intp)
        if len(newly_whole) and self.kind.codec is not None:
            newly_whole = newly_whole[self.kind.codec.usable(records[newly_whole])]
        self._checksums[view, index[newly_whole]] = checksums_N[newly_whole]
        is_whole_N[newly_whole] = True
        return is_whole_N

    def present(self, view: int, index: np.ndarray) -> np.ndarray:
        """Which of the samples ``index`` ``(N,)`` have a whole, usable record: bool ``(N,)``. Reads them."""
        return self.read(view, index)[1]

    def written(self, view: int, index: np.ndarray) -> np.ndarray:
        """As :meth:`present`, but reads the first bytes of each record alone: a damaged record counts too."""
        if self.kind.every_view:
            view = 0
        return are_written(self._files[view], index, self.record_bytes)

    def put(self, view: int, index: np.ndarray, records: np.ndarray) -> None:
        """Stores records where none is yet, each with its checksum; under the cache's lock.

        Args:
            view: number of the view.
            index: numbers of the pictures, ``(N,)``.
            records: uint8 ``(N, record_bytes)``; the bytes of their checksums are not read.

        Raises:
            OSError: they can't be written, or the store is a published one.
        """
        if self.kind.published:
            raise OSError(errno.EROFS, "published answers are only read")
        with self._locked():
            self._grow(view)
            file = self._files[view]
            is_missing = ~self.present(view, index)
            for number, record in zip(index[is_missing], records[is_missing], strict=True):
                head = checksum(record).to_bytes(CRC_BYTES, "little")
                body = record[CRC_BYTES:].tobytes()
                _write_all(file, head + body, int(number) * self.record_bytes)

    def parts(self) -> Iterator[np.ndarray]:
        """Numbers of all pictures, in parts of which the records fit into :data:`AT_ONCE`."""
        count = max(1, AT_ONCE // self.record_bytes)
        for first in range(0, self.samples, count):
            yield np.arange(first, min(first + count, self.samples))

    def filled(self) -> float:
        """The share of all records, in [0, 1], that are written, by any process; some may be damaged."""
        index = np.arange(self.samples)
        shares = [self.written(view, index).mean() for view in range(self.views)]
        return float(np.mean(shares))


def view_file(view: int) -> str:
    """Name of the file with a view's records."""
    return f"view-{view:04d}.bin"


def fingerprint_text(place: str, key: str) -> str:
    """The text of the fingerprint in a folder or behind a URL; ``key`` is the teacher's configuration key.

    Raises:
        UserError: it is missing, or can't be read.
    """
    try:
        return small_file(f"{place}/{FINGERPRINT}", key=f"{key}.cache_dir").decode()
    except FileNotFoundError as error:
        raise UserError(
            f"{key}.cache_dir: {place} not found: no such answers of this teacher to these pictures and views; "
            "kd-cache --describe PLACE recipe=NAME says what differs"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{key}.cache_dir: {first_line(error)}") from error


def fingerprints_in(place: str, key: str = "describe") -> Iterator[tuple[str, str]]:
    """Folder (or URL) and text of each fingerprint at a place and up to three folders below it, the nearest first.

    A file of this machine that can't be read is passed over; of a URL it is a UserError, which begins with ``key``.
    """
    if not is_url(place):
        for depth in range(DEPTH):
            for file in sorted(Path(place).expanduser().glob("*/" * depth + FINGERPRINT)):
                with suppress(OSError, ValueError):
                    yield str(file.parent), text_of(file)
        return
    files, path = file_system(place, key)
    with in_one_line(f"{key}: {place}"):
        for depth in range(DEPTH):
            for name in sorted(files.glob(f"{path}/{'*/' * depth}{FINGERPRINT}")):
                url = files.unstrip_protocol(name)
                yield url.rpartition("/")[0], small_file(url).decode()


def publish(store: AnswerStore, out: str, views: Iterable[int]) -> int:
    """Copies a cache's files of one kind to a folder or URL, the fingerprint last; returns the bytes of all records.

    Args:
        store: filled, on this machine.
        out: folder or URL of this kind of answers.
        views: numbers of all views of ``store``; advanced as they are written, so that a bar around them moves.

    Raises:
        UserError: an answer is missing in ``store``, or the place can't be written.
    """
    with in_one_line(f"out: {out} can't be written"):
        files, path = file_system(out, "out")
        files.makedirs(path, exist_ok=True)
        for view in views:
            missing = sum(int((~store.present(view, part)).sum()) for part in store.parts())
            if missing:
                raise UserError(
                    f"out: {missing} answers of view {view} are missing in {store.kind.place}"
                )
            put_whole(store.kind.folder / view_file(view), f"{out}/{view_file(view)}", "out")
        files.pipe_file(f"{path}/{FINGERPRINT}", whole_fingerprint(store).encode())
    return store.disk_bytes


def whole_fingerprint(store: AnswerStore) -> str:
    """The text of a whole store's fingerprint: it also says how many ``views`` there are."""
    stored = json_of(text_of(store.kind.folder / FINGERPRINT))
    return json.dumps({**stored, "views": store.views}, indent=1)


def refuse_strangers(folder: Path, is_ours: Callable[[Path], bool], key: str) -> None:
    """Refuses a folder that holds anything but a cache, before anything is written to it.

    Args:
        folder: need not exist.
        is_ours: whether a path in it belongs to a cache.
        key: the teacher's configuration key, named in the error.

    Raises:
        UserError: the first other name in it.
    """
    if not folder.exists():
        return
    strangers = sorted(path.name for path in folder.iterdir() if not is_ours(path))
    if strangers:
        raise UserError(
            f"{key}.cache_dir: {folder} is not a cache of answers: it holds {strangers[0]}"
        )


def are_written(file: int, index: np.ndarray, record_bytes: int) -> np.ndarray:
    """Which records ``(N,)`` of an open ``file`` have a checksum, which is not compared: bool ``(N,)``."""
    heads = (os.pread(file, CRC_BYTES, number * record_bytes) for number in index.tolist())
    return np.fromiter(map(any, heads), dtype=bool, count=len(index))


def check_room(sizes: Mapping[Path, int], what: str, key: str) -> None:
    """Checks that the disk has room for the bytes of caches that their folders do not take yet.

    Args:
        sizes: bytes of each whole cache by folder; at least one. The first folder's disk is measured.
        what: views and pictures, named in the error.
        key: the teacher's configuration key, likewise.

    Raises:
        UserError: they don't fit.
    """
    first = next(iter(sizes)).absolute()
    free = free_bytes(first)
    needed = missing_bytes(sizes)
    if needed > free:
        raise UserError(
            f"{key}.cache_dir: {first} needs {needed / 1e6:,.1f} MB more for {what}, the disk has {free / 1e6:,.1f} MB "
            "(fewer cache_views, cache_topk or cache_pixels=false)"
        )


def missing_bytes(sizes: Mapping[Path, int]) -> int:
    """Bytes that caches will still take: of the whole caches (``sizes``, by folder), less what their folders take now."""
    taken = 0
    for folder in sizes:
        for file in folder.glob("view-*.bin"):
            taken += file.lstat().st_blocks * 512
    return sum(sizes.values()) - taken


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that ``folder`` is on, or would be on."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _plain_file(path: Path, flags: int) -> int:
    """Opens a file of the cache; ``flags`` as of :func:`os.open`. Gives its descriptor.

    Raises:
        OSError: it can't be opened; or it is a link, a second name of another file, or not a regular file (a pipe): what it
            leads to is not read or written.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise OSError(f"{path.name} is a link, and a cache has none") from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(descriptor)
        raise OSError(f"{path.name} is not a regular file with one name, as a cache's files are")
    return descriptor


def checksum(record: np.ndarray) -> int:
    """CRC-32 of the bytes of a record, uint8 ``(record_bytes,)``, after those that hold it; 1 where that is 0."""
    crc = zlib.crc32(record[CRC_BYTES:].data)
    return crc or 1  # 0 marks a record that was never written


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Writes all of ``data`` to an open file ``descriptor`` at byte ``offset``: one call of the system may write
    fewer.
    """
    while data:
        written = os.pwrite(descriptor, data, offset)
        data = data[written:]
        offset += written
