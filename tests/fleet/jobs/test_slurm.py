"""kd-launch slurm: times as SLURM writes them; on a cluster that is here a job is tested, sent, followed, fetched."""

import json
import os
import shutil
from pathlib import Path

import pytest

from kd.cli import main
from kd.fleet.jobs.slurm import _hours
from tests._helpers import write_recipe


def test_hours() -> None:
    assert _hours("1-12:30:00") == 36.5
    assert _hours("UNLIMITED") is None


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("sbatch") is None or "SLURM_CONF" not in os.environ,
    reason="needs a SLURM cluster",
)
def test_a_job_from_launch_to_run_folder(
    tmp_path: Path,
    pictures: Path,
    teacher: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("kd.fleet.jobs.slurm.POLL_S", 1)
    recipe = write_recipe(tmp_path / "tiny.yaml", pictures, teacher)
    items = [f"recipe={recipe}", "config=ddp_2cpu", "trainer.max_epochs=1"]
    refused = ["slurm", *items, "instances=9xcpu:2", "job=large"]
    assert main("launch", refused) == 2
    assert "kd-launch: sbatch --test-only: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [recipe]
    assert main("launch", ["slurm", *items, "instances=1xcpu:2", "job=two"]) == 0, (
        capsys.readouterr()
    )
    told = capsys.readouterr().out
    assert "processes: 2 on 1 machine (started by SLURM)" in told
    run = tmp_path / "runs" / "tiny" / "two"
    assert f"COMPLETED; {tmp_path}/runs/tiny/jobs/two/log; run folder: {run}" in told
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    assert json.loads((run / "job.json").read_text())["hours"] >= 0
