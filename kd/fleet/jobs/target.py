"""A place that runs jobs, and what several of them need. A further place is one more file in ``places/``."""

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from kd.errors import UserError
from kd.fleet.jobs.job import Job, JobOptions


class Target(Protocol):
    """A place that runs jobs: ``TARGET`` of a file in ``places/``, whose name is the place's."""

    options: type[JobOptions]
    """What it is given."""

    example: str
    """Of ``instances=``, as this place counts machines."""

    shares_disk: bool
    """Whether its machines have this machine's folders."""

    takes_data: bool
    """Whether it starts machines that prepare data (``data_instances``), too."""

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

    def send(self, job: Job, files: Mapping[str, str]) -> None:
        """Sends the job, and prints how its progress is seen. Torchrun sends nothing: it prints what is to be typed.

        Args:
            job: checked.
            files: what :meth:`write` returned.

        Raises:
            UserError: it was refused; nothing of it is left here or at the place.
        """

    def wait(self, job: Job, files: Mapping[str, str]) -> int:
        """Follows the job that :meth:`send` has sent, where the place can; returns the exit status of ``kd-launch``."""
        return 0

    def follow(self, name: str, runs: str) -> int:
        """Waits for the end of a job that was sent before, and fetches its run.

        Args:
            name: of the job.
            runs: ``runs_dir``.

        Returns:
            The exit status of ``kd-launch``.

        Raises:
            UserError: the place does not do this, or its job can't be followed.
        """
        raise UserError(
            "recipe: must be given (kd-train --list); job= alone follows a job of sagemaker"
        )


@contextmanager
def written(job: Job, files: Mapping[str, str]) -> Iterator[Path]:
    """Writes a job's folder, whose files the user alone can read; where the block fails, the folder is removed.

    Args:
        job: to be sent.
        files: content by name.

    Yields:
        The folder.

    Raises:
        UserError: a folder of this name exists.
        OSError: the disk's errors.
    """
    folder = job.folder
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(f"job: there is a job {folder} already; take another name") from error
    try:
        for name, text in files.items():
            (folder / name).touch(0o600)  # it may hold the secret of the job's machines
            (folder / name).write_text(text, encoding="utf-8")
        yield folder
    except BaseException:
        shutil.rmtree(folder)
        raise


def ask(command: Sequence[str], where: str = "", text: str | None = None) -> str:
    """Runs a program and returns what it prints, without spaces at the ends.

    Args:
        command: program and arguments.
        where: how one gets the program, for the message.
        text: what the program reads.

    Raises:
        UserError: it is not on the PATH, or its exit status is not 0; the message has the last line on its stderr, else on
            its stdout.
    """
    try:
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise UserError(f"no program {command[0]} here ({where})") from error
    if done.returncode == 0:
        return done.stdout.strip()
    reason = f"exit status {done.returncode}"
    lines = (done.stderr or done.stdout).strip().splitlines()
    if lines:
        reason = lines[-1].strip()[:300]
    raise UserError(f"{command[0]} {command[1]}: {reason}")


def command(job: Job) -> str:
    """The arguments of ``kd-train`` as a line for a shell of a machine that shares this one's folders.

    The user's own files and ``runs_dir`` are absolute paths; the run has the job's name.

    Raises:
        UserError: ``spot`` or a channel is given: such a place has neither.
    """
    if job.options.spot:
        raise UserError("spot: is for sagemaker and sky, whose machines have a price by the hour")
    if job.channels:
        raise UserError(
            f"channel:{job.channels[0]}: the machines see this machine's folders; give the folder itself"
        )
    items = job.with_files({name: path.absolute() for name, path in job.files.items()})
    return shlex.join([*items, f"runs_dir={job.runs_dir.absolute()}", f"name={job.name}"])
