"""A whole run on CPUs whose tensors count as a GPU's: each place where its batches would stop the host.

:mod:`tests._fake_gpu` runs no kernel, so no Trainer, no collective and no metric can run on it. Here everything runs, on
the CPU, and a tensor counts as *on the device* where it is a weight, a buffer, what ``batch_to_device`` returned, or
what came of such a tensor. Inside a batch of training or of validation it is noted

- that a value of such a tensor is read (``item``, ``tolist``, ``numpy``, an ``if``),
- that the size of a result depends on its values (``nonzero``, a mask as an index),
- that it is copied to a tensor of the host and waited for,
- that the processes send something to each other.

What :class:`kd.callbacks.host_copies.HostCopies` gives back is on the host; to wait for it is noted. A tensor that code
makes with ``device=`` counts as the host's until something of the device is put into it.
"""

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytorch_lightning
import torch
import torch._dynamo.eval_frame
from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.strategies import Strategy
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from kd.callbacks.host_copies import HostCopies
from kd.cli import main
from tests._fake_gpu import CHECKS, INDEXING, READS, SIZES, _is_mask
from tests._files import write_json

ROOT = Path(__file__).parent.parent
PLACES = (f"{ROOT / 'kd'}/", f"{ROOT / 'tests'}/", f"{Path(pytorch_lightning.__file__).parent}/")
"""Not the root itself, which may hold a virtual environment and so torch's own files."""
OF_NO_PLACE = (__file__, torch._compile.__file__, torch._dynamo.eval_frame.__file__)
aten = torch.ops.aten


class AsIfOnGpu(TorchDispatchMode):
    """Follows the tensors that count as the device's, and notes what would wait for them.

    Attributes:
        waits: (the part of the run, ``file: line of code``, what it does), each once.
        batches: how many batches of each part were watched.
        collectives: how often each line has called one in training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: set[tuple[str, str, str]] = set()
        self.batches = {"training": 0, "validation": 0}
        self.collectives: Counter[str] = Counter()
        self._part = ""
        self._on_device: dict[int, StorageWeakRef] = {}

    def mark(self, values: Any) -> None:
        """All tensors in ``values`` are on the device from now on, with what shares their memory."""
        for value in tree_flatten(values)[0]:
            if isinstance(value, Tensor):
                reference = StorageWeakRef(value.untyped_storage())
                self._on_device[reference.cdata] = reference  # whose address is nobody else's now

    def is_on_device(self, value: Any) -> bool:
        """Whether a value is a tensor of the device."""
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self._on_device

    def note(self, kind: str) -> None:
        """Notes a wait at the innermost line of the project or of Lightning, inside a batch."""
        if not self._part:
            return
        self.waits.add((self._part, _innermost_line(), kind))

    @contextmanager
    def batch(self, part: str, is_watched: bool) -> Iterator[None]:
        """Inside, one batch of ``part`` is worked on."""
        self._part = part if is_watched else ""
        self.batches[part] += is_watched
        try:
            yield
        finally:
            self._part = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d" and self._part == "training":
            self.collectives[_innermost_line()] += 1
        inputs = [value for value in tree_flatten((args, kwargs))[0] if self.is_on_device(value)]
        if not inputs:
            return func(*args, **kwargs)
        if func in READS:
            self.note("reads a value")
        if func in CHECKS:
            self.note("asks whether torch.linalg worked")
        if func in SIZES:
            self.note(f"asks for the size of {func.name()}")
        if func in INDEXING and any(_is_mask(index) for index in args[1]):
            self.note("asks for the size of what a mask chooses")
        if func is aten.copy_.default and not self.is_on_device(args[0]) and args[0].numel() > 1:
            is_free = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if _is_of_the_engine():
                self.mark(args[0])  # DDP's buckets, which its C++ code made where the weights are
            elif not is_free:
                self.note("copies to the host and waits")
            return func(*args, **kwargs)
        outputs = func(*args, **kwargs)
        self.mark(outputs)
        return outputs


def _innermost_line() -> str:
    """``file: line of code`` of the project or of Lightning that is run now."""
    frames = [
        frame
        for frame in traceback.extract_stack()
        if frame.filename.startswith(PLACES) and frame.filename != __file__
    ]
    return f"{Path(frames[-1].filename).name}: {frames[-1].line}"


def _is_of_the_engine() -> bool:
    """Whether torch's engine itself runs, in a backward pass, and no Python under it."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename not in OF_NO_PLACE]
    return frames[-1].name == "_engine_run_backward"


Patch = tuple[Any, str, Callable[..., Any]]
"""A class or module, the name of its function, and what stands in its place."""


def _patched_loops(device: AsIfOnGpu) -> list[Patch]:
    """Lightning's loops, which tell ``device`` its tensors and its batches."""
    advance, evaluate = _TrainingEpochLoop.advance, _EvaluationLoop._evaluation_step
    to_device = Strategy.batch_to_device

    def marked_batch(strategy: Any, *given: Any, **more: Any) -> Any:
        batch = to_device(strategy, *given, **more)
        device.mark(batch)
        return batch

    def mark_weights(trainer: Any) -> None:
        module = trainer.lightning_module
        device.mark([*module.parameters(), *module.buffers()])

    def training_batch(loop: Any, *given: Any) -> None:
        mark_weights(loop.trainer)
        is_settled = loop.total_batch_idx >= 1  # counted from -1
        with device.batch("training", is_settled):
            advance(loop, *given)

    def validation_batch(loop: Any, *given: Any) -> Any:
        mark_weights(loop.trainer)
        with device.batch("validation", not loop.trainer.sanity_checking):
            return evaluate(loop, *given)

    return [
        (Strategy, "batch_to_device", marked_batch),
        (_TrainingEpochLoop, "advance", training_batch),
        (_EvaluationLoop, "_evaluation_step", validation_batch),
    ]


def _patched_reads(device: AsIfOnGpu) -> list[Patch]:
    """Reads that no operator of torch's shows, those that a CPU alone does, and the copies that are free."""
    add, take, one_hot = HostCopies.add, HostCopies.take, nn.functional.one_hot

    def copied(copies: Any, tag: Any, *tensors: Tensor) -> None:
        with _disable_current_modes():
            on_host = [tensor.detach().clone() for tensor in tensors]
        add(copies, tag, *on_host)

    def taken(copies: Any, wait: bool = False) -> Any:
        if wait and copies._pending:
            device.note("waits for an event")
        return take(copies, wait)

    def reading(plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *given: Any, **more: Any) -> Any:
            if device.is_on_device(tensor):
                device.note("reads a value")
            return plain(tensor, *given, **more)

        return read

    def one_hot_unchecked(tensor: Tensor, num_classes: int = -1) -> Tensor:
        """On a CPU the ids are read, to check them; on a GPU only where the number of classes is asked for."""
        if not device.is_on_device(tensor):
            return one_hot(tensor, num_classes)
        if num_classes == -1:
            device.note("reads a value")
        with _disable_current_modes():
            hot = one_hot(tensor, num_classes)
        device.mark(hot)
        return hot

    return [
        (nn.functional, "one_hot", one_hot_unchecked),
        (HostCopies, "add", copied),
        (HostCopies, "take", taken),
        (Tensor, "tolist", reading(Tensor.tolist)),
        (Tensor, "numpy", reading(Tensor.numpy)),
    ]


@contextmanager
def as_if_on_gpu() -> Iterator[AsIfOnGpu]:
    """Inside, trainings count their tensors as a GPU's; gives what is noted."""
    device = AsIfOnGpu()
    with ExitStack() as patches:
        for owner, name, replacement in (*_patched_loops(device), *_patched_reads(device)):
            patches.enter_context(mock.patch.object(owner, name, replacement))
        patches.enter_context(device)
        yield device


def train_as_if_on_gpu(record: Path, *planted: Callable[[], None]) -> Callable[[list[str]], int]:
    """A program for ``run_ranks``: kd-train, whose waits rank r writes to ``record.r`` as JSON.

    ``planted``: called before the run, to change it.
    """

    def program(items: list[str]) -> int:
        for plant in planted:
            plant()
        with as_if_on_gpu() as device:
            status = main("train", items)
        noted = {
            "waits": sorted(device.waits),
            "batches": device.batches,
            "collectives": device.collectives,
        }
        write_json(record.with_suffix(f".{os.environ['LOCAL_RANK']}"), noted)
        return status

    return program
