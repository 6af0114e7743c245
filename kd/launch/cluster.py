"""Which machines a job has, and which of them this is: read from what the launcher left in the environment.

``env`` is the process's environment in all functions; ``machines`` are SageMaker's machines by name, None outside its
jobs. A variable that should hold a whole number and does not is a UserError in all of them (:func:`whole_number`).
"""

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from kd.errors import UserError
from kd.launch import groups

PORT = "29500"
"""TCP port of rank 0 where the processes of several machines meet, where neither ``MASTER_PORT`` nor the launcher names
another one."""
RANKS: tuple[str, ...] = ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK")
"""Variables in which launchers put the number of a process or of its machine."""
INTERACTIVE = ("bash", "interactive")  # SLURM's job names of shells, in which many programs run


@dataclass(frozen=True)
class Cluster:
    """A job's machines."""

    launcher: str
    """What started it: ``torchrun``, ``mpirun``, ``SLURM``, ``SageMaker``, ``SkyPilot`` or ``TrainJob``; or the variable
    that alone says so, ``KD_ROLE`` or ``KD_DATA_NODES``."""
    num_nodes: int
    """Machines that train."""
    devices: int | None
    """Processes on each; None leaves it to the trainer."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that the processes need; the caller puts those there that are not set."""
    job: str | None = None
    """Name of the job, the same after a restart; None: the launcher gives none."""
    role: Literal["train", "data"] = "train"
    """This machine trains, or prepares data for those that do."""
    data_nodes: int = 0
    """How many machines prepare data; at least 1 on such a machine."""

    def settings(self) -> dict[str, int]:
        """The trainer's settings that follow from the job, by key.

        {} where no launcher was found and ``KD_DATA_NODES`` alone says that other machines prepare data.
        """
        if self.launcher == "KD_DATA_NODES":
            return {}
        devices = {}
        if self.devices is not None:
            devices = {"trainer.devices": self.devices}
        return {"trainer.num_nodes": self.num_nodes, **devices}

    @property
    def starts_each_process(self) -> bool:
        """Whether the launcher has started every process itself, so that none may start more; of SLURM also True for a job
        of a single task, which may start others (``trainer.devices``).
        """
        return self.launcher in ("torchrun", "mpirun", "SLURM")


def recognise_launcher(
    env: Mapping[str, str] = os.environ, resource_file: Path | None = None
) -> Cluster | None:
    """The job of this process as its launcher describes it; None without one, unless ``KD_ROLE=data`` or
    ``KD_DATA_NODES`` is set.

    The first launcher whose variables are there counts. ``torchrun`` and ``mpirun`` may run inside SLURM's or SageMaker's
    jobs, so they come first. The environment is not changed: the caller does that (:attr:`Cluster.variables`).

    Args:
        env: the environment.
        resource_file: SageMaker's description of the cluster; default: where SageMaker writes it.

    Raises:
        UserError: a description that contradicts itself or lacks an address, or a variable with another value than it may
            have; it names the variable.
    """
    for name in RANKS:
        whole_number(env, name, default=0)
    if resource_file is None:
        resource_file = groups.base(env) / groups.RESOURCE_FILE
    machines = groups.machines(env, resource_file)
    if env.get("KD_ROLE", "train") not in ("train", "data"):
        raise UserError(f"KD_ROLE: must be train or data, got '{env['KD_ROLE']}'")
    cluster = None
    for launched_by in (
        _torchrun, _mpirun, _data_machine, _skypilot, _sagemaker, _train_job, _slurm,
    ):  # fmt: skip
        cluster = cluster or launched_by(env, machines)
    if cluster and cluster.starts_each_process and env.get("KD_ROLE") == "data":
        raise UserError(
            f"KD_ROLE: data, but {cluster.launcher} starts processes that train; start kd-train without it"
        )
    if "KD_DATA_NODES" not in env or (cluster and cluster.role == "data"):
        return cluster
    count = whole_number(env, "KD_DATA_NODES", 1)
    if cluster and cluster.data_nodes not in (0, count):
        raise UserError(
            f"KD_DATA_NODES: {count}, but {cluster.launcher}'s job has {cluster.data_nodes} that prepare data"
        )
    return replace(cluster or Cluster("KD_DATA_NODES", num_nodes=1, devices=None), data_nodes=count)


def _torchrun(env: Mapping[str, str], _: groups.MachineNames | None) -> Cluster | None:
    """The job as torchrun's variables describe it; None without them. torchrun has started each process.

    A line on stderr warns of a restarted job whose setting of torchrun may make it wait for ever.

    Raises:
        UserError: the processes are not the same number on each machine.
    """
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    restarted = env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if restarted and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # the agent's store still holds the addresses of the processes that died: joining over it waits for them
        print(
            "kd-train: warning: a restarted torchrun job may wait for its dead processes; start torchrun with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
            file=sys.stderr,
        )
    local_size = whole_number(env, "LOCAL_WORLD_SIZE", 1)
    size = whole_number(env, "WORLD_SIZE", 1)
    job: str | None = env["TORCHELASTIC_RUN_ID"]
    if job == "none":  # torchrun's default
        job = None
    nodes = _divided_evenly("WORLD_SIZE", size, local_size, f"machines with {local_size} each")
    return Cluster("torchrun", num_nodes=nodes, devices=local_size, job=job)


def _mpirun(env: Mapping[str, str], machines: groups.MachineNames | None) -> Cluster | None:
    """The job as Open MPI's variables describe it, with the variables that Lightning reads; None without them.

    Raises:
        UserError: processes that are not the same number on each machine or not dealt machine by machine, another number of
            machines than SageMaker's job trains on, or no address of rank 0.
    """
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    size = whole_number(env, "OMPI_COMM_WORLD_SIZE", 1)
    rank = whole_number(env, "OMPI_COMM_WORLD_RANK")
    local_size = whole_number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    local_rank = whole_number(env, "OMPI_COMM_WORLD_LOCAL_RANK")
    nodes = _divided_evenly(
        "OMPI_COMM_WORLD_SIZE", size, local_size, f"machines with {local_size} each"
    )
    if not rank < size or rank % local_size != local_rank:
        raise UserError(
            f"OMPI_COMM_WORLD_RANK: {rank} of {size} is process {local_rank} of {local_size} on its "
            "machine; ranks must be dealt machine by machine (mpirun --map-by slot)"
        )
    if machines and len(machines.train) != nodes:
        raise UserError(
            f"OMPI_COMM_WORLD_SIZE: {size} processes, {local_size} on a machine, make {nodes} machine(s), but "
            f"SageMaker's job trains on {len(machines.train)}: {', '.join(machines.train)}"
        )
    address = env.get("MASTER_ADDR")
    if not address and nodes == 1:
        address = "127.0.0.1"
    if not address and machines:
        address = machines.train[0]
    if not address:
        start = "start it with mpirun -x MASTER_ADDR=HOST"
        raise UserError(
            f"MASTER_ADDR: mpirun on several machines does not say where rank 0 is; {start}"
        )
    port = env.get("MASTER_PORT") or PORT
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    if not env.get("MASTER_PORT") and job and nodes == 1:
        port = str(20000 + int(_digest(job), 16) % 10000)  # another one for each job of the machine
    variables = {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "NODE_RANK": str(rank // local_size),
    }
    name = env.get("TRAINING_JOB_NAME") or env.get("SLURM_JOB_ID")
    return Cluster("mpirun", num_nodes=nodes, devices=local_size, variables=variables, job=name)


def _data_machine(env: Mapping[str, str], machines: groups.MachineNames | None) -> Cluster | None:
    """The job of a machine that prepares data, by ``KD_ROLE=data``; None on any other, and in SageMaker's jobs.

    How many machines the job has is not known here: ``num_nodes`` and ``data_nodes`` are 1.

    Raises:
        UserError: ``MASTER_ADDR`` is not set.
    """
    if env.get("KD_ROLE") != "data" or machines:
        return None
    if not env.get("MASTER_ADDR"):
        raise UserError(
            "KD_ROLE: a data machine needs MASTER_ADDR, the name of the first machine that trains"
        )
    return Cluster(
        "KD_ROLE",
        num_nodes=1,
        devices=None,
        variables={"MASTER_ADDR": env["MASTER_ADDR"]},
        role="data",
        data_nodes=1,
    )


def _skypilot(env: Mapping[str, str], _: groups.MachineNames | None) -> Cluster | None:
    """The job as SkyPilot's variables describe it; None without them. One ``kd-train`` is started on each machine.

    Raises:
        UserError: the variables contradict each other.
    """
    if "SKYPILOT_NODE_IPS" not in env:
        return None
    addresses = env["SKYPILOT_NODE_IPS"].split()
    rank = whole_number(env, "SKYPILOT_NODE_RANK")
    if whole_number(env, "SKYPILOT_NUM_NODES", default=len(addresses)) != len(addresses):
        raise UserError(
            f"SKYPILOT_NUM_NODES: {env['SKYPILOT_NUM_NODES']}, but SKYPILOT_NODE_IPS has {len(addresses)}"
        )
    gpus = whole_number(env, "SKYPILOT_NUM_GPUS_PER_NODE", default=0)
    first = addresses[0] if addresses else ""
    variables = _meeting_variables(first, PORT, rank, len(addresses), "SKYPILOT_NODE_RANK")
    return Cluster(
        "SkyPilot",
        num_nodes=len(addresses),
        devices=gpus or None,
        variables=variables,
        job=env.get("SKYPILOT_TASK_ID"),
    )


def _sagemaker(env: Mapping[str, str], machines: groups.MachineNames | None) -> Cluster | None:
    """The job as SageMaker describes it; None outside its jobs. One ``kd-train`` is started on each machine; it starts the
    processes of the machine's other GPUs itself.
    """
    if machines is None:
        return None
    gpus = whole_number(env, "SM_NUM_GPUS", default=0)
    variables = {"MASTER_ADDR": machines.train[0], "MASTER_PORT": PORT}
    if machines.interface:
        variables |= {
            "NCCL_SOCKET_IFNAME": machines.interface,
            "GLOO_SOCKET_IFNAME": machines.interface,
        }
    role: Literal["train", "data"] = "data"
    if machines.here in machines.train:
        role = "train"
        variables["NODE_RANK"] = str(machines.train.index(machines.here))
    job = env.get("TRAINING_JOB_NAME")
    return Cluster(
        "SageMaker",
        num_nodes=len(machines.train),
        devices=gpus or None,
        variables=variables,
        job=job,
        role=role,
        data_nodes=len(machines.data),
    )


def _train_job(env: Mapping[str, str], _: groups.MachineNames | None) -> Cluster | None:
    """The job as Kubeflow's variables (``PET_*``) describe it; None without them.

    One ``kd-train`` is started on each machine. Where Kubeflow does not say how many processes a machine has, the trainer
    decides.

    Raises:
        UserError: a rank beyond the number of machines, or no address of the first one.
    """
    if "PET_NNODES" not in env:
        return None
    nodes = whole_number(env, "PET_NNODES", 1)
    rank = whole_number(env, "PET_NODE_RANK", default=0)
    devices = None
    if env.get("PET_NPROC_PER_NODE", "auto") not in ("auto", "gpu", "cpu"):
        devices = whole_number(env, "PET_NPROC_PER_NODE", 1)
    address = env.get("PET_MASTER_ADDR", "127.0.0.1" if nodes == 1 else "")
    variables = _meeting_variables(
        address, env.get("PET_MASTER_PORT", PORT), rank, nodes, "PET_NODE_RANK"
    )
    return Cluster(
        "TrainJob",
        num_nodes=nodes,
        devices=devices,
        variables=variables,
        job=env.get("PET_RDZV_ID"),
    )


def _slurm(env: Mapping[str, str], _: groups.MachineNames | None) -> Cluster | None:
    """The job as SLURM's variables describe it; None outside a job, or in a shell within one that has a single task.

    ``srun`` has started each process; but a single task may start others (``trainer.devices``). A batch script's single
    task counts as a job only where ``srun`` starts it.

    Raises:
        UserError: several tasks, and ``srun`` has not started this process; or tasks that are not the same number on each
            machine.
    """
    if "SLURM_PROCID" not in env:
        return None
    tasks = whole_number(env, "SLURM_NTASKS", 1, default=1)
    by_srun = "SLURM_STEP_ID" in env
    job = env.get("SLURM_JOB_ID")
    if tasks == 1:  # a shell within a job runs many things; a batch job is one
        in_shell = not by_srun or env.get("SLURM_JOB_NAME", "bash") in INTERACTIVE
        if in_shell:
            return None
        return Cluster("SLURM", num_nodes=1, devices=None, job=job)
    if not by_srun:  # this process alone would wait for all others
        raise UserError(
            f"SLURM_NTASKS: the job has {tasks} tasks; start all with: srun kd-train ..."
        )
    nodes = slurm_nodes(env)
    devices = _divided_evenly("SLURM_NTASKS", tasks, nodes, f"{nodes} machines")
    return Cluster("SLURM", num_nodes=nodes, devices=devices, job=job)


def slurm_nodes(env: Mapping[str, str]) -> int:
    """How many machines a SLURM job has: ``SLURM_NNODES``, else ``SLURM_JOB_NUM_NODES``, else 1."""
    name = "SLURM_NNODES" if "SLURM_NNODES" in env else "SLURM_JOB_NUM_NODES"
    return whole_number(env, name, 1, default=1)


def whole_number(
    env: Mapping[str, str],
    name: str,
    low: int = 0,
    default: int | None = None,
    high: int | None = None,
) -> int:
    """A variable's whole number, from ``low`` to ``high``.

    Args:
        env: the environment.
        name: of the variable.
        low: the least number.
        default: returned as it is where the variable is not set; None: it must be set.
        high: the greatest number; None: no limit.

    Raises:
        UserError: not such a number, or a variable without a default is not set.
    """
    if name not in env and default is not None:
        return default
    text = env.get(name, "")
    if text.isascii() and text.isdecimal():
        number = int(text)
        if low <= number and (high is None or number <= high):
            return number
    allowed = f">= {low}" if high is None else f"from {low} to {high}"
    raise UserError(f"{name}: must be a whole number {allowed}, got '{text}'")


def _divided_evenly(name: str, processes: int, parts: int, machines: str) -> int:
    """``processes / parts``, which must be a whole number.

    It is the number of machines where ``parts`` is the processes of one, and the processes of each where ``parts`` is the
    machines.

    Args:
        name: the variable that has the number of processes.
        processes: of the whole job.
        parts: how many processes a machine has, or how many machines the job has.
        machines: the machines that ``parts`` describes, in words, for the message.

    Raises:
        UserError: it does not divide evenly; names the variable.
    """
    if processes % parts:
        raise UserError(f"{name}: {processes} processes can't be split evenly over {machines}")
    return processes // parts


def _meeting_variables(address: str, port: str, rank: int, nodes: int, name: str) -> dict[str, str]:
    """The environment variables by which machine ``rank`` (of ``nodes``) finds the first one; Lightning reads them.

    Args:
        address: name or IP address of the first machine; "" where the launcher does not say.
        port: TCP port there, as text.
        rank: this machine's number, from 0.
        nodes: how many machines train.
        name: the variable that has the rank, for messages.

    Raises:
        UserError: ``rank`` is not below ``nodes``, or no address.
    """
    if not rank < nodes:
        raise UserError(f"{name}: must be 0 to {nodes - 1} for {nodes} machines, got {rank}")
    if not address:
        raise UserError(
            f"{name}: this is machine {rank} of {nodes}, but the first machine's address is not set"
        )
    return {"MASTER_ADDR": address, "MASTER_PORT": port, "NODE_RANK": str(rank)}


def marker(job: str | None, runs: Path, command: Sequence[str]) -> Path | None:
    """The path of the file that names the run folder of this command in this job: a restarted job finds its run again.

    Nothing is read or written here. None where the job has no name: then a restart can't be recognised.

    Args:
        job: its name; None: it has none.
        runs: the folder of the recipe's runs, on a file system that all machines share.
        command: all that the command line names, recipe and overlays included: a job may run several commands.
    """
    if job is None:
        return None
    return runs / f".job-{_digest(job, *command)}"


def _digest(*parts: str) -> str:
    """Twelve hexadecimal digits, the same for the same texts in every process."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def is_rank_zero() -> bool:
    """Whether this process is the job's rank 0, by its environment: known before any process group exists.

    In jobs of SageMaker, SkyPilot and TrainJob it is True in each machine's first process until :attr:`Cluster.variables`
    are set.

    Of a process that torchrun or mpirun has started only the rank that these gave it counts: inside a SLURM job, SLURM's
    variables number the tasks that started torchrun or mpirun.
    """
    names = RANKS
    if "TORCHELASTIC_RUN_ID" in os.environ:
        names = ("RANK",)
    elif "OMPI_COMM_WORLD_RANK" in os.environ:
        names = ("OMPI_COMM_WORLD_RANK",)
    for name in names:
        text = os.environ.get(name, "0")
        if text.isdecimal() and int(text) != 0:  # recognise_launcher() refuses other words
            return False
    return True
