"""DeepSpeed over two gloo processes: learns what DDP learns, and each goes on from the other's checkpoints."""

import json
from pathlib import Path

import pytest
import torch

from tests._forks import start_ranks, status_of
from tests._ranks import HINT, check_same, losses, said, train
from tests._runs import assert_good, callback, disturb, student_of, summary_of


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported before the ranks are forked; its own shared memory is for inference, and takes minutes to compile."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    ops = pytest.importorskip("deepspeed").ops
    monkeypatch.setitem(ops.__compatible_ops__, "deepspeed_shm_comm", False)


SLOW = pytest.mark.slow
PLAIN = ["trainer.strategy=ddp"]


def deepspeed(stage: int) -> list[str]:
    keep = {"stage3_param_persistence_threshold": 0}  # else stage 3 leaves small tensors whole
    return [
        "config=deepspeed",
        f"trainer.strategy.stage={stage}",
        f"trainer.strategy.zero={json.dumps(keep)}",
    ]


SHORT = [
    "trainer.accumulate_grad_batches=4",
    "trainer.gradient_clip_val=0.1",
]  # the last accumulation is of two


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        pytest.param(1, SHORT, marks=SLOW),
        pytest.param(2, [*SHORT, "model.ema_decay=0.9"], marks=SLOW),
        (3, [*HINT, "trainer.max_epochs=2"]),
    ],
    ids=["1", "2, with an average", "3, with a loss with parameters"],
)
def test_shards_learn_what_whole_copies_learn(recipe: Path, stage: int, more: list[str]) -> None:
    plain, sharded = (train(recipe, *strategy, *more) for strategy in (PLAIN, deepspeed(stage)))
    check_same(plain, sharded)
    of_plain, of_sharded = (summary_of(folder) for folder in (plain, sharded))
    assert of_sharded["student"]["params"] == of_plain["student"]["params"]
    whole_mb = of_plain["optimizer_state"]["whole_mb"]
    assert of_sharded["optimizer_state"]["whole_mb"] == pytest.approx(whole_mb, rel=0.05)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(PLAIN, deepspeed(1), marks=SLOW),
        (PLAIN, deepspeed(3)),
        (deepspeed(2), PLAIN),
        pytest.param(deepspeed(3), deepspeed(2), marks=SLOW),
    ],
    ids=["DDP to 1", "DDP to 3", "2 to DDP", "3 to 2"],
)
def test_checkpoints_load_in_the_other(recipe: Path, first: list[str], then: list[str]) -> None:
    kill = callback("tests._stop.FailAtStep", step=4)
    audit = json.dumps([{"class_path": "kd.monitor.audit.Audit"}])
    whole = train(recipe, *PLAIN)
    folder = train(recipe, *first, "checkpoint.every_n_steps=1", kill, expect=1)
    train(recipe, *then, f"trainer.callbacks={audit}", resume=folder)
    assert len(losses(folder)) == len(losses(whole))
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-4)


@SLOW
def test_parameters_that_the_ranks_can_not_share_evenly(recipe: Path) -> None:
    """Three ranks: stage 3 pads every tensor; what is padding is neither saved nor looked at."""
    three = ["trainer.devices=3", "data.batch_size=5", "trainer.max_epochs=2", "config=audit"]
    kill = callback("tests._stop.FailAtStep", step=4)
    whole, cut = recipe.parent / "whole", recipe.parent / "cut"
    ranks(recipe, whole, *three, *PLAIN)
    every = "checkpoint.every_n_steps=1"
    ranks(recipe, cut, *three, *deepspeed(3), every, kill, expect=1)
    folder = cut / "tiny" / "000"
    ranks(recipe, cut, *three[:3], *deepspeed(3), "trainer.callbacks=[]", resume=folder)
    a, b = (student_of(runs / "tiny" / "000") for runs in (whole, cut))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def ranks(
    recipe: Path, runs: Path, *items: str, expect: int = 0, resume: Path | None = None
) -> None:
    source = [f"resume={resume}"] if resume else [f"recipe={recipe}", f"runs_dir={runs}"]
    log = recipe.parent / f"{runs.name}{bool(resume)}"
    pids = start_ranks([*source, "trainer.precision=32-true", *items], log, 3)
    assert {status_of(pid) for pid in pids} == {expect}, log.with_suffix(".0").read_text()


@SLOW
@pytest.mark.parametrize(
    "more",
    [
        ["trainer.precision=bf16-mixed"],
        [f"trainer.strategy.zero={json.dumps({'offload_optimizer': {'device': 'cpu'}})}"],
    ],
    ids=["bf16", "offloaded"],
)
def test_autocast_and_offload(recipe: Path, more: list[str]) -> None:
    plain, sharded = (
        train(recipe, *PLAIN, *more[: "bf16" in more[0]]),
        train(recipe, *deepspeed(2), *more),
    )
    assert losses(sharded) == pytest.approx(losses(plain), rel=1e-3)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3])
def test_a_gradient_that_is_no_number_stops_the_run(recipe: Path, stage: int) -> None:
    """DeepSpeed leaves such a step out, and says nothing."""
    every = "checkpoint.every_n_steps=1"
    folder = train(recipe, *deepspeed(stage), every, disturb("BreakGradient", step=3), expect=1)
    assert "kd-train: failed: a gradient was NaN or infinite in step 3" in said(recipe)
    assert_good(folder, 3)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([*deepspeed(3), "model.ema_decay=0.9"], "model.ema_decay: must be null with stage 3"),
        (
            [*deepspeed(2), "config=zero"],
            "optim.zero: DeepSpeed shards the optimizer's state already",
        ),
        (
            [*deepspeed(2), "optim.name=lamb"],
            "optim.name: must be adamw, adam, sgd or momentum with DeepSpeed",
        ),
        (
            [*deepspeed(2), "trainer.precision=bf16-true"],
            "trainer.precision: must be 32-true or bf16-mixed",
        ),
        (
            [*deepspeed(2), "trainer.gradient_clip_algorithm=value"],
            "trainer.gradient_clip_algorithm: DeepSpeed clips",
        ),
        ([*deepspeed(2), "trainer.strategy.stage=4"], "trainer.strategy"),
    ],
)
def test_what_does_not_go_together_is_refused(recipe: Path, items: list[str], message: str) -> None:
    train(recipe, *items, expect=2)
    assert f"kd-train: {message}" in said(recipe)
