"""DeepSpeed over two gloo processes: learns what DDP learns, and each goes on from the other's checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.strategies.test_ddp import losses, train


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported before the ranks are forked; its own shared memory is for inference, and takes minutes to compile."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    ops = pytest.importorskip("deepspeed").ops
    monkeypatch.setitem(ops.__compatible_ops__, "deepspeed_shm_comm", False)


PLAIN = ["trainer.strategy=ddp"]


def deepspeed(stage: int) -> list[str]:
    keep = {"stage3_param_persistence_threshold": 0}  # else stage 3 leaves small tensors whole
    return ["config=deepspeed", f"trainer.strategy.stage={stage}", f"trainer.strategy.zero={json.dumps(keep)}"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_learn_what_whole_copies_learn(recipe: Path, stage: int) -> None:
    plain, sharded = (train(recipe, *strategy) for strategy in (PLAIN, deepspeed(stage)))
    assert losses(sharded) == pytest.approx(losses(plain), rel=1e-4)
    a, b = (load_file(folder / "student.safetensors") for folder in (plain, sharded))
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-3, atol=1e-5)
