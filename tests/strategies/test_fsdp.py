"""FSDP2 over two gloo processes: learns what DDP learns, and each goes on from the other's checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kd.strategies.fsdp  # noqa: F401 (torch.distributed.checkpoint and the rest, once and not in every fork)
from tests._forks import start_ranks, status_of
from tests._helpers import write_recipe
from tests._ranks import HINT as OF_FEATURES
from tests._ranks import losses, said, train
from tests._runs import callback, run_of, summary_of

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


@pytest.mark.slow  # with a loss over logits alone; with parameters too: the next one
def test_shards_learn_what_whole_copies_learn_from_logits(recipe: Path) -> None:
    check_same(train(recipe, PLAIN), train(recipe, SHARDED))


def test_shards_learn_what_whole_copies_learn(recipe: Path, whole: Path) -> None:
    check_same(train(recipe, PLAIN, *HINT), whole)


@pytest.mark.slow  # Muon needs whole matrices, which a shard does not have
def test_shards_learn_what_whole_copies_learn_by_muon(recipe: Path) -> None:
    items = [*HINT, "optim.name=muon"]
    check_same(train(recipe, PLAIN, *items), train(recipe, SHARDED, *items), of_half=0.1)


def check_same(plain: Path, sharded: Path, of_half: float = 0.05) -> None:
    assert losses(sharded) == pytest.approx(losses(plain), rel=1e-4)
    a, b = (load_file(folder / "student.safetensors") for folder in (plain, sharded))
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-3, atol=1e-5)
    account = summary_of(sharded)["optimizer_state"]
    assert account["sharded_over"] == 2
    assert account["rank0_mb"] == pytest.approx(account["whole_mb"] / 2, rel=of_half)


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


@pytest.mark.slow  # test_sharding.py: who shards refuses what does not go with it
def test_what_does_not_go_together_is_refused(recipe: Path) -> None:
    train(recipe, SHARDED, "model.ema_decay=0.9", expect=2)
    assert "kd-train: model.ema_decay: must be null with FSDP" in said(recipe)


@pytest.mark.slow  # tests/test_survival.py: fewer validation pictures than processes
def test_ranks_whose_last_validation_batch_is_padding_alone(recipe: Path) -> None:
    """16 pictures over three ranks in batches of 5: two ranks have nothing real in the last one, and must not wait.
    In bf16, with accumulation."""
    items = [
        f"recipe={recipe}",
        "config=fsdp",
        "trainer.devices=3",
        "data.batch_size=5",
        "trainer.max_epochs=1",
    ]
    pids = start_ranks(
        [*items, "trainer.accumulate_grad_batches=2", "trainer.precision=bf16-mixed"],
        recipe.parent / "log",
        3,
    )
    assert {status_of(pid) for pid in pids} == {0}, (recipe.parent / "log.0").read_text()
    summary = summary_of(run_of(recipe))
    assert (summary["status"], summary["strategy"], summary["precision"]) == (
        "done",
        "FSDP",
        "bf16-mixed",
    )
