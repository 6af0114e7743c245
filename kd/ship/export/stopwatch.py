"""Times one model in a process of its own, so that its threads and its memory are its own."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from kd.errors import UserError


@dataclass(frozen=True)
class ExportedFile:
    to: str  # its format
    file: Path  # what the format opens
    threads: int  # of the runtime

    def __call__(self) -> Callable[[np.ndarray], object]:
        from kd.ship.export.formats import find_format

        return find_format(self.to).open(self.file, self.threads)


class Stopwatch:
    def __init__(self, load: Callable[[], Callable[[np.ndarray], object]], threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._mine, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end,), daemon=True)
        before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
        os.environ |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}  # read when libraries are loaded
        try:
            self._process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        child_end.close()
        self._ask(load)

    def _ask(self, question: object) -> tuple[list[float], float]:
        try:
            self._mine.send(question)
            return self._mine.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            status = self._process.exitcode
            raise UserError(f"the model's process ended with status {status} (out of memory?)") from error

    def measure(self, pictures: object, repeats: int) -> tuple[list[float], float]:
        return self._ask((pictures, repeats))

    def close(self) -> None:
        self._mine.close()
        self._process.join()


def _serve(pipe: Connection) -> None:
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
        return int(next(x for x in status.read_text().splitlines() if x.startswith("VmHWM")).split()[1]) / 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
