"""A trial's run, on its share of a machine: a process that is started or resumed, stopped, and watched to its end."""

import fcntl
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from kd.errors import Stopped
from kd.launch.child import reason_in, start_kd_train
from kd.machine import core_ids, signals_kept
from kd.report.records import rows_of_metrics
from kd.storage.checkpoints import newest_whole
from kd.storage.elsewhere import mapping_of
from kd.storage.of_weights import LATENCY, read_of_weights
from kd.storage.run_urls import only_run, words_of_only_run
from kd.storage.writing import appended, remove

LOG = "log.txt"
"""A trial's output, in its folder."""
KILL_S = 60.0
"""Seconds from SIGTERM to SIGKILL: a step and a checkpoint take less."""
POLL_S = 0.2
"""Seconds between two looks at the trials."""
WITH_SEARCH = "the search ends"
"""Why a trial was stopped that the same command resumes."""
ENDED = object()
"""In place of the next step of a trial that has none left."""
SIGNALS = (130, 143, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL)
"""Exit statuses of a run that a signal has ended."""


@dataclass(frozen=True)
class Slot:
    """A share of this machine."""

    cores: tuple[int, ...]
    """Numbers of its CPU cores; empty where they can't be dealt."""
    gpus: tuple[str, ...]
    """Its GPUs, as CUDA_VISIBLE_DEVICES names them."""

    def variables(self) -> dict[str, str]:
        """Environment of the run: its GPUs, and as many OpenMP threads as it has cores unless the user has set them."""
        variables = {}
        if self.cores and "OMP_NUM_THREADS" not in os.environ:
            variables["OMP_NUM_THREADS"] = str(len(self.cores))
        if self.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        return variables


def deal(jobs: int, gpus: Sequence[str]) -> list[Slot]:
    """This machine in ``jobs`` shares of its cores and of its ``gpus`` (see :func:`usable_gpus`).

    With fewer GPUs than jobs, several shares have the same GPU.

    >>> [slot.gpus for slot in deal(3, ["0", "1"])], [slot.gpus for slot in deal(2, [])]
    ([('0',), ('1',), ('0',)], [(), ()])
    """
    cores = core_ids() or []
    shares_with_gpus = min(jobs, len(gpus) or 1)  # the others begin again with the first GPU
    slots = []
    for i in range(jobs):
        slot_cores = tuple(cores[i::jobs])
        slot_gpus = tuple(gpus[i % shares_with_gpus :: jobs])
        slots.append(Slot(slot_cores, slot_gpus))
    return slots


def usable_gpus(accelerator: str) -> list[str]:
    """The GPUs that runs may use, as ``CUDA_VISIBLE_DEVICES`` names them: by number, or as the user has set it.

    Args:
        accelerator: the Trainer's; [] unless it is one that takes GPUs.
    """
    if accelerator not in ("auto", "gpu", "cuda"):
        return []
    import torch

    numbers = [str(number) for number in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible and numbers else numbers


def lock_trial(folder: Path) -> IO[str] | None:
    """Locks a trial's folder, or one of a confirmation, for this search and its run; None while another process holds it.

    The lock is on the file ``owner``, which the run inherits: it holds also where the search was killed and its run
    still saves.

    Returns:
        The open file; closing it, in the search and in the run, frees the trial.
    """
    owner = appended(folder / "owner")
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner.close()
        return None
    return owner


@dataclass(eq=False)
class TrialRun:
    """A trial's run while this process watches it."""

    folder: Path
    """The trial's folder; the run's folder is below."""
    recipe: str
    """Name of the recipe, for folders."""
    slot: Slot
    """Where it runs."""
    owner: IO[str]
    """The trial's lock."""
    process: subprocess.Popen[bytes] | None = None
    """The last that was started."""
    stopped: str = ""
    """Why the search has stopped it; "" where it has not."""
    kill_at: float = math.inf
    """When it is killed, in seconds of the monotonic clock: a while after it was stopped."""

    @property
    def run(self) -> Path:
        """The run's folder."""
        return only_run(self.folder, self.recipe)

    @property
    def summary(self) -> dict[str, Any]:
        """The run's ``summary.json``; {} without one."""
        return mapping_of(self.run / "summary.json")

    @property
    def is_done(self) -> bool:
        """Whether the run has trained to its end."""
        has_student = (self.run / "student.safetensors").is_file()
        return has_student and self.summary.get("status") == "done"

    @property
    def has_latency(self) -> bool:
        """Whether the run's student was timed."""
        return bool(read_of_weights(self.run, LATENCY, lambda _: None))  # else it is timed anew

    def train(self, items: Sequence[str]) -> Iterator[None]:
        """Trains the run to its end, or resumes it from its last checkpoint; yields between two looks at it.

        A run without a checkpoint begins anew: what it had written is deleted.

        Args:
            items: words of ``kd-train``'s command line; not used where it is resumed.
        """
        if self.is_done:
            return
        checkpoint, *_ = newest_whole(self.run / "checkpoints")
        if checkpoint is not None:
            words = [f"resume={self.run}"]
        else:
            remove(self.run.parent)
            words = [*items, *words_of_only_run(self.folder)]
        yield from self._ended([*words, "trainer.enable_progress_bar=false"])

    def time_student(self) -> Iterator[None]:
        """Times the student by ``kd-latency`` where it was not; yields between two looks at it."""
        if self.is_done and not self.stopped and not self.has_latency:
            conditions = ["runtime=torch", "batch=1", "threads=1", "seconds=1"]
            yield from self._ended(["latency", str(self.run), *conditions])

    def _ended(self, items: Sequence[str]) -> Iterator[None]:
        """Runs a command of kd on the slot's cores and GPUs, in a session of its own, its output in :data:`LOG`; yields
        until it has ended.
        """
        with appended(self.folder / LOG) as log:
            self.process = start_kd_train(
                items,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.slot.variables(),
                pass_fds=(self.owner.fileno(),),
                start_new_session=True,
            )
        if self.slot.cores:
            with suppress(OSError):  # it has ended already
                os.sched_setaffinity(self.process.pid, self.slot.cores)
        while self.poll() is None:
            yield

    def stop(self, why: str) -> None:
        """Makes the run save and end; it is killed where it has not ended :data:`KILL_S` seconds later.

        Args:
            why: kept as :attr:`stopped`; by it the search tells a pruned or slow trial from one that is stopped with
                itself. The first reason stays.
        """
        if self.stopped:
            return
        self.stopped = why
        self.kill_at = time.monotonic() + KILL_S
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs; 0 where nothing was started.

        It kills a run whose time to end is over. So it must be called often.
        """
        if self.process is None:
            return 0
        status = self.process.poll()
        if status is None and time.monotonic() > self.kill_at:
            self.process.send_signal(signal.SIGKILL)
        return status

    def reason(self) -> str:
        """Why the run has failed, in a line: its signal, or the last line of its log."""
        status = self.poll() or 0
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return reason_in(self.folder / LOG)


Begin = Callable[[Slot], tuple[TrialRun, Iterator[None]] | None]
"""Begins the next trial on a place: its run, and what is done with it, which yields while that must wait. None: none is
left."""


class Pool:
    """Runs trials on the places of this machine: until none is left, or a signal comes.

    Args:
        slots: the places.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = list(slots)
        self.running: dict[TrialRun, Iterator[None]] = {}
        self.stopped_by: int | None = None  # number of the signal

    def run(self, begin: Begin) -> None:
        """Fills the places, and looks at each running trial again and again.

        Before it returns or raises, all running trials have saved and ended: no process is left over.

        Args:
            begin: called with a free place; gives a trial's run and its steps, or None where no trial is left.

        Raises:
            Stopped: a signal has come: SIGTERM or SIGINT, of which the second Ctrl-C has trials killed at once.
        """
        free = [*self.slots]
        with signals_kept(self._on_signal):
            try:
                while self.stopped_by is None:
                    free += self._ended()
                    while free:
                        begun = begin(free[0])
                        if begun is None:
                            break
                        job, steps = begun
                        self.running[job] = steps
                        free.pop(0)
                    if not self.running:
                        return
                    time.sleep(POLL_S)
                self._stop()
                while self.running:
                    self._ended()
                    time.sleep(POLL_S)
                raise Stopped(self.stopped_by)
            finally:  # a full disk, too, leaves no process
                self._stop()
                while any(job.poll() is None for job in self.running):
                    time.sleep(POLL_S)

    def _ended(self) -> list[Slot]:
        """Takes each trial a step further; returns the places of those that have ended, and frees their locks."""
        places = []
        for job, steps in [*self.running.items()]:
            if next(steps, ENDED) is ENDED:
                del self.running[job]
                job.owner.close()
                places.append(job.slot)
        return places

    def _stop(self) -> None:
        for job in self.running:
            job.stop(WITH_SEARCH)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM and SIGINT; it only notes the signal, and the loop in :meth:`run` acts on it."""
        if self.stopped_by is not None and number == signal.SIGINT:
            for job in self.running:
                job.kill_at = 0
        self.stopped_by = self.stopped_by or number


def epoch_values(run: Path, metric: str) -> list[tuple[int, float]]:
    """``(epoch from 1, value)`` of a metric, as far as ``metrics.csv`` holds it.

    [] without the file; a torn line, as it is being written, ends it.

    Args:
        run: the run's folder.
        metric: a column of the file, ``val/acc1``.
    """
    rows = rows_of_metrics(run / "metrics.csv", [])
    return [
        (int(row["epoch"]) + 1, row[metric]) for row in rows if metric in row and "epoch" in row
    ]
