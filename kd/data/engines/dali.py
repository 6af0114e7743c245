"""The engine ``dali``: NVIDIA DALI decodes, cuts and resizes, on a GPU or the CPU; the engine ``device`` does the rest.

Crop boxes and everything else that is random come from the loader, drawn as the engine ``torch`` draws them. On the CPU
DALI decodes to the same pixels (libjpeg-turbo), on a GPU nvJPEG differs by a few levels. Its antialiased resize rounds
differently: views differ by a third of a level in the mean, by a few levels in single pixels.
"""

from functools import partial
from typing import Any

import numpy as np
import torch

from kd.data.engines.device import CutSet, DeviceViews
from kd.data.engines.device import check as _check
from kd.data.engines.device import pack as _pack
from kd.data.pictures import MAX_PIXELS, decode, encode_png, plain_jpeg
from kd.data.sources import Source
from kd.errors import UserError, needs_extra
from kd.machine import cores
from kd.processes import local_processes
from kd.settings import Augment


def check(augment: Augment, source: Source) -> None:
    """Checks that DALI can make these views.

    Raises:
        UserError: DALI is not installed, targets that are cut with the picture, or an augmentation that it does not
            have.
    """
    if source.kind.cut_with_picture:
        raise UserError(
            f"data.engine: dali can't make views of {source.kind.name}; data.engine=device can"
        )
    _check(augment, source, "dali")
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        raise UserError(f"data.engine: dali {needs_extra('dali')} ({error})") from error


class DaliCutSet(CutSet):
    """One split, encoded, with the plan of each view. Only a picture's header is read here."""

    def opened(self, data: bytes) -> tuple[bytes, int, int]:
        """The encoded picture with its height and width, see :func:`plain`."""
        return plain(data, self.max_pixels)

    def cut(self, picture: bytes, box: tuple[int, int, int, int]) -> np.ndarray:
        """The whole encoded picture as uint8 ``(bytes,)``: DALI cuts while it decodes."""
        return np.frombuffer(picture, np.uint8)


def plain(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[bytes, int, int]:
    """``(file, height, width)``: an upright JPEG as it is, any other picture as a PNG, which DALI decodes as we do."""
    size = plain_jpeg(data, max_pixels)
    if size is not None:
        return data, *size
    picture = decode(data, max_pixels)
    return encode_png(picture), picture.shape[1], picture.shape[2]


pack = partial(_pack, encoded=True)  # pictures stay on the host until a decoder takes them


class DaliViews(DeviceViews):
    """Makes the views of a packed batch with a DALI pipeline on the device that the batch is on."""

    _pipeline: Any = None
    _most = 0

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        plan = batch["plan"]
        device = batch["target"].device
        if self._pipeline is None or len(plan.encoded) > self._most:
            self._most = len(plan.encoded)
            self._pipeline = self._build(device)
        boxes = np.array([recipe.box for recipe in plan.recipes], np.int32)
        self._pipeline.feed_input("encoded", plan.encoded)
        self._pipeline.feed_input("start", list(boxes[:, :2]))
        self._pipeline.feed_input("shape", list(boxes[:, 2:]))
        (made,) = self._pipeline.run()
        if device.type == "cuda":
            pixels = torch.from_dlpack(made.as_tensor()).clone()  # DALI uses its buffers again
        else:
            pixels = torch.from_numpy(np.array(made.as_array()))
        images = pixels.permute(0, 3, 1, 2).contiguous()
        finished = dict(batch)
        del finished["plan"]
        finished.update(self.finish(images, batch["target"], plan))
        return finished

    def _build(self, device: torch.device) -> Any:
        from nvidia.dali import fn, pipeline_def, types

        gpu = device.type == "cuda"

        @pipeline_def(
            batch_size=self._most,
            num_threads=max(1, cores() // local_processes()),
            device_id=device.index or 0 if gpu else None,
            prefetch_queue_depth=1,
            exec_async=False,
            exec_pipelined=False,
        )
        def views() -> Any:
            encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
            start = fn.external_source(name="start", dtype=types.INT32, ndim=1)
            shape = fn.external_source(name="shape", dtype=types.INT32, ndim=1)
            cut = fn.decoders.image_slice(
                encoded,
                start,
                shape,
                device="mixed" if gpu else "cpu",
                axis_names="HW",
                output_type=types.RGB,
            )
            return fn.resize(
                cut, size=list(self.size), interp_type=types.INTERP_LINEAR, antialias=True
            )

        pipeline = views()
        pipeline.build()
        return pipeline


SAMPLES = DaliCutSet
"""The samples of this engine: the loader's part."""
VIEWS = DaliViews
"""The views of this engine: the device's part."""
