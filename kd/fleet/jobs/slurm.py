"""SLURM: one batch script, whose job goes back into the queue when it is pre-empted."""

import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kd.errors import UserError
from kd.fleet.jobs.job import Job, Machines
from kd.fleet.jobs.target import (
    ANSWER_S,
    Outcome,
    Tail,
    Target,
    ask,
    command,
    followed,
    need,
    refuse_spot_and_channels,
)
from kd.run.own_keys import whole_number

POLL_S = 10
"""Seconds between two questions for the job's state."""
OPTIONS = ("partition", "account", "qos", "mem", "constraint")
"""Keys of the job that are options of ``sbatch`` by the same name."""
LASTING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "RESIZING", "SIGNALING", "STOPPED",
           "STAGE_OUT", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")  # fmt: skip
"""States of a job that has not ended; one that is held stays in the queue until somebody releases it."""
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
{setup}export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
{start_data}srun --kill-on-bad-exit=1 {srun}{program} {command}
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
KD_ROLE=data MASTER_ADDR=$head srun --het-group=1 {srun}{program} {command} &
data=$!
export KD_DATA_NODES={count} MASTER_ADDR=$head
"""
END_DATA = 'kill "$data" 2>/dev/null\nwait "$data"\n'


class Slurm(Target):
    """A batch job of SLURM; machines that prepare data are the second part of a heterogeneous job.

    ``hours`` is the time limit of one start. Five minutes before it, and when the job is pre-empted, the run saves and
    the job goes back into the queue; when it starts again, the run resumes.
    """

    example = "4xgpu:8"
    keys: Mapping[str, str] = {
        "partition": "of the cluster",
        "account": "that pays",
        "qos": "quality of service",
        "mem": "memory of each machine (64G)",
        "constraint": "features that the machines must have",
        "sbatch.NAME": "any other option of sbatch (sbatch.exclude=node7; sbatch.exclusive= for one without a value)",
        "setup": "a shell command before the run ('module load cuda/12')",
        "cpus_per_task": f"cores of each process ({CORES}; of cpu:N machines N, dealt to their processes)",
    }

    def write(self, job: Job) -> dict[str, str]:
        """The text of ``train.sbatch``, the script. Each start of it continues the run under the job's name.

        Raises:
            UserError: ``spot``, a channel, or a key with a wrong value.
        """
        refuse_spot_and_channels(job, "SLURM's machines")
        # the same for the machines that train and those that prepare data
        if job.image:
            program = "kd-train"
            container = f"--container-image={shlex.quote(job.image)} "
        else:
            program = shlex.quote(shutil.which("kd-train") or f"{sys.prefix}/bin/kd-train")
            container = ""
        arguments = command(job)

        train_resources = _resources(job, "instances", job.machines, job.processes or 1)

        # the second part of a heterogeneous job, where machines prepare data
        train_srun = container
        data_resources = start_data = end_data = ""
        data = job.data_machines
        if data:
            train_srun = f"--het-group=0 {container}"
            data_resources = f"#SBATCH hetjob\n{_resources(job, 'data_instances', data, 1)}\n"
            start_data = START_DATA.format(
                program=program, command=arguments, srun=container, count=data.count
            )
            end_data = END_DATA

        setup = job.options.get("setup")
        log = job.folder.absolute() / "log"
        text = SCRIPT.format(
            name=job.name,
            train=train_resources,
            minutes=max(1, round(60 * job.hours)),
            log=shlex.quote(str(log)),
            here=shlex.quote(str(Path.cwd())),
            setup=f"{setup}\n" if setup else "",
            program=program,
            command=arguments,
            srun=train_srun,
            data=data_resources,
            start_data=start_data,
            end_data=end_data,
        )
        return {"train.sbatch": text}

    def check(self, job: Job) -> None:
        """Has SLURM validate the script (``sbatch --test-only``); its refusal is a user's error."""
        need("sbatch", "on a machine of the cluster")
        with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
            file.write(self.write(job)["train.sbatch"])
            file.flush()
            ask(["sbatch", "--test-only", file.name])

    def submit(self, job: Job, folder: Path) -> str:
        """``sbatch``; returns the job's number."""
        return ask(["sbatch", "--parsable", str(folder / "train.sbatch")]).split(";")[0]

    def follow(self, handle: str, folder: Path) -> Outcome:
        """Prints states and new lines of the log until the job has left the queue.

        Args:
            handle: the job's id.
            folder: of the job here, where its log is.
        """
        log = Tail(folder / "log")

        def poll() -> tuple[str, Outcome | None]:
            """One look at the job, whose new lines are printed: its state, and the outcome once it has left the
            queue.
            """
            state, elapsed = _state(handle)
            log.print_new(last=state not in LASTING)
            if state in LASTING:
                return state, None
            return state, Outcome(state == "COMPLETED", f"{state}; {folder / 'log'}", elapsed)

        return followed(f"job {handle}", poll, POLL_S)


def _resources(job: Job, key: str, machines: Machines, processes: int) -> str:
    """The ``#SBATCH`` lines of one part of the job: nodes, processes, cores, GPUs and the options that the user gives.

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
    usual = CORES
    if kind == "cpu":
        usual = max(1, count // processes)
    cores = whole_number(job.options, "cpus_per_task", usual, high=10_000)
    lines = [
        f"--nodes={machines.count}",
        f"--ntasks-per-node={processes}",
        f"--cpus-per-task={cores}",
    ]
    if kind != "cpu":
        lines.append(f"--gpus-per-node={'' if kind == 'gpu' else kind + ':'}{count}")
    lines += [
        f"--{name}={shlex.quote(job.options[name])}" for name in OPTIONS if name in job.options
    ]
    for option, value in job.options.items():
        name = option.removeprefix("sbatch.")
        if name == option:
            continue
        # what the script sets itself is found by its text
        if f"--{name}" in f"{SCRIPT}{lines}" or not re.fullmatch("[a-z][a-z-]*", name):
            raise UserError(
                f"{option}: {name} is not an option of sbatch, or one of the job's own keys sets it"
            )
        lines.append(f"--{name}={shlex.quote(value)}" if value else f"--{name}")
    return "\n".join(f"#SBATCH {line}" for line in lines)


def _state(job_id: str) -> tuple[str, float | None]:
    """The job's state, as in :data:`LASTING` or how it has ended, and hours since its last start (None: not known).
    ``UNKNOWN`` where ``scontrol`` names no state, which counts as ended.

    ``scontrol`` forgets a job some minutes after its end; then ``sacct`` is read.

    Raises:
        UserError: as :func:`_state_by_accounting`.
    """
    try:
        answer = ask(["scontrol", "--oneliner", "show", "job", job_id], timeout_s=ANSWER_S)
    except UserError:
        return _state_by_accounting(job_id)
    fields = {}
    for word in answer.splitlines()[0].split():
        name, equals, value = word.partition("=")
        if equals:
            fields[name] = value
    return fields.get("JobState", "UNKNOWN"), _hours(fields.get("RunTime", ""))


def _state_by_accounting(job_id: str) -> tuple[str, float | None]:
    """A job's state, and hours of its last start, by ``sacct``.

    Raises:
        UserError: ``sacct`` can't be asked, or does not list the job, which says nothing of how that has ended: its
            records come late, and the controller may only be restarting.
    """
    command = ["sacct", "--noheader", "--allocations", "--jobs", job_id]
    answer = ask([*command, "--format=State,ElapsedRaw"], timeout_s=ANSWER_S)
    words = answer.split()  # CANCELLED+ by 1000 3600
    if len(words) < 2:
        raise UserError(f"neither scontrol nor sacct knows job {job_id}")
    state = words[0].rstrip("+")
    seconds = int(words[-1])
    return state, seconds / 3600


def _hours(text: str) -> float | None:
    """Hours in ``[DAYS-]HH:MM:SS``; None for any other text."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return None
    numbers = [int(number or 0) for number in match.groups()]
    days, hours, minutes, seconds = numbers
    return 24 * days + hours + minutes / 60 + seconds / 3600
