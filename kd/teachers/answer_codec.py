"""How a teacher's answer is written as a record of a fixed size, and read again.

A *record* is the bytes of one picture's answer; N records are uint8 ``(N, bytes)``. A *codec* writes one thing into a
record and reads it: a feature (:class:`HalfFeature`, :class:`Int8Feature`), logits (:class:`DenseCodec`,
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

UNITS_OF = 64
"""Pictures that int8's units are measured on; the errors are measured on the pictures after them."""

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


FLOOR = 1 / 8
"""The smallest unit, as a share of the channels' median: a channel that is silent in the sample may fire later."""

OUTLIERS = 1
"""Values of each token that are stored beside the others. One value far beyond its unit would round the others to 0."""

BESIDE = 6
"""Bytes of a token in int8 beside its values; int8 is smaller than half precision from one channel more on."""


class Int8Feature:
    """A feature in int8: each channel in units of its own, and of those each token's second largest value is 127.

    The channels' units are measured once (:meth:`measure`), as channels of a vision transformer differ by orders of
    magnitude. Each token also has a scale, and its largest value in half precision with its channel's number: 6 bytes.
    A value is off by at most 1 / 254 of its token's second largest (or 2^-15), in its channel's unit; the largest, in
    half precision, by 1 / 2048 of itself.

    :meth:`measure` or :meth:`use` comes before encoding and decoding (AssertionError).

    Args:
        shape: of one picture's: a vector ``(D,)``, tokens ``(T, D)`` or a map ``(D, H, W)``.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Lays out the columns of a feature; a vector counts as one token, a map has a token at each position.

        ``bytes`` is the size of a record's part on disk: changing it makes written caches unreadable.
        """
        self.shape = shape
        if len(shape) == 2:
            self.channel_axis = 1
        else:
            self.channel_axis = 0
        self.channels = shape[self.channel_axis]
        values = math.prod(shape)
        self.tokens = values // self.channels
        self.bytes = padded(BESIDE * self.tokens + values)
        self.units: Tensor | None = None

    def measure(self, x: Tensor) -> list[float]:
        """Sets and returns the channels' units, D numbers: root mean squares over ``(N, *shape)``.

        They are at least :data:`FLOOR` of the median of the channels that are not 0; 1 where all are.
        """
        rms_D = self._rows(x).double().square().mean((0, 1)).sqrt()
        of_active_channels = rms_D[rms_D > 0]
        floor = 1.0
        if len(of_active_channels):
            floor = FLOOR * of_active_channels.median().item()
        units: list[float] = rms_D.clamp_min(floor).float().tolist()
        self.use(units)
        return units

    def use(self, units: list[float]) -> None:
        """Sets units that were measured before.

        Args:
            units: one a channel.

        Raises:
            ValueError: another number of channels, or units that are not finite and positive.
        """
        units_D = torch.tensor(units, dtype=torch.float32)
        is_valid_D = units_D.isfinite() & (units_D > 0)
        if units_D.shape != (self.channels,) or not is_valid_D.all():
            raise ValueError(f"{self.channels} units, each > 0")
        self.units = units_D

    def encode(self, x: Tensor) -> Tensor:
        """``(N, *shape)`` -> uint8 ``(N, bytes)``: each token's scale, its largest value with its channel, and all
        others as int8.
        """
        rows_NTD = self._rows(x) / self._units_on(x.device)
        # the largest value of each token and its channel, stored apart
        sizes_NTD = rows_NTD.abs()
        channel_NT1 = sizes_NTD.argmax(2, keepdim=True)
        largest_NT1 = rows_NTD.gather(2, channel_NT1)
        # int8 for the others: scale = second largest / 127
        others_NTD = rows_NTD.scatter(2, channel_NT1, 0.0)
        second_largest_NT1 = others_NTD.abs().amax(2, keepdim=True)
        exact_scale_NT1 = second_largest_NT1 / 127
        smallest_half = torch.finfo(torch.float16).tiny
        scale_NT1 = half(exact_scale_NT1.clamp_min(smallest_half))
        scaled_NTD = others_NTD / scale_NT1.float()
        rounded_NTD = scaled_NTD.round().clamp(-127, 127)
        values_NTD = rounded_NTD.to(torch.int8)
        channel_NT1 = channel_NT1.to(torch.uint16)
        columns = (scale_NT1, half(largest_NT1), channel_NT1, values_NTD)
        return packed(columns, self.bytes)

    def decode(self, columns: Tensor) -> Tensor:
        """The inverse of :meth:`encode`: uint8 ``(N, bytes)`` -> float32 ``(N, *shape)``, times the channels' units."""
        one_a_token = (self.tokens, 1)
        layout = [
            (torch.float16, one_a_token),
            (torch.float16, one_a_token),
            (torch.uint16, one_a_token),
            (torch.int8, (self.tokens, self.channels)),
        ]
        scale_NT1, largest_NT1, channel_NT1, values_NTD = unpacked(columns, layout)
        channel_NT1 = channel_NT1.long().clamp(max=self.channels - 1)  # of a damaged record too
        rows_NTD = values_NTD.float() * scale_NT1.float()
        rows_NTD = rows_NTD.scatter(2, channel_NT1, largest_NT1.float())
        rows_NTD = rows_NTD * self._units_on(columns.device)
        if self.channel_axis == 1:
            return rows_NTD
        return rows_NTD.transpose(1, 2).reshape(-1, *self.shape)

    def _rows(self, x: Tensor) -> Tensor:
        """``(N, *shape)`` -> float32 ``(N, T, D)``; a vector is one token, a map has a token a position."""
        if self.channel_axis == 1:
            return x.float()
        if x.ndim > 2:
            return x.float().flatten(2).transpose(1, 2)
        return x.float()[:, None]

    def _units_on(self, device: torch.device) -> Tensor:
        """The channels' units ``(D,)``, moved to ``device`` once."""
        assert self.units is not None
        self.units = self.units.to(device)
        return self.units


FeatureCodec = HalfFeature | Int8Feature


def relative_error(decoded: Tensor, exact: Tensor) -> float:
    """``|decoded - exact| / |exact|`` over all values of two tensors of one shape (Frobenius norms).

    ``summary.json`` and ``kd-cache`` report it, and int8 is refused by it. Where ``exact`` is 0 it is 0 or huge.
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
        precision: of all logits: ``half``, or ``int8`` with a unit a class and a scale a pixel.
    """

    def __init__(self, shape: tuple[int, int, int], topk: int | None, precision: str) -> None:
        """Lays out a record; the arguments are the class's. ``record_bytes`` is its size on disk, checksum included."""
        self.shape = shape
        self.topk = topk
        self.precision = precision
        self.num_classes, height, width = shape
        self.all_logits = Int8Feature(shape) if precision == "int8" else HalfFeature(shape)
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
        description: dict[str, Any] = {
            "format": "map" if self.topk is None else f"top-{self.topk} map",
            "classes": self.num_classes,
            "size": list(self.shape[1:]),
        }
        if self.topk is None and self.precision != "half":
            description["precision"] = self.precision
            description["outliers"] = OUTLIERS
        return description

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

PRECISIONS: dict[str, type[HalfFeature] | type[Int8Feature]] = {
    "half": HalfFeature,
    "int8": Int8Feature,
}


class AnswerCodec:
    """A whole answer: the logits by a codec of their own, then the features. A cache keeps one or the other in each store.

    Args:
        logits: the codec of logits; None: features alone.
        features: the shape of each, of one picture.
        precision: of the features, a key of :data:`PRECISIONS`; ``logits`` has its own.
    """

    def __init__(
        self,
        logits: Codec | None,
        features: Mapping[Feature, tuple[int, ...]] | None = None,
        precision: str = "half",
    ) -> None:
        """Lays out a record: the logits' part first, then each feature in the order of ``features``.

        The arguments are the class's.
        """
        self.logits = logits
        self.precision = precision
        feature_codec = PRECISIONS[precision]
        self.features = {}
        feature_bytes = 0
        for name, shape in (features or {}).items():
            codec = feature_codec(shape)
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
        if self.precision != "half":
            description["precision"] = self.precision
            description["outliers"] = OUTLIERS
        return description

    def measure(self, logits: Tensor, features: Mapping[Feature, Tensor]) -> dict[str, Any]:
        """Measures int8's units and the errors of rounding on some pictures, when a cache is begun.

        The units come from the first :data:`UNITS_OF` pictures and the errors from the others; where there are no others
        both come from all. The codecs then have these units.

        Args:
            logits: of N pictures, ``(N, C)`` or maps ``(N, C, h, w)``; of a codec of features alone only N counts.
            features: likewise ``(N, ...)``.

        Returns:
            For the fingerprint's file. ``pictures``: how many the errors are measured on; ``error``: the relative error
            (:func:`relative_error`) by kind of answer, ``logits`` or ``layer:tokens``; ``worst``: the largest of one
            picture; ``units`` by kind where the precision is int8. Of ``(N, C)`` logits of which the k largest alone are
            stored there is no error.
        """
        exact = {"logits": logits}
        for feature, x in features.items():
            exact[":".join(feature)] = x

        # the units are measured on the first pictures, the errors on the others
        units = {}
        for name, codec in self._codecs_by_name().items():
            if isinstance(codec, Int8Feature):
                units[name] = codec.measure(exact[name][:UNITS_OF])
        first = 0
        if len(logits) > UNITS_OF:
            first = UNITS_OF
        for name, x in exact.items():
            exact[name] = x[first:].float().cpu()
        held_out_features = {feature: x[first:] for feature, x in features.items()}
        records = self.encode(logits[first:], held_out_features).cpu()

        decoded_logits, decoded_features = self.decode(records)
        decoded = {":".join(feature): x for feature, x in decoded_features.items()}
        if isinstance(decoded_logits, Tensor):  # the k largest logits alone have no such error
            decoded["logits"] = decoded_logits
        measured: dict[str, Any] = {
            "pictures": len(exact["logits"]),
            "error": {name: relative_error(x, exact[name]) for name, x in decoded.items()},
            "worst": {name: worst_error(x, exact[name]) for name, x in decoded.items()},
        }
        if units:
            measured["units"] = units
        return measured

    def as_measured(self, measured: dict[str, Any]) -> None:
        """Gives int8's codecs the units that the cache was begun with; without such codecs it does nothing.

        Args:
            measured: what :meth:`measure` returned then, as read from the cache's file.

        Raises:
            ValueError: missing or damaged.
        """
        for name, codec in self._codecs_by_name().items():
            if not isinstance(codec, Int8Feature):
                continue
            try:
                units = [float(unit) for unit in measured["units"][name]]
            except (KeyError, TypeError) as error:
                raise ValueError(f"no units of {name}") from error
            codec.use(units)

    def _codecs_by_name(self) -> dict[str, FeatureCodec]:
        """The codecs that may have units: of maps of all logits (``logits``) and of features (``layer:tokens``)."""
        codecs: dict[str, FeatureCodec] = {}
        if isinstance(self.logits, MapCodec) and self.logits.topk is None:
            codecs["logits"] = self.logits.all_logits
        for feature, codec in self.features.items():
            codecs[":".join(feature)] = codec
        return codecs

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

        A codec of int8 needs its units first (AssertionError).

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
    """What several kinds of answers hold together: ``format`` of the logits, ``features``, ``precision``.

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
    merged = descriptions[-1]  # the precision of features
    merged.update(descriptions[0])  # the format of the logits, where there are any
    if features:
        merged["features"] = features
    return merged
