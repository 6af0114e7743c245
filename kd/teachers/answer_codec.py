"""How one kind of a teacher's answer is written as a record of a fixed size, and read again.

A *record* is the bytes of one picture's answer: a checksum, then columns of numbers; N records are uint8 ``(N, bytes)``.
Logits and features are kept in half precision (:class:`Half`), a regression's numbers in single (:class:`Codec`). Of
logits a cache may keep the k largest of each row (:class:`TopK`): a picture is one row of C classes, of a map each pixel is
one. The *tail* of a row is the logsumexp of all its other classes, at each temperature that a loss uses.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kd.losses.base import TopKLogits

CRC_BYTES = 4
"""At the start of every record: the checksum of the rest (:mod:`kd.teachers.answer_store`)."""

Feature = tuple[str, str]
"""(layer, tokens): a layer of the teacher and its form, see :class:`kd.models.taps.TapSpec`."""

INDEX_TYPES = {2**16: torch.uint16, 2**31: torch.int32}
"""Types of a class id, by the number of classes up to which they do; of maps one byte does up to 256."""


def half(values: Tensor) -> Tensor:
    """Float16; values beyond +-65,504 become +-65,504, not infinite."""
    largest = torch.finfo(torch.float16).max
    return values.clamp(-largest, largest).half()


class Codec:
    """Writes one kind of answer into records and reads it; base of :class:`Half` and :class:`TopK`.

    By itself it keeps all numbers as they are, in float32: of a regression one may be a thousand times another.

    Args:
        shape: of one picture's answer: ``(C,)`` or ``(C, h, w)`` of logits, any of a feature.
        columns: type and shape of each column of a record; none: one of float32.
    """

    form = "single"
    """Name of the format, for people and for the cache's fingerprint."""

    def __init__(
        self, shape: tuple[int, ...], columns: Sequence[tuple[torch.dtype, tuple[int, ...]]] = ()
    ) -> None:
        """Lays out a record; ``record_bytes`` is its size on disk, a multiple of 4, checksum included."""
        self.shape = shape
        self.columns = columns or [(torch.float32, shape)]
        size = CRC_BYTES
        for dtype, column in self.columns:
            size += math.prod(column) * dtype.itemsize
        to_multiple = -size % 4
        self.record_bytes = size + to_multiple

    def describe(self) -> dict[str, Any]:
        """What a reader must know to read the records, as plain values: a part of the cache's fingerprint."""
        return {"format": self.form, "shape": list(self.shape)}

    def encode(self, x: Tensor) -> Tensor:
        """``(N, *shape)`` -> uint8 ``(N, record_bytes)`` on its device, the checksum left empty (0)."""
        columns = self._to_columns(x.float())
        parts = []
        for column, (dtype, _) in zip(columns, self.columns, strict=True):
            if dtype == torch.float16:
                typed = half(column)
            else:
                typed = column.to(dtype)
            flat = typed.flatten(1).contiguous()
            parts.append(flat.view(torch.uint8))
        body = torch.cat(parts, 1)
        empty_after = self.record_bytes - CRC_BYTES - body.shape[1]
        return torch.nn.functional.pad(body, (CRC_BYTES, empty_after))

    def decode(self, records: Tensor) -> Tensor | TopKLogits:
        """uint8 ``(N, record_bytes)`` -> the answers, float32; the checksum is not read."""
        return self._from_columns(*self._unpacked(records))

    def usable(self, records: np.ndarray) -> np.ndarray:
        """Which records, uint8 ``(N, record_bytes)``, hold finite numbers and classes below C, bool ``(N,)``.

        The checksum is not checked here. Stores count a record that is not usable as missing.
        """
        usable_N = torch.ones(len(records), dtype=torch.bool)
        for column in self._unpacked(torch.from_numpy(records)):
            if column.is_floating_point():
                in_range = column.isfinite()
            else:
                in_range = column.long() < self.shape[0]
            usable_N &= in_range.flatten(1).all(1)
        return usable_N.numpy()

    def _unpacked(self, records: Tensor) -> list[Tensor]:
        """The columns of records, each ``(N, *shape)`` in its type."""
        columns = []
        start = CRC_BYTES
        for dtype, shape in self.columns:
            size = math.prod(shape) * dtype.itemsize
            end = start + size
            flat = records[:, start:end].contiguous()
            column = flat.view(dtype)
            columns.append(column.unflatten(1, shape))
            start = end
        return columns

    def _to_columns(self, x: Tensor) -> Sequence[Tensor]:
        """The columns of answers ``(N, *shape)``, in the order of :attr:`columns`, not yet in their types."""
        return [x]

    def _from_columns(self, *columns: Tensor) -> Tensor | TopKLogits:
        """The answers in the columns of N records."""
        return columns[0]


class Half(Codec):
    """All numbers in float16: one within 6.1e-5 and 65,504 is off by at most 1 / 2048 of itself, a smaller one by 3e-8.

    Args:
        shape: of one picture's.
        relative: keep them relative to the largest one, which is kept in float32: the logits of a picture. A logit
            ``z`` is off by at most ``(max - z) / 2048``.
    """

    form = "half"

    def __init__(self, shape: tuple[int, ...], relative: bool = False) -> None:
        """Lays out a record; the arguments are the class's."""
        largest = [(torch.float32, (1,))] if relative else []
        super().__init__(shape, [*largest, (torch.float16, shape)])
        self.relative = relative

    def _to_columns(self, x: Tensor) -> Sequence[Tensor]:
        if not self.relative:
            return [x]
        largest_N1 = x.amax(1, keepdim=True)
        return [largest_N1, x - largest_N1]

    def _from_columns(self, *columns: Tensor) -> Tensor:
        """The numbers of N pictures, float32; relative ones with their largest added back."""
        *largest_N1, values = columns
        x = values.float()
        if self.relative:
            return largest_N1[0] + x
        return x


class TopK(Codec):
    """The k largest logits of each row in float16, relative to the largest, their classes, and the tails.

    The largest logit of a picture is not stored: a softmax does not depend on it. Of a map it is, and the map comes back
    whole: the mass of the other classes, at temperature 1, is shared equally among them.

    Args:
        shape: of one picture's logits, ``(C,)`` or ``(C, h, w)``.
        k: how many, < C.
        temperatures: those at which the losses soften the teacher's logits; at least one. Not read of a map.
    """

    def __init__(self, shape: tuple[int, ...], k: int, temperatures: tuple[float, ...]) -> None:
        """Lays out a record; the arguments are the class's.

        Its columns: the tails, the classes (in the smallest type that holds C), the k logits, and of a map the largest one.
        """
        classes, *size = shape
        self.is_map = bool(size)
        self.k = k
        self.temperatures = (1.0,) if self.is_map else temperatures
        index_type = next(dtype for most, dtype in INDEX_TYPES.items() if classes <= most)
        if self.is_map and classes <= 2**8:
            index_type = torch.uint8
        tail_type = torch.float16 if self.is_map else torch.float32
        columns = [
            (tail_type, (len(self.temperatures), *size)),
            (index_type, (k, *size)),
            (torch.float16, (k, *size)),
        ]
        if self.is_map:
            columns.append((torch.float16, (1, *size)))
        super().__init__(shape, columns)
        self.form = f"top-{k}"

    def describe(self) -> dict[str, Any]:
        """What a reader must know to read the records, as plain values."""
        return {**super().describe(), "temperatures": list(self.temperatures)}

    def _to_columns(self, x: Tensor) -> Sequence[Tensor]:
        """Columns of logits ``(N, C, ...)``: the tails, the classes of the k largest logits, and these logits less the
        largest; of a map also the largest.
        """
        values, classes = x.topk(self.k, dim=1)
        largest = values[:, :1]
        # log of the others' mass at each temperature t, relative to the largest: log sum exp((z_c - z_max) / t)
        others = x.scatter(1, classes, -torch.inf) - largest
        tails = []
        for temperature in self.temperatures:
            softened = others / temperature
            tails.append(softened.logsumexp(1))
        columns = [torch.stack(tails, 1), classes, values - largest]
        if self.is_map:
            columns.append(largest)
        return columns

    def _from_columns(self, *columns: Tensor) -> Tensor | TopKLogits:
        """The k largest logits, relative to the largest, with classes and tails; of a map all logits ``(N, C, h, w)``."""
        tails, classes, values, *largest = columns
        classes = classes.long()
        values = values.float()
        if not self.is_map:
            pairs = zip(self.temperatures, tails.unbind(1), strict=True)
            return TopKLogits(values, classes, dict(pairs))
        largest_N1hw = largest[0].float()
        count = self.shape[0]
        others = count - self.k
        # one logit for all classes that are not stored: each has an equal share of their mass
        other_N1hw = largest_N1hw + tails.float() - math.log(others)
        logits_NChw = other_N1hw.expand(-1, count, -1, -1).clone()
        values_Nkhw = largest_N1hw + values
        return logits_NChw.scatter_(1, classes, values_Nkhw)
