"""Which machines a job has, and which of them this is: read from what the launcher left in the environment."""

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
RANKS = ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK")


@dataclass(frozen=True)
class Cluster:
    """A job's machines."""

    launcher: str
    """What started it: ``torchrun``, ``mpirun``, ``SLURM``, ``SageMaker``, ``SkyPilot`` or ``TrainJob``."""
    num_nodes: int
    """Machines that train."""
    devices: int | None
    """Processes on each; None leaves it to the trainer."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that the processes need and the launcher does not set."""
    job: str | None = None
    """Name of the job, the same after a restart."""
    role: Literal["train", "data"] = "train"
    """This machine trains, or prepares data for those that do."""
    data_nodes: int = 0
    """Machines that prepare data."""

    def settings(self) -> dict[str, int]:
        """Those of the trainer, by key; {} where one machine trains by itself."""
        if self.launcher == "KD_DATA_NODES":
            return {}
        devices = {} if self.devices is None else {"trainer.devices": self.devices}
        return {"trainer.num_nodes": self.num_nodes, **devices}

    @property
    def starts_each_process(self) -> bool:
        """Whether the launcher has started every process itself, so that none may start more."""
        return self.launcher in ("torchrun", "mpirun", "SLURM")


def recognise(
    env: Mapping[str, str] = os.environ, resource_file: Path | None = None
) -> Cluster | None:
    """The job of this process, or None; ``mpirun`` may run inside SLURM's or SageMaker's jobs, so it counts first.

    Args:
        env: the environment.
        resource_file: SageMaker's description of the cluster; default: where SageMaker writes it.

    Raises:
        UserError: a description that contradicts itself.
    """
    for name in RANKS:
        whole_number(env, name, default=0)
    machines = groups.machines(
        env, groups.base(env) / groups.RESOURCE_FILE if resource_file is None else resource_file
    )
    if env.get("KD_ROLE", "train") not in ("train", "data"):
        raise UserError(f"KD_ROLE: must be train or data, got '{env['KD_ROLE']}'")
    starters = (_torchrun, _mpirun, _data_machine, _skypilot, _sagemaker, _train_job, _slurm)
    found = next((cluster for starter in starters if (cluster := starter(env, machines))), None)
    if found and found.starts_each_process and env.get("KD_ROLE") == "data":
        raise UserError(
            f"KD_ROLE: data, but {found.launcher} starts processes that train; start kd-train without it"
        )
    if "KD_DATA_NODES" not in env or (found and found.role == "data"):
        return found
    count = whole_number(env, "KD_DATA_NODES", 1)
    if found and found.data_nodes not in (0, count):
        raise UserError(
            f"KD_DATA_NODES: {count}, but {found.launcher}'s job has {found.data_nodes} that prepare data"
        )
    return replace(found or Cluster("KD_DATA_NODES", 1, None), data_nodes=count)


def _torchrun(env: Mapping[str, str], _: groups.MachineNames | None) -> Cluster | None:
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    if (
        env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    ):
        # the agent's store still holds the addresses of the processes that died: joining over it waits for them
        print(
            "kd-train: warning: a restarted torchrun job may wait for its dead processes; start torchrun with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
            file=sys.stderr,
        )
    local, size = whole_number(env, "LOCAL_WORLD_SIZE", 1), whole_number(env, "WORLD_SIZE", 1)
    job = env["TORCHELASTIC_RUN_ID"]
    return Cluster(
        "torchrun", _nodes("WORLD_SIZE", size, local), local, job=None if job == "none" else job
    )


def _mpirun(env: Mapping[str, str], machines: groups.MachineNames | None) -> Cluster | None:
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    size, rank = (
        whole_number(env, "OMPI_COMM_WORLD_SIZE", 1),
        whole_number(env, "OMPI_COMM_WORLD_RANK"),
    )
    local_size, local_rank = (
        whole_number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1),
        whole_number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
    )
    nodes = _nodes("OMPI_COMM_WORLD_SIZE", size, local_size)
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
    address = env.get("MASTER_ADDR") or (
        "127.0.0.1" if nodes == 1 else machines.train[0] if machines else ""
    )
    if not address:
        start = "start it with mpirun -x MASTER_ADDR=HOST"
        raise UserError(
            f"MASTER_ADDR: mpirun on several machines does not say where rank 0 is; {start}"
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    port = env.get("MASTER_PORT") or (
        str(20000 + int(_digest(job), 16) % 10000) if job and nodes == 1 else PORT
    )
    variables = {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "NODE_RANK": str(rank // local_size),
    }
    return Cluster(
        "mpirun",
        nodes,
        local_size,
        variables,
        env.get("TRAINING_JOB_NAME") or env.get("SLURM_JOB_ID"),
    )


def _data_machine(env: Mapping[str, str], machines: groups.MachineNames | None) -> Cluster | None:
    if env.get("KD_ROLE") != "data" or machines:
        return None
    if not env.get("MASTER_ADDR"):
        raise UserError(
            "KD_ROLE: a data machine needs MASTER_ADDR, the name of the first machine that trains"
        )
    return Cluster(
        "KD_ROLE", 1, None, {"MASTER_ADDR": env["MASTER_ADDR"]}, role="data", data_nodes=1
    )


def _skypilot(env: Mapping[str, str], _: groups.MachineNames | None) -> Cluster | None:
    if "SKYPILOT_NODE_IPS" not in env:
        return None
    addresses, rank = env["SKYPILOT_NODE_IPS"].split(), whole_number(env, "SKYPILOT_NODE_RANK")
    if whole_number(env, "SKYPILOT_NUM_NODES", default=len(addresses)) != len(addresses):
        raise UserError(
            f"SKYPILOT_NUM_NODES: {env['SKYPILOT_NUM_NODES']}, but SKYPILOT_NODE_IPS has {len(addresses)}"
        )
    gpus = whole_number(env, "SKYPILOT_NUM_GPUS_PER_NODE", default=0)
    variables = _meeting(
        addresses[0] if addresses else "", PORT, rank, len(addresses), "SKYPILOT_NODE_RANK"
    )
    return Cluster("SkyPilot", len(addresses), gpus or None, variables, env.get("SKYPILOT_TASK_ID"))


def _sagemaker(env: Mapping[str, str], machines: groups.MachineNames | None) -> Cluster | None:
    """One ``kd-train`` is started on each machine; it starts the processes of the machine's other GPUs itself."""
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
        role, variables["NODE_RANK"] = "train", str(machines.train.index(machines.here))
    job = env.get("TRAINING_JOB_NAME")
    return Cluster(
        "SageMaker", len(machines.train), gpus or None, variables, job, role, len(machines.data)
    )


def _train_job(env: Mapping[str, str], _: groups.MachineNames | None) -> Cluster | None:
    if "PET_NNODES" not in env:
        return None
    nodes, rank = whole_number(env, "PET_NNODES", 1), whole_number(env, "PET_NODE_RANK", default=0)
    processes = env.get("PET_NPROC_PER_NODE", "auto")
    devices = (
        None if processes in ("auto", "gpu", "cpu") else whole_number(env, "PET_NPROC_PER_NODE", 1)
    )
    address = env.get("PET_MASTER_ADDR", "127.0.0.1" if nodes == 1 else "")
    variables = _meeting(address, env.get("PET_MASTER_PORT", PORT), rank, nodes, "PET_NODE_RANK")
    return Cluster("TrainJob", nodes, devices, variables, env.get("PET_RDZV_ID"))


def _slurm(env: Mapping[str, str], _: groups.MachineNames | None) -> Cluster | None:
    if "SLURM_PROCID" not in env:
        return None
    if (
        whole_number(env, "SLURM_NTASKS", 1, default=1) == 1
    ):  # a shell within a job runs many things; a batch job is one
        shell = "SLURM_STEP_ID" not in env or env.get("SLURM_JOB_NAME", "bash") in (
            "bash",
            "interactive",
        )
        return None if shell else Cluster("SLURM", 1, None, job=env.get("SLURM_JOB_ID"))
    if (
        "SLURM_STEP_ID" not in env
    ):  # set by srun: without it this process alone would wait for all others
        raise UserError(
            f"SLURM_NTASKS: the job has {env['SLURM_NTASKS']} tasks; start all with: srun kd-train ..."
        )
    tasks = whole_number(env, "SLURM_NTASKS", 1)
    nodes = whole_number(
        env, "SLURM_NNODES" if "SLURM_NNODES" in env else "SLURM_JOB_NUM_NODES", 1, default=1
    )
    return Cluster(
        "SLURM", nodes, _nodes("SLURM_NTASKS", tasks, nodes), job=env.get("SLURM_JOB_ID")
    )


def whole_number(
    env: Mapping[str, str], name: str, low: int = 0, default: int | None = None
) -> int:
    """A variable's whole number, at least ``low``; ``default`` where it is not set. Raises a UserError."""
    text = env.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit() and int(text) >= low):
        raise UserError(f"{name}: must be a whole number >= {low}, got '{text}'")
    return int(text)


def _nodes(name: str, processes: int, parts: int) -> int:
    if processes % parts:
        what = "machines" if name == "SLURM_NTASKS" else "a machine"
        raise UserError(f"{name}: {processes} processes can't be divided evenly by {parts} {what}")
    return processes // parts


def _meeting(address: str, port: str, rank: int, nodes: int, name: str) -> dict[str, str]:
    if not rank < nodes:
        raise UserError(f"{name}: must be 0 to {nodes - 1} for {nodes} machines, got {rank}")
    if not address:
        raise UserError(
            f"{name}: this is machine {rank} of {nodes}, but the first machine's address is not set"
        )
    return {"MASTER_ADDR": address, "MASTER_PORT": port, "NODE_RANK": str(rank)}


def marker(job: str | None, runs: Path, command: Sequence[str]) -> Path | None:
    """The file that names the run folder of this command in this job: a restarted job finds its run again.

    Args:
        job: its name; None: it has none.
        runs: the folder of the recipe's runs, on a file system that all machines share.
        command: the command line: a job may run several.
    """
    return None if job is None else runs / f".job-{_digest(job, *command)}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def is_rank_zero() -> bool:
    """Whether this process speaks for the job, by its environment: known before any process group exists."""
    ranks = (os.environ.get(name, "0") for name in RANKS)
    return all(
        not text.isdecimal() or int(text) == 0 for text in ranks
    )  # recognise() refuses other words
