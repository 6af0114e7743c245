"""Batches of all processes together, for losses that compare the samples of a batch with each other."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

_without_gather = False


@contextmanager
def without_gather() -> Iterator[None]:
    """Inside, each process compares the samples of its own batch alone.

    In validation processes have batches of different sizes; before the start the first process may read a sample alone.
    """
    global _without_gather
    before = _without_gather
    _without_gather = True
    try:
        yield
    finally:
        _without_gather = before


def in_parallel() -> bool:
    """Whether losses gather over several processes now; all processes must get the same answer."""
    return (
        not _without_gather
        and dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size() > 1
    )


class _AllGather(Function):
    """Rows of all ranks; not torch's own, whose backward misreads gradients that are not contiguous."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        """This process's rows ``(N, ...)`` -> those of all processes, ``(W * N, ...)`` in the order of ranks."""
        ctx.rows = len(x)  # type: ignore[attr-defined]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Tensor:
        """The one gradient, ``(W * N, ...)``, summed over ranks -> that of this process's rows, ``(N, ...)``."""
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient)
        return gradient[own_rows(ctx.rows)]  # type: ignore[attr-defined]


def of_all_ranks(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each ``(N, ...)`` -> ``(processes * N, ...)`` in the order of ranks, and the same on all; alone: as it is.

    Gradients come back from all processes to the one that a row is from, summed. A loss of the whole that all compute
    alike, or of which each computes its own rows' share, then has the gradient of one process with the whole batch,
    once DDP has averaged the parameters' gradients. All processes must have as many rows.
    """
    if not in_parallel():
        return tensors
    return tuple(_AllGather.apply(each.contiguous()) for each in tensors)


def share_of_the_step(counts: Tensor, counts_of_window: Tensor, batches: int) -> Tensor:
    """Factors for this batch's means, so that with those of a step's other batches they make means over all the step's
    targets.

    A step reads B batches (an accumulation window) on each of P processes. A mean over ``n`` labelled pictures, where
    all these batches have ``N`` together, counts ``n * B * P / N``: the trainer divides by B, DDP by P. Exactly 1 where
    all have as many. With several processes all must call it.

    Args:
        counts: ``(T,)`` int64, how many targets of this batch each of T means is over.
        counts_of_window: ``(T,)`` int64, the same of all B batches of this process.
        batches: B.

    Returns:
        ``(T,)`` float32.
    """
    together = counts_of_window.clone()
    processes = 1
    if in_parallel():
        dist.all_reduce(together)
        processes = dist.get_world_size()
    return (counts * batches * processes).float() / together.clamp_min(1).float()


def own_rows(count: int) -> slice:
    """Where this process's ``count`` rows are in what :func:`of_all_ranks` gives."""
    first = 0
    if in_parallel():
        first = count * dist.get_rank()
    return slice(first, first + count)
