"""SLURM: one batch script, whose job goes back into the queue when it is pre-empted."""

import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated

from kd.config.kinds import Range
from kd.errors import UserError
from kd.fleet.jobs.job import Job, JobOptions, Machines
from kd.fleet.jobs.target import Target, ask, command, written

CORES = 8
"""Cores of each process on a machine with GPUs."""
SCRIPT = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
{train}
#SBATCH --time={minutes}
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={log}
{data}set -uo pipefail
cd {here} || exit 1
{setup}export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{cores}}}
{start_data}srun --kill-on-bad-exit=1 --cpus-per-task={cores} {srun}{program} {command}
status=$?
{end_data}if [ "$status" -eq 143 ]; then
  echo "kd-train saved on SIGTERM: the job goes back into the queue"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
START_DATA = """\
export RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)
KD_ROLE=data MASTER_ADDR=$head srun --cpus-per-task={cores} --het-group=1 {srun}{program} {command} &
data=$!
export KD_DATA_NODES={count} MASTER_ADDR=$head
"""
END_DATA = 'kill "$data" 2>/dev/null\nwait "$data"\n'


class SlurmOptions(JobOptions):
    """What ``kd-launch slurm`` is given."""

    sbatch: dict[str, str] = field(default_factory=dict)
    """Any option of sbatch: sbatch.partition=gpu, sbatch.account=vision; sbatch.exclusive= for one without a value."""
    setup: str = ""
    """A shell command before the run ('module load cuda/12')."""
    cpus_per_task: Annotated[int, Range(">= 1 and <= 10000")] | None = None
    """Cores of each process; default: 8, of cpu:N machines N, dealt to their processes."""


class Slurm(Target):
    """A batch job of SLURM; machines that prepare data are the second part of a heterogeneous job.

    ``hours`` is the time limit of one start. Five minutes before it, and when the job is pre-empted, the run saves and
    the job goes back into the queue; when it starts again, the run resumes.
    """

    example = "4xgpu:8"
    shares_disk = True
    takes_data = True
    options = SlurmOptions

    def write(self, job: Job) -> dict[str, str]:
        """``train.sbatch``, the script, as text by its name. Each start of it continues the run under the job's name.

        Raises:
            UserError: ``spot``, a channel, or a key with a wrong value.
        """
        # the same for the machines that train and those that prepare data
        shared = {"program": "kd-train", "command": command(job)}
        image = job.options.image
        container = f"--container-image={shlex.quote(image)} " if image else ""
        if not image:
            shared["program"] = shlex.quote(
                shutil.which("kd-train") or f"{sys.prefix}/bin/kd-train"
            )

        # the second part of a heterogeneous job, where machines prepare data
        data_machines = job.data_machines
        train_srun = container
        tier = {"data": "", "start_data": "", "end_data": ""}
        if data_machines:
            train_srun = f"--het-group=0 {container}"
            resources, cores = _resources(job, "data_instances", data_machines, 1)
            start = START_DATA.format(
                **shared, srun=container, cores=cores, count=data_machines.count
            )
            tier = {
                "data": f"#SBATCH hetjob\n{resources}\n",
                "start_data": start,
                "end_data": END_DATA,
            }

        train, cores = _resources(job, "instances", job.machines, job.processes or 1)
        setup = job.options.setup
        text = SCRIPT.format(
            **shared,
            **tier,
            name=job.name,
            train=train,
            cores=cores,  # srun takes them from its own command line alone (SLURM 22.05 and later)
            minutes=max(1, round(60 * job.hours)),
            log=shlex.quote(str(job.folder.absolute() / "log")),
            here=shlex.quote(str(Path.cwd())),
            setup=f"{setup}\n" if setup else "",
            srun=train_srun,
        )
        return {"train.sbatch": text}

    def check(self, job: Job) -> None:
        """Has SLURM validate the script (``sbatch --test-only``); its refusal is a user's error."""
        script = self.write(job)["train.sbatch"]
        ask(["sbatch", "--test-only"], "on a machine of the cluster", script)

    def send(self, job: Job, files: Mapping[str, str]) -> None:
        """Submits the script with ``sbatch``; prints the job's number, and where its log and its run will be."""
        with written(job, files) as folder:
            answer = ask(["sbatch", "--parsable", str(folder / "train.sbatch")])
        number = answer.split(";")[0]
        print(
            f"kd-launch: sent as {number}; squeue --job={number} shows its state, tail -F {folder / 'log'} its log; "
            f"run folder: {folder.parents[1] / job.name}",
            flush=True,
        )


def _resources(job: Job, key: str, machines: Machines, processes: int) -> tuple[str, int]:
    """The ``#SBATCH`` lines of one part of the job: nodes, processes, cores, GPUs and the options that the user gives; and
    the cores of each process.

    Cores of each process: ``cpus_per_task``, else :data:`CORES` on machines with GPUs, else the machine's cores dealt
    to its processes. The user's options are the same for the machines that train and those that prepare data.

    Args:
        job: its options.
        key: of the machines, for messages.
        machines: nodes.
        processes: on each node.

    Raises:
        UserError: an instance type in place of parts, a wrong ``cpus_per_task``, or a ``sbatch.NAME`` that is no option's
            name or that the script sets itself.
    """
    if machines.parts is None:
        raise UserError(
            f"{key}: must name each machine's parts (4xgpu:8, 2xa100:8, 1xcpu:16), got '{machines.type}'"
        )
    kind, count = machines.parts
    usual = max(1, count // processes) if kind == "cpu" else CORES
    cores = job.options.cpus_per_task or usual
    lines = [
        f"--nodes={machines.count}",
        f"--ntasks-per-node={processes}",
        f"--cpus-per-task={cores}",
    ]
    if kind != "cpu":
        lines.append(f"--gpus-per-node={'' if kind == 'gpu' else kind + ':'}{count}")
    for key, value in job.options.sbatch.items():
        name = key.replace("_", "-")  # as the command line has each key
        # what the script sets itself is found by its text
        if f"--{name}" in f"{SCRIPT}{lines}" or not re.fullmatch("[a-z][a-z-]*", name):
            raise UserError(
                f"sbatch.{name}: {name} is not an option of sbatch, or one of the job's own keys sets it"
            )
        lines.append(f"--{name}={shlex.quote(value)}" if value else f"--{name}")
    return "\n".join(f"#SBATCH {line}" for line in lines), cores


TARGET = Slurm()
