"""What goes wrong in a long run ends in one clear line, a good checkpoint, and no process left over."""

import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import reduce_storage
from torch.utils.data import DataLoader

from kd.errors import reason
from tests._forks import run_ranks, start, start_ranks, status_of, statuses_of, survivors
from tests._helpers import ROOT, write_recipe
from tests._runs import assert_good, disturb, run_of, summary_of


def fails(recipe: Path, *items: str) -> tuple[int, str, Path]:
    """Exit status, output and folder of a run; nothing of it is left over."""
    log = recipe.parent / "log"
    pid = start(
        [
            f"recipe={recipe}",
            "checkpoint.every_n_steps=1",
            "trainer.enable_progress_bar=false",
            *items,
        ],
        log,
    )
    status = status_of(pid)
    assert survivors(pid) == []
    return status, log.read_text(), run_of(recipe)


def test_a_loss_that_is_no_number_names_step_and_pictures(recipe: Path) -> None:
    status, log, folder = fails(recipe, disturb("BreakWeights", step=3), "config=audit")
    assert status == 1
    (line,) = [text for text in log.splitlines() if "the loss is" in text]
    assert (
        "kd-train: failed: the loss is nan in batch 3 of the run (step 3, epoch 1, rank 0)" in line
    )
    records = (folder / "records" / "samples.rank0.jsonl").read_text().splitlines()
    batch = json.loads(records[3])["index"]
    assert line.endswith(f"training pictures: {', '.join(map(str, batch))}")
    assert_good(folder, 3)
    assert summary_of(folder)["status"] == "failed"


def test_a_gradient_that_is_no_number_spoils_no_checkpoint(recipe: Path) -> None:
    status, log, folder = fails(recipe, disturb("BreakWeights", step=3, gradient=True))
    assert status == 1
    assert "the student's weights are NaN or infinite after step 4" in log
    assert_good(folder, 3)


def test_a_loader_worker_killed_by_the_kernel(recipe: Path) -> None:
    status, log, folder = fails(
        recipe, disturb("KillWorker"), "data.num_workers=2", "data.batch_size=2"
    )
    assert status == 1
    # torch says the one or the other, by who is the first to see it gone
    (line,) = [text for text in log.splitlines() if text.startswith("kd-train: failed:")]
    assert re.search("a loader worker (was killed by signal: Killed|exited unexpectedly)", line)
    # what the loaders had prepared by then is still trained on, if the signal does not end the saving of step 2
    assert_good(folder, *range(1, 7))


class ClosesItsPipe:
    """A batch whose worker has closed the socket behind its file descriptor, as one that dies does, and lives on."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.storage = torch.stack(samples).untyped_storage()

    def __reduce__(self) -> Any:
        rebuilt = reduce_storage(self.storage)
        resource_sharer.stop()
        return rebuilt


def test_a_worker_whose_pipe_closes_before_it_is_seen_dead() -> None:
    batches = iter(
        DataLoader([torch.zeros(3000)] * 8, batch_size=4, num_workers=1, collate_fn=ClosesItsPipe)
    )
    with pytest.raises(OSError) as failure:
        next(batches)
    (worker,) = multiprocessing.active_children()
    assert worker.is_alive()
    assert (
        reason(failure.value)
        == "a loader worker exited unexpectedly (out of memory? data.num_workers)"
    )


def test_a_second_ctrl_c_stops_at_once_and_leaves_the_checkpoint(recipe: Path) -> None:
    status, log, folder = fails(recipe, disturb("Interrupt"))
    assert status == 130
    assert "kd-train: interrupted" in log
    assert "Traceback" not in log
    assert_good(folder, 2)
    assert summary_of(folder)["status"] == "interrupted"


TWO = [
    "trainer.devices=2",
    "trainer.strategy=ddp",
    "data.batch_size=4",
    "checkpoint.every_n_steps=1",
]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_takes_the_other_down(recipe: Path, killed: int) -> None:
    log = recipe.parent / "log.txt"
    pids = start_ranks([f"recipe={recipe}", *TWO, disturb("KillAtStep", step=3, rank=killed)], log)
    statuses = statuses_of(pids)
    assert statuses[killed] == -9
    assert statuses[1 - killed] == 1
    text = log.with_suffix(f".{1 - killed}").read_text()
    assert "failed: lost the connection to another process" in text
    assert_good(run_of(recipe), 3)
    assert [survivors(pid) for pid in pids] == [[], []]


def test_a_bad_loss_on_one_rank_stops_both(recipe: Path) -> None:
    log = recipe.parent / "log.txt"
    pids = start_ranks([f"recipe={recipe}", *TWO, disturb("BreakWeights", step=3, rank=1)], log)
    assert statuses_of(pids) == [1, 1]
    assert (
        "the loss is nan in batch 3 of the run (step 3, epoch 1, rank 1)"
        in log.with_suffix(".1").read_text()
    )
    assert_good(run_of(recipe), 3)


@pytest.mark.slow
def test_ranks_that_kd_train_started_itself_leave_no_orphan(recipe: Path) -> None:
    """The process that started the other is killed: the other ends by itself."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kd.cli", f"recipe={recipe}", *TWO, disturb("KillAtStep", step=3, rank=0)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    out, err = process.communicate(timeout=240)
    assert process.returncode == -9, err
    assert survivors(process.pid) == []
    assert "kd-train: rank 1: failed: lost the connection to another process" in err, out + err


def test_sigterm_waits_for_a_checkpoint_that_is_being_written(recipe: Path) -> None:
    items = [
        "checkpoint.asynchronous=true",
        "data.batch_size=4",
        "trainer.devices=2",
        "trainer.strategy=ddp",
    ]
    log = recipe.parent / "log.txt"
    pids = start_ranks([f"recipe={recipe}", *items, disturb("Terminate", step=2)], log)
    assert status_of(pids[0]) == 143
    status_of(pids[1])
    assert "kd-train: stopped by SIGTERM" in log.with_suffix(".0").read_text()
    assert_good(run_of(recipe), 6)  # ranks agree at the epoch's last batch here


def test_closed_pipes_and_an_early_sigusr2_end_no_run(recipe: Path) -> None:
    """``kd-train ... | head -1``, and a signal that warns jobs alone."""
    log = recipe.parent / "log"
    os.mkfifo(log)
    pid = start([f"recipe={recipe}", "trainer.max_epochs=1", disturb("Slow", seconds=0.01)], log)
    with log.open() as output:
        while not (line := output.readline()).startswith("data: "):
            assert line
        os.kill(pid, signal.SIGUSR2)
    assert status_of(pid) == 0
    assert (run_of(recipe) / "student.safetensors").is_file()


def test_fewer_validation_pictures_than_processes(
    pictures: Path, teacher: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few"
    shutil.copytree(pictures, few)
    for picture in sorted(few.glob("val/*/*.jpg"))[1:]:
        picture.unlink()
    log = tmp_path / "log.txt"
    items = [*TWO, "trainer.max_epochs=1", "preflight=warn"]
    run_ranks([f"recipe={write_recipe(tmp_path / 'tiny.yaml', few, teacher)}", *items], log)
    summary = summary_of(tmp_path / "runs" / "tiny" / "000")
    assert summary["student"]["val"]["acc1"] in (0, 1)
    assert summary["student"]["val"]["agreement"] in (0, 1)


@pytest.mark.parametrize(
    "items",
    [
        ["trainer.precision=bf16-true", "model.ema_decay=0.9", "trainer.max_epochs=1"],
        ["trainer.max_epochs=-1", "trainer.max_time=00:00:00:01"],
        [
            "trainer.max_epochs=-1",
            "trainer.max_steps=7",
            "model.distill_losses.kd.final_temperature=1",
        ],
    ],
    ids=["half precision throughout", "bounded by time", "bounded by steps"],
)
def test_other_bounds_and_precisions(items: list[str], recipe: Path) -> None:
    status, log, folder = fails(recipe, *items)
    assert status == 0, log
    summary = summary_of(folder)
    assert math.isfinite(summary["student"]["val"]["acc1"])
    assert ("the learning rate stays at its peak" in log) == (
        "trainer.max_time=00:00:00:01" in items
    )


def test_a_full_disk_at_the_first_write_is_one_line(recipe: Path) -> None:
    """As under a quota that is used up: no file may grow beyond 1 KiB. What is said goes through a pipe."""
    log = recipe.parent / "log"
    os.mkfifo(log)
    reading = os.open(log, os.O_RDWR)
    pid = start([f"recipe={recipe}"], log, resource.setrlimit, resource.RLIMIT_FSIZE, (1024, 1024))
    status = status_of(pid)
    said = os.read(reading, 2**16).decode()
    os.close(reading)
    assert status == 2, said
    assert said.splitlines()[-1].endswith("runs/tiny can't be written: File too large")
    assert "Traceback" not in said
