"""A trial's process: started or resumed, watched through its run folder, stopped by SIGTERM."""

import csv
import fcntl
import re
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kd.fleet.tuning.places import LOST, RUNNER, Place, Process
from kd.storage.checkpoints import newest_whole
from kd.storage.elsewhere import json_of, text_of

LOG = "log.txt"
KILL_S = 60.0  # after a SIGTERM: a step and a checkpoint take less
MOST_LOST = 3  # machines that go under one trial: then it is the trial


class Owner:
    """A lock on a trial's folder, held by the search and by its run; a run elsewhere holds one of its own machine."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    @classmethod
    def take(cls, folder: Path) -> "Owner | None":
        """The lock; None where another process has it, or a run elsewhere still ends."""
        folder.mkdir(parents=True, exist_ok=True)
        file = _locked(folder / "owner")
        if file is None:
            return None
        if (folder / RUNNER).exists():
            running = _locked(folder / RUNNER)
            if running is None:
                file.close()
                return None
            running.close()
        return cls(file)

    def release(self) -> None:
        self.file.close()


def _locked(path: Path) -> IO[str] | None:
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


@dataclass
class Job:
    folder: Path  # its own; the run's folder lies below
    recipe: str  # the recipe's name
    slot: Place  # where it runs
    owner: Owner  # its lock
    process: Process | None = None  # None where the run had ended before
    items: Sequence[str] = ()  # its command line, to be begun again where its machine went
    lost: int = 0
    stopped: str = ""  # why the search stopped it, if it did
    stopped_at: float = 0.0  # when
    patience_s: float = field(default_factory=lambda: KILL_S)  # how long it may take to save and end
    timed: bool = False  # its student's speed is being measured, or was
    began: float = field(default_factory=time.monotonic)

    @property
    def run(self) -> Path:
        return self.folder / self.recipe / "000"

    def begin(self, items: Sequence[str]) -> None:
        """Starts the run, or resumes it from its last checkpoint; one that has ended well is left as it is."""
        self.items = items
        if self.summary().get("status") == "done" and (self.run / "student.safetensors").is_file():
            return
        if newest_whole(self.run / "checkpoints")[0] is not None:
            command = [f"resume={self.run}"]
        else:
            shutil.rmtree(self.folder / self.recipe, ignore_errors=True)
            command = [*items, f"runs_dir={self.folder}"]
        self._start([*command, "trainer.enable_progress_bar=false"])

    @property
    def untimed(self) -> bool:
        return not (self.run / "export" / "latency.json").is_file()

    def time_student(self) -> bool:
        if not self.untimed or self.timed:
            return False
        self.timed = True
        self._start(["latency", str(self.run), "runtime=torch", "batch=1", "threads=1", "seconds=1"])
        return True

    def _start(self, items: Sequence[str]) -> None:
        self.process = self.slot.start(items, self.folder / LOG, self.owner.file)

    def stop(self, why: str) -> None:
        """Makes the run save and end; :attr:`status` kills one that has not after ``patience_s``."""
        if not self.stopped:
            self.stopped, self.stopped_at = why, time.monotonic()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        while self.status is None:
            time.sleep(0.05)

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs. Where its machine went it is begun again, a few times."""
        status = 0 if self.process is None else self.process.poll()
        if self.process and status is None and self.stopped and time.monotonic() > self.stopped_at + self.patience_s:
            self.process.send_signal(signal.SIGKILL)
        if status != LOST:
            return status
        if self.stopped:
            return -signal.SIGTERM
        self.lost += 1
        if self.lost > MOST_LOST:
            return 1
        self.timed = False
        self.begin(self.items)
        return None

    def summary(self) -> dict[str, Any]:
        try:
            return json_of(text_of(self.run / "summary.json"))
        except (OSError, ValueError):
            return {}

    def reason(self) -> str:
        """Why the run failed, in a line: the last that ``kd-train`` has said of it."""
        try:
            text = (self.folder / LOG).read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        said = r"kd-(?:train|latency): (?!the traceback|to resume|resume)(?:rank \d+: )?(?:failed: )?(.+)"
        last = text.strip().splitlines()[-1:] or ["no output"]
        status = self.status or 0
        if self.lost > MOST_LOST:
            return f"its machine went {self.lost} times"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return (re.findall(said, text) or last)[-1][:200]


def evaluate(run: Path, split: str, slot: Place) -> dict[str, float]:
    file = run / f"eval_{split}.json"
    if not file.is_file():
        process = slot.start(["eval", str(run), f"split={split}"], run.parent.parent / LOG)
        while process.poll() is None:
            time.sleep(0.05)
    return json_of(text_of(file))["student"] if file.is_file() else {}


def epoch_values(run: Path, metric: str) -> list[tuple[int, float]]:
    try:
        with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row.get(metric) and row.get("epoch")]
        return [(int(row["epoch"]) + 1, float(row[metric])) for row in rows]
    except (OSError, ValueError):
        return []
