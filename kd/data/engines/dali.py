"""The engine ``dali``: NVIDIA DALI decodes, cuts and resizes, on a GPU or the CPU; the engine ``device`` does the rest.

Crop boxes and everything else that is random come from the loader, drawn as the engine ``torch`` draws them. Where whole
pictures are flipped and rotated before the crop (``data.augment.before_resize``), DALI does that too. On the CPU DALI
decodes to the same pixels (libjpeg-turbo), on a GPU nvJPEG differs by a few levels. Its antialiased resize rounds
differently: views differ by a third of a level in the mean, by a few levels in single pixels.
"""

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from kd.data.engines.device import CutSet, DeviceViews, Plan, Recipe
from kd.data.engines.device import check as _check
from kd.data.engines.device import pack as _pack
from kd.data.pictures import MAX_PIXELS, decode, encode_png, size_of_plain_jpeg
from kd.data.transforms import MixPairs
from kd.errors import UserError, needs_extra
from kd.machine import cores
from kd.processes import local_processes
from kd.settings import Augment


def check(augment: Augment) -> None:
    """Checks that DALI can make these views; called when the data module is made.

    Raises:
        UserError: DALI is not installed, or an augmentation that it does not have.
    """
    _check(augment, "dali")
    if augment.before_resize and augment.color_jitter:
        raise UserError(
            "data.augment.before_resize: with data.augment.color_jitter needs data.engine=torch or device, got dali"
        )
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        raise UserError(f"data.engine: dali {needs_extra('dali')} ({error})") from error


class DaliCutSet(CutSet):
    """One split, encoded, with the plan of each view. Of an upright JPEG only the header is read here (:func:`for_dali`)."""

    def opened(self, data: bytes) -> tuple[bytes, int, int]:
        """The encoded picture with its height and width, see :func:`for_dali`."""
        return for_dali(data, self.max_pixels)

    def cut(self, picture: bytes, recipe: Recipe) -> np.ndarray:
        """The whole encoded picture as uint8 ``(bytes,)``: DALI cuts it."""
        return np.frombuffer(picture, np.uint8)


def for_dali(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[bytes, int, int]:
    """A picture's bytes in a form that DALI decodes as kd does.

    An upright JPEG in grey or RGB is returned as it is, and only its header is read. Any other picture is decoded here, and
    encoded again as an uncompressed PNG.

    Args:
        data: the encoded picture.
        max_pixels: a picture with more is refused.

    Returns:
        The file's bytes, height and width in pixels.

    Raises:
        RuntimeError: the picture (of such a JPEG the header) can't be read, or is too large.
    """
    size = size_of_plain_jpeg(data, max_pixels)
    if size is not None:
        return data, *size
    picture = decode(data, max_pixels)
    return encode_png(picture), picture.shape[1], picture.shape[2]


pack = partial(_pack, encoded=True)  # pictures stay on the host until a decoder takes them


class DaliViews(DeviceViews):
    """Makes the views of a batch with a DALI pipeline on the device that the batch is on.

    A batch may be scheduled before it is wanted (:class:`OneAhead`): DALI's threads and streams then work beside the
    training step. What is scheduled comes out in the order in which it went in.
    """

    def __init__(self, size: tuple[int, int], augment: Augment, mix: MixPairs) -> None:
        """Stores the settings, which are those of :class:`DeviceViews`; the pipeline is built at the first batch."""
        super().__init__(size, augment, mix)
        self._pipeline: Any = None
        self._most = 0  # pictures of a batch that the pipeline takes
        self._scheduled: deque[tuple[Plan, Any]] = deque()  # with the pipeline that makes it

    def crops(self, batch: dict[str, Any]) -> Tensor:
        """The resized crops of a batch from the loader, uint8 ``(N, 3, *size)``.

        A batch that was not scheduled ahead is scheduled here, after what was scheduled is forgotten.
        """
        plan = batch["plan"]
        device = batch["target"].device
        if not self._scheduled or self._scheduled[0][0] is not plan:
            self.forget()
            self.schedule(plan, device)
        return self._take(device)

    def schedule(self, plan: Plan, device: torch.device) -> None:
        """Begins to make a batch's views on a device; the host does not wait.

        :meth:`crops` returns them, in this order.

        Args:
            plan: encoded pictures, boxes and what was drawn.
            device: of the views; a GPU, or the CPU. It must not change: a pipeline is built for it at the first batch, and
                another at each batch that is larger than all before.
        """
        count = len(plan.encoded)
        if self._pipeline is None or count > self._most:
            self._most = count
            self._pipeline = self._build(device)
        pipeline = self._pipeline
        boxes_N4 = np.array([recipe.box for recipe in plan.recipes], np.int32)
        pipeline.feed_input("encoded", plan.encoded)
        pipeline.feed_input("start", list(boxes_N4[:, :2]))
        pipeline.feed_input("shape", list(boxes_N4[:, 2:]))
        steps_of_pictures = [dict(recipe.steps) for recipe in plan.recipes]
        for number in range(self.crop_number):
            amounts = [_amount(steps.get(number)) for steps in steps_of_pictures]
            pipeline.feed_input(f"change {number}", amounts)
        pipeline.schedule_run()
        self._scheduled.append((plan, pipeline))

    def _take(self, device: torch.device) -> Tensor:
        """The oldest scheduled batch's resized crops, uint8 ``(N, 3, *size)``, on the ``device`` that it was scheduled for.

        The copy is this process's own: DALI uses its buffers again. The batches after it are not waited for.
        """
        _, pipeline = self._scheduled.popleft()
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
            (made,) = pipeline.outputs(cuda_stream=stream)
            pixels = torch.from_dlpack(made.as_tensor()).clone()
        else:
            (made,) = pipeline.outputs()
            pixels = torch.from_numpy(np.array(made.as_tensor()))
        return pixels.permute(0, 3, 1, 2).contiguous()

    def forget(self) -> None:
        """Drops what is scheduled: an epoch that ends early leaves a batch behind."""
        while self._scheduled:
            _, pipeline = self._scheduled.popleft()
            pipeline.outputs()

    def _build(self, device: torch.device) -> Any:
        """A pipeline for batches of up to ``_most`` pictures: encoded -> uint8 ``(*size, 3)`` each.

        Where transforms come before the crop whole pictures are decoded, changed and cut; else they are cut as they are
        decoded. It uses the process's share of the machine's cores.
        """
        from nvidia.dali import fn, pipeline_def, types

        gpu = device.type == "cuda"
        decoder = "mixed" if gpu else "cpu"

        def number(name: str, dtype: object, ndim: int) -> object:
            """An input of the pipeline, by the name under which :meth:`schedule` feeds it."""
            return fn.external_source(name=name, dtype=dtype, ndim=ndim)

        def changed(picture: object, number_of_change: int) -> object:
            """The picture after one transform of the chain, its amount (degrees, or 0 and 1 of a flip) an input of the
            pipeline.
            """
            amount = number(f"change {number_of_change}", types.FLOAT, 0)
            transform = self.chain[number_of_change]
            if isinstance(transform, v2.RandomRotation):
                return fn.rotate(
                    picture,
                    angle=amount,
                    keep_size=True,
                    fill_value=0,
                    interp_type=types.INTERP_NN,
                )
            axis = "horizontal" if isinstance(transform, v2.RandomHorizontalFlip) else "vertical"
            flags = {"horizontal": 0, "vertical": 0} | {axis: fn.cast(amount, dtype=types.INT32)}
            return fn.flip(picture, **flags)

        @pipeline_def(
            batch_size=self._most,
            num_threads=max(1, cores() // local_processes()),
            device_id=device.index or 0 if gpu else None,
            exec_dynamic=True,
            prefetch_queue_depth=1,  # the first schedule_run starts so many runs, each with an input
        )
        def views() -> Any:
            """The pipeline's graph: encoded bytes -> RGB pictures of ``size``, cut at ``start`` with ``shape``
            (pixels).
            """
            encoded = number("encoded", types.UINT8, 1)
            start, shape = number("start", types.INT32, 1), number("shape", types.INT32, 1)
            if self.crop_number > 0:
                picture = fn.decoders.image(encoded, device=decoder, output_type=types.RGB)
                for change in range(self.crop_number):
                    picture = changed(picture, change)
                cut = fn.slice(picture, start, shape, axis_names="HW")
            else:
                cut = fn.decoders.image_slice(
                    encoded,
                    start,
                    shape,
                    device=decoder,
                    axis_names="HW",
                    output_type=types.RGB,
                )
            return fn.resize(
                cut, size=list(self.size), interp_type=types.INTERP_LINEAR, antialias=True
            )

        pipeline = views()
        pipeline.build()
        return pipeline


def _amount(parameters: dict[str, Any] | None) -> np.ndarray:
    """The amount of a change of a whole picture, float32 without axes: its angle in degrees, 1 for a flip.

    It is 0 where chance has not chosen the change (``parameters`` None).
    """
    amount = 0.0 if parameters is None else parameters.get("angle", 1.0)
    return np.array(amount, np.float32)


class OneAhead:
    """A loader that gives each batch once the views of the next one are scheduled.

    Args:
        loader: of this process's batches.
        views: make them.
        device: that they are trained on.
    """

    def __init__(self, loader: DataLoader, views: DaliViews, device: torch.device) -> None:
        self.loader, self.views, self.device = loader, views, device
        self.batch_sampler = loader.batch_sampler  # Lightning sets its epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[object]:
        """The loader's batches in order; what an unfinished pass has left scheduled is dropped first."""
        self.views.forget()
        for batch, _ in pairwise(chain(map(self._schedule_views, self.loader), [None])):
            yield batch

    def _schedule_views(self, batch: object) -> object:
        """Schedules the views of a batch, where it is one of this engine's, and returns the batch."""
        if isinstance(batch, dict) and "plan" in batch:
            self.views.schedule(batch["plan"], self.device)
        return batch


SAMPLES = DaliCutSet
"""The samples of this engine: the loader's part."""
VIEWS = DaliViews
"""The views of this engine: the device's part."""
