"""``kd-train`` as a child process: on its own machine, outside any job, and never longer than its parent."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kd.launch.groups import OUTSIDE
from kd.machine import SAFE_PATH, python
from kd.storage.elsewhere import LARGEST_LOG, text_of

PARENT = "KD_PARENT"  # names the process with which a child ends
STARTER = "KD_STARTER"  # names the first process of a machine, in the ranks that it starts
TRAINS_TEACHER = (
    "KD_TRAINS_TEACHER"  # set in a run that trains the teacher of another one, which has started it
)
CHECK_STARTER_S = 0.5  # seconds between two checks that the first process is alive
OUTLIVES_S = 8.0  # seconds that a rank may outlive the first process, to finish what it writes
_PR_SET_PDEATHSIG = 1  # of prctl(2)
# variables of a process within a job, and what those of launchers begin with (PET: Kubeflow, SM: SageMaker): a child that
# inherited them would look for the job's other processes
_OF_LAUNCHERS = (
    "SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "JSM_", "SKYPILOT_", "PET_", "SM_",
)  # fmt: skip
_OF_A_JOB = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "KD_ROLE", "KD_DATA_NODES", "TRAINING_JOB_NAME", STARTER,
}  # fmt: skip
_OF_DATA = "SM_CHANNEL_"  # SageMaker's names of folders of data
_rank_is_done = threading.Event()  # set by leave_starter()


def start_kd_train(items: Sequence[str], **popen: Any) -> subprocess.Popen:
    """Starts ``kd-train``, or the command that the first word names (``eval``), as a child process; returns it.

    On Linux it gets a SIGTERM when this thread, which counts as its parent, ends in any way. It works on this machine alone:
    the variables by which a launcher describes a job are not passed on, and SageMaker's description of the job in files is
    not read. The folders of SageMaker's channels stay known.

    Args:
        items: the words of its command line, without the name.
        popen: further arguments of ``subprocess.Popen``; ``env`` is added to what it gets of this process's environment.
    """
    env = {}
    for name, value in os.environ.items():
        of_job = name in _OF_A_JOB or name.startswith(_OF_LAUNCHERS)
        if not of_job or name.startswith(_OF_DATA):
            env[name] = value
    env[OUTSIDE] = "1"
    env |= popen.pop("env", None) or {}
    env[PARENT] = str(os.getpid())
    env[SAFE_PATH] = "1"  # for its ranks
    return subprocess.Popen(python("-m", "kd.cli", *items), env=env, **popen)


def trains_teacher() -> bool:
    """Whether this process trains the teacher of the run that has started it."""
    return TRAINS_TEACHER in os.environ


OUTER_KEYS = {
    r"model\.student\.(checkpoint|pretrained)\b": "model.teacher.backbone",
    r"model\.student(?=\.(arch|img_size|kwargs|mean|std|checkpoint_key)\b|(?!\.\w))": "model.teacher",
}
"""Keys of a teacher's training as patterns -> the keys of the run that it is trained for."""


def with_outer_keys(message: str) -> str:
    """A message of a teacher's training with the keys of the run that needs the teacher, which its user types.

    >>> with_outer_keys("model.student.checkpoint: file a.pth not found")
    'model.teacher.backbone: file a.pth not found'
    """
    for pattern, key in OUTER_KEYS.items():
        message = re.sub(pattern, key, message)
    return message


def reason_in(log: Path) -> str:
    """Why a ``kd-train``, ``kd-latency`` or ``kd-eval`` failed, in a line, from the log of its output.

    It is the last line of the log that begins with such a name and may be a reason, else the last line: 200 characters at
    most, then the path of the log.
    """
    text = ""
    if log.is_file():
        text = text_of(log, LARGEST_LOG, errors="replace")
    not_a_reason = "(?!the traceback|to resume|resume|loading )"
    message = rf"kd-(?:train|latency|eval): {not_a_reason}(?:rank \d+: )?(?:failed: )?(.+)"
    reasons = re.findall(message, text)
    lines = reasons or text.strip().splitlines() or ["no output"]
    return f"{lines[-1][:200]} (log: {log})"


def die_with_parent() -> None:
    """Asks the kernel (Linux) for a SIGTERM at the end of the thread that has started this process; on other systems
    nothing.

    It runs in the child, also between ``fork`` and ``exec`` (``preexec_fn``): so it imports nothing and takes no lock of
    Python's.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with_parent() -> None:
    """In a child of kd's that was given :data:`PARENT`, as it starts: asks the kernel for a SIGTERM at the parent's end,
    and ends at once where that has come already.

    In any other process, and on systems other than Linux, nothing.
    """
    # popped: processes that this one starts have another parent
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    die_with_parent()
    if os.getppid() != int(parent):  # it ended before prctl was called
        os.kill(os.getpid(), signal.SIGTERM)


def name_starter() -> None:
    """Sets a variable to this process's id. The first process of a machine calls it before it starts the other ranks.

    They inherit the variable, and end when the first process ends (:func:`end_with_starter`).
    """
    os.environ[STARTER] = str(os.getpid())


def end_with_starter() -> None:
    """In a rank that the first process of its machine has started: starts a thread that watches that process. Elsewhere it
    does nothing.

    A new rank waits in torch's rendezvous, where no Python signal handler runs, for a first process that may be gone. The
    thread ends the rank :data:`OUTLIVES_S` seconds after the first process, whatever the rank waits for, unless
    :func:`leave_starter` was called. Only the first call in a process starts the thread.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return
    starter = os.environ.pop(STARTER, None)  # popped: what this process starts has another parent
    if starter is None:
        return
    _rank_is_done.clear()
    threading.Thread(target=_end_after, args=[int(starter)], daemon=True, name="starter").start()


def leave_starter() -> None:
    """To be called when this rank's part of the run is done: it may then outlive the first process."""
    _rank_is_done.set()


def _end_after(starter: int) -> None:
    """The thread of :func:`end_with_starter`: ends this rank, with status 1, :data:`OUTLIVES_S` seconds after the process
    ``starter`` that started it.

    It does not where the rank's part of the run is done by then (:func:`leave_starter`).
    """
    while os.getppid() == starter:
        if _rank_is_done.wait(CHECK_STARTER_S):
            return
    if _rank_is_done.wait(OUTLIVES_S):
        return
    rank = os.environ.get("LOCAL_RANK", "?")
    message = f"kd-train: rank {rank}: the first process ({starter}), which started it, has ended\n"
    with suppress(OSError):
        os.write(2, message.encode())
    os._exit(1)


SAYS_HOW = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user decides how OpenMP's threads wait; then kd does not."""


def wait_asleep() -> None:
    """Lets OpenMP's waiting threads sleep: by default they spin, on cores that other processes need.

    It sets a variable that OpenMP reads when torch is imported, so it must be called before that. Where the user has set
    one of :data:`SAYS_HOW` nothing is changed.
    """
    if not any(name in os.environ for name in SAYS_HOW):
        os.environ["OMP_WAIT_POLICY"] = "passive"
