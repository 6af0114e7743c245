"""Names the ranks that do not come to a step, while the others wait for them in a collective.

A collective says only that its time is over, and NCCL ends the process without a word to Python. So each rank writes, every
second and from a thread, how far it is into the store through which the process group has met. A rank that makes no batch
for half of the time-out reads what the others have written: a rank whose writes have ended does not run (stopped, or its
machine is gone); one with fewer batches is held up before the collective.
"""

import os
import re
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.types import STEP_OUTPUT

from kd.callbacks.hooks import Closing
from kd.data.batch import Batch
from kd.errors import LOST, RunError
from kd.processes import heard_at

BEAT_S = 1.0
"""Seconds between two writes of a rank."""
SILENT_S = 4.0
"""Seconds without a write after which a rank counts as one that does not run."""
TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]imeout")
"""What gloo and NCCL say when a collective has waited for as long as it may."""
ANSWER_S = 10.0
"""Seconds in which the store must answer."""


@dataclass(frozen=True)
class Beat:
    """What a rank has written last."""

    number: int
    """Writes so far: it stands still when the process does."""
    batches: int
    """Starts and ends of training batches so far: equal on all ranks in a collective of a training step."""
    host: str
    """Name of its machine."""
    process: int
    """Its process id there."""

    def to_text(self) -> str:
        """The beat as the store holds it."""
        return f"{self.number} {self.batches} {self.process} {self.host}"

    @classmethod
    def of_text(cls, text: str) -> "Beat":
        """The beat that :meth:`to_text` has written."""
        number, batches, process, host = text.split(" ", 3)
        return cls(int(number), int(batches), host, int(process))


def missing_ranks(
    before: dict[int, Beat], after: dict[int, Beat], batches: int, world_size: int
) -> dict[int, str]:
    """The ranks that others wait for, with why; {} without any.

    Args:
        before: what the ranks had written, by rank; without those that have written nothing.
        after: what they have written :data:`SILENT_S` later.
        batches: :attr:`Beat.batches` of a rank that waits.
        world_size: number of ranks.

    >>> stopped, late = Beat(7, 24, "a", 1), Beat(8, 22, "b", 2)
    >>> missing_ranks({0: stopped, 1: late}, {0: stopped, 1: Beat(9, 22, "b", 2)}, 24, 2)
    {0: 'does not run (stopped, or its machine is gone)', 1: 'is held up before it'}
    """
    reasons = {}
    for rank in range(world_size):
        is_silent = rank not in after
        if rank in after and rank in before:
            is_silent = before[rank].number == after[rank].number
        if is_silent:
            reasons[rank] = "does not run (stopped, or its machine is gone)"
        elif after[rank].batches < batches:
            reasons[rank] = "is held up before it"
    return reasons


class RankWatch(Closing):
    """Reports in a line which ranks did not come to a step that this rank waits in; does nothing for a single process.

    Args:
        timeout_s: seconds after which a collective fails; the line comes after half of them.
    """

    def __init__(self, timeout_s: float) -> None:
        """Nothing is watched before the training begins; ``timeout_s``: seconds after which a collective fails."""
        self.timeout_s = timeout_s
        self.missing = ""
        """The ranks that this one waits for, in words; "" where it waits for none, or for less than half of the time-out."""
        self._batches = 0
        self._moved_at = time.monotonic()
        self._step = 0
        self._rank = self._world_size = 0
        self._done = threading.Event()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Starts the two threads, one that writes and one that watches, once the process group is there.

        Nothing in a run of a single process.
        """
        if trainer.world_size == 1 or not dist.is_initialized():
            return
        self._rank = trainer.global_rank
        self._world_size = trainer.world_size
        self._done.clear()
        self._moved_at = time.monotonic()
        for work in (self._beat, self._watch):
            threading.Thread(target=work, name=f"rank-watch{work.__name__}", daemon=True).start()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Counts the batch's begin, and notes that this rank moves: it waits for no one."""
        self._move(trainer, 1)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Counts the batch's end, as its begin; and notes that this rank moves."""
        self._move(trainer, 1)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: object
    ) -> None:
        """Notes that this rank still moves; no batch is counted, as ranks may have unequal numbers in validation."""
        self._move(trainer, 0)

    def _move(self, trainer: Trainer, batches: int) -> None:
        """Notes that this rank moves, and that so many more starts or ends of training batches are behind it (1 or 0)."""
        self._batches += batches
        self._step = trainer.global_step
        self._moved_at = time.monotonic()
        self.missing = ""

    def close(self, trainer: Trainer) -> None:
        """Ends the threads."""
        self._done.set()

    def explain(self, error: BaseException) -> RunError | None:
        """A training's error as one that names the ranks that a collective has waited for; None for any other error.

        After a time-out it looks which are missing, where that is not known yet: for up to 14 s.

        Args:
            error: that ended the training on this rank.
        """
        if not self._world_size or not isinstance(error, RuntimeError):
            return None
        message = str(error)
        if not self.missing and TIMED_OUT.search(message):
            self.missing, _ = self._find_missing()
        if not self.missing or not LOST.search(message):
            return None
        return RunError(f"{self.missing}, {self.timeout_s:g} s long (rank_timeout_s)")

    def _beat(self) -> None:
        """Thread: writes this rank's state to the store every :data:`BEAT_S` seconds."""
        number = 0
        try:
            store = _connect()
            while not self._done.is_set():
                number += 1
                beat = Beat(number, self._batches, socket.gethostname(), os.getpid())
                store.set(_key(self._rank), beat.to_text())
                self._done.wait(BEAT_S)
        except RuntimeError:  # the process that holds the store is gone: the collectives fail too
            return

    def _watch(self) -> None:
        """Thread: where this rank has waited for half the timeout, finds whom it waits for; the first of those waiting
        prints it.
        """
        checked_at = 0.0
        while not self._done.wait(BEAT_S):
            now = time.monotonic()
            moved_at = max(self._moved_at, heard_at())  # it waits for one that computes for all
            waits_s = now - moved_at
            since_check_s = now - checked_at
            if self.missing or waits_s < self.timeout_s / 2 or since_check_s < self.timeout_s / 10:
                continue
            checked_at = now
            missing, first_waiting = self._find_missing()
            has_moved = max(self._moved_at, heard_at()) != moved_at
            if self._done.is_set() or has_moved or not missing:
                continue
            self.missing = missing
            if self._rank == first_waiting:
                waits_s = time.monotonic() - moved_at
                print(
                    f"kd-train: {missing}, for {waits_s:.0f} s so far; the run fails after "
                    f"{self.timeout_s:g} s (rank_timeout_s)",
                    file=sys.stderr,
                    flush=True,
                )

    def _find_missing(self) -> tuple[str, int]:
        """The missing ranks in words, "" where none is, and the lowest rank that waits: takes 4 s, at most 14.

        Where the store, which rank 0 holds, does not answer, rank 0 is the missing one.
        """
        beats: list[dict[int, Beat]] = []
        reader = threading.Thread(target=self._read_twice, args=[beats], daemon=True)
        reader.start()
        reader.join(SILENT_S + ANSWER_S)
        if len(beats) < 2:
            text = f"rank 0 did not come to step {self._step}: it, or its machine, does not answer"
            return text, 1
        before, after = beats
        reasons = missing_ranks(before, after, self._batches, self._world_size)
        reasons.pop(self._rank, None)
        waiting = [rank for rank in range(self._world_size) if rank not in reasons]
        named = []
        for rank, reason in sorted(reasons.items()):
            place = ""
            beat = after.get(rank)
            if beat is not None:
                place = f" on {beat.host} (process {beat.process})"
            named.append(f"rank {rank}{place} did not come to step {self._step}: it {reason}")
        return "; ".join(named), waiting[0]

    def _read_twice(self, beats: list[dict[int, Beat]]) -> None:
        """Appends two readings of all ranks' states, :data:`SILENT_S` seconds apart: equal ones show who is silent."""
        # in a thread of its own: no time-out ends a read from a process that is stopped
        try:
            store = _connect()
            beats.append(_read(store, self._world_size))
            time.sleep(SILENT_S)
            beats.append(_read(store, self._world_size))
        except RuntimeError:
            return


def _connect() -> dist.TCPStore:
    """A new connection, for one thread, to the store through which the process group has met."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=ANSWER_S))


def _key(rank: int) -> str:
    return f"kd-rank/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


def _read(store: dist.TCPStore, world_size: int) -> dict[int, Beat]:
    """Each rank's last beat, by rank; without the ranks that have written none. ``world_size``: how many ranks."""
    beats = {}
    for rank in range(world_size):
        if store.check([_key(rank)]):
            beats[rank] = Beat.of_text(store.get(_key(rank)).decode())
    return beats
