"""The loader: workers that outlive a signal to the whole job, and that say what the machine lacks for them."""

import errno
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from kd.errors import NO_SHARED_MEMORY, RunError

# The training process alone answers these: it needs its workers until the checkpoint is written. Python on macOS can't
# say who sent a signal, so a worker there could not be ended by its own process: nothing is held back there.
FROM_OUTSIDE = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
HELD_BACK = FROM_OUTSIDE if hasattr(signal, "sigwaitinfo") else set[signal.Signals]()
"""Signals that the loader's workers hold back; none where the system can't wait for them."""


class Loader(DataLoader):
    """A ``DataLoader`` whose workers ignore :data:`HELD_BACK` signals from anyone but the training process.

    A signal to the whole process group reaches them too: workers that die of it would end the run before it has saved.
    """

    def __iter__(self) -> Any:
        """Begins a pass. The first one starts the workers, which stay for all passes of this loader.

        They start with the signals held back, so that there is no moment in which one could kill them.

        Raises:
            RunError: the processes can't be started, or shared memory is full.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        try:
            return super().__iter__()
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise RunError(NO_SHARED_MEMORY) from error
            raise RunError(
                f"data.num_workers: the {self.num_workers} loader processes can't be started "
                f"({error.strerror or error}); data.num_workers=0 does without them, or raise the limit "
                "(ulimit -u, a container's --pids-limit)"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class Shared:
    """Collates in a worker, into shared memory: the queue's own thread would lose the batch where memory is full.

    Args:
        collate: samples -> a batch.
    """

    collate: Callable[[Sequence[Any]], Any]

    def __call__(self, samples: Sequence[Any]) -> object:
        """A batch of samples; in a worker its tensors are moved to shared memory.

        Raises:
            RunError: shared memory is full.
        """
        batch = self.collate(samples)
        if get_worker_info() is None:
            return batch
        try:
            return apply_to_collection(
                batch, Tensor, lambda part: part.share_memory_() if part.numel() else part
            )
        except RuntimeError as error:
            raise RunError(NO_SHARED_MEMORY) from error


def listen_to_parent(worker: int) -> None:  # noqa: ARG001
    """Runs in each worker process as it starts: holds back :data:`HELD_BACK` signals; one that its parent sends ends it.

    Args:
        worker: number of the worker, as torch gives it to every ``worker_init_fn``.
    """
    # A worker that was not forked has not inherited it.
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    if HELD_BACK:
        threading.Thread(target=_end_when_signalled, args=(os.getppid(),), daemon=True).start()


def _end_when_signalled(parent: int) -> None:
    """A worker's thread: ends the worker at once when the process ``parent`` (its id) sends a held-back signal.

    The training process sends SIGTERM to a worker that does not end by itself. Signals of other processes are dropped.
    """
    while signal.sigwaitinfo(HELD_BACK).si_pid != parent:
        pass
    os._exit(0)
