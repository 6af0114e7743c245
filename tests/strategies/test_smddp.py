"""The smddp strategy: the real library can't be installed outside SageMaker's images, so a stand-in registers the
backend over gloo; everything else (import hook, process group, DDP) is real."""

import json
import os
from pathlib import Path

import pytest

from kd.errors import UserError
from kd.strategies.smddp import HOOK, SMDDPStrategy
from tests._helpers import run_cli

STAND_IN = """
import torch.distributed as dist

def create(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)

dist.Backend.register_backend("smddp", create, devices=["cpu"])
"""


def test_without_the_library_one_clear_line() -> None:
    with pytest.raises(UserError, match=f"trainer.strategy: smddp needs the module {HOOK}"):
        SMDDPStrategy()


def test_two_processes_over_the_backend(recipe: Path, tmp_path: Path) -> None:
    *packages, module = HOOK.split(".")
    folder = tmp_path / "site"
    for package in packages:
        folder = folder / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (folder / f"{module}.py").write_text(STAND_IN)
    done = run_cli(
        f"recipe={recipe}", "config=smddp_4x8", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.num_nodes=1",
        "trainer.max_epochs=1", "data.batch_size=4", "data.num_workers=0",
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((recipe.parent / "runs" / "tiny" / "000" / "summary.json").read_text())
    assert summary["strategy"] == "SMDDPStrategy"
    assert summary["world_size"] == 2
