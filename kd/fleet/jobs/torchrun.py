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
from kd.fleet.jobs.target import Outcome, Tail, Target, command, need, refuse_spot
from kd.run.own_keys import whole_number
from kd.storage.elsewhere import text_of

POLL_S = 0.5
SCRIPT = """\
#!/usr/bin/env bash
# {name}: {what}
cd {here} || exit 1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1{data_nodes}
exec timeout --foreground --signal=TERM --kill-after=300 {seconds} \\
  {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node={processes} --max-restarts=3 \\
  --rdzv-id={name} --rdzv-backend=c10d --rdzv-endpoint={endpoint} -m kd.cli {command}
"""
DATA_SCRIPT = """\
#!/usr/bin/env bash
# {name}: on each machine that prepares data
cd {here} || exit 1
export KD_ROLE=data MASTER_ADDR={head} RAY_AUTH_TOKEN={secret}
exec {python} -m kd.cli {command}
"""


class Torchrun(Target):
    """One ``torchrun`` on each machine: this one, or those that ``ssh`` reaches."""

    keys: Mapping[str, str] = {
        "hosts": "machines that train, as ssh knows them; none: this one",
        "data_hosts": "machines that prepare data",
        "port": "of the first machine, where they meet (29500)",
    }

    def write(self, job: Job) -> dict[str, str]:
        """``train.sh``, the same for each machine that trains, and ``data.sh``."""
        refuse_spot(job, "torchrun's machines")
        hosts, data_hosts = _hosts(job)
        head = hosts[0] if hosts else "localhost"
        shared = {
            "name": job.name,
            "here": shlex.quote(str(Path.cwd())),
            "python": shlex.quote(sys.executable),
            "command": command(job),
        }
        where = f"on each of {', '.join(hosts)}" if hosts else "on this machine"
        port = whole_number(job.own, "port", 29500, high=65535) if hosts else 0
        tier = f" KD_DATA_NODES={len(data_hosts)} RAY_AUTH_TOKEN={job.secret}" if data_hosts else ""
        files = {
            "train.sh": SCRIPT.format(
                **shared,
                what=where,
                nodes=job.machines.count,
                processes=job.processes or "gpu",
                endpoint=shlex.quote(f"{head}:{port}"),
                data_nodes=tier,
                seconds=round(3600 * job.hours),
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
            The process ids, with commas between: of the training machines in order, then of the data machines.
        """
        hosts, data_hosts = _hosts(job)
        places = [(host, "train.sh") for host in hosts or [""]] + [
            (host, "data.sh") for host in data_hosts
        ]
        started = []
        for number, (host, script) in enumerate(places):
            start = f"ssh -o BatchMode=yes -- {shlex.quote(host)} bash -s <" if host else "bash"
            names = (script, f"log.{number}", f"status.{number}")
            script, log, status = (shlex.quote(str(folder / name)) for name in names)
            line = f"{start} {script} >{log} 2>&1; echo $? >{status}"
            process = subprocess.Popen(
                ["bash", "-c", line], start_new_session=True, stdin=subprocess.DEVNULL
            )
            started.append(str(process.pid))
        return ",".join(started)

    def follow(self, handle: str, folder: Path) -> Outcome:
        """Prints the first machine's log until all scripts have ended; the first status other than 0 is the outcome."""
        pids, log = [int(pid) for pid in handle.split(",")], Tail(folder / "log.0")
        while any(map(_lives, pids)):
            log.print_new()
            time.sleep(POLL_S)
        log.print_new()
        statuses = [_status(folder / f"status.{number}") for number in range(len(pids))]
        failed = next((number for number, status in enumerate(statuses) if status != "0"), None)
        if failed is None:
            return Outcome(True, "done")
        return Outcome(
            False,
            f"machine {failed} ended with status {statuses[failed]}; {folder / f'log.{failed}'}",
        )


def _hosts(job: Job) -> tuple[list[str], list[str]]:
    hosts, data = (
        [h for h in job.own.get(key, "").split(",") if h] for key in ("hosts", "data_hosts")
    )
    for key, found, group in (
        ("hosts", hosts, job.machines),
        ("data_hosts", data, job.data_machines),
    ):
        wanted = group.count if group else 0
        if len(found) != wanted and (found or wanted != 1 or key == "data_hosts"):
            raise UserError(
                f"{key}: must name {wanted} machine(s), got {', '.join(found) or 'none'}"
            )
    return hosts, data


def _lives(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _status(file: Path) -> str:
    return text_of(file).strip() if file.is_file() else "unknown (killed)"
