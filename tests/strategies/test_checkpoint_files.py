"""Weights that can't be written: every rank ends, with the reason of the one that writes."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from kd.cli import train_main
from kd.storage import writing
from kd.storage.writing import write_whole
from kd.strategies import checkpoint_files
from tests._forks import start_ranks, statuses_of

TWO = [
    "trainer.devices=2",
    "trainer.strategy=ddp",
    "data.batch_size=4",
    "trainer.max_epochs=2",
    "trainer.enable_progress_bar=false",
]
OWN = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "RUN/own", "filename": "mine"}}
FULL = "can't be written: No space left on device"
PATIENCE_S = 60


def full_disk(items: list[str]) -> int:
    """kd-train whose disk is full for one file; rank 0, once it has failed, stays until rank 1 has reported its failure.

    Args:
        items: name of the file, path of rank 1's output, and the command line.
    """
    name, log_of_second, *command = items

    def write(path: Path, content: Callable[..., object], keep: Path | None = None) -> None:
        if path.name == name:
            raise OSError(28, "No space left on device")
        write_whole(path, content, keep)

    with (
        mock.patch.object(checkpoint_files, "write_whole", write),
        mock.patch.object(writing, "write_whole", write),
    ):
        status = train_main(command)
    deadline = time.monotonic() + PATIENCE_S
    if os.environ["LOCAL_RANK"] == "0":
        while "failed" not in Path(log_of_second).read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
    return status


@pytest.mark.parametrize(
    ("name", "items", "reason"),
    [
        ("last.ckpt", ["checkpoint.every_n_steps=1"], f"last.ckpt {FULL}"),
        (
            "mine.ckpt",
            [f"trainer.callbacks={json.dumps([OWN])}", "checkpoint.asynchronous=true"],
            f"mine.ckpt {FULL}",
        ),
    ],
)
def test_a_full_disk_of_rank_0_ends_the_other_rank(
    name: str, items: list[str], reason: str, recipe: Path
) -> None:
    """It would wait in Lightning's barrier while the process of rank 0 lives, for up to ``rank_timeout_s``."""
    log = recipe.parent / "log.txt"
    first, second = log.with_suffix(".0"), log.with_suffix(".1")
    command = [name, str(second), f"recipe={recipe}", *TWO, *items]
    pids = start_ranks(command, log, program=full_disk)
    assert statuses_of(pids) == [1, 1]
    assert reason in first.read_text()
    (line,) = [text for text in second.read_text().splitlines() if ": failed: " in text]
    assert line.startswith("kd-train: rank 1: failed: rank 0: ") and reason in line
