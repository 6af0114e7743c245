"""What a place for jobs can do, and the programs by which places are reached (``sbatch``, ``sky``, ``ssh``)."""

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from kd.errors import UserError
from kd.fleet.jobs.job import Job
from kd.storage.elsewhere import LARGEST_DATA, open_regular

Answer = TypeVar("Answer")

PATIENCE_S = 600.0
"""Seconds that a place which runs a job may be out of reach before it is followed no more."""
ANSWER_S = 120.0
"""Seconds that a program may take to look at a job."""
FINAL = re.compile(r"\((ValidationException|\w*AccessDenied\w*)\)")
"""In what AWS says where another try would change nothing."""


@dataclass(frozen=True)
class Outcome:
    """How a job has ended."""

    done: bool
    """Whether it has a result: a run trained to its end, a search's best trial, an endpoint in service. False: failed or
    stopped."""
    text: str
    """How it has ended, in one line: the place's state and its reason."""
    hours: float | None = None
    """Hours that it ran, where the place reports them."""
    billed_hours: float | None = None
    """Hours that are paid for, where the place reports them."""
    where: str = ""
    """Where its results are, in the place's own terms, for :meth:`Target.fetch`; "" where it left none, or shares this
    machine's folders."""


def followed(name: str, poll: Callable[[], tuple[str, Outcome | None]], seconds: float) -> Outcome:
    """Polls a job until it has an outcome; prints each new state. Blocks for hours; Ctrl-C raises out of it.

    Args:
        name: of the job, for the lines.
        poll: gives the state in one line, and the outcome once the job has ended.
        seconds: between two polls.

    Raises:
        UserError: as :func:`patiently`.
    """
    last = ""
    while True:
        state, outcome = patiently(name, poll, seconds)
        if state != last:
            print(f"kd-launch: {name}: {state}", flush=True)
            last = state
        if outcome is not None:
            return outcome
        time.sleep(seconds)


def patiently(name: str, attempt: Callable[[], Answer], seconds: float) -> Answer:
    """What a place answers; where it can't be reached, it is tried again for :data:`PATIENCE_S`.

    A network fails for a moment, a cluster's server restarts: the job runs on meanwhile. The first failure is printed.

    Args:
        name: of the job, for the line.
        attempt: asks the place; raises a UserError where that fails.
        seconds: between two attempts.

    Raises:
        UserError: the last attempt's; or the first one that :data:`FINAL` recognises.
    """
    failed_at: float | None = None
    while True:
        try:
            return attempt()
        except UserError as error:
            now = time.monotonic()
            is_first = failed_at is None
            failed_at = now if failed_at is None else failed_at
            if now - failed_at >= PATIENCE_S or FINAL.search(str(error)):
                raise
            if is_first:
                again = f"tried again for up to {PATIENCE_S / 60:g} minutes"
                print(f"kd-launch: {name}: {error}; {again}", file=sys.stderr, flush=True)
        time.sleep(seconds)


class Target(Protocol):
    """A place that runs jobs: SageMaker, SkyPilot, SLURM, torchrun. What one writes to add another."""

    keys: Mapping[str, str]
    """Its own keys -> what they are."""

    example: str
    """Of ``instances=``, as this place counts machines."""

    def write(self, job: Job) -> dict[str, str]:
        """File name -> text of what will be sent, exactly; the first one is the request itself. Writes no file.

        Raises:
            UserError: a key with a value that the place does not take. For a missing one the text has a placeholder, and
                ``job.missing`` an entry.
        """

    def check(self, job: Job) -> None:
        """Checks credentials, the bucket and the programs of the place. Changes nothing.

        Raises:
            UserError: the job could not be sent.
        """

    def submit(self, job: Job, folder: Path) -> str:
        """Sends the files in ``folder``, those of :meth:`write`; returns the handle by which the place finds the job.

        The handle is one line; ``job.json`` keeps it.

        Raises:
            UserError: it was refused; nothing of it is left at the place.
        """

    def follow(self, handle: str, folder: Path) -> Outcome:
        """Waits for the job's end and prints its progress.

        Args:
            handle: what :meth:`submit` returned.
            folder: of the job here.

        Returns:
            How the job has ended.

        Raises:
            UserError: the place can't be reached; the job continues, and can be followed again.
        """

    def fetch(self, outcome: Outcome, into: Path) -> Path | None:
        """Brings the run's folder to ``into``; called after a job that is done, where ``into`` does not exist.

        This one is for places that share this machine's folders, where the run itself makes ``into``: it brings nothing.

        Args:
            outcome: what :meth:`follow` returned.
            into: the run's folder here.

        Returns:
            ``into``; None where the job has left no folder.

        Raises:
            UserError: the folder can't be fetched.
        """
        return into if into.is_dir() else None


def need(program: str, where: str) -> None:
    """Checks that a program is on the PATH.

    Args:
        program: its name.
        where: how one gets it, for the message.

    Raises:
        UserError: it is not.
    """
    if shutil.which(program) is None:
        raise UserError(f"no program {program} here ({where})")


def ask(command: Sequence[str], text: str | None = None, timeout_s: float | None = None) -> str:
    """Runs a program and returns what it prints.

    Args:
        command: program and arguments.
        text: its standard input; None: this process's.
        timeout_s: after so long it is ended; None: it may take any time.

    Returns:
        Its standard output, without spaces at the ends.

    Raises:
        UserError: its exit status is not 0 (the message has the last line on its stderr, else on its stdout), or it took
            too long.
    """
    try:
        done = subprocess.run(
            command, input=text, text=True, capture_output=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{command[0]} {command[1]}: no answer within {timeout_s:g} s") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        if lines:
            reason = lines[-1].strip()[:300]
        else:
            reason = f"exit status {done.returncode}"
        raise UserError(f"{command[0]} {command[1]}: {reason}")
    return done.stdout.strip()


class Tail:
    """New lines of a log file, printed as they come.

    Args:
        file: it may not be there yet.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read = 0  # bytes that were printed

    def print_new(self, last: bool = False) -> None:
        """Prints what has come since the last call, in whole lines.

        Args:
            last: nothing comes any more: a line that its process could not end is printed too.
        """
        if not self._file.is_file():
            return
        with open_regular(self._file, LARGEST_DATA) as file:
            file.seek(self._read)
            text = file.read()
        end = len(text) if last else text.rfind(b"\n") + 1
        self._read += end
        if end:
            lines = text[:end].decode(errors="replace")
            print(lines, end="", flush=True)


def command(job: Job) -> str:
    """The arguments of ``kd-train`` as a line for a shell of a machine that shares this one's folders.

    The user's own files and ``runs_dir`` are absolute paths; the run has the job's name.
    """
    items = job.with_files({name: path.absolute() for name, path in job.files.items()})
    return shlex.join([*items, f"runs_dir={job.runs_dir.absolute()}", f"name={job.name}"])


def refuse_spot_and_channels(job: Job, who: str) -> None:
    """Refuses ``spot`` and channels at a place that has neither; ``who`` is the place in the message.

    Raises:
        UserError: one of them is given.
    """
    if job.spot:
        raise UserError(
            f"spot: {who} have no price by the hour; spot=true is for sagemaker and sky"
        )
    if job.channels:
        raise UserError(
            f"channel:{job.channels[0]}: {who} see this machine's folders; give the folder itself"
        )
