"""What this process may use of its machine: cores, a cache folder, a Ray of its own, the network EFA; and signals to it."""

import os
import platform
import re
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from kd.errors import UserError, first_line

if TYPE_CHECKING:
    import torch

SAFE_PATH = "PYTHONSAFEPATH"
"""A variable: where it is set, Python looks for no module in the present folder, nor in that of its program."""


def python(*words: str) -> list[str]:
    """A command line that starts this Python without the present folder on its module path (``-P``); kd starts every Python
    process with it.

    A ``statistics.py`` in a folder that others write to would else be imported in place of Python's own. ``PYTHONPATH``
    counts as usual. For processes that libraries start, :func:`kd.cli.main` sets :data:`SAFE_PATH`.

    Args:
        words: Python's arguments: ``-m``, the module, and its arguments.
    """
    return [sys.executable, "-P", *words]


def core_ids() -> list[int] | None:
    """Numbers of the cores that this process may run on (its affinity), ascending; None where the system does not say
    (macOS).
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return None


def processor() -> str:
    """The CPU's model name for people, from ``/proc/cpuinfo`` on Linux, else from Python; "CPU" where neither has one."""
    with suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "CPU"


def choose_device(name: str | None = None) -> "torch.device":
    """The device of that name, after a tensor was made on it; None: the CUDA GPU where there is one, else the CPU.

    Raises:
        UserError: the name is no device, or the device can't be used.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device: '{name}' can't be used: {first_line(error)}") from error
    return device


def peak_memory_mb() -> float:
    """The most memory of the host that this process has held so far (resident), in MB (2**20 bytes)."""
    with suppress(OSError):  # Linux, where getrusage would count the parent's memory at the fork
        status = Path("/proc/self/status")
        peak_kb = re.search(r"^VmHWM:\s+(\d+)", status.read_text(), re.MULTILINE)
        if peak_kb is not None:  # gVisor's status has none
            return int(peak_kb[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak / 2**20
    return peak / 2**10


def cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """How many CPU cores this process may use, at least 1: by affinity, or by its container's limit if that is less.

    Args:
        quota: the container's file (cgroup v2): microseconds of CPU time allowed in a period (``max`` for no limit), then
            microseconds of the period. Their ratio is rounded down. Without the file affinity alone counts.
    """
    if hasattr(os, "sched_getaffinity"):
        given = len(os.sched_getaffinity(0))
    else:
        given = os.cpu_count() or 1
    if quota.is_file() and not quota.read_text().startswith("max"):
        allowed, period = quota.read_text().split()
        given = min(given, max(1, int(allowed) // int(period)))
    return given


def cache_dir() -> Path:
    """The folder of what kd keeps from run to run (:data:`kd.storage.cache_parts.PARTS`): the variable ``KD_CACHE``, else
    ``kd`` in the user's cache folder (the variable ``XDG_CACHE_HOME``, else ``~/.cache``).

    The folder is not made here, and may not exist yet. An empty variable counts as not set.
    """
    if os.environ.get("KD_CACHE"):
        return Path(os.environ["KD_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kd"


def shipped(kind: str) -> Path:
    """The folder of the recipes or overlays that come with kd: ``kd/_recipes`` or ``kd/_configs`` of an installed wheel; in
    a checkout ``recipes`` or ``configs`` beside ``kd``.

    Args:
        kind: ``recipes`` or ``configs``.
    """
    package = Path(__file__).parent
    inside = package / f"_{kind}"
    if inside.is_dir():
        return inside
    return package.parent / kind


def is_about_cache(error: BaseException) -> bool:
    """Whether an error comes from a cache folder (:func:`cache_dir`) that can't be made or written.

    True for an OSError whose file is the cache folder, a folder above it or a path below it, if the cache folder is missing
    or not writable now.
    """
    if not isinstance(error, OSError) or error.filename is None:
        return False
    folder = cache_dir().absolute()
    named = Path(os.fsdecode(error.filename)).absolute()
    if named != folder and folder not in named.parents and named not in folder.parents:
        return False
    # Path.is_dir raises where a folder above can't be searched
    return not os.path.isdir(folder) or not os.access(folder, os.W_OK)  # noqa: PTH112


# characters of the temporary folder: the system allows a socket's path 107, and Ray's own part is long
LONGEST_FOLDER = 40


def own_folder() -> Path:
    """Makes a new folder for the files of a Ray that this process starts, with a path short enough for Ray's sockets: in
    ``/tmp`` where the path of the temporary folder is longer than :data:`LONGEST_FOLDER`.
    """
    base = tempfile.gettempdir()
    return Path(
        tempfile.mkdtemp(prefix="kd-ray-", dir=base if len(base) <= LONGEST_FOLDER else "/tmp")
    )


JOBS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")  # each scheduler's variable with the job's id


def in_job() -> bool:
    """Whether this process runs in a job of a scheduler (SLURM, LSF, PBS), which sends a signal before it ends the job."""
    return any(name in os.environ for name in JOBS)


def say_in_handler(text: str) -> None:
    """Writes a line to stderr from a signal's handler, straight to file descriptor 2.

    Not by ``sys.stderr``: the handler may have interrupted code that holds its buffer. On a terminal the line begins on a
    new line. A closed stderr is no error.
    """
    line_end = "\n" if os.isatty(2) else ""  # of a progress bar that may be shown
    with suppress(OSError):  # a terminal that was closed
        os.write(2, f"{line_end}{text}\n".encode())


def stopping(number: int, when: str) -> str:
    """The line that a training prints as soon as a signal comes. For SIGINT it says what a second Ctrl-C does; for all
    others it names the signal.

    Args:
        number: the signal's.
        when: the words after "stopping after".

    >>> stopping(signal.SIGTERM, "this step")
    'kd-train: SIGTERM: stopping after this step, with a checkpoint'
    """
    if number != signal.SIGINT:
        return f"kd-train: {signal.Signals(number).name}: stopping after {when}, with a checkpoint"
    return f"kd-train: stopping after {when}, with a checkpoint (Ctrl-C again stops at once, without one)"


@contextmanager
def signals_kept(handler: Callable[[int, FrameType | None], None] | None = None) -> Iterator[None]:
    """Restores the handlers of SIGTERM and SIGINT at its end, whatever was set inside.

    In any thread but the main one it does nothing, as Python sets handlers of signals in the main thread alone.

    Args:
        handler: set for both signals inside; called with the signal's number and the frame, as by :func:`signal.signal`.
            None: none is set here, for code inside that sets its own (``ray.init`` does).
    """
    main = threading.current_thread() is threading.main_thread()
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT) if main
    }
    try:
        for number in handlers if handler else ():
            signal.signal(number, handler)
        yield
    finally:
        for number, before in handlers.items():
            if before is not None:  # one that C code has installed can't be put back from here
                signal.signal(number, before)


def last_line(error: Exception) -> str:
    """The last line of an error's text, at most 200 characters; in Ray's errors it has the reason, below the traceback.

    The name of the error's class where it has no text.
    """
    lines = str(error).strip().splitlines()
    if not lines:
        lines = [type(error).__name__]
    last = lines[-1].strip()
    return last[:200]


def has_efa(devices: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether the machine has Amazon's network EFA, by the PCI ids of its devices (0xefa0, 0xefa1, ...)."""
    return any(file.read_text().startswith("0xefa") for file in devices.glob("*/device/device"))


def log_nccl(env: MutableMapping[str, str] = os.environ) -> None:
    """On a machine with EFA, makes NCCL log its start, which names its network, to a file of each process.

    Sets NCCL's variables ``NCCL_DEBUG*`` in ``env``; to be called before NCCL makes its first communicator. The file is
    ``kd-nccl.PID`` in the temporary folder; :func:`nccl_network` reads it. Where ``NCCL_DEBUG`` is set already, nothing is
    changed; a ``NCCL_DEBUG_FILE`` without it is replaced.
    """
    if "NCCL_DEBUG" not in env and has_efa():
        file = str(Path(tempfile.gettempdir()) / "kd-nccl.%p")
        env.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=file)


def nccl_network(env: MutableMapping[str, str] = os.environ) -> str:
    """The network that NCCL uses, by the last that this process's log of NCCL names: ``Libfabric`` (EFA), ``Socket`` (TCP),
    ...; "" without a log, or where it names none.

    Args:
        env: as :func:`log_nccl` has left it; its ``NCCL_DEBUG_FILE`` is the log.
    """
    file = Path(env.get("NCCL_DEBUG_FILE", "").replace("%p", str(os.getpid())))
    text = ""
    if file.is_file():
        text = file.read_text(errors="replace")
    return (re.findall(r"Using network (?:AWS )?(\w+)", text) or [""])[-1]
