"""What the processes of a training say to each other about the run itself: numbers, decisions, texts.

There are two ways to the other processes. Sums, largest numbers, :func:`of_all_processes` and :func:`in_each` use the
training's own group: NCCL sends no tensor of the host, so a number is moved to the device, where it waits for all the
work queued there.
Decisions (:func:`any_process`, :func:`all_processes`), what the first process sends (:func:`by_first`,
:func:`from_first`, :func:`tensors_from_first`) and what is gathered there (:func:`merged_at_first`) must not wait: where
the training's backend is one of GPUs they use a second group, of the hosts alone (gloo, :func:`_host_group`), or the
training's own group where no such group can be made.

The collectives of a training's own tensors (gradients, batches that a loss compares) are not here.
"""

import functools
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from pytorch_lightning.strategies import Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from kd.errors import RunError, UserError, first_line
from kd.lightning_internals import timeout_of
from kd.machine import core_ids, cores

T = TypeVar("T")

ON_THE_HOST = "gloo"
"""The backend that sends tensors of the host."""
# backends of GPUs that allow a second group beside them; a third party's (smddp) may not
WITH_SECOND_GROUPS = ("nccl", "xccl", "hccl")
TRIAL_S = 30.0
"""Seconds after which, at most, gloo counts as unable to connect hosts that are all waiting to be connected."""

MESSAGES_IN_TIME = 4
"""How often the first process says that it computes, within the time that a collective may take."""

# the hosts' group that was made beside a default group; None where none could be made
_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = (
    weakref.WeakKeyDictionary()
)


def local_processes() -> int:
    """How many processes of the training run on this machine, this one included; 1 where there is no process group.

    The launcher's number (the variable ``LOCAL_WORLD_SIZE``) counts. Without it one for each GPU that this process sees is
    assumed, but no more than the training has; without GPUs all processes of the training.
    """
    if not in_process_group():
        return 1
    launchers_count = os.environ.get("LOCAL_WORLD_SIZE", "")
    if launchers_count.isdecimal():
        return max(1, int(launchers_count))
    everyone = dist.get_world_size()
    return min(everyone, torch.cuda.device_count() or everyone)


def of_all_processes(mine: T) -> list[T]:
    """A list of every process's ``mine``, by rank. Every process must call this and gets the list; ``mine`` may be anything
    that pickles.
    """
    if not in_process_group():
        return [mine]
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, mine)
    return objects


def cores_of_rank() -> int:
    """This process's share of the cores that it may run on, at least 1; every process must call this.

    By affinity: its number of cores, divided by how many processes of the training on this machine may run on any of them;
    so cores to which the launcher has bound this process alone are its own. Where a container's quota allows fewer cores
    than the affinity, or the affinity is not known, all processes of the training on this machine share equally.
    """
    usable = cores()
    mine = (socket.gethostname(), core_ids())
    on_this_host = [ids for host, ids in of_all_processes(mine) if host == mine[0]]
    own_ids = mine[1]
    if own_ids is None or usable < len(own_ids):  # affinity is not known, or the quota is less
        return max(1, usable // len(on_this_host))
    sharers = 0
    for ids in on_this_host:
        if not set(own_ids).isdisjoint(ids or own_ids):
            sharers += 1
    return max(1, usable // sharers)


def total(strategy: Strategy, number: float) -> float:
    """The sum of the numbers that the processes pass; every process must call this and gets it.

    An ``int`` is added exactly, as int64; a ``float`` in float32, also one without a fraction.
    """
    return total_of_tensors(strategy, torch.tensor(number)).item()


def largest(strategy: Strategy, number: float) -> float:
    """The largest of the numbers that the processes pass, rounded to float32; every process must call this and gets it."""
    placed = torch.tensor(number, dtype=torch.float32, device=strategy.root_device)
    return float(cast(Tensor, strategy.reduce(placed, reduce_op="max")))


def total_of_tensors(strategy: Strategy, mine: Tensor) -> Tensor:
    """The sum of a tensor over all processes, of the same shape, on the strategy's device.

    Every process must call this, with tensors of one shape and dtype. ``mine`` is left as it is.
    """
    placed = mine.to(strategy.root_device, copy=True)
    return cast(Tensor, strategy.reduce(placed, reduce_op="sum"))


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor of a shard (FSDP2's DTensor), gathered from all processes, which must all call this; any other tensor
    is returned as it is.
    """
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def any_process(strategy: Strategy, answer: bool) -> bool:
    """Whether ``answer`` is True in one process at least. Every process must call this and gets the same result; it uses
    :func:`_host_group` where there is one.
    """
    if not in_process_group():  # called after each batch: a single process makes no tensor for it
        return answer
    group = _host_group(strategy)
    if group is None:
        return bool(total_of_tensors(strategy, torch.tensor(int(answer))))
    return _any_over_gloo(group, answer)


def all_processes(strategy: Strategy, answer: bool) -> bool:
    """Whether ``answer`` is True in every process. Every process must call this (:func:`any_process`)."""
    return not any_process(strategy, not answer)


def from_first(strategy: Strategy, value: T) -> T:
    """Returns the first process's value in every process. Every process must call this; it uses :func:`_host_group` where
    there is one.

    Args:
        strategy: of the training.
        value: anything that pickles; that of the other processes is not used.
    """
    if not in_process_group():
        return value
    group = _host_group(strategy)
    if group is None:
        return cast(T, strategy.broadcast(value))
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def merged_at_first(strategy: Strategy, mine: T, merge: Callable[[T, T], T]) -> T:
    """Returns in the first process what all processes hold, merged; in the others a part or all of it, of no use to them.

    Every process must call this; it uses :func:`_host_group`. Neighbours are merged first, then pairs of pairs, in the
    order of the ranks: no process holds more than two at a time, and the first one waits for ``ceil(log2(P))`` others.
    Without a group of the hosts every process gathers all of them and merges them.

    Args:
        strategy: of the training.
        mine: of this process; anything that pickles.
        merge: ``(of lower ranks, of higher ranks) -> of both``; may change its first argument in place.
    """
    if not in_process_group():
        return mine
    group = _host_group(strategy)
    if group is None:  # a third party's backend may send nothing from one process to another
        return functools.reduce(merge, of_all_processes(mine))
    rank, processes = dist.get_rank(), dist.get_world_size()
    distance = 1
    while distance < processes:
        if rank % (2 * distance):
            dist.send_object_list([mine], dst=rank - distance, group=group)
            return mine
        if rank + distance < processes:
            box: list[Any] = [None]
            dist.recv_object_list(box, src=rank + distance, group=group)
            mine = merge(mine, box[0])
        distance *= 2
    return mine


def by_first(strategy: Strategy, compute: Callable[[], T]) -> T:
    """Returns in every process what the first one computes; where that fails, all fail with its reason.

    Every process must call this; it uses :func:`_host_group` where there is one. (With :func:`from_first` alone, an error of
    the first process before its call would leave the others waiting.) With a group of the hosts the first process may
    compute for longer than a collective may take (``rank_timeout_s``): a thread sends the others a message meanwhile.

    Args:
        strategy: of the training.
        compute: called in the first process alone, so it must hold no collective; gives anything that pickles.

    Raises:
        UserError: ``compute`` has raised it; in every process.
        RunError: ``compute`` has failed otherwise in the first process; raised in the others. The first one raises its own
            error.
    """
    if not in_process_group():
        return compute()
    if dist.get_rank() == 0:
        try:
            with _keeping_others_waiting(strategy):
                value = compute()
        except Exception as error:
            from_first(strategy, _Message(failure=_failure_of(error)))
            raise
        from_first(strategy, _Message(value))
        return value
    while True:
        message = from_first(strategy, _Message[T]())
        if not message.is_computing:
            return _unless_failed(message.value, message.failure)


@dataclass(frozen=True)
class _Message(Generic[T]):
    """A message of the first process to those that wait for it in :func:`by_first`."""

    value: T | None = None
    failure: "_Failure | None" = None
    is_computing: bool = False
    """Whether the first process is not done yet, so that another message follows."""


@contextmanager
def _keeping_others_waiting(strategy: Strategy) -> Iterator[None]:
    """Inside, a thread of the first process sends the other processes a message at intervals, so that the collective in
    which they wait does not time out (:func:`by_first`). Only the first process calls this.

    Without a group of the hosts (:func:`_host_group`) nothing is sent: the messages would travel by way of a GPU, which the
    process uses meanwhile. Then what runs inside may take no longer than a collective.
    """
    group = _host_group(strategy)
    done = threading.Event()

    def say() -> None:
        """The thread: sends messages until the computation is done. Where another process is gone it ends silently; the
        result that is sent afterwards fails for the same reason.
        """
        with suppress(RuntimeError):
            while not done.wait(timeout_of(strategy) / MESSAGES_IN_TIME):
                box = [_Message[None](is_computing=True)]
                dist.broadcast_object_list(box, src=0, group=group)

    thread = threading.Thread(target=say, name="kd-computes", daemon=True)
    if group is not None:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if group is not None:
            thread.join()


def in_each(compute: Callable[[], T]) -> T:
    """Returns what this process computes, once all have computed theirs; where one of them fails, all fail with its
    reason.

    Every process must call this, and none may wait for another inside ``compute``. The processes that are done wait for
    the others, in the training's own group. Unlike in :func:`by_first` no messages are sent meanwhile, so the slowest must
    end within a collective's time-out (``rank_timeout_s``) after the fastest.

    Args:
        compute: called in every process, which keeps its own value: values are not sent, so they need not pickle.

    Raises:
        UserError: ``compute`` has raised it in one of the processes; raised in the others too.
        RunError: ``compute`` has failed otherwise in one process; raised in the others. A process that has failed raises its
            own error. Where several have failed, those that have not raise what the lowest failed rank reports.
    """
    if not in_process_group():
        return compute()
    try:
        value = compute()
    except Exception as error:
        of_all_processes(_failure_of(error))
        raise
    none: _Failure | None = None
    for failure in of_all_processes(none):
        _unless_failed(value, failure)
    return value


class _Failure(NamedTuple):
    """Why a process has failed, as the others report it."""

    rank: int
    is_users_mistake: bool
    reason: str
    """In one line."""


def _failure_of(error: Exception) -> _Failure:
    return _Failure(dist.get_rank(), isinstance(error, UserError), first_line(error))


def _unless_failed(value: T | None, failure: _Failure | None) -> T:
    """Returns ``value`` if ``failure`` is None; else raises another process's failure here.

    Raises:
        UserError: the failure was a user's mistake.
        RunError: it was another one; the message names the rank.
    """
    if failure is None:
        return cast(T, value)
    if failure.is_users_mistake:
        raise UserError(failure.reason)
    raise RunError(f"rank {failure.rank}: {failure.reason}")


@torch.no_grad()
def tensors_from_first(strategy: Strategy, tensors: Iterable[Tensor]) -> None:
    """Overwrites tensors in place by the first process's, bit for bit: they are sent as bytes.

    Every process must call this, with tensors of the same shapes and dtypes in the same order. It uses
    :func:`_host_group` where there is one. Without a process group nothing happens.
    """
    if not in_process_group():
        return
    group = _host_group(strategy)
    place = strategy.root_device if group is None else torch.device("cpu")
    for tensor in tensors:
        if not tensor.numel():
            continue
        sent = tensor.detach().to(place).contiguous()
        dist.broadcast(sent.reshape(-1).view(torch.uint8), src=0, group=group)
        tensor.copy_(sent)


def in_process_group() -> bool:
    """Whether this process is in a process group; a run of one process need not be."""
    return dist.is_available() and dist.is_initialized()


def _any_over_gloo(group: dist.ProcessGroup, answer: bool) -> bool:
    """Whether ``answer`` is True in one process at least of a gloo group; all its processes must call this together.

    Each process sends what it has heard so far to the one 1, 2, 4, ... ranks further, so all have heard of all after
    ``ceil(log2(P))`` messages (the rounds of a dissemination barrier; Hensgen, Finkel, Manber, "Two algorithms for barrier
    synchronization", 1988). Gloo's ``all_reduce`` passes a ring of ``2 (P - 1)``, each step of which is quicker: of a few
    processes it takes less time, of hundreds many times more (scripts/bench/scaling_cpu_2026-11-29.md).
    """
    rank, processes = dist.get_rank(group), dist.get_world_size(group)
    heard = torch.tensor(int(answer), dtype=torch.uint8)
    distance = 1
    while distance < processes:
        sent = heard.clone()  # not changed while it is being sent
        news = torch.zeros_like(heard)
        sending = dist.isend(sent, group=group, group_dst=(rank + distance) % processes)
        dist.recv(news, group=group, group_src=(rank - distance) % processes)
        if sending is not None:
            sending.wait()
        heard |= news
        distance *= 2
    return bool(heard)


def _host_group(strategy: Strategy) -> dist.ProcessGroup | None:
    """The group that sends tensors of the host, so that nothing waits for a GPU. To be called only in a process group.

    Where the training's own group is gloo's, that one is returned. Else a second group is made at the first call, and kept;
    so all processes must make the first call together. None where it can't be made (a backend other than
    :data:`WITH_SECOND_GROUPS`, or hosts that gloo can't connect): the caller then uses the training's group, and tensors of
    the device.
    """
    default = dist.group.WORLD
    assert default is not None
    backend = dist.get_backend()
    if backend == ON_THE_HOST:
        return default
    if backend not in WITH_SECOND_GROUPS:
        return None
    if default not in _host_groups:
        _host_groups[default] = _new_host_group(strategy)
    return _host_groups[default]


def _new_host_group(strategy: Strategy) -> dist.ProcessGroup | None:
    """Makes a gloo group of all processes, which must call this together; None on all of them where it failed on one.

    Where one process can't make it, the others wait for that process until gloo's time-out. With the training's time-out
    they would come too late to the collective (:func:`_made_by_all`) in which it waits for them. So a trial group with a
    short time-out is made first, and removed. All processes meet on the device before it, so that none is merely late.
    """
    seconds = timeout_of(strategy)
    _made_by_all(strategy, True)  # a barrier
    trial = _try_gloo(min(TRIAL_S, seconds / 4))
    can_meet = _made_by_all(strategy, trial is not None)
    if trial is not None:
        dist.destroy_process_group(trial)
    if not can_meet:
        return None
    group = _try_gloo(seconds)
    return group if _made_by_all(strategy, group is not None) else None


def _try_gloo(seconds: float) -> dist.ProcessGroup | None:
    """Makes a gloo group of all processes, whose collectives fail after ``seconds``; None where this process can't make it.

    All processes must call this together. A machine whose host name has no address can't make such a group, though NCCL
    works there.
    """
    try:
        group = dist.new_group(backend=ON_THE_HOST, timeout=timedelta(seconds=seconds))
    except RuntimeError:
        return None
    return cast(dist.ProcessGroup, group)  # all processes are in it


def _made_by_all(strategy: Strategy, made: bool) -> bool:
    """Whether ``made`` is True in every process, by an all-reduce on the device; every process must call this."""
    count = torch.tensor(int(made), device=strategy.root_device)
    dist.all_reduce(count, dist.ReduceOp.MIN)
    return bool(count)
