"""Runs as forked processes: what the tests have imported already is not imported again."""

import faulthandler
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo

import kd.run.trainer  # noqa: F401 (Lightning and the rest, the same)
from kd.cli import main, train_main
from tests._helpers import ROOT

PATIENCE_S = 240
"""A run that takes longer hangs; shortly before, it writes where to this process's stderr."""


def forget_the_parents_pipes() -> None:
    """First of all in a fork: multiprocessing forgets the sockets and queues of its parent, as it does in its own forks.

    Otherwise a batch in shared memory may be asked of the parent's listener, and a loader process closes a pipe of its own
    that has the number of a socket of the parent.
    """
    util._run_after_forkers()  # type: ignore[attr-defined]


def skip_forks_beside_a_gpu() -> None:
    """Skips a test that forks where there is a GPU: after any backward pass, on the CPU too, autograd has a thread for
    each GPU, and a forked process can't make another."""
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, a fork of a process that has trained can't train")


def start(
    items: list[str],
    log: Path,
    *first: Any,
    program: str | Callable[[list[str]], int] = "train",
    **env: str,
) -> int:
    """A forked run in a session of its own, its output in ``log``; the process id. ``first``: a call made before."""
    skip_forks_beside_a_gpu()
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        forget_the_parents_pipes()
        os.setsid()
        os.chdir(ROOT)
        os.environ.update(env)
        if first:
            first[0](*first[1:])
        # Behind it: to enter a namespace a process must have no other thread, and this starts one.
        faulthandler.dump_traceback_later(PATIENCE_S - 10, file=os.dup(2))
        with log.open("ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        import sys

        # never closed: torch's threads may still have something to say, and abort the process where they can't
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        status = program(items) if callable(program) else main(program, items)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        log.write_text(log.read_text() + traceback.format_exc())
    finally:
        os._exit(status)


def as_installed(folder: Path) -> None:
    """A call for ``first``: begins in a folder, which, as for an installed program, is not on Python's path."""
    import sys

    os.chdir(folder)
    sys.path[:] = filter(None, sys.path)
    sys.modules.pop("mine", None)  # another test's


def as_program(items: list[str]) -> None:
    """A call for ``first``: Lightning starts the other processes of a run as it finds this one started, by forks."""
    import sys

    from pytorch_lightning.strategies.launchers import subprocess_script

    sys.modules["__main__"].__spec__ = find_spec("kd.cli")
    sys.argv = ["kd-train", *items]
    subprocess_script.subprocess = SimpleNamespace(Popen=forked_program)  # type: ignore[assignment]


def forked_program(args: Sequence[str], env: dict[str, str] | None = None, **_: Any) -> "ForkedRun":
    """``subprocess.Popen`` of ``python -m kd.cli ...``, by a fork."""
    return ForkedRun(list(args[list(args).index("kd.cli") + 1 :]), env=env)


def torchrun(items: list[str]) -> int:
    """A program for ``start``: torchrun itself, whose worker is a fork; it raises where it is stopped."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = forked_program  # type: ignore[assignment,misc]
    run.main(["--nproc-per-node=1", f"--master-port={free_port()}", "-m", "kd.cli", *items])
    return 0


def free_port() -> str:
    """That nothing listens at, below those that the system gives to connections: a rank that asks before the first one
    listens may be given the very port that it asks, and then waits for itself.
    """
    while True:
        port = 20_000 + int.from_bytes(os.urandom(2), "big") % 12_000
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return str(port)


def start_ranks(
    items: list[str],
    log: Path,
    world_size: int = 2,
    program: str | Callable[[list[str]], int] = "train",
) -> list[int]:
    """One run of several processes on this machine, as a launcher would start them; rank ``r`` logs to ``log.r``."""
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
    }
    return [
        start(items, log.with_suffix(f".{rank}"), program=program, LOCAL_RANK=str(rank), **job)
        for rank in range(world_size)
    ]  # fmt: skip


def run_ranks(
    items: list[str],
    log: Path,
    world_size: int = 2,
    program: str | Callable[[list[str]], int] = "train",
) -> None:
    """One run of several processes to its end; fails where one fails, with what it said."""
    pids = start_ranks(items, log, world_size, program)
    statuses = [status_of(pid) for pid in pids]
    assert not any(statuses), "".join(
        log.with_suffix(f".{rank}").read_text() for rank in range(world_size)
    )


def status_of(pid: int, timeout_s: float = PATIENCE_S) -> int:
    """Waits for the end of a process; its exit status, negative for a signal."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(pid, 9)
    os.waitpid(pid, 0)
    raise TimeoutError(f"process {pid} did not end within {timeout_s} s")


def statuses_of(pids: Iterable[int]) -> list[int]:
    """Waits for the end of each; their exit statuses."""
    return [status_of(pid) for pid in pids]


def wait_until(true: Callable[[], bool], log: Path | None = None, timeout_s: float = 300) -> None:
    """Waits until something is so; where it never is, ``log`` may say why."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, log.read_text() if log else ""
        time.sleep(0.05)


def survivors(session: int, timeout_s: float = 15) -> list[int]:
    """Processes of a session that still live after a while; loader workers look for their parent now and then."""
    deadline = time.monotonic() + timeout_s
    while True:
        alive = [
            pid
            for pid, its_session, state in processes()
            if its_session == session and state != "Z"
        ]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.1)


def processes() -> list[tuple[int, int, str]]:
    """(process id, session, state) of all processes of the machine."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        found.append((int(stat.parent.name), int(session), state))
    return found


class ForkedRun:
    """``kd.launch.child.start_kd_train`` by a fork: the same run, without importing everything anew."""

    def __init__(
        self,
        items: list[str],
        stdout: Any = None,
        env: dict[str, str] | None = None,
        pass_fds: tuple[int, ...] = (),
        first: Callable[[], None] | None = None,
        **_: Any,
    ) -> None:
        self.returncode: int | None = None
        parent, self.pid = os.getpid(), os.fork()
        if self.pid:
            return
        status = 99
        try:
            forget_the_parents_pipes()
            os.setsid()
            for stream in (1, 2) if stdout else ():
                os.dup2(stdout.fileno(), stream)
            kept = max(pass_fds, default=3)
            os.closerange(3, kept)  # as exec does: locks of other trials are none of this one's
            os.closerange(kept + 1, 256)
            os.environ.update((env or {}) | {"KD_PARENT": str(parent), "OMP_NUM_THREADS": "1"})
            import sys

            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(
                    number,
                    signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler,
                )
            if first:
                first()
            status = main(items[0], items[1:]) if items[0].isalpha() else train_main(items)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            import traceback

            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)

    def poll(self) -> int | None:
        """As ``Popen.poll``."""
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """As ``Popen.wait``."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("kd-train", timeout)
            time.sleep(0.01)
        return self.returncode  # type: ignore[return-value]

    def send_signal(self, number: int) -> None:
        """As ``Popen.send_signal``."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """As ``Popen.kill``."""
        self.send_signal(signal.SIGKILL)
