"""The engine ``nvjpeg``: JPEGs travel encoded, and torchvision decodes a batch of them on the GPU (nvJPEG).

All else is done by the engine ``device``. nvJPEG's pixels differ from libjpeg-turbo's by a few levels. Any file but
an upright JPEG is decoded and cut in the loader. On a CPU the views equal those of the engine ``device`` to a bit.
"""

import warnings
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from kd.data.engines.dali import pack
from kd.data.engines.device import CutSet as _CutSet
from kd.data.engines.device import DeviceViews as _DeviceViews
from kd.data.engines.device import Plan
from kd.data.engines.device import check as _check
from kd.data.pictures import plain_jpeg

__all__ = ["CutSet", "DeviceViews", "check", "pack"]


check = partial(_check, engine="nvjpeg")


class CutSet(_CutSet):
    """One split, with the plan of each view: upright JPEGs encoded, all others decoded and cut."""

    def opened(self, data: bytes) -> tuple[bytes | Tensor, int, int]:
        """The JPEG still encoded, with height and width; any other picture is decoded here."""
        size = plain_jpeg(data, self.max_pixels)
        return super().opened(data) if size is None else (data, *size)

    def cut(self, picture: bytes | Tensor, box: tuple[int, int, int, int]) -> np.ndarray:
        """The file's bytes, or ``(3, height, width)``; no tensor, which would cost a file handle between processes."""
        return (
            np.frombuffer(picture, np.uint8)
            if isinstance(picture, bytes)
            else super().cut(picture, box).numpy()
        )


class DeviceViews(_DeviceViews):
    """Views on the GPU: decodes the JPEGs that arrive encoded, then as :class:`kd.data.engines.device.DeviceViews`."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        plan, device = batch["plan"], batch["target"].device
        side = _stream(device) if device.type == "cuda" else None
        if side is not None:
            side.synchronize()  # torchvision writes pictures on a stream of its own, at once: pytorch/vision#9606
        with torch.cuda.stream(side) if side is not None else nullcontext():
            pixels = torch.cat([cut.reshape(-1) for cut in _cuts(plan, device)])
        if side is not None:
            here = torch.cuda.current_stream(device)
            here.wait_stream(side)
            pixels.record_stream(here)
        return super().__call__({**batch, "pixels": pixels})


def _cuts(plan: Plan, device: torch.device) -> list[Tensor]:
    with (
        warnings.catch_warnings()
    ):  # torchvision recommends TorchCodec; torch warns of read-only arrays
        warnings.simplefilter("ignore")
        parts = [torch.from_numpy(array) for array in plan.encoded]
        encoded = [part for part in parts if part.ndim == 1]
        pictures = iter(decode_jpeg(encoded, ImageReadMode.RGB, device) if encoded else [])
    boxes = [recipe.box for recipe in plan.recipes]
    return [
        next(pictures)[:, top : top + height, left : left + width]
        if part.ndim == 1
        else part.to(device)
        for part, (top, left, height, width) in zip(parts, boxes, strict=True)
    ]


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
