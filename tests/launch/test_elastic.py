"""Torchrun's elastic agent starts a failed job again, and the job goes on where it was."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests._files import json_lines
from tests._helpers import ROOT
from tests._runs import callback, run_of, summary_of


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_goes_on(recipe: Path) -> None:
    kill = callback("tests._stop.KillOnce", step=9, rank=1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=2",
         "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=night", "-m", "kd.cli",
         f"recipe={recipe}", "config=audit", "data.batch_size=4", "trainer.accelerator=cpu", "trainer.max_epochs=3",
         "checkpoint.every_n_steps=1", kill],
        cwd=ROOT, text=True, capture_output=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    folder = run_of(recipe)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("processes: 2 on 1 machine (started by torchrun)") == 2
    assert f"kd-train: this job has run before: resuming {folder}" in done.stdout
    assert [p.name for p in (recipe.parent / "runs" / "tiny").glob("[0-9]*")] == ["000"]
    for rank in (0, 1):
        lines = json_lines(folder / "records" / f"samples.rank{rank}.jsonl")
        assert [line["step"] for line in lines] == list(range(1, 19))
    assert summary_of(folder)["status"] == "done"
