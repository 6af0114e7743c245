"""A teacher's answers on disk, by (sample, view): checksummed, safe to kill at any moment.

A folder holds ``fingerprint.json`` (what the answers depend on) and one file for each view, ``view-0003.bin``, with a
record of fixed size for each sample. A record starts with the CRC-32 of the rest; without the right one it counts as
missing and is written again. So what a process leaves that dies while it writes is never read.
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
BEGUN = (".lock", f"{FINGERPRINT}.part")  # what a cache holds before its fingerprint


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
        self._usable = usable
        self._sums = np.zeros(
            (views, samples), dtype="<u4"
        )  # of records that were found whole; 0: not yet

    def among(self, view: int, index: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Of the records of the samples ``index``, uint8 ``(N, record_bytes)``: bool ``(N,)``."""
        sums = records[:, :CRC_BYTES].copy().view("<u4")[:, 0]
        there = (sums != 0) & (sums == self._sums[view, index])
        unknown = np.flatnonzero(~there & (sums != 0))
        whole = (
            unknown[[checksum(records[i]) == sums[i] for i in unknown]] if len(unknown) else unknown
        )
        if len(whole) and self._usable is not None:
            whole = whole[self._usable(records[whole])]
        self._sums[view, index[whole]] = sums[whole]
        there[whole] = True
        return there


class AnswerStore:
    """Records of one teacher's answers to ``samples`` pictures in ``views`` views each, for any number of processes.

    A whole record is never overwritten, and a writer holds the folder's lock. Files are read by ``pread``, so that a
    truncated file loses records but ends no run. ``measured`` is what ``measure`` returned when the cache was begun.

    Args:
        folder: made where it is missing.
        fingerprint: what the answers depend on, by part (``teacher``, ``transform``, ``data``, ``answers``).
        samples: pictures in the training set.
        views: views a picture.
        record_bytes: size of a record.
        usable: which whole records ``(N, record_bytes)`` hold an answer; default: all.
        measure: what is noted beside the fingerprint when the cache is begun, as ``measured``.
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
        self.folder, self.samples, self.views, self.record_bytes = (
            folder,
            samples,
            views,
            record_bytes,
        )
        self._files: dict[int, int] = {}
        self._key = key
        self.measured: dict[str, Any] = {}
        try:
            if not os.path.lexists(
                folder / FINGERPRINT
            ):  # looked for again: another process may just have begun
                refuse_strangers(
                    folder, lambda p: p.name in BEGUN or os.path.lexists(folder / FINGERPRINT), key
                )
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

    def _claim(
        self, fingerprint: dict[str, dict[str, Any]], measure: Callable[[], dict[str, Any]] | None
    ) -> None:
        file = self.folder / FINGERPRINT
        if not os.path.lexists(file):
            noted = {"measured": measure()} if measure else {}
            write_text(file, json.dumps({**fingerprint, **noted}, indent=1))
        os.close(_plain_file(file, os.O_RDONLY))
        self.measured = (
            compare(text_of(file), fingerprint, str(self.folder), self._key).get("measured") or {}
        )

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk once all records of all views are filled."""
        return self.views * self.samples * self.record_bytes

    def _open(self, view: int) -> None:
        self._files[view] = _plain_file(
            self.folder / f"view-{view:04d}.bin", os.O_RDWR | os.O_CREAT
        )
        self._grow(view)

    def _grow(self, view: int) -> None:
        """Reserves the whole file, so that a full disk raises here; clears the checksum of a truncated record."""
        file, whole = self._files[view], self.samples * self.record_bytes
        size = os.fstat(file).st_size
        if size >= whole:
            return
        if size % self.record_bytes:
            start = size - size % self.record_bytes
            _write_all(file, bytes(min(CRC_BYTES, size - start)), start)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, whole)
        else:  # macOS
            os.truncate(file, whole)

    def __getstate__(self) -> dict[str, Any]:
        """For spawned loader processes, which open the files themselves."""
        return {**self.__dict__, "_files": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for view in range(self.views):
            self._open(view)

    def _locked(self) -> FileLock:
        return FileLock(
            self.folder / ".lock"
        )  # anew each time: a loader process may not use one that it inherited

    def close(self) -> None:
        """Closes the files of all views."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def read(self, view: int, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Records of the samples ``index``, uint8 ``(N, record_bytes)``, and which are whole, bool ``(N,)``.

        Returns:
            uint8 ``(N, record_bytes)`` and bool ``(N,)``.
        """
        records = np.empty((len(index), self.record_bytes), dtype=np.uint8)
        for row, i in zip(records, index, strict=True):
            if (
                os.preadv(self._files[view], [row.data], int(i) * self.record_bytes)
                < self.record_bytes
            ):
                row[:] = 0  # the file was cut
        return records, self._whole.among(view, index, records)

    def present(self, view: int, index: np.ndarray) -> np.ndarray:
        """Which of the samples ``index`` have a whole record: bool, the shape of ``index``."""
        return self.read(view, index)[1]

    def put(self, view: int, index: np.ndarray, records: np.ndarray) -> None:
        """Stores records where none is yet, each with its checksum; under the cache's lock.

        Args:
            view: number of the view.
            index: numbers of the pictures, ``(N,)``.
            records: uint8 ``(N, record_bytes)``.

        Raises:
            OSError: they can't be written.
        """
        with self._locked():
            self._grow(view)
            missing = ~self.present(view, index)
            for i, record in zip(index[missing], records[missing], strict=True):
                whole = (
                    checksum(record).to_bytes(CRC_BYTES, "little") + record[CRC_BYTES:].tobytes()
                )
                _write_all(self._files[view], whole, int(i) * self.record_bytes)

    def filled(self) -> float:
        """The share of all records that have a checksum."""
        begun = sum(
            records_begun(file, self.samples, self.record_bytes) for file in self._files.values()
        )
        return begun / (self.views * self.samples)


def refuse_strangers(folder: Path, is_ours: Callable[[Path], bool], key: str) -> None:
    """Raises a UserError for a folder that holds anything else, before anything is written to it."""
    strangers = (
        sorted(p.name for p in folder.iterdir() if not is_ours(p)) if folder.exists() else []
    )
    if strangers:
        raise UserError(
            f"{key}.cache_dir: {folder} is not a cache of answers: it holds {strangers[0]}"
        )


def records_begun(file: int, samples: int, record_bytes: int) -> int:
    """How many records of a view's open file have a checksum."""
    begun, step = 0, max(1, 2**24 // record_bytes)
    for first in range(0, samples, step):
        data = os.pread(file, min(step, samples - first) * record_bytes, first * record_bytes)
        rows = np.frombuffer(data, np.uint8)[: len(data) // record_bytes * record_bytes]
        begun += int(rows.reshape(-1, record_bytes)[:, :CRC_BYTES].any(1).sum())
    return begun


def check_room(sizes: Mapping[Path, int], what: str, key: str, pixels: bool = False) -> None:
    """Raises a UserError if the disk lacks room for caches of these sizes, less what their folders already take."""
    there = sum(f.lstat().st_blocks * 512 for folder in sizes for f in folder.glob("view-*.bin"))
    first = next(iter(sizes)).absolute()
    free, needed = free_bytes(first), sum(sizes.values()) - there
    if needed > free:
        less = "or cache_pixels=false" if pixels else "cache_topk, or cache_precision=int8"
        raise UserError(
            f"{key}.cache_dir: {first} needs {needed / 1e6:,.1f} MB more for {what}, the disk has {free / 1e6:,.1f} MB "
            f"(fewer cache_views, {less})"
        )


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that ``folder`` is on, or would be on."""
    folder = folder.absolute()
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def _plain_file(path: Path, flags: int) -> int:
    """Opens a file of the cache.

    Raises:
        OSError: it is a link, a second name of another file, or no file at all; whatever it leads to is left alone.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise OSError(f"{path.name} is a link, and a cache has none") from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(descriptor)
        raise OSError(f"{path.name} is not a regular file with one name, as a cache's files are")
    return descriptor


NAMED = {
    "transform": "transforms",
    "answers": "kinds of answers",
}  # parts of a fingerprint, in messages


def compare(
    text: str, fingerprint: dict[str, dict[str, Any]], folder: str, key: str
) -> dict[str, Any]:
    """The fingerprint that a cache holds as ``text``; a UserError names the first difference from the run's.

    Args:
        text: content of the file.
        fingerprint: what it must hold.
        folder: where it is, named in errors.
        key: the teacher's configuration key, likewise.

    Raises:
        UserError: it is damaged, or the cache's answers depend on something else: the first difference is named.
    """
    try:
        found = json_of(text)
        parts = {name: dict(found[name]) for name in fingerprint}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{key}.cache_dir: {folder}/{FINGERPRINT} is damaged ({type(error).__name__})"
        ) from error
    for name, here in json_of(json.dumps(fingerprint)).items():
        for differing in differences(parts[name], here).values():
            raise UserError(
                f"{key}.cache_dir: {folder} was filled with other {NAMED.get(name, name)}: {differing}"
            )
    return dict(found)


def differences(there: dict[str, Any], here: dict[str, Any]) -> dict[str, str]:
    """What differs between a part of a cache's fingerprint and the run's, by name."""
    names = [*here, *(name for name in there if name not in here)]
    return {
        n: f"{n} is {there.get(n)} there, {here.get(n)} here"
        for n in names
        if there.get(n) != here.get(n)
    }


def checksum(record: np.ndarray) -> int:
    """CRC-32 of a record's bytes after those that hold it."""
    return zlib.crc32(record[CRC_BYTES:].data) or 1  # 0 marks a record that was never written


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
