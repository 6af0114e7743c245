"""How features are written into records: in half precision, or as int8 with a scale for each channel."""

import math
from typing import Any

import torch
from torch import Tensor


def half(values: Tensor) -> Tensor:
    """Float16, with values beyond +-65,504 kept as that."""
    most = torch.finfo(torch.float16).max
    return values.clamp(-most, most).half()


class HalfFeature:
    """A feature in float16: off by at most 1 / 2048 of itself."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.bytes = 2 * math.prod(shape)

    def encode(self, x: Tensor) -> Tensor:
        return half(x.float()).flatten(1).contiguous().view(torch.uint8)

    def decode(self, columns: Tensor) -> Tensor:
        return columns.view(torch.float16).float().unflatten(1, self.shape)


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
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.channel = 1 if len(shape) == 2 else 0
        self.tokens = math.prod(shape) // shape[self.channel]
        size = BESIDE * self.tokens + math.prod(shape)
        self.bytes = size + -size % 4  # so that what follows is aligned
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
        found = torch.tensor(units, dtype=torch.float32)
        if found.shape != (self.shape[self.channel],) or not (found.isfinite() & (found > 0)).all():
            raise ValueError(f"{self.shape[self.channel]} units, each > 0")
        self.units = found

    def encode(self, x: Tensor) -> Tensor:
        rows = self._rows(x) / self._units(x)
        place = rows.abs().argmax(2, keepdim=True)
        rest = rows.scatter(2, place, 0.0)
        scale = half((rest.abs().amax(2, keepdim=True) / 127).clamp_min(torch.finfo(torch.float16).tiny))
        values = (rest / scale.float()).round().clamp(-127, 127).to(torch.int8)
        parts = (scale, half(rows.gather(2, place)), place.to(torch.uint16), values)
        body = torch.cat([part.flatten(1).contiguous().view(torch.uint8) for part in parts], 1)
        return torch.nn.functional.pad(body, (0, self.bytes - body.shape[1]))

    def decode(self, columns: Tensor) -> Tensor:
        size = 2 * self.tokens
        beside = [columns[:, i * size : (i + 1) * size].contiguous() for i in range(3)]
        scale, largest = (part.view(torch.float16).float().unsqueeze(2) for part in beside[:2])
        end = 3 * size + math.prod(self.shape)
        values = columns[:, 3 * size : end].contiguous().view(torch.int8).unflatten(1, (self.tokens, -1))
        place = beside[2].view(torch.uint16).long().unsqueeze(2).clamp(max=values.shape[2] - 1)
        rows = (values.float() * scale).scatter(2, place, largest) * self._units(columns)
        return rows if self.channel else rows.transpose(1, 2).reshape(-1, *self.shape)

    def _rows(self, x: Tensor) -> Tensor:
        """``(N, *shape)`` -> float32 ``(N, tokens, D)``."""
        return x.float() if self.channel else x.float().flatten(2).transpose(1, 2) if x.ndim > 2 else x.float()[:, None]

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


def as_measured(features: dict[str, FeatureCodec], measured: dict[str, Any]) -> None:
    """Gives codecs the units that a cache was begun with."""
    for name, codec in features.items():
        if isinstance(codec, Int8Feature):
            try:
                codec.use([float(unit) for unit in measured["units"][name]])
            except (KeyError, TypeError) as error:
                raise ValueError(f"no units of {name}") from error
