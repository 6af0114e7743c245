"""A trial's process, on its share of a machine: started or resumed, watched through its run folder, stopped."""

import csv
import fcntl
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from kd.errors import Stopped
from kd.launch.child import reason_in, start_kd_train
from kd.machine import core_ids, signals_kept
from kd.storage.checkpoints import newest_whole
from kd.storage.elsewhere import LARGEST_LOG, lines_of, mapping_of
from kd.storage.of_weights import LATENCY, evaluation, on_stderr, read_of_weights
from kd.storage.run_urls import folder_of_recipe
from kd.storage.writing import appended, remove

LOG = "log.txt"
"""A trial's output, in its folder."""
KILL_S = 60.0
"""Seconds from SIGTERM to SIGKILL: a step and a checkpoint take less."""
POLL_S = 0.2
"""Seconds between two looks at the trials."""
WITH_SEARCH = "the search ends"
"""Why a trial was stopped that the same command resumes."""


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

    def start(
        self, items: Sequence[str], log: Path, owner: IO[str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts ``kd-train`` on the slot's cores and GPUs, in a session of its own.

        Args:
            items: its command line.
            log: takes its output.
            owner: the trial's lock, which the run keeps open as long as it lives.
        """
        with appended(log) as opened:
            process = start_kd_train(
                items,
                stdout=opened,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.variables(),
                pass_fds=() if owner is None else (owner.fileno(),),
                start_new_session=True,
            )
        if self.cores:
            with suppress(OSError):  # it has ended already
                os.sched_setaffinity(process.pid, self.cores)
        return process


def deal(jobs: int, gpus: Sequence[str]) -> list[Slot]:
    """This machine in ``jobs`` shares of its cores and of its ``gpus`` (see :func:`gpus_of`).

    With fewer GPUs than jobs, several shares have the same GPU.
    """
    cores = core_ids() or []
    shares_with_gpus = min(jobs, len(gpus) or 1)  # the others begin again with the first GPU
    slots = []
    for i in range(jobs):
        slot_cores = tuple(cores[i::jobs])
        slot_gpus = tuple(gpus[i % shares_with_gpus :: jobs])
        slots.append(Slot(slot_cores, slot_gpus))
    return slots


def gpus_of(accelerator: str) -> list[str]:
    """The GPUs that runs may use, as ``CUDA_VISIBLE_DEVICES`` names them: by number, or as the user has set it.

    Args:
        accelerator: the Trainer's; [] unless it is one that takes GPUs.
    """
    if accelerator not in ("auto", "gpu", "cuda"):
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")
    return [str(number) for number in range(torch.cuda.device_count())]


def lock_trial(folder: Path) -> IO[str] | None:
    """Locks a trial's folder for this search and its run; None while another process holds it.

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


@dataclass
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
    """None: nothing to run, the run had already ended well."""
    stopped: str = ""
    """Why the search has stopped it; "" where it has not."""
    stopped_at: float = 0.0
    """When it was stopped, in seconds of the monotonic clock; 0 where it was not."""
    patience_s: float = field(default_factory=lambda: KILL_S)
    """Seconds that it may take to save and end."""
    timed: bool = False
    """Whether the measurement of its student's speed was started."""
    began: float = field(default_factory=time.monotonic)
    """When this process began to watch it, in seconds of the monotonic clock."""
    trial: Any = None
    """Optuna's trial; None of a run that confirms the winner."""
    chosen: dict[str, Any] = field(default_factory=dict)
    """The trial's values by key."""

    @property
    def run(self) -> Path:
        """The run's folder."""
        return folder_of_recipe(self.folder, self.recipe) / "000"

    def begin(self, items: Sequence[str]) -> None:
        """Starts the run, or resumes it from its last checkpoint; nothing if it has ended well.

        A run without a checkpoint begins anew: what it had written is deleted.

        Args:
            items: words of ``kd-train``'s command line; not used where it is resumed.
        """
        self.process = None
        has_student = (self.run / "student.safetensors").is_file()
        if has_student and self.summary().get("status") == "done":
            return
        checkpoint, *_ = newest_whole(self.run / "checkpoints")
        if checkpoint is not None:
            command = [f"resume={self.run}"]
        else:
            remove(self.run.parent)
            command = [*items, f"runs_dir={self.folder}"]
        self._start([*command, "trainer.enable_progress_bar=false"])

    @property
    def has_latency(self) -> bool:
        """Whether the run's student was timed."""
        return bool(read_of_weights(self.run, LATENCY, lambda _: None))  # else it is timed anew

    def time_student(self) -> bool:
        """Starts ``kd-latency`` on the run's student, as :attr:`process`; False if it was measured, or started, before."""
        if self.has_latency or self.timed:
            return False
        self.timed = True
        self._start(
            ["latency", str(self.run), "runtime=torch", "batch=1", "threads=1", "seconds=1"]
        )
        return True

    def _start(self, items: Sequence[str]) -> None:
        """Starts a command on the trial's place; its output goes to :data:`LOG`, its process becomes :attr:`process`."""
        self.process = self.slot.start(items, self.folder / LOG, self.owner)

    def stop(self, why: str) -> None:
        """Makes the run save and end; :attr:`status` kills it when it has not ended after ``patience_s``.

        Args:
            why: kept as :attr:`stopped`; by it the search tells a pruned or slow trial from one that is stopped with
                itself. The first reason stays.
        """
        if not self.stopped:
            self.stopped = why
            self.stopped_at = time.monotonic()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs; 0 where there was nothing to run.

        Reading it acts: it kills a run that was stopped :attr:`patience_s` ago and still runs. So it must be read often.
        """
        if self.process is None:
            return 0
        status = self.process.poll()
        out_of_patience = time.monotonic() > self.stopped_at + self.patience_s
        if status is None and self.stopped and out_of_patience:
            self.process.send_signal(signal.SIGKILL)
        return status

    def summary(self) -> dict[str, Any]:
        """The run's ``summary.json``; {} without one."""
        return mapping_of(self.run / "summary.json")

    def reason(self) -> str:
        """Why the run has failed, in a line: its signal, or the last line of its log."""
        status = self.status or 0
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return reason_in(self.folder / LOG)


class Pool:
    """Runs trials on the places of this machine: until none is left, a signal comes, or the time is up.

    Args:
        slots: the places.
        hours: after which running trials save and :meth:`run` returns; None: as long as it takes.
    """

    def __init__(self, slots: Sequence[Slot], hours: float | None = None) -> None:
        self.free = list(slots)
        self.running: list[TrialRun] = []
        self.stopped_by: int | None = None  # number of the signal
        self._ends = math.inf
        if hours is not None:
            now = time.monotonic()
            self._ends = now + 3600 * hours

    def run(
        self, begin: Callable[[Slot], TrialRun | None], ended: Callable[[TrialRun], bool]
    ) -> None:
        """Fills the places, and looks at each running trial again and again.

        Before it returns or raises, all running trials have saved and ended: no process is left over.

        Args:
            begin: starts the next trial on a place; None: none is left.
            ended: looks at a running trial; whether it has ended, and its place and its lock are free.

        Raises:
            Stopped: a signal has come: SIGTERM or SIGINT, of which the second Ctrl-C has trials killed at once.
        """
        with signals_kept(self._on_signal):
            try:
                while True:
                    self._look(ended)
                    is_late = time.monotonic() > self._ends
                    is_over = is_late or self.stopped_by is not None
                    while self.free and not is_over:
                        job = begin(self.free[0])
                        if job is None:
                            break
                        self.free.pop(0)
                        self.running.append(job)
                    if is_over:
                        self._stop()
                    if not self.running:
                        break
                    time.sleep(POLL_S)
            finally:  # a full disk, too, leaves no process
                self._stop()
                while any(job.status is None for job in self.running):
                    time.sleep(POLL_S)
        if self.stopped_by is not None:
            raise Stopped(self.stopped_by)

    def _look(self, ended: Callable[[TrialRun], bool]) -> None:
        for job in list(self.running):
            if ended(job):
                self.running.remove(job)
                self.free.append(job.slot)
                job.owner.close()

    def _stop(self) -> None:
        for job in self.running:
            job.stop(WITH_SEARCH)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM and SIGINT; it only notes the signal, and the loop in :meth:`run` acts on it."""
        if self.stopped_by is not None and number == signal.SIGINT:
            for job in self.running:
                job.patience_s = 0
        self.stopped_by = self.stopped_by or number


def split_metrics(run: Path, split: str, slot: Slot) -> dict[str, float]:
    """The student's metrics on a split, measured by ``kd-eval`` where its file is not there yet.

    Args:
        run: folder of a finished run.
        split: of its data.
        slot: where it is measured.

    Returns:
        Metrics by name, without the split's name; {} where the evaluation has failed, which is printed. Waits for
        the evaluation's end.
    """
    figures = read_of_weights(run, evaluation(split), on_stderr)
    if not figures:
        log = run.parent.parent / LOG
        process = slot.start(["eval", str(run), f"split={split}"], log)
        while process.poll() is None:
            time.sleep(0.05)
        figures = read_of_weights(run, evaluation(split), on_stderr)
        if not figures:
            print(f"kd-tune: {run} is not measured on {split}: {reason_in(log)}", flush=True)
            return {}
    return figures["student"]


def epoch_values(run: Path, metric: str) -> list[tuple[int, float]]:
    """``(epoch from 1, value)`` of a metric, as far as ``metrics.csv`` holds it.

    [] without the file, or where it can't be read (a torn line, as it is being written).

    Args:
        run: the run's folder.
        metric: a column of the file, ``val/acc1``.
    """
    try:
        with lines_of(run / "metrics.csv", LARGEST_LOG) as lines:
            values = []
            for row in csv.DictReader(lines):
                if row.get(metric) and row.get("epoch"):
                    values.append((int(row["epoch"]) + 1, float(row[metric])))
            return values
    except (OSError, ValueError):
        return []
