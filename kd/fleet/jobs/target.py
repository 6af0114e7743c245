"""What every place that a job can be sent to answers to."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kd.fleet.jobs.job import Job


@dataclass(frozen=True)
class Outcome:
    done: bool  # it has trained to its end
    text: str  # in a line
    hours: float | None = None  # that it ran, where the place says so
    billed_hours: float | None = None  # that are paid for, where the place says so
    where: str = ""  # its results are, in the place's own terms


def followed(name: str, poll: Callable[[], tuple[str, Outcome | None]], seconds: float) -> Outcome:
    """Polls a job until it has an outcome; prints each new state."""
    last = ""
    while True:
        state, outcome = poll()
        if state != last:
            print(f"kd-launch: {name}: {state}", flush=True)
            last = state
        if outcome is not None:
            return outcome
        time.sleep(seconds)


class Target(Protocol):
    """A place: SageMaker, SkyPilot, SLURM, Kubernetes, torchrun."""

    keys: Mapping[str, str]
    """Its own keys -> what they are."""

    def write(self, job: Job) -> dict[str, str]:
        """File name -> text of what will be sent, exactly; the first one is the request itself."""

    def check(self, job: Job) -> None:
        """Checks credentials, the bucket and the programs of the place. Changes nothing."""

    def submit(self, job: Job, folder: Path) -> str:
        """Sends the files in ``folder``; returns what the place calls the job."""

    def follow(self, handle: str, folder: Path) -> Outcome:
        """Waits for the job's end and prints its progress."""

    def fetch(self, outcome: Outcome, into: Path) -> Path | None:
        """Brings the run's folder to ``into``, or says where it is; None without a folder."""
