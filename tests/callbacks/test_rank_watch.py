"""A rank that is stopped in the middle of a run: the others end after the time-out, and name it."""

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytorch_lightning.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

from kd.callbacks.rank_watch import RankWatch
from kd.lightning_internals import set_timeout
from kd.strategies.ddp import DDP
from kd.strategies.fsdp import FSDP
from tests._forks import start_ranks, status_of


def items(recipe: Path) -> list[str]:
    return [
        f"recipe={recipe}",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "data.batch_size=4",
        "trainer.enable_progress_bar=false",
        "trainer.max_epochs=2000",
        "rank_timeout_s=16",
        "checkpoint.every_n_steps=1",
    ]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_after_the_time_out(recipe: Path, stopped: int) -> None:
    """Rank 0 holds the store that all ranks read, so its own stop is the harder case."""
    log = recipe.parent / "log"
    pids = start_ranks(items(recipe), log)
    other = 1 - stopped
    try:
        trained = recipe.parent / "runs" / "tiny" / "000" / "checkpoints" / "last.ckpt"
        deadline = time.monotonic() + 120
        while not trained.exists():
            assert time.monotonic() < deadline and os.waitpid(pids[0], os.WNOHANG)[0] == 0, (
                log.with_suffix(".0").read_text()
            )
            time.sleep(0.1)
        os.kill(pids[stopped], signal.SIGSTOP)
        began = time.monotonic()
        status = status_of(pids[other], 90)
        seconds = time.monotonic() - began
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    text = log.with_suffix(f".{other}").read_text()
    assert status == 1, text
    assert 8 < seconds < 45
    failures = [
        line
        for line in text.splitlines()
        if line.startswith("kd-train: ") and "failed: rank" in line
    ]
    assert len(failures) == 1, text
    assert f"rank {stopped}" in failures[0] and "did not come to step" in failures[0]
    assert failures[0].endswith("16 s long (rank_timeout_s)")


@pytest.mark.parametrize(
    "strategy",
    [DDPStrategy(), DDP(), FSDP(), FSDPStrategy(accelerator=None), ModelParallelStrategy()],
    ids=lambda strategy: type(strategy).__name__,
)
def test_the_time_out_reaches_every_strategy(strategy: Any) -> None:
    assert set_timeout(strategy, 60.0) == 60.0
    assert strategy._timeout == timedelta(seconds=60)


def test_a_strategy_s_own_time_out_stays() -> None:
    assert set_timeout(DDP(timeout=timedelta(seconds=5)), 60.0) == 5.0
    assert set_timeout(SingleDeviceStrategy("cpu"), 60.0) == 60.0


@pytest.mark.parametrize(
    "text",
    [
        "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 16000ms for recv operation",
        "Got the following error when running the callback: RuntimeError: Application timeout "
        "caused pair closure",
    ],
)
def test_the_ways_in_which_gloo_says_that_its_time_is_over_are_known(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three ranks one has noted nothing; where no rank's time is over, a lost connection has another reason."""
    notes = {"kd-rank/0/place/2": " on b (process 7)", "kd-rank/0/ended/1": ""}
    store = SimpleNamespace(
        set=notes.__setitem__,
        check=lambda names: names[0] in notes,
        get=lambda name: notes[name].encode(),
    )
    monkeypatch.setattr("kd.callbacks.rank_watch._connect", lambda: store)
    monkeypatch.setattr("kd.callbacks.rank_watch.NOTED_WITHIN_S", 0.0)
    watch = RankWatch(16.0)
    watch._trainer = SimpleNamespace(global_rank=0, world_size=3, global_step=5)  # type: ignore[assignment]
    lost = RuntimeError(
        "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31245"
    )
    assert watch.explain(lost) is None
    for error in (RuntimeError(text), lost):
        named = "rank 2 on b (process 7) did not come to step 5, 16 s long (rank_timeout_s)"
        assert str(watch.explain(error)) == named
    assert watch.explain(RuntimeError("another mistake")) is None
