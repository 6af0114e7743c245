"""FSDP2 over two gloo processes: learns what DDP learns, and each goes on from the other's checkpoints."""

import json
from pathlib import Path

import pytest

import kd.strategies.fsdp  # noqa: F401 (torch.distributed.checkpoint and the rest, once and not in every fork)
from tests._helpers import write_recipe
from tests._ranks import HINT as OF_FEATURES
from tests._ranks import check_same, losses, train
from tests._runs import callback

HINT = [*OF_FEATURES, "model.student.channels_last=true"]
SHARDED, PLAIN = "config=fsdp", "trainer.strategy=ddp"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, pictures: Path, teacher: Path) -> Path:
    """A run in shards by a loss with parameters; not to be changed."""
    return train(
        write_recipe(tmp_path_factory.mktemp("whole") / "tiny.yaml", pictures, teacher),
        SHARDED,
        *HINT,
    )


def test_shards_learn_what_whole_copies_learn(recipe: Path, whole: Path) -> None:
    check_same(train(recipe, PLAIN, *HINT), whole)


@pytest.mark.slow  # Muon needs whole matrices, which a shard does not have
def test_shards_learn_what_whole_copies_learn_by_muon(recipe: Path) -> None:
    items = [*HINT, "optim.name=muon"]
    check_same(train(recipe, PLAIN, *items), train(recipe, SHARDED, *items), of_half=0.1)


@pytest.mark.parametrize(
    ("first", "then"),
    [pytest.param(PLAIN, SHARDED, marks=pytest.mark.slow), (SHARDED, PLAIN)],
    ids=["to shards", "from shards"],
)
def test_checkpoints_load_in_the_other(recipe: Path, whole: Path, first: str, then: str) -> None:
    kill = callback("tests._stop.FailAtStep", step=4)
    audit = json.dumps([{"class_path": "kd.monitor.audit.Audit"}])
    whole = whole if first == SHARDED else train(recipe, first, *HINT)
    folder = train(recipe, first, *HINT, "checkpoint.every_n_steps=1", kill, expect=1)
    again = train(recipe, then, f"trainer.callbacks={audit}", resume=folder)
    assert again == folder
    assert losses(folder)[:4] == losses(whole)[:4]
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-4)
