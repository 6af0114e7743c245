"""kd-launch slurm on a cluster that is here: a job is tested, sent, and goes back into the queue when it is told to end."""

import csv
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests._forks import wait_until
from tests._helpers import Command, write_recipe
from tests._runs import disturb, summary_of


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    shutil.which("sbatch") is None or "SLURM_CONF" not in os.environ,
    reason="needs a SLURM cluster",
)
def test_a_job_from_launch_to_run_folder(
    tmp_path: Path,
    pictures: Path,
    teacher: Path,
    prints: Command,
    refusal: Command,
) -> None:
    recipe = write_recipe(tmp_path / "tiny.yaml", pictures, teacher)
    slow = [disturb("Slow", seconds=0.5), "trust=tests._stop", "checkpoint.every_n_steps=1"]
    items = [f"recipe={recipe}", "config=ddp_2cpu", "trainer.max_epochs=3", *slow]
    refused = ["slurm", *items, "instances=9xcpu:2", "job=large"]
    assert "kd-launch: sbatch --test-only: " in refusal("launch", refused)
    assert list(tmp_path.iterdir()) == [recipe]
    number = (
        prints("launch", ["slurm", *items, "instances=1xcpu:2", "job=two"])
        .split("squeue --job=")[1]
        .split()[0]
    )
    run, log = tmp_path / "runs/tiny/two", tmp_path / "runs/tiny/jobs/two/log"

    wait_until(lambda: any(run.glob("checkpoints/last.ckpt")), log)
    subprocess.run(["scancel", "--signal=TERM", number], check=True)  # as before a pre-emption
    wait_until((run / "summary.json").is_file, log)
    wait_until(lambda: summary_of(run).get("status") == "done", log)
    told = log.read_text()
    assert "processes: 2 on 1 machine (started by SLURM)" in told
    assert "kd-train saved on SIGTERM: the job goes back into the queue" in told
    with (run / "metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert steps == sorted(set(steps))  # each step was made once
