"""A rank that is stopped in the middle of a run: the others end after the time-out, and name it."""

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

from kd.lightning_internals import set_timeout
from kd.strategies.ddp import DDP
from kd.strategies.fsdp import FSDP
from tests._forks import start_ranks, status_of
from tests._runs import run_of


def items(recipe: Path) -> list[str]:
    return [
        f"recipe={recipe}",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "data.batch_size=4",
        "trainer.enable_progress_bar=false",
        "trainer.max_epochs=2000",
        "rank_timeout_s=10",
        "checkpoint.every_n_steps=1",
    ]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_ends_the_others_after_the_time_out(recipe: Path, stopped: int) -> None:
    """Rank 0 holds the store that all ranks read, so its own stop is the harder case."""
    log = recipe.parent / "log"
    pids = start_ranks(items(recipe), log)
    other = 1 - stopped
    try:
        trained = run_of(recipe) / "checkpoints" / "last.ckpt"
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
    assert 5 < seconds < 45
    failures = [line for line in text.splitlines() if line.startswith("kd-train: ")]
    assert any("failed: waited for another process for rank_timeout_s" in x for x in failures), text


@pytest.mark.parametrize(
    "strategy",
    [DDPStrategy(), DDP(), FSDP(), FSDPStrategy(accelerator=None), ModelParallelStrategy()],
    ids=lambda strategy: type(strategy).__name__,
)
def test_the_time_out_reaches_every_strategy(strategy: Any) -> None:
    set_timeout(strategy, 60.0)
    assert strategy._timeout == timedelta(seconds=60)


def test_a_strategy_s_own_time_out_stays() -> None:
    strategy = DDP(timeout=timedelta(seconds=5))
    set_timeout(strategy, 60.0)
    assert strategy._timeout == timedelta(seconds=5)
    set_timeout(SingleDeviceStrategy("cpu"), 60.0)
