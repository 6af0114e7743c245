"""How a teacher's answer is written as a record of a fixed size, and read again."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kd.losses.base import TopKLogits

UNITS_OF = 64  # pictures
CRC_BYTES = 4
"""At the start of every record: the checksum of the rest (:mod:`kd.teachers.answer_store`)."""


def half(values: Tensor) -> Tensor:
    """Float16, with values beyond +-65,504 kept as that."""
    most = torch.finfo(torch.float16).max
    return values.clamp(-most, most).half()


def padded(size: int) -> int:
    """``size`` in bytes, rounded up to a multiple of 4, so that what follows is aligned."""
    return size + -size % 4  # so that what follows is aligned


def packed(columns: Sequence[Tensor], size: int, head: int = 0) -> Tensor:
    """Columns ``(N, ...)`` of any types, one after the other: uint8 ``(N, size)``, ``head`` bytes empty."""
    body = torch.cat([column.flatten(1).contiguous().view(torch.uint8) for column in columns], 1)
    return torch.nn.functional.pad(body, (head, size - head - body.shape[1]))


def unpacked(
    records: Tensor, layout: Sequence[tuple[torch.dtype, tuple[int, ...]]], start: int = 0
) -> list[Tensor]:
    """The columns that :func:`packed` has written from byte ``start`` on, by type and shape."""
    found = []
    for dtype, shape in layout:
        end = start + math.prod(shape) * dtype.itemsize
        found.append(records[:, start:end].contiguous().view(dtype).unflatten(1, shape))
        start = end
    return found


class HalfFeature:
    """A feature in float16: off by at most 1 / 2048 of itself.

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


FLOOR = 1 / 8  # of the channels' median unit: a channel that is silent in the sample may fire later
OUTLIERS = 1
"""Values of each token that are kept beside the others, which one that is far beyond its unit would round to 0."""


BESIDE = 6
"""Bytes of a token in int8 beside its values: so many channels at least make it smaller than in half precision."""


class Int8Feature:
    """A feature in int8: each channel in units of its own, and of those each token's second largest value is 127.

    The channels' units are measured once (:meth:`measure`), as channels of a vision transformer differ by orders of
    magnitude. Each token also has a scale, and its largest value in half precision with its channel's number: 6 bytes.
    A value is off by at most 1 / 254 of its token's second largest (or 2^-15), in its channel's unit.

    Args:
        shape: of one picture's: a vector ``(D,)``, tokens ``(T, D)`` or a map ``(D, H, W)``.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.channel = 1 if len(shape) == 2 else 0
        self.tokens = math.prod(shape) // shape[self.channel]
        self.bytes = padded(BESIDE * self.tokens + math.prod(shape))
        self.units: Tensor | None = None

    def measure(self, x: Tensor) -> list[float]:
        """The channels' units: root mean squares over ``(N, *shape)``, at least :data:`FLOOR` of their median."""
        rms = self._rows(x).double().square().mean((0, 1)).sqrt()
        heard = rms[rms > 0]
        floor = FLOOR * heard.median().item() if len(heard) else 1.0
        units: list[float] = rms.clamp_min(floor).float().tolist()
        self.use(units)
        return units

    def use(self, units: list[float]) -> None:
        """Takes units that were measured before.

        Raises:
            ValueError: other channels, or units that are no positive numbers.
        """
        found = torch.tensor(units, dtype=torch.float32)
        if found.shape != (self.shape[self.channel],) or not (found.isfinite() & (found > 0)).all():
            raise ValueError(f"{self.shape[self.channel]} units, each > 0")
        self.units = found

    def encode(self, x: Tensor) -> Tensor:
        """``(N, *shape)`` -> uint8 ``(N, bytes)``: each token's scale, its largest value with its channel, and all
        others as int8.
        """
        rows = self._rows(x) / self._units(x)
        place = rows.abs().argmax(2, keepdim=True)
        rest = rows.scatter(2, place, 0.0)
        scale = half(
            (rest.abs().amax(2, keepdim=True) / 127).clamp_min(torch.finfo(torch.float16).tiny)
        )
        values = (rest / scale.float()).round().clamp(-127, 127).to(torch.int8)
        return packed(
            (scale, half(rows.gather(2, place)), place.to(torch.uint16), values), self.bytes
        )

    def decode(self, columns: Tensor) -> Tensor:
        """uint8 ``(N, bytes)`` -> float32 ``(N, *shape)``."""
        depth, one = self.shape[self.channel], (self.tokens, 1)
        layout = [
            (torch.float16, one),
            (torch.float16, one),
            (torch.uint16, one),
            (torch.int8, (self.tokens, depth)),
        ]
        scale, largest, place, values = unpacked(columns, layout)
        place = place.long().clamp(max=depth - 1)
        rows = (values.float() * scale.float()).scatter(2, place, largest.float()) * self._units(
            columns
        )
        return rows if self.channel else rows.transpose(1, 2).reshape(-1, *self.shape)

    def _rows(self, x: Tensor) -> Tensor:
        """``(N, *shape)`` -> float32 ``(N, tokens, D)``."""
        return (
            x.float()
            if self.channel
            else x.float().flatten(2).transpose(1, 2)
            if x.ndim > 2
            else x.float()[:, None]
        )

    def _units(self, beside: Tensor) -> Tensor:
        assert self.units is not None
        self.units = self.units.to(beside.device)
        return self.units


FeatureCodec = HalfFeature | Int8Feature


def relative_error(there: Tensor, exact: Tensor) -> float:
    """``|there - exact| / |exact|`` over all values."""
    return float(((there - exact).double().norm() / exact.double().norm().clamp_min(1e-30)).item())


def worst_error(there: Tensor, exact: Tensor) -> float:
    """The largest :func:`relative_error` of one picture, the first axis."""
    return max(relative_error(a, b) for a, b in zip(there, exact, strict=True))


class MapCodec:
    """A map of logits ``(C, h, w)``: all, or at each pixel the ``topk`` largest and the mass of the others.

    ``precision`` of all: ``half``, or ``int8`` with a unit a class and a scale a pixel.
    """

    def __init__(self, shape: tuple[int, int, int], topk: int | None, precision: str) -> None:
        self.shape, self.topk, self.precision = shape, topk, precision
        self.num_classes = shape[0]
        self.whole = Int8Feature(shape) if precision == "int8" else HalfFeature(shape)
        self.index_type = torch.uint8 if shape[0] <= 2**8 else torch.int16
        pixels = math.prod(shape[1:])
        size = (
            self.whole.bytes
            if topk is None
            else pixels * (2 * (topk + 2) + topk * self.index_type.itemsize)
        )
        self.record_bytes = padded(CRC_BYTES + size)

    def describe(self) -> dict[str, Any]:
        """What a reader must know to read the records, as plain values."""
        kind = "map" if self.topk is None else f"top-{self.topk} map"
        found = {"format": kind, "classes": self.num_classes, "size": list(self.shape[1:])}
        half = self.topk or self.precision == "half"
        return found if half else {**found, "precision": self.precision, "outliers": OUTLIERS}

    def encode(self, logits: Tensor) -> Tensor:
        """``(N, C, h, w)`` -> uint8 ``(N, record_bytes)``, the checksum left empty."""
        body = (
            self.whole.encode(logits)
            if self.topk is None
            else self._largest(logits.float(), self.topk)
        )
        return packed([body], self.record_bytes, CRC_BYTES)

    def decode(self, records: Tensor) -> Tensor:
        """uint8 ``(N, record_bytes)`` -> float32 ``(N, C, h, w)``."""
        body = records[:, CRC_BYTES:]
        return (
            self.whole.decode(body[:, : self.whole.bytes])
            if self.topk is None
            else self._filled(body, self.topk)
        )

    def _largest(self, logits: Tensor, k: int) -> Tensor:
        values, indices = logits.topk(k, dim=1)
        top = values[:, :1]
        others = (logits.scatter(1, indices, -torch.inf) - top).logsumexp(1, keepdim=True)
        parts = [half(top), half(others), half(values - top), indices.to(self.index_type)]
        return torch.cat([packed([part], part[0].nbytes) for part in parts], 1)

    def _filled(self, body: Tensor, k: int) -> Tensor:
        one, several = (1, *self.shape[1:]), (k, *self.shape[1:])
        layout = [
            (torch.float16, one),
            (torch.float16, one),
            (torch.float16, several),
            (self.index_type, several),
        ]
        top, others, values, indices = unpacked(body, layout)
        rest = top.float() + others.float() - math.log(self.num_classes - k)
        whole = rest.expand(-1, self.num_classes, -1, -1).clone()
        return whole.scatter_(
            1, indices.long().clamp(0, self.num_classes - 1), top.float() + values.float()
        )


class DenseCodec:
    """All logits in float16, relative to the largest one, which is kept in float32.

    The error of a logit ``z`` is at most ``(max - z) / 2048``.

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
        top = logits.float().amax(1, keepdim=True)
        return packed([top, half(logits.float() - top)], self.record_bytes, CRC_BYTES)

    def decode(self, records: Tensor) -> Tensor:
        """uint8 ``(N, record_bytes)`` -> float32 logits ``(N, C)``."""
        layout = [(torch.float32, (1,)), (torch.float16, (self.num_classes,))]
        top, rest = unpacked(records, layout, CRC_BYTES)
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
        self.record_bytes = padded(
            CRC_BYTES + 4 * len(temperatures) + (self.index_type.itemsize + 2) * k
        )

    def describe(self) -> dict[str, Any]:
        """What a reader must know to read the records, as plain values."""
        return {
            "format": f"top-{self.k}",
            "classes": self.num_classes,
            "temperatures": list(self.temperatures),
        }

    def encode(self, logits: Tensor) -> Tensor:
        """``(N, C)`` -> uint8 ``(N, record_bytes)``, the checksum left empty."""
        values, indices = logits.float().topk(self.k, dim=1)
        others = logits.float().scatter(1, indices, -torch.inf) - values[:, :1]
        tails = torch.stack([(others / t).logsumexp(1) for t in self.temperatures], 1)
        parts = [tails, indices.to(self.index_type), half(values - values[:, :1])]
        return packed(parts, self.record_bytes, CRC_BYTES)

    def decode(self, records: Tensor) -> TopKLogits:
        """uint8 ``(N, record_bytes)`` -> the k largest logits ``(N, k)``, their classes, and the others' logsumexp
        by temperature.
        """
        count, k = (len(self.temperatures),), (self.k,)
        layout = [(torch.float32, count), (self.index_type, k), (torch.float16, k)]
        tails, indices, values = unpacked(records, layout, CRC_BYTES)
        return TopKLogits(
            values.float(),
            indices.long(),
            dict(zip(self.temperatures, tails.unbind(1), strict=True)),
        )


Codec = DenseCodec | TopKCodec | MapCodec

FEATURES_ALONE = "features alone"

Feature = tuple[str, str]
"""(layer, tokens): a layer of the teacher and its form, see :class:`kd.models.taps.TapSpec`."""

PRECISIONS: dict[str, type[HalfFeature] | type[Int8Feature]] = {
    "half": HalfFeature,
    "int8": Int8Feature,
}


class AnswerCodec:
    """A whole answer: the logits by a codec of their own, and behind them features.

    Args:
        logits: None where no loss wants them.
        features: the shape of each, of one picture.
        precision: of the features: ``half`` or ``int8``.
    """

    def __init__(
        self,
        logits: Codec | None,
        features: Mapping[Feature, tuple[int, ...]] | None = None,
        precision: str = "half",
    ) -> None:
        self.logits, self.precision = logits, precision
        self.features = {
            name: PRECISIONS[precision](shape) for name, shape in (features or {}).items()
        }
        self._start = logits.record_bytes if logits else CRC_BYTES
        self.record_bytes = padded(
            self._start + sum(codec.bytes for codec in self.features.values())
        )

    def describe(self) -> dict[str, Any]:
        """What a reader must know to read the records."""
        shapes = {":".join(feature): list(codec.shape) for feature, codec in self.features.items()}
        found = self.logits.describe() if self.logits else {"format": FEATURES_ALONE}
        if shapes:
            found = {**found, "features": shapes}
        return (
            found
            if self.precision == "half"
            else {**found, "precision": self.precision, "outliers": OUTLIERS}
        )

    def measure(self, logits: Tensor, features: Mapping[Feature, Tensor]) -> dict[str, Any]:
        """Measured when a cache is begun: int8's ``units`` by feature, relative ``error`` by kind, the ``worst``.

        Args:
            logits: of some pictures, ``(N, C)``.
            features: likewise ``(N, ...)``.

        Returns:
            ``units`` by feature, and ``error``: the relative error of each kind of answer on these pictures.
        """
        given = {"logits": logits} | {":".join(name): x for name, x in features.items()}
        units = {
            name: codec.measure(given[name][:UNITS_OF])
            for name, codec in self._named().items()
            if isinstance(codec, Int8Feature)
        }
        judged = slice(UNITS_OF if len(logits) > UNITS_OF else 0, None)
        exact = {name: x[judged].float().cpu() for name, x in given.items()}
        back, found = self.decode(
            self.encode(logits[judged], {k: x[judged] for k, x in features.items()}).cpu()
        )
        there = {":".join(name): x for name, x in found.items()}
        if isinstance(back, Tensor):
            there["logits"] = back
        error, worst = (
            {name: measure(x, exact[name]) for name, x in there.items()}
            for measure in (relative_error, worst_error)
        )
        noted = {"pictures": len(exact["logits"]), "error": error, "worst": worst}
        return {**noted, "units": units} if units else noted

    def as_measured(self, measured: dict[str, Any]) -> None:
        """Gives int8's codecs the units that the cache was begun with.

        Raises:
            ValueError: missing or damaged.
        """
        for name, codec in self._named().items():
            if isinstance(codec, Int8Feature):
                try:
                    codec.use([float(unit) for unit in measured["units"][name]])
                except (KeyError, TypeError) as error:
                    raise ValueError(f"no units of {name}") from error

    def _named(self) -> dict[str, FeatureCodec]:
        named = {":".join(name): codec for name, codec in self.features.items()}
        whole = isinstance(self.logits, MapCodec) and self.logits.topk is None
        return {"logits": self.logits.whole, **named} if whole else named  # type: ignore[union-attr]

    def encode(self, logits: Tensor, features: Mapping[Feature, Tensor] | None = None) -> Tensor:
        """Logits ``(N, C)`` and features ``(N, ...)`` -> uint8 ``(N, record_bytes)``, the checksum left empty."""
        empty = torch.zeros(len(logits), CRC_BYTES, dtype=torch.uint8, device=logits.device)
        first = self.logits.encode(logits) if self.logits else empty
        return packed(
            [
                first,
                *(codec.encode((features or {})[name]) for name, codec in self.features.items()),
            ],
            self.record_bytes,
        )

    def usable(self, records: np.ndarray) -> np.ndarray:
        """Which records ``(N, record_bytes)`` hold finite answers, bool ``(N,)``: a checksum does not show that."""
        logits, features = self.decode(torch.from_numpy(records))
        values: list[Tensor] = list(features.values())
        known = torch.ones(len(records), dtype=torch.bool)
        if isinstance(self.logits, TopKCodec):
            assert isinstance(logits, TopKLogits)
            known = (logits.indices < self.logits.num_classes).all(1)
            values += [logits.values, *logits.tails.values()]
        elif isinstance(logits, Tensor):
            values.append(logits)
        for value in values:
            known &= value.reshape(len(records), -1).isfinite().all(1)
        return known.numpy()

    def decode(self, records: Tensor) -> tuple[Tensor | TopKLogits | None, dict[Feature, Tensor]]:
        """uint8 ``(N, record_bytes)`` -> what is known of the logits, and the features, float32."""
        logits = self.logits.decode(records[:, : self._start]) if self.logits else None
        columns = unpacked(
            records,
            [(torch.uint8, (codec.bytes,)) for codec in self.features.values()],
            self._start,
        )
        pairs = zip(self.features.items(), columns, strict=True)
        return logits, {name: codec.decode(column) for (name, codec), column in pairs}


def described(codecs: Sequence[AnswerCodec]) -> dict[str, Any]:
    """What several kinds of answers hold together: ``format`` of the logits, ``features``, ``precision``."""
    each = sorted(
        (codec.describe() for codec in codecs), key=lambda one: one["format"] == FEATURES_ALONE
    )
    features = {name: shape for one in each for name, shape in one.pop("features", {}).items()}
    merged = {**each[-1], **each[0]}
    return {**merged, "features": features} if features else merged
