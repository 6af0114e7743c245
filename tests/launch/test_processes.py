"""The environment against the settings: what does not fit ends in a line, at once; what fits trains."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kd.launch.processes import check_processes, started
from kd.storage.elsewhere import json_of
from tests._forks import start, status_of
from tests._helpers import refuses
from tests._runs import run_of

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
         "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_NODELIST": os.uname().nodename}  # fmt: skip
STEP = {**SLURM, "SLURM_STEP_ID": "0"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "RANK": "0",
    "LOCAL_RANK": "0",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
CHILD = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
TWO_MACHINES = {"MASTER_ADDR": "a", "NODE_RANK": "1"}


def trainer(devices: int, nodes: int = 1) -> Any:
    return SimpleNamespace(num_devices=devices, num_nodes=nodes)


@pytest.mark.parametrize(
    ("env", "devices", "nodes"),
    [
        ({}, 1, 1),
        ({}, 2, 1),
        (SLURM, 2, 1),  # one task starts the others
        (STEP, 8, 1),
        ({**STEP, "SLURM_NTASKS": "2"}, 2, 1),
        ({**STEP, "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}, 2, 2),
        ({**STEP, "SLURM_NTASKS": "2", "SLURM_JOB_NAME": "bash"}, 2, 1),
        (TORCHRUN, 2, 1),
        (MPI, 2, 1),
        (CHILD, 2, 1),
        (TWO_MACHINES, 2, 2),
        ({"LOCAL_RANK": "0"}, 1, 1),  # says nothing that is wrong
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}, 2, 1),
    ],
)
def test_what_fits_is_taken(
    env: dict[str, str], devices: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of pytest has no file that could be started again, as kd-train has."""
    monkeypatch.setattr("kd.launch.processes._has_a_file", lambda: True)
    check_processes(trainer(devices, nodes), env)


@pytest.mark.parametrize(
    ("env", "devices", "nodes", "message"),
    [
        (
            {"LOCAL_RANK": "0"},
            2,
            1,
            "LOCAL_RANK: 0 in the environment says that another program starts each",
        ),
        ({"LOCAL_RANK": "1"}, 1, 1, "LOCAL_RANK: 1 in the environment"),
        (
            {"RANK": "1"},
            1,
            1,
            "RANK: 1 in the environment, but no launcher has started processes; unset RANK",
        ),
        ({"WORLD_SIZE": "8"}, 2, 1, "WORLD_SIZE: 8 in the environment, but no launcher"),
        ({"NODE_RANK": "1"}, 2, 1, "NODE_RANK: 1 in the environment, but trainer.num_nodes=1"),
        ({}, 8, 4, "trainer.num_nodes: 4, but MASTER_ADDR does not name the first machine"),
        (
            TORCHRUN,
            4,
            1,
            "WORLD_SIZE: torchrun has started 2 processes, but trainer.num_nodes=1 and trainer.devices=4",
        ),
        (TORCHRUN, 1, 1, "want 1 process$"),
        (
            CHILD,
            4,
            1,
            "another program has started 2 processes, .* want 4 processes; unset LOCAL_RANK and WORLD_SIZE",
        ),
        (MPI, 8, 1, "OMPI_COMM_WORLD_SIZE: mpirun has started 2 processes, but .* want 8"),
        (
            {**STEP, "SLURM_NTASKS": "2"},
            8,
            1,
            "SLURM_NTASKS: SLURM has started 2 processes, but .* want 8",
        ),
        (
            {**STEP, "SLURM_NTASKS": "2", "SLURM_NNODES": "2"},
            2,
            1,
            "trainer.num_nodes: 1, but SLURM's job has 2 mach",
        ),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "1"},
            1,
            1,
            "PMI_SIZE: mpiexec has started 2 processes that do not know each",
        ),
        ({"JSM_NAMESPACE_SIZE": "6"}, 2, 1, "JSM_NAMESPACE_SIZE: jsrun has started 6 processes"),
        ({"NODE_RANK": "x"}, 1, 1, "NODE_RANK: must be a whole number >= 0, got 'x'"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(
    env: dict[str, str], devices: int, nodes: int, message: str
) -> None:
    with refuses(message) as error:
        check_processes(trainer(devices, nodes), env)
    assert "\n" not in str(error.value)


def test_one_task_starts_the_others_and_so_nothing_is_started() -> None:
    assert started(SLURM) is started(STEP) is started({}) is None


def items(recipe: Path) -> list[str]:
    two = ["trainer.devices=2", "trainer.strategy=ddp", "trainer.max_epochs=1", "data.batch_size=4"]
    return [f"recipe={recipe}", *two, "trainer.enable_progress_bar=false"]


def test_a_rank_that_is_left_over_ends_at_once(recipe: Path) -> None:
    log = recipe.parent / "log"
    began = time.monotonic()
    assert status_of(start(items(recipe), log, WORLD_SIZE="8"), 120) == 2, log.read_text()
    assert "kd-train: WORLD_SIZE: 8 in the environment" in log.read_text()
    assert time.monotonic() - began < 100
    assert not (recipe.parent / "runs" / "tiny").exists()


@pytest.mark.parametrize("env", [SLURM, STEP], ids=["batch script", "srun"])
def test_a_slurm_job_of_one_task_trains_with_two_processes(
    recipe: Path, env: dict[str, str]
) -> None:
    from tests._forks import as_program

    log = recipe.parent / "log"
    left_over = {
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "1",
    }  # of another job: nothing answers there
    pid = start(items(recipe), log, as_program, items(recipe), **env, **left_over)
    assert status_of(pid) == 0, log.read_text()
    assert "processes: 2 on 1 machine" in log.read_text()
    summary = json_of((run_of(recipe) / "summary.json").read_bytes())
    assert summary["world_size"] == 2
