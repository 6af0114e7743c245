"""``kd-train`` as a child process: on its own machine, outside any job, and never longer than its parent."""

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kd.storage.elsewhere import LARGEST_LOG, text_of

PARENT = "KD_PARENT"  # names the process with which a child ends
_PR_SET_PDEATHSIG = 1
_OF_A_JOB = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip


def start_kd_train(items: Sequence[str], **popen: Any) -> subprocess.Popen:
    """Starts ``kd-train``, which gets a SIGTERM when this thread (Linux counts it as the parent) ends in any way.

    Args:
        items: the command line.
        popen: further arguments of ``subprocess.Popen``; ``env`` is added to this process's environment.
    """
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in _OF_A_JOB and not k.startswith(("SLURM_", "TORCHELASTIC_"))
    }
    env |= {**(popen.pop("env", None) or {}), PARENT: str(os.getpid())}
    return subprocess.Popen([sys.executable, "-m", "kd.cli", *items], env=env, **popen)


def reason_in(log: Path) -> str:
    """Why a ``kd-train`` failed, in a line, by the log of its output."""
    text = text_of(log, LARGEST_LOG, errors="replace") if log.is_file() else ""
    message = (
        r"kd-(?:train|latency): (?!the traceback|to resume|resume)(?:rank \d+: )?(?:failed: )?(.+)"
    )
    return (re.findall(message, text) or text.strip().splitlines() or ["no output"])[-1][:200]


def die_with_parent() -> None:
    """Asks the kernel (Linux) for a SIGTERM at the parent's end."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with_parent() -> None:
    """In such a child, as it starts: asks the kernel for a SIGTERM at the parent's end. Elsewhere nothing."""
    parent = os.environ.pop(
        PARENT, None
    )  # popped: processes that this one starts have another parent
    if parent is None or not sys.platform.startswith("linux"):
        return
    die_with_parent()
    if os.getppid() != int(parent):  # it ended before prctl was called
        os.kill(os.getpid(), signal.SIGTERM)


SAYS_HOW = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_asleep() -> None:
    """Waiting threads sleep: OpenMP's spin on cores that others need. Before torch."""
    if not any(name in os.environ for name in SAYS_HOW):
        os.environ["OMP_WAIT_POLICY"] = "passive"
