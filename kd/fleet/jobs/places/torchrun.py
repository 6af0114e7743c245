"""torchrun: a line for each machine, all of which share this folder; the line of this machine is run."""

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from kd.config.kinds import Range
from kd.errors import UserError
from kd.fleet.jobs.job import Job, JobOptions
from kd.fleet.jobs.target import Target, command

HERE = "this machine"
"""Name of the line where no machine is named."""
TRAIN = (
    "cd {here} && PYTHONSAFEPATH=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
    "timeout --foreground --signal=TERM --kill-after=300 {seconds} {python} -m torch.distributed.run "
    "--nnodes={nodes} --nproc-per-node={processes} --max-restarts=3 --rdzv-id={name} --rdzv-backend=c10d "
    "--rdzv-endpoint={endpoint} -m kd.cli {command}"
)


class TorchrunOptions(JobOptions):
    """What ``kd-launch torchrun`` is given."""

    hosts: str = ""
    """Names of the machines that train, with commas; default: this one."""
    port: Annotated[int, Range(">= 1 and < 65536")] = 29500
    """Of the first machine, where they meet."""


class Torchrun(Target):
    """One ``torchrun`` on each machine; what runs on other machines is typed there."""

    example = "1xcpu:2"
    shares_disk = True
    takes_data = False
    options = TorchrunOptions

    def write(self, job: Job) -> dict[str, str]:
        """The line of each machine by its name.

        Raises:
            UserError: ``spot``, a channel, or wrong ``hosts``.
        """
        hosts = _names(job)
        head = "localhost"
        port = 0  # any free one
        if hosts:
            head = hosts[0]
            port = job.options.port
        train = TRAIN.format(
            here=shlex.quote(str(Path.cwd())),
            python=shlex.quote(sys.executable),
            command=command(job),
            seconds=job.seconds,
            nodes=job.machines.count,
            processes=job.processes or "gpu",
            name=job.name,
            endpoint=shlex.quote(f"{head}:{port}"),
        )
        return dict.fromkeys(hosts or [HERE], f"{train}\n")

    def check(self, job: Job) -> None:
        """Nothing is needed but torch."""

    def send(self, job: Job, files: Mapping[str, str]) -> None:
        """Prints each machine's line."""
        for host, lines in files.items():
            print(f"# {host}\n{lines}", end="", flush=True)

    def wait(self, job: Job, files: Mapping[str, str]) -> int:
        """Replaces this process by that of this machine's line: then it does not return. Where no line is this machine's,
        says so and returns 0.
        """
        here = None
        for host, line in files.items():
            if here is None and (host == HERE or _is_here(host)):
                here = line
        if here is None:
            print("kd-launch: none of these is this machine: type each machine's line there")
            return 0
        os.execvp("bash", ["bash", "-c", here])


def _names(job: Job) -> list[str]:
    """The names in ``hosts``, with commas between; a UserError unless there are as many as machines. A single machine needs
    no name.
    """
    names = [name for name in job.options.hosts.split(",") if name]
    if not names and job.machines.count == 1:
        return []
    if len(names) != job.machines.count:
        given = ", ".join(names) or "none"
        raise UserError(f"hosts: must name {job.machines.count} machine(s), got {given}")
    return names


def _is_here(host: str) -> bool:
    """Whether a name is resolved to an address of this machine: one that a socket can be bound to."""
    try:
        with socket.create_server((host, 0)):
            return True
    except OSError:
        return False


TARGET = Torchrun()
