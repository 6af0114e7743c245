"""torchrun: a line for each machine, all of which share this folder; the line of this machine is run."""

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import psutil

from kd.config.kinds import Range
from kd.errors import UserError
from kd.fleet.jobs.job import Job
from kd.fleet.jobs.target import Target, command
from kd.run.options import option

HERE = "this machine"
"""Name of the line where no machine is named."""
TRAIN = (
    "cd {here} && PYTHONSAFEPATH=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {tier}"
    "timeout --foreground --signal=TERM --kill-after=300 {seconds} {python} -m torch.distributed.run "
    "--nnodes={nodes} --nproc-per-node={processes} --max-restarts=3 --rdzv-id={name} --rdzv-backend=c10d "
    "--rdzv-endpoint={endpoint} -m kd.cli {command}"
)
DATA = "cd {here} && PYTHONSAFEPATH=1 KD_ROLE=data MASTER_ADDR={head} {python} -m kd.cli {command}"


class Torchrun(Target):
    """One ``torchrun`` on each machine; what runs on other machines is typed there."""

    also = ("local", "ssh")
    example = "1xcpu:2"
    shares_disk = True
    keys: Mapping[str, str] = {
        "hosts": "names of the machines that train; none: this one, without data_hosts",
        "data_hosts": "names of the machines that prepare data",
        "port": "of the first machine, where they meet (29500)",
    }

    def write(self, job: Job) -> dict[str, str]:
        """The line of each machine by its name; with ``data_hosts`` the line that sets the shared secret is before it.

        Raises:
            UserError: ``spot``, a channel, or wrong ``hosts`` or ``data_hosts``.
        """
        hosts = _names(job, "hosts", job.machines.count)
        data_hosts = _names(job, "data_hosts", job.data_machines.count if job.data_machines else 0)
        if data_hosts and not hosts:
            raise UserError(
                "hosts: must name the machine that trains, as those in data_hosts reach it (hosts=NAME)"
            )
        head = hosts[0] if hosts else "localhost"
        port = (
            option(job.options, "port", Annotated[int, Range(">= 1 and < 65536")], 29500)
            if hosts
            else 0
        )
        shared = {
            "here": shlex.quote(str(Path.cwd())),
            "python": shlex.quote(sys.executable),
            "command": command(job),
            "head": shlex.quote(head),
        }
        train = TRAIN.format(
            **shared,
            tier=f"KD_DATA_NODES={len(data_hosts)} " if data_hosts else "",
            seconds=job.seconds,
            nodes=job.machines.count,
            processes=job.processes or "gpu",
            name=job.name,
            endpoint=shlex.quote(f"{head}:{port}"),
        )
        secret = f"export RAY_AUTH_TOKEN={job.secret}\n" if data_hosts else ""
        lines = dict.fromkeys(hosts or [HERE], f"{secret}{train}\n")
        return lines | dict.fromkeys(data_hosts, f"{secret}{DATA.format(**shared)}\n")

    def check(self, job: Job) -> None:
        """Nothing is needed but torch."""

    def send(self, job: Job, files: Mapping[str, str]) -> None:
        """Prints each machine's lines."""
        for host, lines in files.items():
            print(f"# {host}\n{lines}", end="", flush=True)

    def wait(self, job: Job, files: Mapping[str, str]) -> int:
        """This process becomes that of this machine's line, where it is among them.

        Args:
            job: its secret is given by the environment: other users see a process's arguments.
            files: the lines by machine.
        """
        here = None
        for host, lines in files.items():
            if here is None and (host == HERE or _is_here(host)):
                here = lines
        if here is None:
            print("kd-launch: none of these is this machine: type each machine's lines there")
            return 0
        environment = dict(os.environ)
        if job.secret:
            environment["RAY_AUTH_TOKEN"] = job.secret
        own = here.splitlines()[-1]
        os.execvpe("bash", ["bash", "-c", own], environment)


def _names(job: Job, key: str, count: int) -> list[str]:
    """The names in an option, with commas between; a UserError unless there are ``count`` of them.

    One machine that trains needs no name.
    """
    text = job.options.get(key, "")
    names = [name for name in text.split(",") if name]
    if not names and key == "hosts" and count == 1:
        return []
    if len(names) != count:
        given = ", ".join(names) or "none"
        raise UserError(f"{key}: must name {count} machine(s), got {given}")
    return names


def _is_here(host: str) -> bool:
    """Whether a name is this machine's, or is resolved to an address of it."""
    if host == socket.gethostname():
        return True
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False
    cards = psutil.net_if_addrs().values()
    own = [of_card.address for addresses in cards for of_card in addresses]
    return address in own
