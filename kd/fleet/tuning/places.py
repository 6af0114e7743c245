"""Where trials run: shares of this machine that do not overlap, or of a Ray cluster (``jobs=ray``)."""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import torch

from kd.launch.child import start_kd_train
from kd.machine import core_ids

RUNNER = "runner"  # a lock beside a trial's log: of a run that holds no other, wherever it is


class Process(Protocol):
    def poll(self) -> int | None:
        """The exit status, negative for a signal, :data:`LOST` where its machine went; None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """Sends the run a signal."""


LOST = 1000  # The status of a run whose machine went: nothing is known against the run itself


class Place(Protocol):
    """A share of some machine that one trial has for itself."""

    def start(self, items: Sequence[str], log: Path, owner: IO[str] | None = None) -> Process:
        """Starts ``kd-train`` (or the command that the first item names)."""


@dataclass(frozen=True)
class Slot:
    cores: tuple[int, ...]  # numbers of its CPU cores; empty where they can't be dealt
    gpus: tuple[str, ...]  # numbers of its GPUs

    def variables(self) -> dict[str, str]:
        threads = {} if "OMP_NUM_THREADS" in os.environ or not self.cores else {"OMP_NUM_THREADS": str(len(self.cores))}
        return threads | ({"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {})

    def start(self, items: Sequence[str], log: Path, owner: IO[str] | None = None) -> Process:
        with log.open("a") as opened:
            process = start_kd_train(
                items,
                stdout=opened, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.variables(),
                pass_fds=() if owner is None else (owner.fileno(),), start_new_session=True,
            )  # fmt: skip
        if self.cores:
            with suppress(OSError):  # it has ended already
                os.sched_setaffinity(process.pid, self.cores)
        return process


def deal(jobs: int, gpus: Sequence[str]) -> list[Slot]:
    cores = core_ids() or []
    return [Slot(tuple(cores[i::jobs]), tuple(gpus[i::jobs])) for i in range(jobs)]


def gpus_of(accelerator: str) -> list[str]:
    if accelerator not in ("auto", "gpu", "cuda") or not torch.cuda.is_available():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


@dataclass(frozen=True)
class Share:
    # CPU cores; None: as many as each trial can have where all GPUs are used, one without GPUs
    cores: int | None = None
    gpus: int | None = None  # GPUs; None: one where runs may use them and the cluster has some
