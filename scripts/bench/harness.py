"""What the benchmarks share: arms measured in turn, medians with their spread, dated result files that say how."""

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, Trainer

HERE = Path(__file__).parent


def settings() -> str:
    """Machine and versions, in a line."""
    import pytorch_lightning
    import timm
    import torch
    import torchvision

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, no GPU"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{device}; {cores} core(s) given, {torch.get_num_threads()} compute thread(s); Python "
        f"{platform.python_version()}, torch {torch.__version__}, torchvision {torchvision.__version__}, timm "
        f"{timm.__version__}, Lightning {pytorch_lightning.__version__}"
    )


def measure(
    arms: dict[str, Callable[[], Any]], rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each arm's call, in turn: A B A B ...; the first ``warmup`` rounds are not kept."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(warmup + rounds):
        for name, call in arms.items():
            start = time.perf_counter()
            call()
            synchronize()
            if number >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def spread(values: Sequence[float], digits: int = 1) -> str:
    """``median (least to most)``."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def write(
    theme: str, hardware: str, date: str, title: str, lines: Sequence[str], out: bool
) -> None:
    """Prints the result; keeps it as ``theme_hardware_date.md`` beside the scripts where ``out``."""
    text = "\n".join(
        [f"# {title}", "", f"{settings()}.", f"Command: `{command()}`", "", *lines, ""]
    )
    print(text)
    if out:
        (HERE / f"{theme}_{hardware}_{date}.md").write_text(text)


@contextmanager
def served(words: Sequence[str], **process: Any) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Inside, ``kd-serve`` runs with these words on a free port: its process, and the port. It is killed at the end.

    Args:
        words: of its command line, without ``port``.
        **process: further arguments of :class:`subprocess.Popen`.
    """
    server = subprocess.Popen(
        [sys.executable, "-m", "kd.cli", "serve", *words, "port=0"],
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **process,
    )
    try:
        assert server.stdout is not None
        said = []
        for line in server.stdout:
            said.append(line)
            if " on http://" in line:
                break
        else:
            raise SystemExit("".join(said))
        yield server, int(line.rpartition(":")[2])
    finally:
        server.kill()
        server.wait()


def command() -> str:
    """How this script was called."""
    return " ".join(["python", f"scripts/bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def options(parser: Any) -> Any:
    """Arguments that all benchmarks take."""
    parser.add_argument("--hardware", default="cpu", help="in the result file's name")
    parser.add_argument("--write", action="store_true", help="keep the result beside the scripts")
    found = parser.parse_args()
    found.date = subprocess.run(
        ["date", "+%F"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return found


def synchronize() -> None:
    """Waits until a GPU has done what it was given: before a clock is stopped."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Turns(Callback):
    """Gives each epoch of one training run to the next arm in turn and times it; other work may go between.

    Args:
        arms: name -> what to set up before the arm's epoch; it is given the module.
        between: name -> an epoch of something else, run after each full turn and timed alike.
        after: epochs that come before the first turn (warm-up, filling), given to ``before``.
        before: set up for those.

    Attributes:
        seconds: what each epoch took, by arm.
        cpu_seconds: what all threads of this process computed in it, in seconds of one core; other programs on the
            machine hardly change it.
        first: seconds of the epochs before the first turn.
    """

    def __init__(
        self,
        arms: dict[str, Callable[[Any], None]],
        between: dict[str, Callable[[int], None]] | None = None,
        after: int = 1,
        before: Callable[[Any], None] = lambda module: None,
    ) -> None:
        self.arms, self.between, self.after, self.before = arms, between or {}, after, before
        self.seconds: dict[str, list[float]] = {name: [] for name in [*arms, *self.between]}
        self.cpu_seconds: dict[str, list[float]] = {name: [] for name in arms}
        self.first: list[float] = []
        self._start = self._cpu_start = 0.0

    def _arm(self, epoch: int) -> str | None:
        return (
            None if epoch < self.after else list(self.arms)[(epoch - self.after) % len(self.arms)]
        )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Sets the arm up and starts its clock."""
        arm = self._arm(trainer.current_epoch)
        (self.arms[arm] if arm else self.before)(pl_module)
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Stops it; runs what goes between."""
        synchronize()
        seconds, arm = time.perf_counter() - self._start, self._arm(trainer.current_epoch)
        (self.seconds[arm] if arm else self.first).append(seconds)
        if arm:
            self.cpu_seconds[arm].append(time.process_time() - self._cpu_start)
        for name, epoch in self.between.items():
            start = time.perf_counter()
            epoch(trainer.current_epoch)
            synchronize()
            if arm:
                self.seconds[name].append(time.perf_counter() - start)


def train(
    recipe: str,
    items: Sequence[str],
    turns: Turns,
    prepare: Callable[[Any], None] = lambda run: None,
) -> Any:
    """A whole ``kd-train`` run in this process with ``turns`` among its callbacks; returns the run."""
    from kd.run.build import build
    from kd.run.request import translate
    from kd.run.run import Run
    from kd.run.train_first import train_teacher_if_missing

    quiet = [
        "trainer.limit_val_batches=0",
        "trainer.enable_progress_bar=false",
        "runs_dir=runs/bench",
    ]
    run = Run.of(translate([f"recipe={recipe}", *quiet, *items]))
    train_teacher_if_missing(run)
    build(run)
    run.trainer.callbacks.append(turns)
    prepare(run)
    run.trainer.fit(run.module, datamodule=run.data)
    return run
