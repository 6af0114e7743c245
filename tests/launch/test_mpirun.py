"""Processes that mpirun has started, inside SageMaker's and SLURM's jobs: they are the job's, and start no others."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests._forks import start, status_of, statuses_of
from tests._helpers import ROOT

JOB = {
    "SM_HOSTS": '["localhost"]', "SM_CURRENT_HOST": "localhost", "SM_NUM_GPUS": "8",
    "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "food", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NNODES": "4",
}  # fmt: skip


def items_for(recipe: Path) -> list[str]:
    return [f"recipe={recipe}", "data.batch_size=4", "trainer.max_epochs=1"]


def check(recipe: Path, said: str) -> None:
    assert said.count("processes: 2 on 1 machine (started by mpirun), gloo") == 1, said
    assert "rank 0-1" in said
    assert [p.name for p in (recipe.parent / "runs" / "tiny").glob("[0-9]*")] == ["000"]


def test_mpiruns_variables(recipe: Path) -> None:
    log = recipe.parent / "log"
    ranks = []
    for rank in "10":
        own = {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "PMIX_NAMESPACE": str(recipe),
        }
        size = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        ranks.append(start(items_for(recipe), log, **JOB, **own, **size))
    assert statuses_of(ranks) == [0, 0], log.read_text()
    check(recipe, log.read_text())
    alone = start([*items_for(recipe), "trainer.devices=8"], log, **JOB, **own, **size)
    assert status_of(alone) == 2
    assert (
        "OMPI_COMM_WORLD_SIZE: mpirun has started 2 processes, but trainer.num_nodes=1 and trainer.devices=8 want 8"
        in log.read_text()
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
def test_mpirun_itself(recipe: Path) -> None:
    done = subprocess.run(
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2",
         sys.executable, "-m", "kd.cli", *items_for(recipe)],
        cwd=ROOT, text=True, capture_output=True, timeout=240, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **JOB},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check(recipe, done.stdout)
