"""Times one model in a process of its own, so that its threads and its memory are its own."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from kd.errors import UserError
from kd.machine import peak_memory_mb, python


def open_export(to: str, file: Path, threads: int) -> Callable[[np.ndarray], object]:
    """Opens an export of the format ``to`` on ``threads`` threads; returns its runtime.

    A function of the module, so that the timing process can unpickle it.
    """
    from kd.ship.export.base import find_format

    return find_format(to).open(file, threads)


class Stopwatch:
    """A process that times a model.

    Args:
        load: makes the callable, in the process; picklable.
        threads: of the process.

    Raises:
        UserError: the model can't be loaded.
    """

    def __init__(self, load: Callable[[], Callable[[np.ndarray], object]], threads: int) -> None:
        """Starts the process and waits until it has loaded the model; arguments and errors are the class's."""
        # a program of its own: multiprocessing's spawn would run the caller's script again
        self._pipe, child_end = multiprocessing.Pipe()
        number = child_end.fileno()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({number})"
        )
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        self._process = subprocess.Popen(python("-c", program), env=env, pass_fds=[number])
        child_end.close()
        self._request(load)

    def _request(self, message: object) -> tuple[list[float], float]:
        """Sends a message to the process, waits for its answer and returns it: times in ms, and peak memory in MB.

        Args:
            message: pictures and how often they run; the first message is the function that loads the model, answered by
                "ready" in place of a result.

        Raises:
            UserError: the process has ended, whatever the reason; its own error is printed by itself.
        """
        try:
            self._pipe.send(message)
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            status = self._process.wait()
            raise UserError(
                f"the model's process ended with status {status} (out of memory?)"
            ) from error

    def measure(self, pictures: object, repeats: int) -> tuple[list[float], float]:
        """Runs the model so often on the same pictures; the errors of :meth:`_request`.

        Args:
            pictures: what the loaded callable takes, uint8 ``(N, *manifest.shape)`` of a :class:`Runtime`; picklable.
            repeats: runs.

        Returns:
            Milliseconds of each run, and the process's peak memory since its start in MB (2**20 bytes).
        """
        return self._request((pictures, repeats))

    def close(self) -> None:
        """Ends the process and waits for it."""
        self._pipe.close()
        self._process.wait()


def serve(number: int) -> None:
    """The process of a :class:`Stopwatch`: opens the model that comes through a pipe, and times it until the pipe ends.

    Args:
        number: the pipe's file descriptor.
    """
    pipe = Connection(number)
    call = pipe.recv()()
    pipe.send("ready")
    while True:
        try:
            pictures, repeats = pipe.recv()
        except EOFError:
            return
        pipe.send((timed(partial(call, pictures), repeats), peak_memory_mb()))


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each of ``repeats`` calls."""
    milliseconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        milliseconds.append(1000 * (time.perf_counter() - start))
    return milliseconds
