"""Times one model in a process of its own, so that its threads and its memory are its own."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from kd.errors import UserError


def open_export(to: str, file: Path, threads: int) -> Callable[[np.ndarray], object]:
    """Opens an export of the format ``to``; a function of the module, so that the timing process can unpickle it."""
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
        # a program of its own: multiprocessing's spawn would run the caller's script again
        self._mine, child_end = multiprocessing.Pipe()
        number = child_end.fileno()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({number})"
        )
        threaded = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], env=threaded, pass_fds=[number]
        )
        child_end.close()
        self._ask(load)

    def _ask(self, question: object) -> tuple[list[float], float]:
        try:
            self._mine.send(question)
            return self._mine.recv()
        except (EOFError, OSError) as error:
            status = self._process.wait()
            raise UserError(
                f"the model's process ended with status {status} (out of memory?)"
            ) from error

    def measure(self, pictures: object, repeats: int) -> tuple[list[float], float]:
        """Milliseconds of each repeat, and the process's peak memory so far in MB."""
        return self._ask((pictures, repeats))

    def close(self) -> None:
        """Ends the process and waits for it."""
        self._mine.close()
        self._process.wait()


def serve(number: int) -> None:
    """Opens what comes through a pipe, by its file descriptor, and times it as often as asked."""
    pipe = Connection(number)
    call = pipe.recv()()
    pipe.send("ready")
    while True:
        try:
            pictures, repeats = pipe.recv()
        except EOFError:
            return
        took = []
        for _ in range(repeats):
            start = time.perf_counter()
            call(pictures)
            took.append(1000 * (time.perf_counter() - start))
        pipe.send((took, _peak_mb()))


def _peak_mb() -> float:
    status = Path("/proc/self/status")
    if status.is_file():
        return (
            int(
                next(x for x in status.read_text().splitlines() if x.startswith("VmHWM")).split()[1]
            )
            / 1024
        )
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
