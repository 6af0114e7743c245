"""A teacher's answers on disk, by (sample, view): checksummed, safe to kill at any moment.

A folder holds ``fingerprint.json`` (what the answers depend on) and one file for each view, ``view-0003.bin``, with a
record of fixed size for each sample. A record starts with the CRC-32 of the rest; without the right one it counts as
missing and is written again. So the half of a record that a killed process has written is never used.
"""

import json
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from kd.errors import UserError
from kd.storage.elsewhere import json_of, text_of
from kd.storage.writing import make_folder, write_text
from kd.teachers.answer_codec import CRC_BYTES

FINGERPRINT = "fingerprint.json"
BEGUN = (".lock", f"{FINGERPRINT}.part")
"""What a cache's folder holds before its fingerprint."""


class WholeRecords:
    """Which records are whole; a whole record's checksum is computed once.

    Args:
        samples: pictures.
        views: views a picture.
        usable: which whole records ``(N, record_bytes)`` hold an answer; default: all.
    """

    def __init__(
        self, samples: int, views: int, usable: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> None:
        """No record is known to be whole yet; arguments as of the class."""
        self._usable = usable
        # checksums of the records that were found whole, by view and picture; 0: not yet
        self._checksums = np.zeros((views, samples), dtype="<u4")

    def among(self, view: int, index: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Checks records that were read.

        Args:
            view: number of the view.
            index: numbers of the pictures, ``(N,)``.
            records: uint8 ``(N, record_bytes)``.

        Returns:
            Which are whole and usable, bool ``(N,)``.
        """
        heads_N4 = records[:, :CRC_BYTES].copy()
        checksums_N = heads_N4.view("<u4")[:, 0]
        is_written_N = checksums_N != 0
        known_N = self._checksums[view, index]
        is_whole_N = is_written_N & (checksums_N == known_N)

        # the others are summed up once, and then known
        unchecked = np.flatnonzero(is_written_N & ~is_whole_N)
        agreeing = []
        for i in unchecked:
            if checksum(records[i]) == checksums_N[i]:
                agreeing.append(i)
        newly_whole = np.array(agreeing, dtype=np.intp)
        if len(newly_whole) and self._usable is not None:
            is_usable = self._usable(records[newly_whole])
            newly_whole = newly_whole[is_usable]
        self._checksums[view, index[newly_whole]] = checksums_N[newly_whole]
        is_whole_N[newly_whole] = True
        return is_whole_N


class AnswerStore:
    """Records of one teacher's answers to ``samples`` pictures in ``views`` views each, for any number of processes.

    A whole record is never overwritten, and a writer holds the folder's lock. Files are read by ``pread``, so that a
    truncated file loses records but ends no run. ``measured`` is what ``measure`` returned when the cache was begun,
    maybe by another process; {} without.

    Args:
        folder: made where it is missing.
        fingerprint: what the answers depend on, by part (``teacher``, ``transform``, ``data``, ``answers``).
        samples: pictures in the training set.
        views: views a picture.
        record_bytes: size of a record.
        usable: which whole records ``(N, record_bytes)`` hold an answer; default: all.
        measure: called by the process that begins the cache, under its lock; what it returns is noted beside the
            fingerprint, as ``measured``.
        key: the teacher's configuration key, named in errors.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: dict[str, dict[str, Any]],
        samples: int,
        views: int,
        record_bytes: int,
        usable: Callable[[np.ndarray], np.ndarray] | None = None,
        measure: Callable[[], dict[str, Any]] | None = None,
        key: str = "model.teacher",
    ) -> None:
        """Opens the folder's files, or makes them; the arguments are the class's.

        Raises:
            UserError: the folder holds other files or another fingerprint, the disk has no room, it can't be written, or
                what ``measure`` raises.
        """
        self.folder = folder
        self.samples = samples
        self.views = views
        self.record_bytes = record_bytes
        self.measured: dict[str, Any] = {}
        self._files: dict[int, int] = {}  # descriptors by view
        self._key = key
        try:
            if not self._has_begun():
                # looked for again at each file: another process may just have begun this cache
                refuse_strangers(folder, lambda p: p.name in BEGUN or self._has_begun(), key)
            check_room({folder: self.disk_bytes}, f"{views} view(s) of {samples} pictures", key)
            self._whole = WholeRecords(samples, views, usable)
            make_folder(folder)
            with self._locked():
                self._claim(fingerprint, measure)
                for view in range(views):
                    self._open(view)
        except OSError as error:
            raise UserError(
                f"{key}.cache_dir: {folder} can't be used: {error.strerror or error}"
            ) from error

    def _has_begun(self) -> bool:
        return os.path.lexists(self.folder / FINGERPRINT)

    def _claim(
        self, fingerprint: dict[str, dict[str, Any]], measure: Callable[[], dict[str, Any]] | None
    ) -> None:
        """Writes the fingerprint of a new cache, or compares that of an older one; sets :attr:`measured`.

        The caller holds the lock.
        """
        file = self.folder / FINGERPRINT
        if not self._has_begun():
            content: dict[str, Any] = dict(fingerprint)
            if measure:
                content["measured"] = measure()
            write_text(file, json.dumps(content, indent=1))
        handle = _plain_file(file, os.O_RDONLY)  # refuses a link before it is read
        os.close(handle)
        text = text_of(file, errors="replace")
        stored = compare(text, fingerprint, str(self.folder), self._key)
        self.measured = stored.get("measured") or {}

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk once all records of all views are filled."""
        return self.views * self.samples * self.record_bytes

    def _open(self, view: int) -> None:
        """Opens the file of view number ``view``, which is made where it is missing, at its whole size."""
        path = self.folder / f"view-{view:04d}.bin"
        self._files[view] = _plain_file(path, os.O_RDWR | os.O_CREAT)
        self._grow(view)

    def _grow(self, view: int) -> None:
        """Reserves the whole file, so that a full disk raises here; clears the checksum of a truncated record."""
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
        for view in range(self.views):
            self._open(view)

    def _locked(self) -> FileLock:
        """A new lock each time: a loader process must not use one that it inherited."""
        return FileLock(self.folder / ".lock")

    def close(self) -> None:
        """Closes the files of all views."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def read(self, view: int, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads records.

        Args:
            view: number of the view.
            index: numbers of the pictures, ``(N,)``.

        Returns:
            The records, uint8 ``(N, record_bytes)``, and which of them are whole and usable, bool ``(N,)``.
        """
        records = np.empty((len(index), self.record_bytes), dtype=np.uint8)
        file = self._files[view]
        for record, number in zip(records, index.tolist(), strict=True):
            offset = number * self.record_bytes
            bytes_read = os.preadv(file, [record.data], offset)
            if bytes_read < self.record_bytes:  # the file was cut
                record[:] = 0
        is_whole = self._whole.among(view, index, records)
        return records, is_whole

    def present(self, view: int, index: np.ndarray) -> np.ndarray:
        """Which of the samples ``index`` ``(N,)`` have a whole, usable record: bool ``(N,)``. Reads them."""
        return self.read(view, index)[1]

    def written(self, view: int, index: np.ndarray) -> np.ndarray:
        """Which of the samples ``index`` ``(N,)`` have a record, bool ``(N,)``. Reads its first bytes; it may be damaged."""
        file = self._files[view]
        heads = [os.pread(file, CRC_BYTES, number * self.record_bytes) for number in index.tolist()]
        return np.array([any(head) for head in heads], dtype=bool)

    def put(self, view: int, index: np.ndarray, records: np.ndarray) -> None:
        """Stores records where none is yet, each with its checksum; under the cache's lock.

        Args:
            view: number of the view.
            index: numbers of the pictures, ``(N,)``.
            records: uint8 ``(N, record_bytes)``; the bytes of their checksums are not read.

        Raises:
            OSError: they can't be written.
        """
        with self._locked():
            self._grow(view)
            file = self._files[view]
            is_missing = ~self.present(view, index)
            new_numbers = index[is_missing]
            new_records = records[is_missing]
            for number, record in zip(new_numbers, new_records, strict=True):
                head = checksum(record).to_bytes(CRC_BYTES, "little")
                body = record[CRC_BYTES:].tobytes()
                offset = int(number) * self.record_bytes
                _write_all(file, head + body, offset)

    def filled(self) -> float:
        """The share of all records, in [0, 1], that are written, by any process; reads the whole files."""
        written = 0
        for file in self._files.values():
            written += count_written(file, self.samples, self.record_bytes)
        return written / (self.views * self.samples)


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


def count_written(file: int, samples: int, record_bytes: int) -> int:
    """Counts the records that have a checksum, which is not compared.

    Args:
        file: descriptor of a view's open file.
        samples: pictures, so many records at most.
        record_bytes: size of a record.
    """
    written = 0
    records_a_read = max(1, 2**24 // record_bytes)  # 16 MiB
    for first in range(0, samples, records_a_read):
        count = min(records_a_read, samples - first)
        data = os.pread(file, count * record_bytes, first * record_bytes)
        whole_records = len(data) // record_bytes  # fewer where the file was cut
        values = np.frombuffer(data, np.uint8, whole_records * record_bytes)
        records = values.reshape(-1, record_bytes)
        has_checksum = records[:, :CRC_BYTES].any(1)
        written += int(has_checksum.sum())
    return written


def check_room(sizes: Mapping[Path, int], what: str, key: str, pixels: bool = False) -> None:
    """Checks that the disk has room for what caches will take beside what their folders already do.

    Args:
        sizes: bytes of each whole cache by folder; at least one. The first folder's disk is measured.
        what: views and pictures, named in the error.
        key: the teacher's configuration key, likewise.
        pixels: whether the views' pixels are among them, likewise.

    Raises:
        UserError: they don't fit.
    """
    first = next(iter(sizes)).absolute()
    free = free_bytes(first)
    needed = missing_bytes(sizes)
    if needed > free:
        less = "or cache_pixels=false" if pixels else "cache_topk"
        raise UserError(
            f"{key}.cache_dir: {first} needs {needed / 1e6:,.1f} MB more for {what}, the disk has {free / 1e6:,.1f} MB "
            f"(fewer cache_views, {less})"
        )


def missing_bytes(sizes: Mapping[Path, int]) -> int:
    """Bytes that caches will take beside what their folders already do; ``sizes``: bytes of each whole cache by folder."""
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
        OSError: it is a link, a second name of another file, or no file at all; whatever it leads to is left alone.
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


NAMED = {"transform": "transforms", "answers": "kinds of answers"}
"""Names of a fingerprint's parts in messages, where they differ."""


def compare(
    text: str, fingerprint: dict[str, dict[str, Any]], folder: str, key: str
) -> dict[str, Any]:
    """Compares the fingerprint that a cache holds with the run's.

    Args:
        text: content of the cache's file.
        fingerprint: the parts that must be equal; other parts of the file are not compared.
        folder: where it is, named in errors.
        key: the teacher's configuration key, likewise.

    Returns:
        The file's content: the parts, and what was measured when the cache was begun.

    Raises:
        UserError: it is damaged, or the cache's answers depend on something else: the first difference is named.
    """
    try:
        stored = json_of(text)
        stored_parts = {name: dict(stored[name]) for name in fingerprint}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{key}.cache_dir: {folder}/{FINGERPRINT} is damaged ({type(error).__name__})"
        ) from error
    # With lists for tuples, as in the file.
    for name, part in json_of(json.dumps(fingerprint)).items():
        for difference in differences(stored_parts[name], part).values():
            raise UserError(
                f"{key}.cache_dir: {folder} was filled with other {NAMED.get(name, name)}: {difference}"
            )
    return dict(stored)


def differences(there: dict[str, Any], here: dict[str, Any]) -> dict[str, str]:
    """What differs between a part of a cache's fingerprint (``there``) and the run's (``here``).

    Returns:
        A sentence by name, first the names of ``here``; a value that one of them lacks is None in it.
    """
    names = dict.fromkeys([*here, *there])
    sentences = {}
    for name in names:
        stored = there.get(name)
        present = here.get(name)
        if stored != present:
            sentences[name] = f"{name} is {stored} there, {present} here"
    return sentences


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
