"""The step time of this tree against another checkout: epochs of the same tiny run in two processes, in turn.

    git worktree add --detach DIR COMMIT
    OMP_NUM_THREADS=1 python scripts/bench/step_time.py --against DIR --rounds 40 --write

A step is the time from the end of one batch to the end of the next, loading included, inside an epoch.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback

ROOT = Path(__file__).parents[2]
PIPES = "KD_BENCH_PIPES"
BATCH, PICTURES = 16, 100
"""Of a step; of each of the four classes."""


class StepTime(Callback):
    """In the run: waits before each epoch until it is told to go, and answers with the epoch's steps in ms."""

    def __init__(self) -> None:
        told, answer = map(int, os.environ[PIPES].split(","))
        self.told, self.answer = os.fdopen(told), os.fdopen(answer, "w")
        self.ends: list[float] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Waits."""
        self.told.readline()
        self.ends = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the time."""
        self.ends.append(time.perf_counter())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Answers."""
        print(
            json.dumps([1000 * (b - a) for a, b in zip(self.ends, self.ends[1:], strict=False)]),
            file=self.answer,
        )
        self.answer.flush()


class Tree:
    """A checkout whose ``kd-train`` runs epoch by epoch."""

    def __init__(self, root: Path, items: list[str], folder: Path) -> None:
        self.root, self.log = root, folder / "log.txt"
        folder.mkdir()
        theirs, go = os.pipe()
        back, answer = os.pipe()
        env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{Path(__file__).parent}", PIPES: f"{theirs},{answer}",
               "KD_CACHE": str(folder / "cache")}  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kd.cli", *items, f"runs_dir={folder / 'runs'}"],
                cwd=root, env=env, stdout=log, stderr=subprocess.STDOUT, pass_fds=(theirs, answer),
            )  # fmt: skip
        os.close(theirs)
        os.close(answer)
        self.go, self.back = os.fdopen(go, "w"), os.fdopen(back)

    def commit(self) -> str:
        """What is checked out."""
        command = ["git", "-C", str(self.root), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def epoch(self) -> float:
        """One epoch: its median step in ms."""
        with suppress(BrokenPipeError):  # it has ended: its log says why
            print("go", file=self.go, flush=True)
        answer = self.back.readline()
        if not answer:
            sys.exit(f"the run of {self.root} has ended:\n{self.log.read_text()[-3000:]}")
        return statistics.median(json.loads(answer))

    def end(self) -> None:
        """After the last epoch, or before it where the other tree failed."""
        self.go.close()
        self.process.wait()


def quartiles(values: list[float], digits: int) -> str:
    """``median (middle half from to)``."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} (middle half {low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    """Runs both, prints the ratio."""
    asked = options(__doc__, against=Path, rounds=40)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        pictures = draw_folder(folder / "pictures", train=PICTURES, val=4)
        recipe = write_recipe(
            folder / "tiny.yaml", pictures, save_teacher(folder / "teacher.safetensors", seed=1)
        )
        items = [
            f"recipe={recipe}", f"trainer.max_epochs={asked.rounds + 1}", f"data.batch_size={BATCH}",
            "trainer.limit_val_batches=0", "trainer.enable_progress_bar=false", "trainer.precision=32-true",
            'trainer.callbacks+={"class_path": "step_time.StepTime"}',
        ]  # fmt: skip
        here = Tree(ROOT, items, folder / "here")
        there = Tree(asked.against.resolve(), items, folder / "there")
        times: dict[Tree, list[float]] = {here: [], there: []}
        try:
            for number in range(asked.rounds + 1):
                for tree in (here, there) if number % 2 else (there, here):
                    ms = tree.epoch()
                    if number:  # the first one warms up
                        times[tree].append(ms)
        finally:
            here.end()
            there.end()
    ratios = [a / b for a, b in zip(times[here], times[there], strict=True)]
    rows = [
        [f"this one, {here.commit()}", quartiles(times[here], 3)],
        [f"the other, {there.commit()}", quartiles(times[there], 3)],
        ["this one against the other, of each turn", quartiles(ratios, 4)],
    ]
    lines = [
        f"The tests' tiny pair (ViT, 32 px) with KD, float32, batch {BATCH}, {4 * PICTURES // BATCH} steps an epoch, "
        f"{asked.rounds} epochs of each in turn, whose order changes; loading in the same process.",
        "",
        *table(["tree", "median step, ms"], rows),
    ]
    write(asked, "step_time", "The step time of two checkouts", lines)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from scripts.bench.harness import options, table, write
    from tests._helpers import draw_folder, save_teacher, write_recipe

    main()
