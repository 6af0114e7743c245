"""How a teacher's answer is written as a record of a fixed size, and read again."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kd.losses.base import TopKLogits
from kd.teachers.answer_features import (
    OUTLIERS,
    FeatureCodec,
    HalfFeature,
    Int8Feature,
    as_measured,
    half,
    relative_error,
    worst_error,
)
from kd.teachers.answer_maps import MapCodec

UNITS_OF = 64  # pictures
CRC_BYTES = 4
"""At the start of every record: the checksum of the rest (:mod:`kd.teachers.answer_store`)."""


class DenseCodec:
    """All logits in float16, relative to the largest one, which is kept in float32.

    The error of a logit ``z`` is at most ``(max - z) / 2048``: none for the largest, more where the probability is
    vanishing.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.record_bytes = _padded(CRC_BYTES + 4 + 2 * num_classes)

    def describe(self) -> dict[str, Any]:
        return {"format": "dense", "classes": self.num_classes}

    def encode(self, logits: Tensor) -> Tensor:
        """``(N, C)`` -> uint8 ``(N, record_bytes)``, the checksum left empty."""
        top = logits.float().amax(1, keepdim=True)
        return _packed([top, half(logits.float() - top)], self.record_bytes)

    def decode(self, records: Tensor) -> Tensor:
        top, rest = _columns(records, [(torch.float32, 1), (torch.float16, self.num_classes)])
        return top + rest.float()


class TopKCodec:
    """The k largest logits in float16, relative to the largest, and the logsumexp of all others at each temperature."""

    def __init__(self, num_classes: int, k: int, temperatures: tuple[float, ...]) -> None:
        self.num_classes, self.k, self.temperatures = num_classes, k, temperatures
        self.index_type = torch.uint16 if num_classes <= 2**16 else torch.int32
        self.record_bytes = _padded(CRC_BYTES + 4 * len(temperatures) + (self.index_type.itemsize + 2) * k)

    def describe(self) -> dict[str, Any]:
        return {"format": f"top-{self.k}", "classes": self.num_classes, "temperatures": list(self.temperatures)}

    def encode(self, logits: Tensor) -> Tensor:
        """``(N, C)`` -> uint8 ``(N, record_bytes)``, the checksum left empty."""
        values, indices = logits.float().topk(self.k, dim=1)
        others = logits.float().scatter(1, indices, -torch.inf) - values[:, :1]
        tails = torch.stack([(others / t).logsumexp(1) for t in self.temperatures], 1)
        return _packed([tails, indices.to(self.index_type), half(values - values[:, :1])], self.record_bytes)

    def decode(self, records: Tensor) -> TopKLogits:
        layout = [(torch.float32, len(self.temperatures)), (self.index_type, self.k), (torch.float16, self.k)]
        tails, indices, values = _columns(records, layout)
        return TopKLogits(values.float(), indices.long(), dict(zip(self.temperatures, tails.unbind(1), strict=True)))


Codec = DenseCodec | TopKCodec | MapCodec

FEATURES_ALONE = "features alone"

Feature = tuple[str, str]
"""(layer, tokens): a layer of the teacher and its form, see :class:`kd.models.taps.TapSpec`."""

PRECISIONS: dict[str, type[HalfFeature] | type[Int8Feature]] = {"half": HalfFeature, "int8": Int8Feature}


class AnswerCodec:
    """A whole answer: the logits by a codec of their own, and behind them features."""

    def __init__(
        self, logits: Codec | None, features: Mapping[Feature, tuple[int, ...]] | None = None, precision: str = "half"
    ) -> None:
        self.logits, self.precision = logits, precision
        self.features = {name: PRECISIONS[precision](shape) for name, shape in (features or {}).items()}
        self._start = logits.record_bytes if logits else CRC_BYTES
        self.record_bytes = _padded(self._start + sum(codec.bytes for codec in self.features.values()))

    def describe(self) -> dict[str, Any]:
        """What a reader must know to read the records."""
        shapes = {":".join(feature): list(codec.shape) for feature, codec in self.features.items()}
        found = self.logits.describe() if self.logits else {"format": FEATURES_ALONE}
        if shapes:
            found = {**found, "features": shapes}
        return found if self.precision == "half" else {**found, "precision": self.precision, "outliers": OUTLIERS}

    def measure(self, logits: Tensor, features: Mapping[Feature, Tensor]) -> dict[str, Any]:
        """Measured when a cache is begun: int8's ``units`` by feature, relative ``error`` by kind, the ``worst``."""
        given = {"logits": logits} | {":".join(name): x for name, x in features.items()}
        units = {name: codec.measure(given[name][:UNITS_OF]) for name, codec in self._named().items()
                 if isinstance(codec, Int8Feature)}  # fmt: skip
        judged = slice(UNITS_OF if len(logits) > UNITS_OF else 0, None)
        exact = {name: x[judged].float().cpu() for name, x in given.items()}
        back, found = self.decode(self.encode(logits[judged], {k: x[judged] for k, x in features.items()}).cpu())
        there = {":".join(name): x for name, x in found.items()}
        if isinstance(back, Tensor):
            there["logits"] = back
        error, worst = ({name: measure(x, exact[name]) for name, x in there.items()}
                        for measure in (relative_error, worst_error))  # fmt: skip
        noted = {"pictures": len(exact["logits"]), "error": error, "worst": worst}
        return {**noted, "units": units} if units else noted

    def as_measured(self, measured: dict[str, Any]) -> None:
        as_measured(self._named(), measured)

    def _named(self) -> dict[str, FeatureCodec]:
        named = {":".join(name): codec for name, codec in self.features.items()}
        whole = isinstance(self.logits, MapCodec) and self.logits.topk is None
        return {"logits": self.logits.whole, **named} if whole else named  # type: ignore[union-attr]

    def encode(self, logits: Tensor, features: Mapping[Feature, Tensor] | None = None) -> Tensor:
        """Logits ``(N, C)`` and features ``(N, ...)`` -> uint8 ``(N, record_bytes)``, the checksum left empty."""
        empty = torch.zeros(len(logits), CRC_BYTES, dtype=torch.uint8, device=logits.device)
        first = self.logits.encode(logits) if self.logits else empty
        body = torch.cat([first, *(codec.encode((features or {})[name]) for name, codec in self.features.items())], 1)
        return torch.nn.functional.pad(body, (0, self.record_bytes - body.shape[1]))

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
        columns = _columns(records, [(torch.uint8, codec.bytes) for codec in self.features.values()], self._start)
        pairs = zip(self.features.items(), columns, strict=True)
        return logits, {name: codec.decode(column) for (name, codec), column in pairs}


def described(codecs: Sequence[AnswerCodec]) -> dict[str, Any]:
    """What several kinds of answers hold together: ``format`` of the logits, ``features``, ``precision``."""
    each = sorted((codec.describe() for codec in codecs), key=lambda one: one["format"] == FEATURES_ALONE)
    features = {name: shape for one in each for name, shape in one.pop("features", {}).items()}
    merged = {**each[-1], **each[0]}
    return {**merged, "features": features} if features else merged


def _padded(size: int) -> int:
    return -(-size // 4) * 4  # so that the columns of every record can be viewed as their own types


def _packed(columns: list[Tensor], record_bytes: int) -> Tensor:
    body = torch.cat([column.contiguous().view(torch.uint8) for column in columns], 1)
    return torch.nn.functional.pad(body, (CRC_BYTES, record_bytes - CRC_BYTES - body.shape[1]))


def _columns(records: Tensor, layout: list[tuple[torch.dtype, int]], start: int = CRC_BYTES) -> list[Tensor]:
    found = []
    for dtype, count in layout:
        found.append(records[:, start : start + count * dtype.itemsize].view(dtype))
        start += count * dtype.itemsize
    return found
