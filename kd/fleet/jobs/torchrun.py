"""torchrun: on this machine, or on machines that ``ssh`` reaches and that share this folder with it."""

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from kd.errors import UserError
from kd.fleet.jobs.job import Job
from kd.fleet.jobs.target import Outcome, Tail, Target, command, need, refuse_spot_and_channels
from kd.run.own_keys import whole_number
from kd.storage.elsewhere import text_of

POLL_S = 0.5
"""Seconds between two looks at the log and the processes."""
SCRIPT = """\
#!/usr/bin/env bash
# {name}: {what}
cd {here} || exit 1
export PYTHONSAFEPATH=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1{data_nodes}
exec timeout --foreground --signal=TERM --kill-after=300 {seconds} \\
  {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node={processes} --max-restarts=3 \\
  --rdzv-id={name} --rdzv-backend=c10d --rdzv-endpoint={endpoint} -m kd.cli {command}
"""
DATA_SCRIPT = """\
#!/usr/bin/env bash
# {name}: on each machine that prepares data
cd {here} || exit 1
export PYTHONSAFEPATH=1 KD_ROLE=data MASTER_ADDR={head} RAY_AUTH_TOKEN={secret}
exec {python} -m kd.cli {command}
"""


class Torchrun(Target):
    """One ``torchrun`` on each machine: this one, or those that ``ssh`` reaches."""

    example = "1xcpu:2"
    keys: Mapping[str, str] = {
        "hosts": "machines that train, as ssh knows them; none: this one, without data_hosts",
        "data_hosts": "machines that prepare data",
        "port": "of the first machine, where they meet (29500)",
    }

    def write(self, job: Job) -> dict[str, str]:
        """The text of ``train.sh``, the same for each machine that trains, and of ``data.sh`` where some prepare data.

        Raises:
            UserError: ``spot``, a channel, or wrong ``hosts`` or ``data_hosts``.
        """
        refuse_spot_and_channels(job, "torchrun's machines")
        hosts, data_hosts = _hosts(job)
        head = hosts[0] if hosts else "localhost"
        shared = {
            "name": job.name,
            "here": shlex.quote(str(Path.cwd())),
            "python": shlex.quote(sys.executable),
            "command": command(job),
        }
        where = "on this machine"
        if hosts:
            where = f"on each of {', '.join(hosts)}"
        port = 0
        if hosts:
            port = whole_number(job.options, "port", 29500, high=65535)
        tier = ""
        if data_hosts:
            tier = f" KD_DATA_NODES={len(data_hosts)} RAY_AUTH_TOKEN={job.secret}"
        files = {
            "train.sh": SCRIPT.format(
                **shared,
                what=where,
                nodes=job.machines.count,
                processes=job.processes or "gpu",
                endpoint=shlex.quote(f"{head}:{port}"),
                data_nodes=tier,
                seconds=job.seconds,
            )
        }
        if data_hosts:
            files["data.sh"] = DATA_SCRIPT.format(
                **shared, head=shlex.quote(head), secret=job.secret
            )
        return files

    def check(self, job: Job) -> None:
        """Checks that there is an ``ssh``, where machines are named."""
        if _hosts(job)[0]:
            need("ssh", "OpenSSH")

    def submit(self, job: Job, folder: Path) -> str:
        """Starts the scripts in sessions of their own; they continue when this process ends.

        Returns:
            The ids of the processes on this machine, with commas between, one for each machine (for another machine
            its ssh): training machines in order, then data machines; each number is that of its ``log.N``.
        """
        hosts, data_hosts = _hosts(job)
        this_machine = ""
        places = [(host, "train.sh") for host in hosts or [this_machine]]
        places += [(host, "data.sh") for host in data_hosts]
        started = []
        for number, (host, script_name) in enumerate(places):
            shell = "bash"
            if host:
                shell = f"ssh -o BatchMode=yes -- {shlex.quote(host)} bash -s <"
            script = shlex.quote(str(folder / script_name))
            log = shlex.quote(str(folder / f"log.{number}"))
            status = shlex.quote(str(folder / f"status.{number}"))
            line = f"{shell} {script} >{log} 2>&1; echo $? >{status}"
            process = subprocess.Popen(
                ["bash", "-c", line], start_new_session=True, stdin=subprocess.DEVNULL
            )
            started.append(str(process.pid))
        return ",".join(started)

    def follow(self, handle: str, folder: Path) -> Outcome:
        """Prints the first machine's log until all scripts have ended; the first status other than 0 is the outcome.

        Args:
            handle: what :meth:`submit` returned: ids of processes of this machine.
            folder: of the job here, with each machine's ``log.N`` and ``status.N``.
        """
        pids = [int(pid) for pid in handle.split(",")]
        log = Tail(folder / "log.0")
        while any(_runs(pid) for pid in pids):
            log.print_new()
            time.sleep(POLL_S)
        log.print_new(last=True)
        for number in range(len(pids)):
            status = _status(folder / f"status.{number}")
            if status != "0":
                text = f"machine {number} ended with status {status}; {folder / f'log.{number}'}"
                return Outcome(False, text)
        return Outcome(True, "done")


def _hosts(job: Job) -> tuple[list[str], list[str]]:
    """The names in ``hosts`` and in ``data_hosts``: machines that train ([]: this one), and that prepare data.

    Raises:
        UserError: not as many names as ``instances`` and ``data_instances`` say, or ``data_hosts`` without ``hosts``, by
            whose first name their machines join.
    """
    hosts = _names(job, "hosts")
    data_hosts = _names(job, "data_hosts")
    this_machine_alone = not hosts and job.machines.count == 1
    if not this_machine_alone:
        _check_number("hosts", hosts, job.machines.count)
    data_count = 0
    if job.data_machines is not None:
        data_count = job.data_machines.count
    _check_number("data_hosts", data_hosts, data_count)
    if data_hosts and not hosts:
        raise UserError(
            "hosts: must name the machine that trains, as those in data_hosts reach it (hosts=NAME)"
        )
    return hosts, data_hosts


def _names(job: Job, key: str) -> list[str]:
    return [name for name in job.options.get(key, "").split(",") if name]


def _check_number(key: str, names: list[str], count: int) -> None:
    if len(names) != count:
        raise UserError(f"{key}: must name {count} machine(s), got {', '.join(names) or 'none'}")


def _runs(pid: int) -> bool:
    """Whether a process of this machine runs; a child that has ended, and that nobody has waited for, does not."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _status(file: Path) -> str:
    """The exit status in the file that a script's shell writes at its end; in words where the shell was killed."""
    if file.is_file():
        return text_of(file).strip()
    return "unknown (killed)"
