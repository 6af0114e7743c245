"""``kd-train`` as a child process: on its own machine, outside any job, and never longer than its parent."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PARENT = "KD_PARENT"  # names the process with which a child ends
_PR_SET_PDEATHSIG = 1
_OF_A_JOB = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip


def start_kd_train(items: Sequence[str], **popen: Any) -> subprocess.Popen:
    """Starts ``kd-train``; where this process ends in any way, SIGKILL too, the child gets a SIGTERM (Linux).

    To be called by a thread that lives as long as the child may: the kernel counts its end as the parent's.
    """
    env = {k: v for k, v in os.environ.items() if k not in _OF_A_JOB and not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    env |= {**(popen.pop("env", None) or {}), PARENT: str(os.getpid())}
    return subprocess.Popen([sys.executable, "-m", "kd.cli", *items], env=env, **popen)


def end_with_parent() -> None:
    """In such a child, as it starts: asks the kernel for a SIGTERM at the parent's end. Elsewhere nothing."""
    parent = os.environ.pop(PARENT, None)  # popped: processes that this one starts have another parent
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGTERM)
