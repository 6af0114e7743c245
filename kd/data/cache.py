"""A teacher's answers on disk, by (sample, view): memory-mapped, checksummed, safe to kill at any moment.

A folder holds ``fingerprint.json`` (what the answers depend on) and one file a view, ``view-0003.bin``: a record of one
fixed size a sample. A record starts with the CRC-32 of the rest; a sample whose record has none, or a wrong one, counts
as missing and is written anew. So a process that dies while it writes leaves nothing that would be read.
"""

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from kd.errors import UserError
from kd.losses.topk import TopKLogits

CRC_BYTES = 4


class DenseCodec:
    """All logits in float16, relative to the largest one, which is kept in float32.

    The error of a logit ``z`` is at most ``(max - z) / 2048``: none for the largest, more where the probability is
    vanishing.

    Args:
        num_classes: C.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.record_bytes = _padded(CRC_BYTES + 4 + 2 * num_classes)

    def describe(self) -> dict[str, Any]:
        """What a reader must know to read the records."""
        return {"format": "dense", "classes": self.num_classes}

    def encode(self, logits: Tensor) -> Tensor:
        """``(N, C)`` -> uint8 ``(N, record_bytes)``, the checksum left empty."""
        top = logits.float().amax(1, keepdim=True)
        return _packed([top, _half(logits.float() - top)], self.record_bytes)

    def decode(self, records: Tensor) -> Tensor:
        """uint8 ``(N, record_bytes)`` -> float32 logits ``(N, C)``."""
        top, rest = _columns(records, [(torch.float32, 1), (torch.float16, self.num_classes)])
        return top + rest.float()


class TopKCodec:
    """The k largest logits in float16, relative to the largest, and the logsumexp of all others at each temperature.

    Args:
        num_classes: C.
        k: how many, < C.
        temperatures: at which the answers will be wanted.
    """

    def __init__(self, num_classes: int, k: int, temperatures: tuple[float, ...]) -> None:
        self.num_classes, self.k, self.temperatures = num_classes, k, temperatures
        self.index_type = torch.uint16 if num_classes <= 2**16 else torch.int32
        self.record_bytes = _padded(CRC_BYTES + 4 * len(temperatures) + (self.index_type.itemsize + 2) * k)

    def describe(self) -> dict[str, Any]:
        """What a reader must know to read the records."""
        return {"format": f"top-{self.k}", "classes": self.num_classes, "temperatures": list(self.temperatures)}

    def encode(self, logits: Tensor) -> Tensor:
        """``(N, C)`` -> uint8 ``(N, record_bytes)``, the checksum left empty."""
        values, indices = logits.float().topk(self.k, dim=1)
        others = logits.float().scatter(1, indices, -torch.inf) - values[:, :1]
        tails = torch.stack([(others / t).logsumexp(1) for t in self.temperatures], 1)
        return _packed([tails, indices.to(self.index_type), _half(values - values[:, :1])], self.record_bytes)

    def decode(self, records: Tensor) -> TopKLogits:
        """uint8 ``(N, record_bytes)`` -> what is known of the logits."""
        layout = [(torch.float32, len(self.temperatures)), (self.index_type, self.k), (torch.float16, self.k)]
        tails, indices, values = _columns(records, layout)
        return TopKLogits(values.float(), indices.long(), dict(zip(self.temperatures, tails.unbind(1), strict=True)))


Codec = DenseCodec | TopKCodec

Feature = tuple[str, str]
"""(layer, tokens): a layer of the teacher and its form, see :class:`kd.taps.TapSpec`."""


class AnswerCodec:
    """A whole answer: the logits by a codec of their own, and behind them features in float16.

    A feature is off by at most 1 / 2048 of itself; values beyond +-65,504 are kept as that.

    Args:
        logits: None where no loss wants them.
        features: the shape of each, of one picture.
    """

    def __init__(self, logits: Codec | None, features: Mapping[Feature, tuple[int, ...]] | None = None) -> None:
        self.logits, self.features = logits, dict(features or {})
        self._start = logits.record_bytes if logits else CRC_BYTES
        self._sizes = [torch.Size(shape).numel() for shape in self.features.values()]
        self.record_bytes = _padded(self._start + 2 * sum(self._sizes))

    def describe(self) -> dict[str, Any]:
        """What a reader must know to read the records."""
        shapes = {":".join(feature): list(shape) for feature, shape in self.features.items()}
        logits = self.logits.describe() if self.logits else {"format": "features alone"}
        return {**logits, "features": shapes} if shapes else logits

    def encode(self, logits: Tensor, features: Mapping[Feature, Tensor] | None = None) -> Tensor:
        """Logits ``(N, C)`` and features ``(N, ...)`` -> uint8 ``(N, record_bytes)``, the checksum left empty."""
        empty = torch.zeros(len(logits), CRC_BYTES, dtype=torch.uint8, device=logits.device)
        first = self.logits.encode(logits) if self.logits else empty
        halves = [_half((features or {})[name].float()).flatten(1) for name in self.features]
        body = torch.cat([first, *(half.contiguous().view(torch.uint8) for half in halves)], 1)
        return torch.nn.functional.pad(body, (0, self.record_bytes - body.shape[1]))

    def decode(self, records: Tensor) -> tuple[Tensor | TopKLogits | None, dict[Feature, Tensor]]:
        """uint8 ``(N, record_bytes)`` -> what is known of the logits, and the features, float32."""
        logits = self.logits.decode(records[:, : self._start]) if self.logits else None
        columns = _columns(records, [(torch.float16, size) for size in self._sizes], self._start)
        pairs = zip(self.features.items(), columns, strict=True)
        return logits, {name: column.float().unflatten(1, shape) for (name, shape), column in pairs}


def _padded(size: int) -> int:
    return -(-size // 4) * 4  # so that the columns of every record can be viewed as their own types


def _half(values: Tensor) -> Tensor:
    most = torch.finfo(torch.float16).max
    return values.clamp(-most, most).half()


def _packed(columns: list[Tensor], record_bytes: int) -> Tensor:
    body = torch.cat([column.contiguous().view(torch.uint8) for column in columns], 1)
    return torch.nn.functional.pad(body, (CRC_BYTES, record_bytes - CRC_BYTES - body.shape[1]))


def _columns(records: Tensor, layout: list[tuple[torch.dtype, int]], start: int = CRC_BYTES) -> list[Tensor]:
    found = []
    for dtype, count in layout:
        found.append(records[:, start : start + count * dtype.itemsize].view(dtype))
        start += count * dtype.itemsize
    return found


class AnswerStore:
    """Records of one teacher's answers to ``samples`` pictures in ``views`` views each.

    Any number of processes may read and write it at once: a whole record is never overwritten, and whoever writes holds
    the folder's lock.

    Args:
        folder: made where it is missing.
        fingerprint: what the answers depend on, by part (``teacher``, ``transform``, ``data``, ``answers``).
        samples: pictures in the training set.
        views: views a picture.
        record_bytes: size of a record.

    Raises:
        UserError: the folder's answers depend on something else (the first difference is named), it can't be written,
            or the disk has no room for all records.
    """

    def __init__(
        self, folder: Path, fingerprint: dict[str, dict[str, Any]], samples: int, views: int, record_bytes: int
    ) -> None:
        self.folder, self.samples, self.views, self.record_bytes = folder, samples, views, record_bytes
        self._read: dict[int, np.ndarray] = {}
        self._write: dict[int, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / ".lock")
            with self._lock:
                self._claim(fingerprint)
                self._check_room()
                self._checked = np.zeros((views, samples), dtype=bool)
                for view in range(views):
                    self._open(view)
        except OSError as error:
            raise UserError(f"model.teacher.cache_dir: {folder} can't be used: {error.strerror or error}") from error

    def _claim(self, fingerprint: dict[str, dict[str, Any]]) -> None:
        file, text = self.folder / "fingerprint.json", json.dumps(fingerprint, indent=1)
        if not file.is_file():
            strangers = [p.name for p in self.folder.iterdir() if p.name != ".lock"]
            if strangers:
                raise UserError(
                    f"model.teacher.cache_dir: {self.folder} is no cache of answers, it holds {strangers[0]}"
                )
            part = file.with_suffix(".part")
            part.write_text(text)
            part.replace(file)
        try:
            found = json.loads(file.read_text())
            parts = {name: dict(found[name]) for name in fingerprint}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"model.teacher.cache_dir: {file} is damaged ({type(error).__name__})") from error
        for name, here in json.loads(text).items():
            difference = _difference(parts[name], here)
            if difference:
                what = NAMED.get(name, name)
                raise UserError(f"model.teacher.cache_dir: {self.folder} was filled with other {what}: {difference}")

    def _check_room(self) -> None:
        files = [self._file(view) for view in range(self.views)]
        there = sum(f.stat().st_blocks * 512 for f in files if f.is_file())
        needed, free = self.disk_bytes - there, shutil.disk_usage(self.folder).free
        if needed > free:
            raise UserError(
                f"model.teacher.cache_dir: {self.folder} needs {needed / 1e6:,.1f} MB more for {self.views} view(s) of "
                f"{self.samples} pictures, the disk has {free / 1e6:,.1f} MB (fewer cache_views, or cache_topk)"
            )

    @property
    def disk_bytes(self) -> int:
        """Size on disk when all is filled."""
        return self.views * self.samples * self.record_bytes

    def _file(self, view: int) -> Path:
        return self.folder / f"view-{view:04d}.bin"

    def _open(self, view: int) -> None:
        # Reserved whole, and written by pwrite: a full disk is an OSError here, and never a SIGBUS behind the map.
        self._write[view] = os.open(self._file(view), os.O_RDWR | os.O_CREAT, 0o666)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._write[view], 0, self.samples * self.record_bytes)
        else:  # macOS
            os.truncate(self._write[view], self.samples * self.record_bytes)
        self._read[view] = np.memmap(self._file(view), np.uint8, "r", shape=(self.samples, self.record_bytes))

    def close(self) -> None:
        """Closes the files."""
        for descriptor in self._write.values():
            os.close(descriptor)
        self._write, self._read = {}, {}

    def present(self, view: int, index: np.ndarray) -> np.ndarray:
        """Which of the samples ``index`` have a whole record: bool, the shape of ``index``."""
        unknown = index[~self._checked[view, index]]
        for i, record in zip(unknown, self._read[view][unknown], strict=True):
            self._checked[view, i] = _checksum(record) == int.from_bytes(record[:CRC_BYTES].tobytes(), "little")
        return self._checked[view, index]

    def get(self, view: int, index: np.ndarray) -> np.ndarray:
        """Records of samples that are :meth:`present`: uint8 ``(N, record_bytes)``."""
        return self._read[view][index]

    def put(self, view: int, index: np.ndarray, records: np.ndarray) -> None:
        """Stores records where there is none yet.

        Raises:
            OSError: they can't be written.
        """
        with self._lock:
            missing = ~self.present(view, index)
            for i, record in zip(index[missing], records[missing], strict=True):
                whole = _checksum(record).to_bytes(CRC_BYTES, "little") + record[CRC_BYTES:].tobytes()
                _write_all(self._write[view], whole, int(i) * self.record_bytes)

    def filled(self) -> float:
        """The share of all records that have been begun, by their checksums being there."""
        begun = sum(int(self._read[view][:, :CRC_BYTES].any(1).sum()) for view in range(self.views))
        return begun / (self.views * self.samples)


NAMED = {"transform": "transforms", "answers": "kinds of answers"}


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    for key in [*here, *(k for k in there if k not in here)]:
        if there.get(key) != here.get(key):
            return f"{key} is {there.get(key)} there, {here.get(key)} here"
    return ""


def _checksum(record: np.ndarray) -> int:
    return zlib.crc32(record[CRC_BYTES:].tobytes()) or 1  # 0 marks a record that was never written


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
