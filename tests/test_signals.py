"""A job that is stopped from outside keeps its work, whichever of its processes the signal reaches."""

import ctypes
import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from tests._forks import start, start_ranks, status_of, statuses_of, survivors, torchrun
from tests._helpers import ROOT
from tests._runs import assert_good, disturb, run_of, summary_of

QUIET = ["trainer.enable_progress_bar=false", "data.batch_size=2", "data.num_workers=2"]
TWO = ["trainer.devices=2", "trainer.strategy=ddp"]


@pytest.fixture(autouse=True)
def _no_nohup() -> Iterator[None]:
    """A closed terminal ends what is started here, also where the tests themselves run below nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def stopped(recipe: Path, *items: str, program: Any = "train", **env: str) -> tuple[int, str, Path]:
    """Exit status, output and folder of a run that a callback stops; nothing of it is left over."""
    log = recipe.parent / "log"
    pid = start([f"recipe={recipe}", *QUIET, *items], log, program=program, **env)
    status = status_of(pid)
    assert survivors(pid) == []
    return status, log.read_text(), run_of(recipe)


def test_submitits_signal_stops_a_job_and_turns_the_samples_off_elsewhere(recipe: Path) -> None:
    signal_group = disturb("SignalGroup", step=2, number=int(signal.SIGUSR2))
    ended, log, folder = stopped(recipe, signal_group, SLURM_JOB_ID="7")
    assert ended == 128 + signal.SIGUSR2, log
    assert "kd-train: stopped by SIGUSR2 at step 3" in log and "Traceback" not in log
    assert_good(folder, 3)
    ended, log, _ = stopped(recipe, signal_group, "trainer.max_epochs=1")
    assert ended == 0, log


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        (signal.SIGUSR1, 138),  # what Lightning's guide has SLURM send before a job ends
    ],
)
def test_a_signal_to_the_group_spares_the_loaders_workers(
    recipe: Path, number: int, status: int
) -> None:
    ended, log, folder = stopped(recipe, disturb("SignalGroup", step=2, number=int(number)))
    assert ended == status, log
    first, _ = log.split(f"kd-train: stopped by {signal.Signals(number).name} at step 3")
    assert first.count("stopping after this step, with a checkpoint") == 1  # said at once
    assert ("(Ctrl-C again stops at once, without one)" in first) == (number == signal.SIGINT)
    assert "Traceback" not in log
    assert_good(folder, 3)
    assert summary_of(folder)["status"] == "interrupted"


def test_an_interrupt_after_a_sigterm_keeps_the_step(recipe: Path) -> None:
    ended, log, folder = stopped(recipe, disturb("TerminateAndInterrupt"))
    assert ended == 143, log
    assert_good(folder, 3)


def login(terminal: int, other: int) -> None:
    """Makes a terminal the session's own, and keeps nothing of its other end."""
    os.close(terminal)
    fcntl.ioctl(other, termios.TIOCSCTTY, 0)


def test_a_terminal_that_is_closed_keeps_the_step(recipe: Path) -> None:
    """The kernel sends SIGHUP, and whatever is written from then on fails."""
    terminal, other = os.openpty()
    items = [f"recipe={recipe}", *QUIET, disturb("Slow", seconds=0.1), "trainer.max_epochs=50"]
    pid = start(items, Path(os.ttyname(other)), login, terminal, other)
    os.close(other)
    folder = run_of(recipe)
    while (
        not (folder / "metrics.csv").exists()
        or (folder / "metrics.csv").read_text().count("\n") < 3
    ):
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 4096)
    os.close(terminal)
    assert status_of(pid) == 129
    assert survivors(pid) == []
    assert summary_of(folder)["status"] == "interrupted"
    assert (folder / "checkpoints" / "last.ckpt").is_file()


def test_a_worker_that_dies_after_the_signal_is_a_part_of_it(recipe: Path) -> None:
    """Within an optimizer step there is nothing to save: the run goes on from the last checkpoint."""
    items = [
        "trainer.accumulate_grad_batches=4",
        "checkpoint.every_n_steps=1",
        disturb("TerminateAndKillWorker"),
    ]
    ended, log, folder = stopped(recipe, *items)
    assert ended == 143, log
    assert f"kd-train resume={folder}" in log
    assert "Traceback" not in log
    assert_good(folder, 2)
    assert summary_of(folder)["status"] == "interrupted"


def launch(command: list[str], recipe: Path, *items: str) -> tuple[int, str, Path]:
    """As ``stopped``, of a program of its own."""
    process = subprocess.Popen(
        [sys.executable, *command, f"recipe={recipe}", *QUIET, *items],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    log, _ = process.communicate(timeout=240)
    assert survivors(process.pid) == []
    return process.returncode, log, run_of(recipe)


def test_a_signal_to_the_group_of_one_rank_stops_both(recipe: Path) -> None:
    log = recipe.parent / "log.txt"
    stop = disturb("SignalGroup", step=2, rank=0)
    pids = start_ranks([f"recipe={recipe}", *QUIET, *TWO, stop], log)
    text = log.with_suffix(".0").read_text
    assert statuses_of(pids) == [143, 0], text()  # 0: see _status_of_stop
    assert [survivors(pid) for pid in pids] == [[], []]
    folder = run_of(recipe)
    assert "kd-train: stopped by SIGTERM at step 10" in text()
    assert f"kd-train resume={folder}" in text()
    assert_good(folder, 10)  # ranks agree every ten batches


@pytest.mark.slow
def test_two_ranks_in_one_group(recipe: Path) -> None:
    ended, log, folder = launch(["-m", "kd.cli"], recipe, *TWO, disturb("SignalGroup", step=2))
    assert ended == 143, log
    assert_good(folder, 10)  # ranks agree every ten batches
    assert summary_of(folder)["status"] == "interrupted"


def test_torchrun_that_is_told_to_stop(recipe: Path) -> None:
    """Its worker, in a session of its own, is sent a SIGTERM with all of its loader processes.

    This process has shared a tensor before, as any test before this one may have: no fork uses its listener.
    """
    ForkingPickler.dumps(torch.ones(1).share_memory_())
    ended, log, folder = stopped(recipe, disturb("SignalLauncher", step=2), program=torchrun)
    assert ended != 0
    assert f"kd-train resume={folder}" in log, log
    assert "loader worker" not in log
    assert_good(folder, 3)
    assert summary_of(folder)["status"] == "interrupted"


# -- what the machine lacks for loader processes -----------------------------------------------------------------------


def forbid_forks() -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    os.fork = refuse


def shrink_shared_memory() -> None:
    """A /dev/shm of 160 kB, seen by this process alone; exit status 77 where that is not allowed."""
    libc = ctypes.CDLL(None)
    new_mounts, private = 0x20000, 0x44000
    if libc.unshare(new_mounts) or libc.mount(b"none", b"/", None, private, None):
        os._exit(77)
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=160k"):
        os._exit(77)


@pytest.mark.parametrize(
    ("lack", "told"),
    [
        (
            forbid_forks,
            "the 2 loader processes can't be started (Resource temporarily unavailable)",
        ),
        (shrink_shared_memory, "data.num_workers: no shared memory is left"),
    ],
)
def test_a_machine_without_room_for_loader_processes(
    recipe: Path, lack: Callable[[], None], told: str
) -> None:
    log = recipe.parent / "log"
    pid = start(
        [
            f"recipe={recipe}",
            "trainer.enable_progress_bar=false",
            "data.num_workers=2",
            "data.img_size=64",
        ],
        log,
        lack,
    )
    status = status_of(pid)
    if status == 77:
        pytest.skip("needs the right to mount a file system")
    text = log.read_text()
    assert status == 1, text
    (line,) = [part for part in text.splitlines() if "kd-train: failed" in part]
    assert told in line
    assert "data.num_workers=0" in line
    assert "Traceback" not in text
    assert survivors(pid) == []
