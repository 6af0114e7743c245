"""Exceptions that the commands report in one line."""

import re
import shlex
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import TypeVar

Kind = TypeVar("Kind", bound=BaseException)


class UserError(ValueError):
    """A mistake in what the user gave, as one line that names the key or file; commands exit with status 2.

    In a job of several processes the first alone prints it, but for :class:`UserErrorOfAll`.
    """


class UserErrorOfAll(UserError):
    """A mistake that every process prints: what the environment says of ranks and machines is wrong, or too little to know
    which process is the first.
    """


class RunError(RuntimeError):
    """A failed run's reason in one line (a full disk, a NaN loss); status 1. The traceback is in the folder's
    ``error.txt``, where the run has one.
    """


class Stopped(Exception):
    """A signal has ended work that is no run in its own folder: a teacher's training before the run, a search of
    ``kd-tune``, a wait for machines, a machine's making of batches for others; status 128 + the signal's number. The same
    command resumes it.

    Args:
        signal_number: the signal's (``signal.SIGTERM``: 15).
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


LOST = re.compile(  # what gloo, nccl and the rendezvous store say when the other side is gone or silent
    r"Connection (reset|closed|refused)|peer closed|Broken pipe|[Tt]imed out|remote process|DistNetworkError|"
    r"DistBackendError|NCCL|[Ww]ait timeout|No route to host|Socket Timeout|pair closure"
)
TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]imeout")
"""What gloo and NCCL say when a collective has waited for as long as it may."""
KILLED_WORKER = re.compile(
    r"DataLoader worker \(pid.*? [\d, ]+\) (is killed by signal: [\w ]+|exited unexpectedly)"
)
NO_SHARED_MEMORY = (
    "data.num_workers: no shared memory is left for the loader processes' batches (/dev/shm); data.num_workers=0 does "
    "without, or give the machine more (docker run --shm-size=8g)"
)
KNOWN = {
    "Expected more than 1 value per channel when training": "data.batch_size: must be >= 2 in each process for a student "
    "with BatchNorm, which has no variance of a single picture whose map is one pixel",
    "no kernel image is available": "trainer.accelerator: this torch has no code for the machine's GPU; a newer GPU, a "
    "torch that was built for this one, or trainer.accelerator=cpu",
    "is killed by signal: Bus error": NO_SHARED_MEMORY,
}
"""A part of a library's message -> what a run prints in its place: the key, and what to do."""


NEARLY = 0.85
"""Likeness (see :func:`kd.config.suggest.nearest`) from which on the name before an unknown model's tag (``NAME.TAG``)
counts as that of a known model misspelt, and not as part of a class path.
"""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, then the one that it was raised from (``__cause__``), or else the one that was being handled when it
    was raised (``__context__``), and so on; nothing for None.

    A context that ``raise ... from None`` hides is yielded too: what a library hides from its users may be what a message
    of kd is about.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # an error may be its own cause
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def cause_of_kind(error: BaseException | None, kind: type[Kind]) -> Kind | None:
    """The first of :func:`causes` (the error itself, then those inside it) that is of a kind; None without one."""
    return next((cause for cause in causes(error) if isinstance(cause, kind)), None)


def builder_hint(name: str, key: str) -> str:
    """The end of a message for an architecture that timm lacks, where its name has the form of a class path (names joined by
    dots); else "".

    >>> builder_hint("mine.Nets", "model.student"), builder_hint("resnet10", "model.student")
    ('; a class path goes to model.student.builder=mine.Nets', '')

    Args:
        name: what was given as ``arch``.
        key: of the model's settings: ``model.student``, ``model.teacher`` or ``model.teachers.NAME``; or ``weights`` for a
            file that ``kd-eval`` measures, which removes this word from the message.
    """
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name):
        return f"; a class path goes to {key}.builder={name}"
    return ""


def needs_extra(extra: str) -> str:
    """The end of a message for a missing package: ``needs the extra ray: .../python -m pip install 'kd-train[ray]'``."""
    package = f"'kd-train[{extra}]'"
    return f"needs the extra {extra}: {pip_install(package)}"


def pip_install(package: str) -> str:
    """The command that installs a package for this Python: ``pip`` alone may belong to another Python."""
    return f"{shlex.quote(sys.executable)} -m pip install {package}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, cut to 200 characters; the name of its class where that line is empty."""
    return (str(error).splitlines() or [""])[0].strip()[:200] or type(error).__name__


def reason(error: BaseException) -> str:
    """Why a run failed, in one line; long messages of libraries are put into plain words.

    The first of these that fits: a RunError's or UserError's own line, also from a loader worker; one of :data:`KNOWN`; a
    loader worker that was killed or is gone; a lost connection to another process, or a wait for one that timed out; the
    class and text of an error in a loader worker; else :func:`plain`.

    Args:
        error: what ended the run. For :data:`KNOWN` and a worker's end its :func:`causes` are searched too.
    """
    lines = str(error).splitlines() or [""]
    first = lines[0]
    of_worker = "in DataLoader worker process" in first
    if (
        of_worker
    ):  # the worker's traceback follows; after its indented lines come the error's class and text
        last_of_frames = max(i for i, line in enumerate(lines) if line.startswith("  ") or i == 0)
        text = " ".join(" ".join(lines[last_of_frames + 1 :]).split())
        first = re.sub(r"^kd\.errors\.\w+: ", "", text)
    if isinstance(error, RunError | UserError):
        return first
    said = "\n".join(map(str, causes(error)))
    for words, line in KNOWN.items():
        if words in said:
            return line
    end = end_of_a_worker(error)
    if end:
        return f"a loader worker {end} (out of memory? data.num_workers)"
    if isinstance(error, RuntimeError) and LOST.search(str(error)):
        detail = re.sub(r"^.*?(Read|Write) error |^\[\S*\.cc:\d+\] ", "", first).split(". ")[0]
        what = "lost the connection to another process (killed, or its machine is gone)"
        if TIMED_OUT.search(first):
            what = "waited for another process for rank_timeout_s (stopped, or its machine is gone)"
        return f"{what}: {detail[:160]}"
    return first if of_worker else plain(error)


def end_of_a_worker(error: BaseException) -> str:
    """How a worker process of a DataLoader ended, if its end has caused the error: "was killed by signal: Killed", "exited
    unexpectedly"; else "".

    Args:
        error: what ended the run; its :func:`causes` are searched too.
    """
    killed = KILLED_WORKER.search("\n".join(map(str, causes(error))))
    if killed is not None:
        return killed[1].replace("is killed", "was killed")
    return "exited unexpectedly" if any(map(_is_of_a_workers_pipe, causes(error))) else ""


def _is_of_a_workers_pipe(error: BaseException) -> bool:
    """Whether an error is a broken pipe to a loader worker that has just died, or the missing file of its socket: its
    traceback leads through torch's loader and multiprocessing.

    torch itself reports a worker that it sees is dead; where the process still counts as alive, this error arrives.
    Other errors from torch's loader (too many open files, a worker that could not be started) are not of this kind.
    """
    if not isinstance(error, EOFError | ConnectionError | FileNotFoundError):
        return False
    shown = "".join(traceback.format_tb(error.__traceback__))
    return "torch/utils/data/dataloader.py" in shown and "/multiprocessing/" in shown


def plain(error: BaseException) -> str:
    """An unexpected error in one line: its class and at most 240 characters of its text. An OSError that has a reason is
    shown by the reason and the file instead. What the error was raised from follows (:func:`raised_from`).
    """
    if isinstance(error, OSError) and error.strerror:
        line = error.strerror
        if error.filename:
            line = f"{error.strerror}: {error.filename!s:.120}"
    else:
        line = f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"
    return line + raised_from(error, line)


def raised_from(error: BaseException, line: str) -> str:
    """The causes of an error (``raise ... from``), as the end of the line that shows it: a library's error may name its own
    step, and only the cause names the mistake. "" without causes, or where the line has their text.

    >>> error = RuntimeError("can't build")
    >>> error.__cause__ = KeyError("widht")
    >>> raised_from(error, "can't build")
    " (from KeyError: 'widht')"

    Args:
        error: the one that is shown; at most three causes are read.
        line: what is shown already; a cause whose text is in it is left out.
    """
    shown = ""
    cause = error.__cause__
    for _ in range(3):
        text = " ".join(str(cause or "").split())[:160]
        if text and text not in line + shown:
            shown += f" (from {type(cause).__name__}: {text})"
        cause = cause and cause.__cause__
    return shown


def among(names: Iterable[str]) -> str:
    """Names in brackets, for the end of a message, such as " (a, b)"; "" without names."""
    listed = ", ".join(names)
    return f" ({listed})" if listed else ""


REFUSED_LOSSES = {
    "MultiLabel": "compares classes that exclude each other, the data has several labels a picture; BinaryKDLoss and the "
    "losses over features are defined for them",
    "Segmentation": "is not defined for masks; PixelKDLoss, CWDLoss and the losses over features are",
    "Regression": "compares classes, the data has numbers (RegressionKDLoss compares these)",
}
"""What a message says of a loss that a task refuses, after the loss's name, by the task's class."""


def no_such_loss(name: str, losses: Iterable[str]) -> UserError:
    """Makes the error for settings (arguments, a weight) of a loss that the run does not have; the caller raises it.

    Args:
        name: of the loss, the key's last part.
        losses: names of the run's losses; the message lists those other than ``name``.
    """
    key = f"model.distill_losses.{name}"
    others = among(other for other in losses if other != name)
    return UserError(f"{key}: loss '{name}' not found{others}; to add one: {key}=KDLoss")
