"""Names the ranks that did not come to a collective when its time is over, which the collective itself does not.

The store through which the process group has met holds where each rank runs. A rank whose collective has ended without
the others notes that there, waits a moment, and names the ranks that have noted nothing: they are stopped, their machine is
gone, or they are held up before the collective.
"""

import os
import re
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer

from kd.errors import LOST, RunError

NOTED_WITHIN_S = 4.0
"""Seconds within which all ranks that wait note that their collective has ended."""
TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]imeout")
"""What gloo and NCCL say when a collective has waited for as long as it may."""
ANSWER_S = 10.0
"""Seconds in which the store must answer."""
TIME_IS_OVER = "over"
"""The note that some rank's collective has timed out: a lost connection may have other reasons."""


class RankWatch(Callback):
    """Names the ranks that a failed collective has waited for; does nothing for a single process.

    Args:
        timeout_s: seconds after which a collective fails.
    """

    def __init__(self, timeout_s: float) -> None:
        """Nothing is noted before the process group is there; ``timeout_s``: seconds after which a collective fails."""
        self.timeout_s = timeout_s
        self._trainer: Trainer | None = None  # of several processes

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Notes where this rank runs, once the process group is there. Nothing in a run of a single process."""
        if trainer.world_size > 1 and dist.is_initialized():
            self._trainer = trainer
            # in a thread, as are all that follow: no time-out ends an answer from a process that is stopped
            threading.Thread(target=self._note_place, daemon=True).start()

    def _note_place(self) -> None:
        """Thread: writes this rank's machine and process to the store."""
        assert self._trainer is not None
        rank = self._trainer.global_rank
        host = socket.gethostname()
        place = f" on {host} (process {os.getpid()})"
        with suppress(RuntimeError):
            store = _connect()
            store.set(_key(f"place/{rank}"), place)

    def explain(self, error: BaseException) -> RunError | None:
        """A training's error as one that names the ranks that a collective has waited for; None for any other error.

        It takes 4 s, at most 14. Where the time is over and the store, which rank 0 holds, does not answer, rank 0 is the
        missing one; a connection that is lost before is another process that ended.

        Args:
            error: that ended the training on this rank.
        """
        if self._trainer is None or not isinstance(error, RuntimeError):
            return None
        if not LOST.search(str(error)):
            return None
        timed_out = TIMED_OUT.search(str(error)) is not None
        missing = []
        if timed_out:
            step = self._trainer.global_step
            missing = [f"rank 0 did not come to step {step}: its store is silent"]
        reader = threading.Thread(target=self._find, args=[missing, timed_out], daemon=True)
        reader.start()
        reader.join(NOTED_WITHIN_S + ANSWER_S)
        if not missing:
            return None
        return RunError(f"{'; '.join(missing)}, {self.timeout_s:g} s long (rank_timeout_s)")

    def _find(self, missing: list[str], timed_out: bool) -> None:
        """Thread: replaces what ``missing`` holds by the ranks that note nothing; by none where no rank has timed out.

        Args:
            missing: of each rank, why the others wait for it.
            timed_out: whether this rank's collective has waited for as long as it may.
        """
        assert self._trainer is not None
        rank, ranks = self._trainer.global_rank, range(self._trainer.world_size)
        found = []
        try:
            store = _connect()
            store.set(_key(f"ended/{rank}"), "")
            if timed_out:
                store.set(_key(TIME_IS_OVER), "")
            time.sleep(NOTED_WITHIN_S)
            if store.check([_key(TIME_IS_OVER)]):
                for other in ranks:
                    if not store.check([_key(f"ended/{other}")]):
                        at = _key(f"place/{other}")
                        place = store.get(at).decode() if store.check([at]) else ""
                        step = self._trainer.global_step
                        found.append(f"rank {other}{place} did not come to step {step}")
        except RuntimeError:  # the process that holds the store is gone
            if timed_out:
                return
        missing[:] = found


def _connect() -> dist.TCPStore:
    """A new connection, for one thread, to the store through which the process group has met."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=ANSWER_S))


def _key(name: str) -> str:
    return f"kd-rank/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"
