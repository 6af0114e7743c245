"""A GPU that is not there: fake CUDA tensors through the real code, and each place where the host waits for the device.

No kernel runs. torch's FakeTensorMode carries shapes, dtypes and devices, and raises where devices do not fit each
other. :class:`Waits` notes what would stop the host: a value that is read, a result whose size only the device knows,
a copy that blocks. torch's own engine refuses to go backward on an absent device, so :func:`backward` walks the graph.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

CUDA = torch.device("cuda", 0)
KD = f"{Path(__file__).parent.parent / 'kd'}/"
aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.equal.default}  # .item(), bool(), float(), an if
CHECKS = {
    aten._linalg_check_errors.default
}  # torch.linalg.solve, inv, cholesky, eigh: did it work?
SIZES = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default,
         aten.unique_consecutive.default, aten.bincount.default}  # fmt: skip
INDEXING = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}


class Waits(TorchDispatchMode):
    """Counts what stops the host by ``kd``'s innermost line, and goes on with values that could be.

    Attributes:
        found: how often, by ``(file: line of code, what it does)``.
        node: the graph's node that runs, in a backward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()
        self.node = ""

    def note(self, kind: str) -> None:
        """Counts one wait at the line that runs now."""
        ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(KD)]
        place = (
            f"{Path(ours[-1].filename).name}: {ours[-1].line}"
            if ours
            else f"outside kd {self.node}"
        )
        self.found[place, kind] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        on_gpu = any(x.device.type == "cuda" for x in tensors)
        made_there = torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if not made_there and not any(
            isinstance(x, FakeTensor) for x in tensors
        ):  # what is drawn on the host is real
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func in READS and isinstance(tensors[0], FakeTensor):
            if on_gpu:
                self.note("reads a value")
            return tensors[0].dtype != torch.bool and (1.0 if tensors[0].is_floating_point() else 0)
        if func in CHECKS and on_gpu:
            return self.note("asks whether torch.linalg worked")
        if func in SIZES and on_gpu:
            self.note(f"asks for the size of {func.name()}")
            return self._of_some_size(func, tensors[0], args)
        if func in INDEXING and on_gpu and any(_is_mask(i) for i in args[1]):
            self.note("asks for the size of what a mask chooses")
            args = self._by_numbers(func, args)
        if func in (aten._to_copy.default, aten.copy_.default):
            self._copy(func, args, kwargs)
        return func(*args, **kwargs)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is aten._to_copy.default:
            source, target, free = (
                args[0],
                kwargs.get("device") or args[0].device,
                kwargs.get("non_blocking", False),
            )
        else:
            target, source, free = (
                args[0].device,
                args[1],
                args[2] if len(args) > 2 else kwargs.get("non_blocking"),
            )
        ends = (source.device.type, torch.device(target).type)
        if "cuda" in ends and ends[0] != ends[1] and not free:
            self.note(f"copies from {ends[0]} to {ends[1]} and waits")

    @staticmethod
    def _by_numbers(func: Any, args: Any) -> Any:
        """The arguments with numbers in the place of masks, half as many as a mask has places."""
        chosen: list[Tensor | None] = []
        for i in args[1]:
            several = range(i.ndim) if _is_mask(i) else ()
            chosen += [
                torch.zeros(max(1, i.numel() // 2), dtype=torch.long, device=i.device)
                for _ in several
            ] or [i]
        rest = list(args[2:])
        if func is not aten.index.Tensor and rest[0].ndim and rest[0].numel() > 1:
            count = next(len(i) for i in chosen if i is not None)
            rest[0] = rest[0].new_zeros(count, *rest[0].shape[1:])
        return (args[0], chosen, *rest)

    @staticmethod
    def _of_some_size(func: Any, x: Tensor, args: Any) -> Any:
        count, nothing = max(1, x.numel() // 2), x.new_zeros(0).long()
        if func is aten.nonzero.default:
            return torch.zeros(count, x.ndim, dtype=torch.long, device=x.device)
        if func is aten.masked_select.default:
            return x.new_zeros(count)
        if func is aten.bincount.default:
            return torch.zeros(
                max(2, args[2] if len(args) > 2 else 2), dtype=torch.long, device=x.device
            )
        if func is aten.unique_dim.default:
            return x.new_zeros(max(1, x.shape[0] // 2), *x.shape[1:]), nothing, nothing
        return x.new_zeros(2), nothing, nothing


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


class _Event:
    """``torch.cuda.Event`` on a device that is never done with anything; to wait for it is noted."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        """Nothing runs."""

    def query(self) -> bool:
        """Never done, so a host that does not wait must go on without."""
        return False

    def synchronize(self) -> None:
        """Waits."""
        for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            if isinstance(mode, Waits):
                mode.note("waits for an event")


class _Stream:
    """``torch.cuda.Stream`` likewise; streams that wait for each other do not stop the host."""

    device = CUDA

    def __init__(self, *_: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        """Nothing runs."""

    wait_event = wait_stream
    synchronize = _Event.synchronize

    def record_event(self) -> _Event:
        """An event of nothing."""
        return _Event()


@contextmanager
def gpu() -> Iterator[Waits]:
    """Inside, ``device="cuda"`` is there, and nothing runs. Gives what is noted."""
    # A process's first backward pass makes a thread for each GPU that torch knows then, and a fork of a process with such
    # threads can't train. From now on torch knows of a GPU that is not there.
    torch.ones((), requires_grad=True).backward()
    waits = Waits()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            mock.patch(
                "torch.cuda.amp.common.amp_definitely_not_available", lambda: False
            ),  # else autocast is off
            mock.patch("torch.cuda.is_bf16_supported", lambda *_, **__: True),
            mock.patch("torch.cuda.manual_seed", lambda seed: None),
            mock.patch("torch.cuda.current_stream", _Stream),
            mock.patch("torch.cuda.Stream", _Stream),
            mock.patch("torch.cuda.stream", nullcontext),
            mock.patch("torch.Tensor.record_stream", lambda tensor, stream: None),
            mock.patch("torch.cuda.Event", _Event),
            FakeTensorMode(allow_non_fake_inputs=True),
            waits,
        ):
            yield waits
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def backward(loss: Tensor, waits: Waits) -> None:
    """The backward pass, node by node; leaves get ``.grad``."""
    assert loss.grad_fn is not None
    grads: dict[Any, list[Tensor | None]] = {loss.grad_fn: [torch.ones_like(loss)]}
    with torch.no_grad():
        for node in _last_first(loss.grad_fn):
            given = grads.pop(node, None)
            if given is None:
                continue
            waits.node = node.name()
            if hasattr(node, "variable"):
                leaf = node.variable
                assert given[0] is not None
                assert given[0].device == leaf.device, (
                    f"a gradient on {given[0].device} of a leaf on {leaf.device}"
                )
                own = _as(given[0], leaf)
                leaf.grad = own if leaf.grad is None else leaf.grad + own
                continue
            given = [
                g if g is None else _as(g, m)
                for g, m in zip(given, node._input_metadata, strict=True)
            ]
            outputs = (node if callable(node) else node.apply)(
                *given
            )  # the latter: an autograd.Function in Python
            outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
            while not callable(node) and len(outputs) > len(node.next_functions):
                outputs.remove(None)  # of an argument that is no tensor, which has no node
            for (following, place), value in zip(node.next_functions, outputs, strict=False):
                if following is not None and value is not None:
                    slots = grads.setdefault(
                        following, [None] * len(getattr(following, "_input_metadata", [0]))
                    )
                    slots[place] = value if slots[place] is None else slots[place] + value
    waits.node = ""


def _last_first(root: Any) -> list[Any]:
    """The nodes of a graph, each before those that it gives gradients to."""
    order, seen, stack = [], set(), [(root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack += [
                (node, True),
                *(
                    (following, False)
                    for following, _ in node.next_functions
                    if following is not None
                ),
            ]
    return order[::-1]


def _as(x: Tensor, like: Any) -> Tensor:
    x = x if tuple(x.shape) == tuple(like.shape) else x.sum_to_size(tuple(like.shape))
    return x if x.dtype == like.dtype else x.to(like.dtype)
