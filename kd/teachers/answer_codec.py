"""How a teacher's answer is written as a record of a fixed size, and read again.

A *record* is the bytes of one picture's answer; N records are uint8 ``(N, bytes)``. A *codec* writes one thing into a
record and reads it: a feature (:class:`HalfFeature`), logits (:class:`DenseCodec`,
:class:`TopKCodec`, :class:`MapCodec`), or a whole answer (:class:`AnswerCodec`). The *tail* of logits of which the k
largest are kept is the logsumexp of all others, at each temperature that a loss uses.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kd.losses.base import TopKLogits

CRC_BYTES = 4
"""At the start of every record: the checksum of the rest (:mod:`kd.teachers.answer_store`)."""


def half(values: Tensor) -> Tensor:
    """Float16, with values beyond +-65,504 kept as that."""
    largest = torch.finfo(torch.float16).max
    return values.clamp(-largest, largest).half()


def padded(size: int) -> int:
    """``size`` in bytes, rounded up to a multiple of 4, so that what follows is aligned."""
    return size + -size % 4


def packed(columns: Sequence[Tensor], size: int, head: int = 0) -> Tensor:
    """Writes columns of any types one after the other into records.

    Args:
        columns: each ``(N, ...)``.
        size: bytes of a record; the end is filled with zeros.
        head: bytes that are left empty (zero) before the columns.

    Returns:
        uint8 ``(N, size)``.
    """
    columns_of_bytes = []
    for column in columns:
        values = column.flatten(1).contiguous()
        columns_of_bytes.append(values.view(torch.uint8))
    body = torch.cat(columns_of_bytes, 1)
    empty_after = size - head - body.shape[1]
    return torch.nn.functional.pad(body, (head, empty_after))


def unpacked(
    records: Tensor, layout: Sequence[tuple[torch.dtype, tuple[int, ...]]], start: int = 0
) -> list[Tensor]:
    """The columns that :func:`packed` has written from byte ``start`` on.

    Args:
        records: uint8 ``(N, bytes)``.
        layout: type and shape of each column, for one record.
        start: byte of a record.

    Returns:
        Of each column a tensor ``(N, *shape)``.
    """
    columns = []
    for dtype, shape in layout:
        end = start + math.prod(shape) * dtype.itemsize
        column = records[:, start:end].contiguous().view(dtype)
        columns.append(column.unflatten(1, shape))
        start = end
    return columns


class HalfFeature:
    """A feature in float16: a value within 6.1e-5 and 65,504 is off by at most 1 / 2048 of itself.

    A larger one becomes 65,504, a smaller one is off by at most 3e-8.

    Args:
        shape: of one picture's.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.bytes = 2 * math.prod(shape)

    def encode(self, x: Tensor) -> Tensor:
        """``(N, *shape)`` -> uint8 ``(N, bytes)``; values beyond float16's range are clipped."""
        return packed([half(x.float())], self.bytes)

    def decode(self, columns: Tensor) -> Tensor:
        """uint8 ``(N, bytes)`` -> float32 ``(N, *shape)``."""
        return unpacked(columns, [(torch.float16, self.shape)])[0].float()


def relative_error(decoded: Tensor, exact: Tensor) -> float:
    """``|decoded - exact| / |exact|`` over all values of two tensors of one shape (Frobenius norms).

    ``summary.json`` and ``kd-cache`` report it. Where ``exact`` is 0 it is 0 or huge.
    """
    difference = (decoded - exact).double().norm()
    size = exact.double().norm().clamp_min(1e-30)
    return float((difference / size).item())


def worst_error(decoded: Tensor, exact: Tensor) -> float:
    """The largest :func:`relative_error` of one picture; pictures are the first axis."""
    pairs = zip(decoded, exact, strict=True)
    return max(relative_error(of_picture, exactly) for of_picture, exactly in pairs)


class MapCodec:
    """A map of logits ``(C, h, w)``: all, or at each pixel the k largest and the mass of the others.

    Args:
        shape: ``(C, h, w)`` of one picture's.
        topk: k < C; None: all logits.
    """

    def __init__(self, shape: tuple[int, int, int], topk: int | None) -> None:
        """Lays out a record; the arguments are the class's. ``record_bytes`` is its size on disk, checksum included."""
        self.shape = shape
        self.topk = topk
        self.num_classes, height, width = shape
        self.all_logits = HalfFeature(shape)
        if self.num_classes <= 2**8:
            self.index_type = torch.uint8
        else:
            self.index_type = torch.int16
        size = self.all_logits.bytes
        if topk is not None:
            half_values = topk + 2  # the largest, the others' mass, and k values below the largest
            bytes_a_pixel = 2 * half_values + topk * self.index_type.itemsize
            size = height * width * bytes_a_pixel
        self.record_bytes = padded(CRC_BYTES + size)

    def describe(self) -> dict[str, Any]:
        """What a reader must know to read the records, as plain values."""
        return {
            "format": "map" if self.topk is None else f"top-{self.topk} map",
            "classes": self.num_classes,
            "size": list(self.shape[1:]),
        }

    def encode(self, logits: Tensor) -> Tensor:
        """``(N, C, h, w)`` -> uint8 ``(N, record_bytes)``, the checksum left empty."""
        if self.topk is None:
            body = self.all_logits.encode(logits)
        else:
            body = self._encode_largest(logits.float(), self.topk)
        return packed([body], self.record_bytes, CRC_BYTES)

    def decode(self, records: Tensor) -> Tensor:
        """Records uint8 ``(N, record_bytes)`` -> logits float32 ``(N, C, h, w)``; the checksum is not read."""
        body = records[:, CRC_BYTES:]
        if self.topk is not None:
            return self._decode_largest(body, self.topk)
        logits = body[:, : self.all_logits.bytes]
        return self.all_logits.decode(logits)

    def _encode_largest(self, logits: Tensor, k: int) -> Tensor:
        """Logits ``(N, C, h, w)`` -> uint8 ``(N, B)``: at each pixel the largest logit, the others' mass relative to
        it, the k largest relative to it and their classes.
        """
        values_Nkhw, classes_Nkhw = logits.topk(k, dim=1)
        largest_N1hw = values_Nkhw[:, :1]
        # log of the mass of all classes but the k, relative to the largest: log sum exp(z_c - z_max)
        others = logits.scatter(1, classes_Nkhw, -torch.inf) - largest_N1hw
        mass_N1hw = others.logsumexp(1, keepdim=True)
        columns = [
            half(largest_N1hw),
            half(mass_N1hw),
            half(values_Nkhw - largest_N1hw),
            classes_Nkhw.to(self.index_type),
        ]
        return torch.cat([packed([column], column[0].nbytes) for column in columns], 1)

    def _decode_largest(self, body: Tensor, k: int) -> Tensor:
        """uint8 ``(N, B)`` -> logits ``(N, C, h, w)``, where the others' mass is shared equally among them."""
        one_shape = (1, *self.shape[1:])
        k_shape = (k, *self.shape[1:])
        layout = [
            (torch.float16, one_shape),
            (torch.float16, one_shape),
            (torch.float16, k_shape),
            (self.index_type, k_shape),
        ]
        largest_N1hw, mass_N1hw, values_Nkhw, classes_Nkhw = unpacked(body, layout)
        largest_N1hw = largest_N1hw.float()
        others = self.num_classes - k
        other_N1hw = largest_N1hw + mass_N1hw.float() - math.log(others)
        logits_NChw = other_N1hw.expand(-1, self.num_classes, -1, -1).clone()
        last_class = self.num_classes - 1
        classes_Nkhw = classes_Nkhw.long().clamp(0, last_class)
        values_Nkhw = largest_N1hw + values_Nkhw.float()
        return logits_NChw.scatter_(1, classes_Nkhw, values_Nkhw)


class DenseCodec:
    """All logits in float16, relative to the largest one, which is kept in float32.

    The error of a logit ``z`` is at most ``(max - z) / 2048`` (or 3e-8); one more than 65,504 below the largest is
    raised to that.

    Args:
        num_classes: C.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.record_bytes = padded(CRC_BYTES + 4 + 2 * num_classes)

    def describe(self) -> dict[str, Any]:
        """What a reader must know to read the records, as plain values."""
        return {"format": "dense", "classes": self.num_classes}

    def encode(self, logits: Tensor) -> Tensor:
        """``(N, C)`` -> uint8 ``(N, record_bytes)``, the checksum left empty."""
        largest_N1 = logits.float().amax(1, keepdim=True)
        below_NC = half(logits.float() - largest_N1)
        return packed([largest_N1, below_NC], self.record_bytes, CRC_BYTES)

    def decode(self, records: Tensor) -> Tensor:
        """uint8 ``(N, record_bytes)`` -> float32 logits ``(N, C)``."""
        layout = [(torch.float32, (1,)), (torch.float16, (self.num_classes,))]
        largest_N1, below_NC = unpacked(records, layout, CRC_BYTES)
        return largest_N1 + below_NC.float()


class TopKCodec:
    """The k largest logits in float16, relative to the largest, and the logsumexp of all others at each temperature.

    The largest logit itself is not stored: a softmax does not depend on it.

    Args:
        num_classes: C; a class needs 2 bytes up to 65,536, then 4.
        k: how many, < C.
        temperatures: those at which the losses soften the teacher's logits; at least one.
    """

    def __init__(self, num_classes: int, k: int, temperatures: tuple[float, ...]) -> None:
        """Lays out a record: checksum, a tail for each temperature, then the ``k`` largest classes and their values.

        The arguments are the class's.
        """
        self.num_classes = num_classes
        self.k = k
        self.temperatures = temperatures
        if num_classes <= 2**16:
            self.index_type = torch.uint16
        else:
            self.index_type = torch.int32
        tail_bytes = 4 * len(temperatures)
        value_bytes = 2 + self.index_type.itemsize  # of each of the k classes
        self.record_bytes = padded(CRC_BYTES + tail_bytes + k * value_bytes)

    def describe(self) -> dict[str, Any]:
        """What a reader must know to read the records, as plain values."""
        return {
            "format": f"top-{self.k}",
            "classes": self.num_classes,
            "temperatures": list(self.temperatures),
        }

    def encode(self, logits: Tensor) -> Tensor:
        """Logits ``(N, C)`` -> records uint8 ``(N, record_bytes)``; the checksum's bytes are left 0 for the store."""
        values_Nk, classes_Nk = logits.float().topk(self.k, dim=1)
        largest_N1 = values_Nk[:, :1]
        # log of the others' mass at each temperature t, relative to the largest: log sum exp((z_c - z_max) / t)
        others_NC = logits.float().scatter(1, classes_Nk, -torch.inf) - largest_N1
        tails_N = [(others_NC / temperature).logsumexp(1) for temperature in self.temperatures]
        columns = [
            torch.stack(tails_N, 1),
            classes_Nk.to(self.index_type),
            half(values_Nk - largest_N1),
        ]
        return packed(columns, self.record_bytes, CRC_BYTES)

    def decode(self, records: Tensor) -> TopKLogits:
        """uint8 ``(N, record_bytes)`` -> the k largest logits ``(N, k)``, their classes, and the others' logsumexp
        ``(N,)`` by temperature; all relative to the largest logit, which is 0.
        """
        layout = [
            (torch.float32, (len(self.temperatures),)),
            (self.index_type, (self.k,)),
            (torch.float16, (self.k,)),
        ]
        tails, classes_Nk, values_Nk = unpacked(records, layout, CRC_BYTES)
        tail_by_temperature = dict(zip(self.temperatures, tails.unbind(1), strict=True))
        return TopKLogits(values_Nk.float(), classes_Nk.long(), tail_by_temperature)


Codec = DenseCodec | TopKCodec | MapCodec

FEATURES_ALONE = "features alone"
"""The format of records without logits."""

Feature = tuple[str, str]
"""(layer, tokens): a layer of the teacher and its form, see :class:`kd.models.taps.TapSpec`."""


class AnswerCodec:
    """A whole answer: the logits by a codec of their own, then the features. A cache keeps one or the other in each store.

    Args:
        logits: the codec of logits; None: features alone.
        features: the shape of each, of one picture.
    """

    def __init__(
        self,
        logits: Codec | None,
        features: Mapping[Feature, tuple[int, ...]] | None = None,
    ) -> None:
        """Lays out a record: the logits' part first, then each feature in the order of ``features``.

        The arguments are the class's.
        """
        self.logits = logits
        self.features = {}
        feature_bytes = 0
        for name, shape in (features or {}).items():
            codec = HalfFeature(shape)
            self.features[name] = codec
            feature_bytes += codec.bytes
        if logits:
            self._start_of_features = logits.record_bytes
        else:
            self._start_of_features = CRC_BYTES
        self.record_bytes = padded(self._start_of_features + feature_bytes)

    def describe(self) -> dict[str, Any]:
        """What a reader must know to read the records, as plain values: a part of the cache's fingerprint."""
        description: dict[str, Any] = {"format": FEATURES_ALONE}
        if self.logits:
            description = self.logits.describe()
        if self.features:
            description["features"] = {
                ":".join(feature): list(codec.shape) for feature, codec in self.features.items()
            }
        return description

    def measure(self, logits: Tensor, features: Mapping[Feature, Tensor]) -> dict[str, Any]:
        """Measures the errors of rounding on some pictures, when a cache is begun.

        Args:
            logits: of N pictures, ``(N, C)`` or maps ``(N, C, h, w)``; of a codec of features alone only N counts.
            features: likewise ``(N, ...)``.

        Returns:
            For the fingerprint's file. ``pictures``: how many the errors are measured on; ``error``: the relative error
            (:func:`relative_error`) by kind of answer, ``logits`` or ``layer:tokens``; ``worst``: the largest of one
            picture. Of ``(N, C)`` logits of which the k largest alone are stored there is no error.
        """
        exact = {"logits": logits.float().cpu()}
        for feature, x in features.items():
            exact[":".join(feature)] = x.float().cpu()
        records = self.encode(logits, features).cpu()
        decoded_logits, decoded_features = self.decode(records)
        decoded = {":".join(feature): x for feature, x in decoded_features.items()}
        if isinstance(decoded_logits, Tensor):  # the k largest logits alone have no such error
            decoded["logits"] = decoded_logits
        return {
            "pictures": len(logits),
            "error": {name: relative_error(x, exact[name]) for name, x in decoded.items()},
            "worst": {name: worst_error(x, exact[name]) for name, x in decoded.items()},
        }

    def encode(self, logits: Tensor, features: Mapping[Feature, Tensor] | None = None) -> Tensor:
        """Logits and features -> uint8 ``(N, record_bytes)``, the checksum left empty (0), on the device of the logits.

        Args:
            logits: ``(N, C)`` or maps ``(N, C, h, w)``; of a codec of features alone N and the device count.
            features: ``(N, ...)`` each, of all features of the codec; None: it has none.
        """
        if self.logits:
            columns = [self.logits.encode(logits)]
        else:
            columns = [torch.zeros(len(logits), CRC_BYTES, dtype=torch.uint8, device=logits.device)]
        for name, codec in self.features.items():
            assert features is not None
            columns.append(codec.encode(features[name]))
        return packed(columns, self.record_bytes)

    def usable(self, records: np.ndarray) -> np.ndarray:
        """Which records, uint8 ``(N, record_bytes)``, hold finite answers, bool ``(N,)``: a checksum does not show that.

        Of the k largest logits, classes beyond C are not usable either. Stores count others as missing.
        """
        logits, features = self.decode(torch.from_numpy(records))
        usable_N = torch.ones(len(records), dtype=torch.bool)
        values: list[Tensor] = list(features.values())
        if isinstance(self.logits, TopKCodec):
            assert isinstance(logits, TopKLogits)
            usable_N = (logits.indices < self.logits.num_classes).all(1)
            values += [logits.values, *logits.tails.values()]
        elif isinstance(logits, Tensor):
            values.append(logits)
        for value in values:
            numbers = value.reshape(len(records), -1)
            usable_N &= numbers.isfinite().all(1)
        return usable_N.numpy()

    def decode(self, records: Tensor) -> tuple[Tensor | TopKLogits | None, dict[Feature, Tensor]]:
        """Reads records; their checksum is not read.

        Args:
            records: uint8 ``(N, record_bytes)``.

        Returns:
            The logits, float32 ``(N, C)`` or ``(N, C, h, w)`` (a top-k map comes back whole), or the k largest; None
            where the records have none. The features, float32 ``(N, ...)`` each.
        """
        logits = None
        if self.logits:
            head = records[:, : self._start_of_features]
            logits = self.logits.decode(head)
        codecs = self.features.values()
        layout = [(torch.uint8, (codec.bytes,)) for codec in codecs]
        columns = unpacked(records, layout, self._start_of_features)
        pairs = zip(codecs, columns, strict=True)
        decoded = [codec.decode(column) for codec, column in pairs]
        return logits, dict(zip(self.features, decoded, strict=True))


def described(codecs: Sequence[AnswerCodec]) -> dict[str, Any]:
    """What several kinds of answers hold together: ``format`` of the logits, ``features``.

    Args:
        codecs: at least one; of these at most one has logits.

    Returns:
        For JSON: ``summary.json`` has these keys among those of the cache, and the terminal shows them.
    """
    descriptions = [codec.describe() for codec in codecs]
    descriptions.sort(key=lambda description: description["format"] == FEATURES_ALONE)
    features = {}
    for description in descriptions:
        features.update(description.pop("features", {}))
    merged = descriptions[0]  # the format of the logits, where there are any
    if features:
        merged["features"] = features
    return merged
