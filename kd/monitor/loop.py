"""A plain training loop, in the form in which the monitor's parts read Lightning's trainer."""

import socket
from collections.abc import Iterable, Iterator, Sized
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pytorch_lightning.profilers import PassThroughProfiler, Profiler
from torch import Tensor, nn

from kd.processes import in_process_group, of_all_processes

Batch = TypeVar("Batch")
Value = TypeVar("Value")
FETCH = "[PlainLoop].train_dataloader_next"
"""The action of waiting for a batch, named as Lightning names its own."""
_NO_MORE = object()  # in the place of a batch after the last one


class LoopStrategy:
    """Where a loop trains, and what its processes say to each other; of ``torch.distributed``, if it is used."""

    def __init__(self, model: nn.Module | None) -> None:
        """The model, and the device that the program trains on: the current GPU where it uses one, else the CPU."""
        self.model = model
        self.root_device = torch.device("cpu")
        if torch.cuda.is_initialized():  # a program that has placed nothing on a GPU trains on none
            self.root_device = torch.device("cuda", torch.cuda.current_device())

    def broadcast(self, value: Value) -> Value:
        """Rank 0's value, on all ranks."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def reduce(self, tensor: Tensor, reduce_op: str = "sum") -> Tensor:
        """The sum, or another reduction (``max``, ``min``), over all ranks; in place. A single process changes nothing."""
        if dist.is_initialized():
            dist.all_reduce(tensor, getattr(dist.ReduceOp, reduce_op.upper()))
        return tensor


class PlainLoop:
    """What the monitor reads of a training loop; each pass over a loader is an epoch.

    The names are those of :class:`pytorch_lightning.Trainer`.

    Args:
        model: that the loop trains, where it is known.
    """

    num_nodes = 1
    accumulate_grad_batches = 1
    max_epochs: int | None = None
    max_steps = -1
    precision = "as the loop has it"
    ckpt_path = None
    lightning_module = None
    sanity_checking = False

    def __init__(self, model: nn.Module | None = None) -> None:
        """Reads ranks from ``torch.distributed``, and machines from the processes' hosts: all must call this. The other
        attributes are named as in a Trainer.
        """
        self.strategy = LoopStrategy(model)
        together = in_process_group()
        self.global_rank = dist.get_rank() if together else 0
        self.world_size = dist.get_world_size() if together else 1
        hosts = of_all_processes(socket.gethostname())
        here = hosts[self.global_rank]
        self.local_rank = hosts[: self.global_rank].count(here)
        self.num_devices = hosts.count(here)
        self.node_rank = [*dict.fromkeys(hosts)].index(here)
        self.profiler: Profiler = PassThroughProfiler()
        self.loggers: list[Any] = []
        self.callback_metrics: dict[str, Tensor] = {}
        self.train_dataloader: object = None
        self.num_training_batches = float("inf")
        self.current_epoch = 0
        self.global_step = 0
        self.batches: object = None
        """Of the epoch that is open; None between epochs."""
        self.open_batch: int | None = None
        """Number in its epoch of the batch that the loop has; None where it has asked for the next one."""
        self.is_last_batch = False
        self.should_stop = False
        batches = SimpleNamespace(total_batch_idx=-1)
        self.fit_loop = SimpleNamespace(epoch_loop=batches)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process."""
        return self.global_rank == 0

    def expect(self, loader: Iterable[object]) -> None:
        """Takes the loader of the next epoch, and its length in batches; infinite where it does not say."""
        self.train_dataloader = loader
        self.num_training_batches = float("inf")
        if isinstance(loader, Sized):
            self.num_training_batches = len(loader)

    def fetch(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of an epoch, until one of the parts sets :attr:`should_stop`; the wait for each is timed.

        Counts each batch before it gives it.
        """
        self.profiler.start("run_training_epoch")
        batches = iter(loader)
        for index in count():
            if self.should_stop:
                return
            with self.profiler.profile(FETCH):
                batch: Any = next(batches, _NO_MORE)
            if batch is _NO_MORE:
                return
            self.is_last_batch = index + 1 == self.num_training_batches
            self.fit_loop.epoch_loop.total_batch_idx += 1
            yield batch
