"""Which machines a job has, and which of them this is: read from what the launcher left in the environment."""

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kd.errors import UserError

RESOURCE_FILE = Path("/opt/ml/input/config/resourceconfig.json")  # SageMaker's description of the cluster
PORT = "29500"


@dataclass
class Cluster:
    """A job's machines.

    Attributes:
        launcher: who started it: ``torchrun``, ``SLURM`` or ``SageMaker``.
        num_nodes: machines.
        devices: processes on each; None leaves it to the trainer.
        variables: environment variables that the processes need and the launcher does not set.
        job: names the job, the same after a restart.
    """

    launcher: str
    num_nodes: int
    devices: int | None
    variables: dict[str, str] = field(default_factory=dict)
    job: str | None = None

    def arguments(self) -> list[str]:
        """For the parser."""
        devices = [] if self.devices is None else [f"--trainer.devices={self.devices}"]
        return [f"--trainer.num_nodes={self.num_nodes}", *devices]


def recognise(env: Mapping[str, str] = os.environ, resource_file: Path = RESOURCE_FILE) -> Cluster | None:
    """The job that this process is part of; None for a process of its own.

    Raises:
        UserError: a description that contradicts itself.
    """
    return _torchrun(env) or _slurm(env) or _sagemaker(env, resource_file)


def _torchrun(env: Mapping[str, str]) -> Cluster | None:
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        # the agent's store still holds the addresses of the processes that died: joining over it waits for them
        print(
            "kd-train: warning: a restarted torchrun job may wait for its dead processes; start torchrun with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
            file=sys.stderr,
        )
    local = int(env["LOCAL_WORLD_SIZE"])
    job = env["TORCHELASTIC_RUN_ID"]
    return Cluster("torchrun", int(env["WORLD_SIZE"]) // local, local, job=None if job == "none" else job)


def _slurm(env: Mapping[str, str]) -> Cluster | None:
    if "SLURM_PROCID" not in env or int(env.get("SLURM_NTASKS", "1")) < 2:
        return None
    if "SLURM_STEP_ID" not in env:  # set by srun: without it this process alone would wait for all others
        raise UserError(
            f"SLURM_NTASKS: the job has {env['SLURM_NTASKS']} tasks and this is one; start it with: srun kd-train ..."
        )
    tasks, nodes = int(env["SLURM_NTASKS"]), int(env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES", "1")))
    if tasks % nodes:
        raise UserError(f"SLURM_NTASKS: {tasks} processes can't be dealt evenly to {nodes} machines")
    return Cluster("SLURM", nodes, tasks // nodes, job=env.get("SLURM_JOB_ID"))


def _sagemaker(env: Mapping[str, str], resource_file: Path) -> Cluster | None:
    """One ``kd-train`` is started on each machine; it starts the processes of the machine's other GPUs itself."""
    if "SM_HOSTS" in env:
        hosts, here = json.loads(env["SM_HOSTS"]), env.get("SM_CURRENT_HOST", "")
        interface = env.get("SM_NETWORK_INTERFACE_NAME")
    elif resource_file.is_file():
        content = json.loads(resource_file.read_text(encoding="utf-8"))
        hosts, here = content["hosts"], content["current_host"]
        interface = content.get("network_interface_name")
    else:
        return None
    hosts = sorted(hosts)
    if here not in hosts:
        raise UserError(f"SM_CURRENT_HOST: '{here}' is none of the job's hosts {', '.join(hosts)}")
    gpus = int(env.get("SM_NUM_GPUS", "0"))
    variables = {"MASTER_ADDR": hosts[0], "MASTER_PORT": PORT, "NODE_RANK": str(hosts.index(here))}
    if interface:
        variables |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    return Cluster("SageMaker", len(hosts), gpus or None, variables, env.get("TRAINING_JOB_NAME"))


def marker(cluster: Cluster, runs: Path, command: Sequence[str]) -> Path | None:
    """The file that names the run folder of this command in this job: a restarted job finds its run again.

    Args:
        cluster: the job.
        runs: the folder of the recipe's runs, on a file system that all machines share.
        command: the command line: a job may run several.
    """
    if cluster.job is None:
        return None
    digest = hashlib.sha256("\0".join([cluster.job, *command]).encode()).hexdigest()[:12]
    return runs / f".job-{digest}"


def is_rank_zero() -> bool:
    """Whether this process speaks for the job, by its environment: known before any process group exists."""
    return all(int(os.environ.get(name, "0")) == 0 for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"))
