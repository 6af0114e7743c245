"""How answers for every pixel are written into records."""

import math
from typing import Any

import torch
from torch import Tensor

from kd.teachers.answer_features import OUTLIERS, HalfFeature, Int8Feature, half


class MapCodec:
    """A map of logits ``(C, h, w)``: all, or at each pixel the ``topk`` largest and the mass of the others.

    ``precision`` of all: ``half``, or ``int8`` with a unit a class and a scale a pixel. ``head``: bytes of the
    checksum.
    """

    def __init__(self, shape: tuple[int, int, int], topk: int | None, precision: str, head: int) -> None:
        self.shape, self.topk, self.precision, self.head = shape, topk, precision, head
        self.num_classes = shape[0]
        self.whole = Int8Feature(shape) if precision == "int8" else HalfFeature(shape)
        self.index_type = torch.uint8 if shape[0] <= 2**8 else torch.int16
        pixels = math.prod(shape[1:])
        size = self.whole.bytes if topk is None else pixels * (2 * (topk + 2) + topk * self.index_type.itemsize)
        self.record_bytes = head + size + -size % 4

    def describe(self) -> dict[str, Any]:
        kind = "map" if self.topk is None else f"top-{self.topk} map"
        found = {"format": kind, "classes": self.num_classes, "size": list(self.shape[1:])}
        half = self.topk or self.precision == "half"
        return found if half else {**found, "precision": self.precision, "outliers": OUTLIERS}

    def encode(self, logits: Tensor) -> Tensor:
        """``(N, C, h, w)`` -> uint8 ``(N, record_bytes)``, the checksum left empty."""
        body = self.whole.encode(logits) if self.topk is None else self._largest(logits.float(), self.topk)
        return torch.nn.functional.pad(body, (self.head, self.record_bytes - self.head - body.shape[1]))

    def decode(self, records: Tensor) -> Tensor:
        """uint8 ``(N, record_bytes)`` -> float32 ``(N, C, h, w)``."""
        body = records[:, self.head :]
        return self.whole.decode(body[:, : self.whole.bytes]) if self.topk is None else self._filled(body, self.topk)

    def _largest(self, logits: Tensor, k: int) -> Tensor:
        values, indices = logits.topk(k, dim=1)
        top = values[:, :1]
        others = (logits.scatter(1, indices, -torch.inf) - top).logsumexp(1, keepdim=True)
        parts = [half(top), half(others), half(values - top), indices.to(self.index_type)]
        return torch.cat([part.flatten(1).contiguous().view(torch.uint8) for part in parts], 1)

    def _filled(self, body: Tensor, k: int) -> Tensor:
        pixels, parts, start = math.prod(self.shape[1:]), [], 0
        for dtype, rows in ((torch.float16, 1), (torch.float16, 1), (torch.float16, k), (self.index_type, k)):
            size = rows * pixels * dtype.itemsize
            parts.append(body[:, start : start + size].contiguous().view(dtype).unflatten(1, (rows, *self.shape[1:])))
            start += size
        top, others, values, indices = parts
        rest = top.float() + others.float() - math.log(self.num_classes - k)
        whole = rest.expand(-1, self.num_classes, -1, -1).clone()
        return whole.scatter_(1, indices.long().clamp(0, self.num_classes - 1), top.float() + values.float())
