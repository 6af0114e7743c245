"""What the commands print: it harms no terminal, and continues when its reader has gone (``kd-train ... | head``).

Libraries are kept quiet.
"""

import errno
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any, TextIO

from kd.launch.cluster import is_rank_zero
from kd.storage.shown import on_terminal, without_secrets

HEAVY = ("torch", "onnxruntime", "openvino", "optuna")
"""Packages whose import takes a second or more."""
OF_NO_USE = (
    ".*does not have many workers.*",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    ".*exists and is not empty.*",
    ".*`_scheduled_optimizer_step`.*",
    ".*number of training batches.*smaller than the logging interval.*",
    ".*dataloader is not resumable.*",
    ".*lr_scheduler.step.*before.*optimizer.step.*",
    ".*in eval mode at the start of training.*",
    ".*It is recommended to use `self.log.*sync_dist=True.*",
    ".*Total length of `\\w*Loader` across ranks is zero.*",
    ".*`srun` command is available on your system but is not used.*",
    # before the copy the module adds the teacher's answers, also to a loader that is not kd's; after it the data make
    # the views, and Lightning has one hook for each
    ".*You have overridden `on_before_batch_transfer`.*",
)
"""Warnings of libraries that call for nothing, as ``warnings.filterwarnings`` takes them."""
UP = "\x1b[A"  # moves a terminal's cursor to the line above: tqdm draws bars below each other


class Unbroken:
    """A text stream that turns silent when its pipe or terminal is closed, instead of raising in the next print.

    Whoever prints may print a name from a file: of all control characters only new lines and tabs pass. Secrets of the
    settings are ``...``.

    It stands in the place of ``sys.stdout`` or ``sys.stderr``: attributes that are not defined here are the stream's.

    Args:
        stream: standard output or error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.has_written = False  # read by FirstLine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes lines of text; for a reader that has gone they are dropped. Returns the number of characters given."""
        self._write(on_terminal(without_secrets(text), "\n\t"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes lines of text as :meth:`write` does."""
        for line in lines:
            self.write(line)

    def draw(self, text: str) -> None:
        """Writes a part of a drawing on a terminal, which may return to a line's start or go up a line."""
        self._write(UP.join(on_terminal(part, "\n\t\r") for part in text.split(UP)))

    def _write(self, text: str) -> None:
        """Writes to the stream; where its reader has gone, all later output is dropped."""
        self.has_written = True
        try:
            self._stream.write(text)
        except OSError as error:
            self._silence(error)

    def flush(self) -> None:
        """Flushes; where the reader has gone, all later output is dropped."""
        try:
            self._stream.flush()
        except OSError as error:
            self._silence(error)

    def _silence(self, error: OSError) -> None:
        """Points the stream's descriptor at /dev/null for all its holders, also for Python's flush at the exit.

        Raises:
            OSError: ``error`` itself, unless it says that the reader has gone.
        """
        if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: of a terminal that was closed
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


class FirstLine(MetaPathFinder):
    """Prints that a command is loading before its first heavy import, unless the command has printed already.

    It finds no module: Python asks it for each module first, whoever imports it. The line goes to standard error, as
    the standard output may be another program's input.

    Args:
        command: the command's name, ``eval`` for ``kd-eval``.
        streams: what the command prints to.
    """

    def __init__(self, command: str, streams: Sequence[Unbroken]) -> None:
        self.command = command
        self.streams = streams

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Prints at the first of :data:`HEAVY`; returns None, so that Python goes on to its own finders."""
        if name in HEAVY and not any(stream.has_written for stream in self.streams):
            print(f"kd-{self.command}: loading {name} ...", file=sys.stderr, flush=True)


@contextmanager
def unbroken_output(command: str) -> Iterator[None]:
    """Inside, nothing that prints moves a terminal's cursor (but :meth:`Unbroken.draw`), or fails because its reader has
    gone.

    The first line comes before the first heavy import (:class:`FirstLine`), in the process that speaks for the job.

    Args:
        command: as of :class:`FirstLine`.
    """
    before = sys.stdout, sys.stderr
    streams = [Unbroken(stream) for stream in before]
    sys.stdout, sys.stderr = streams
    first_line = FirstLine(command, streams)
    if is_rank_zero():
        sys.meta_path.insert(0, first_line)
    try:
        yield
    finally:
        if first_line in sys.meta_path:
            sys.meta_path.remove(first_line)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def quiet_libraries() -> None:
    """Silences Lightning's hardware lines and tips, and the warnings :data:`OF_NO_USE`.

    To the end of the process, inside :func:`kd.run.as_function.as_function` the warnings to its end.
    """
    for name in ("pytorch_lightning", "lightning_fabric", "timm", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in OF_NO_USE:
        warnings.filterwarnings("ignore", message=message)
