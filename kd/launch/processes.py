"""The processes that exist against those that the settings want, compared before any of them waits for another.

A launcher starts every process of a job (torchrun, mpirun, srun) or one on each machine; in the second case Lightning
starts the others. Who believes in processes that do not exist waits for them for ever; who overlooks some trains with
fewer than were paid for.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.errors import UserError, UserErrorOfAll
from kd.launch.cluster import INTERACTIVE, slurm_nodes, whole_number

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


@dataclass(frozen=True)
class Started:
    """Processes that a launcher has started, all of the job."""

    by: str
    """The launcher."""
    variable: str
    """The variable of the environment that counts them."""
    processes: int
    """How many there are."""
    machines: int | None = None
    """On how many machines; None: not known."""


# launcher, a variable by which it is recognised, the variable that counts its processes
LAUNCHERS = (
    ("torchrun", "TORCHELASTIC_RUN_ID", "WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_SIZE"),
)


def started(env: Mapping[str, str] = os.environ) -> Started | None:
    """The processes that a launcher has started, by the environment ``env``.

    None where no launcher has started each process, so that this one starts the others of its machine itself.

    Raises:
        UserError: a variable that should count processes has something else; it names the variable.
    """
    for launcher, sign, count in LAUNCHERS:
        if sign in env:
            return Started(launcher, count, whole_number(env, count, 1, default=1))
    tasks = whole_number(env, "SLURM_NTASKS", 1, default=1)
    if tasks > 1 and "SLURM_STEP_ID" in env and env.get("SLURM_JOB_NAME") not in INTERACTIVE:
        return Started("SLURM", "SLURM_NTASKS", tasks, slurm_nodes(env))
    if "SLURM_NTASKS" not in env and whole_number(env, "PMI_SIZE", 1, default=1) > 1:
        return Started("mpiexec", "PMI_SIZE", whole_number(env, "PMI_SIZE", 1))
    # a launcher of the user's own, or Lightning in its children
    if "LOCAL_RANK" in env and "WORLD_SIZE" in env:
        return Started("another program", "WORLD_SIZE", whole_number(env, "WORLD_SIZE", 1))
    return None


def devices_asked_for(devices: object) -> int | None:
    """Processes of each machine by ``trainer.devices``, a number or a list of GPUs (``[0, 1]``, ``"0,1"``).

    None for any other value (``auto``, -1): the machine decides, one process on each GPU, or one where it trains on CPUs.
    """
    if isinstance(devices, str) and "," in devices:
        devices = [number for number in devices.split(",") if number.strip()]
    if isinstance(devices, list):
        return len(devices)
    if str(devices).isdecimal():
        return int(str(devices))
    return None


def processes_asked_for(trainer: Mapping[str, Any]) -> int:
    """Processes that a run will have on all machines, by the settings ``trainer``, before there is a Trainer.

    Where they leave the number to the machine, each machine has one for each GPU of this one; a single one without GPUs,
    or where ``trainer.accelerator`` is none of ``auto``, ``gpu`` and ``cuda``.
    """
    devices = devices_asked_for(trainer["devices"])
    if devices is None:
        devices = 1
        if trainer["accelerator"] in ("auto", "gpu", "cuda"):
            import torch

            devices = max(1, torch.cuda.device_count())
    machines: int = trainer["num_nodes"]
    return devices * machines


def check_processes(trainer: "Trainer", env: Mapping[str, str] = os.environ) -> None:
    """Refuses a trainer that wants other processes than there are. Nothing has been waited for yet.

    Every process calls it, as soon as the trainer is made, unless a plugin of the user's is the cluster's environment.

    Args:
        trainer: Lightning's, which wants ``num_nodes * num_devices`` processes.
        env: the process's environment.

    Raises:
        UserError: a launcher has started another number of processes (names the variable that counts them), or on another
            number of machines; it is ``mpiexec``, whose processes do not know each other; or this process should start
            others of its machine, and its program has no file to start.
        UserErrorOfAll: no launcher, and a rank or a count in the environment (:func:`_check_alone`).
    """
    nodes = trainer.num_nodes
    devices = trainer.num_devices
    wanted = nodes * devices
    settings = f"trainer.num_nodes={nodes} and trainer.devices={devices} want {_in_words(wanted)}"
    existing = started(env)
    if existing is None:
        _check_alone(env, wanted, nodes, settings)
        if devices > 1 and not _has_a_file():
            raise UserError(
                f"trainer.devices: {devices} processes need a program that each of them can start again "
                "(python FILE.py, kd-train); this one has no file (python - or -c)"
            )
    elif existing.by == "mpiexec":
        raise UserError(
            f"PMI_SIZE: mpiexec has started {_in_words(existing.processes)} that do not know each other; "
            "start them with torchrun, srun or Open MPI's mpirun"
        )
    elif existing.processes != wanted:
        hint = ""
        if existing.by == "another program":
            hint = "; unset LOCAL_RANK and WORLD_SIZE if nothing has"
        started_by = f"{existing.by} has started {_in_words(existing.processes)}"
        raise UserError(f"{existing.variable}: {started_by}, but {settings}{hint}")
    elif existing.machines not in (None, nodes):
        raise UserError(
            f"trainer.num_nodes: {nodes}, but {existing.by}'s job has {existing.machines} machines"
        )


def _check_alone(env: Mapping[str, str], wanted: int, nodes: int, settings: str) -> None:
    """Refuses ranks and counts in the environment that contradict a run without a launcher, where this process starts the
    others of its machine.

    Args:
        env: the environment's variables.
        wanted: processes of all machines together.
        nodes: how many machines.
        settings: the settings that want so many, in words.

    Raises:
        UserErrorOfAll: such a rank or count, or several machines without ``MASTER_ADDR``; every process reports it, as none
            of them is known to be the first.
        UserError: a variable with something else than a number.
    """
    left_over = "in the environment, but no launcher has started processes"
    node_rank = whole_number(env, "NODE_RANK", default=0)
    if "LOCAL_RANK" in env and (wanted > 1 or whole_number(env, "LOCAL_RANK")):
        means = "in the environment says that another program starts each process, but not how many (WORLD_SIZE)"
        raise UserErrorOfAll(
            f"LOCAL_RANK: {env['LOCAL_RANK']} {means}, and {settings}; unset LOCAL_RANK"
        )
    if whole_number(env, "RANK", default=0):
        raise UserErrorOfAll(
            f"RANK: {env['RANK']} {left_over}; unset RANK, or start them with torchrun"
        )
    if whole_number(env, "WORLD_SIZE", 1, default=1) not in (1, wanted):
        raise UserErrorOfAll(
            f"WORLD_SIZE: {env['WORLD_SIZE']} {left_over}, and {settings}; unset WORLD_SIZE"
        )
    if node_rank >= nodes:
        raise UserErrorOfAll(
            f"NODE_RANK: {node_rank} in the environment, but trainer.num_nodes={nodes}"
        )
    if nodes > 1 and not env.get("MASTER_ADDR"):
        how = "start kd-train through a launcher, or set MASTER_ADDR and NODE_RANK on each machine"
        raise UserErrorOfAll(
            f"trainer.num_nodes: {nodes}, but MASTER_ADDR does not name the first machine; {how}"
        )


def _has_a_file() -> bool:
    """Whether this program can be started again by its file or its module, as Lightning starts the other processes.

    False for a program from standard input, of ``python -c``, or typed into a shell.
    """
    is_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    return is_module or Path(sys.argv[0]).is_file()


def _in_words(processes: int) -> str:
    return f"{processes} process{'es' * (processes != 1)}"
