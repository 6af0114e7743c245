"""How the cost of a run grows with its pictures, classes and steps; no picture is drawn, nothing is trained.

    python scripts/bench/scaling.py pictures 14200000 21841 8      # pictures, classes, processes of one machine
    python scripts/bench/scaling.py classes 50000 1000 21841       # validation pictures, numbers of classes
    python scripts/bench/scaling.py steps 10000 1000000            # numbers of steps

Each row is measured in a process of its own: CPU seconds, and bytes of its own memory that stay while its result is held
(what the processes of a machine share, names, targets and places of pictures, is there once: about 31 bytes a picture) or,
of ``steps``, bytes on disk. Times are of the machine that runs it; bytes are not.
"""

import argparse
import multiprocessing
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.callbacks.metrics_csv import MetricsCSV
from kd.data.sampler import EvalBatches, TrainBatches
from kd.data.sources import FileSplit
from kd.data.sources.shards import PICTURE, ShardSplit
from kd.report.records import Writer, read_run
from kd.tasks.fidelity import Fidelity
from scripts.bench.harness import table

BATCH = 64


class Cost(NamedTuple):
    """What one row has cost a process."""

    cpu_s: float
    held_bytes: int


def listed(ids: np.ndarray) -> FileSplit:
    """A split of files with paths as of ImageNet-21k, its arrays shared."""
    names = (f"/data/21k/train/n{label:08d}/n{label:08d}_{i}.JPEG" for i, label in enumerate(ids))
    split = FileSplit(names, ids)
    split.share()
    return split


def indexed(ids: np.ndarray) -> ShardSplit:
    """A split of a pack, whose index is a file."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(np.zeros(len(ids), PICTURE).tobytes())
        file.flush()
        table = np.memmap(file.name, PICTURE, "r")
    return ShardSplit("/none", ["a.tar"], table, table["target"], "")


def begun(batches: Iterable[Any]) -> Iterator[Any]:
    """What is held of a loader's order while its batches are asked for."""
    asked = iter(batches)
    next(asked)
    return asked


OF_PICTURES: dict[str, Callable[[np.ndarray], Any]] = {
    "list of files": listed,
    "index of a pack": indexed,
    "order of an epoch": lambda ids: begun(TrainBatches(len(ids), BATCH, seed=0)),
    "balanced order": lambda ids: begun(TrainBatches(len(ids), BATCH, seed=0, classes=ids)),
    "validation": lambda ids: begun(EvalBatches(len(ids), BATCH)),
}


def compared(pictures: int, classes: int) -> Fidelity:
    """A student beside its teacher on so many pictures, drawn: each names half of them rightly."""
    drawn = torch.Generator().manual_seed(0)
    fidelity = Fidelity("classification", classes)
    for start in range(0, pictures, BATCH):
        count = min(BATCH, pictures - start)
        targets = torch.randint(classes, (count,), generator=drawn)
        student, teacher = torch.rand(2, count, classes, generator=drawn)
        student[: count // 2].scatter_(1, targets[: count // 2, None], 2.0)
        teacher[count // 2 :].scatter_(1, targets[count // 2 :, None], 2.0)
        fidelity.update(student, teacher, targets, torch.arange(start, start + count))
    return fidelity


def measured(make: Callable[[], Any], together: int = 1) -> list[Cost]:
    """What ``make`` costs in each of so many processes, all of which hold their results at the same time."""
    out: Any = multiprocessing.SimpleQueue()
    ready = multiprocessing.Barrier(together)

    def run() -> None:
        """One process."""
        memory = psutil.Process().memory_full_info
        before, start = memory().uss, time.process_time()
        result = make()
        cpu_s = time.process_time() - start
        ready.wait()
        out.put(Cost(cpu_s, memory().uss - before))
        ready.wait()
        del result

    started = [multiprocessing.get_context("fork").Process(target=run) for _ in range(together)]
    for process in started:
        process.start()
    costs = [out.get() for _ in started]
    for process in started:
        process.join()
    return costs


def of_pictures(count: int, classes: int, together: int) -> list[str]:
    """Rows of what a run holds of each picture: in one process, and the list in all processes of a machine."""
    targets = (np.arange(count) * classes // count).astype(np.int32)
    rows = []
    cases = [(name, 1) for name in OF_PICTURES] + [("list of files", together)]
    for name, ranks in cases:
        costs = measured(partial(OF_PICTURES[name], targets), ranks)
        held = sum(cost.held_bytes for cost in costs) / count
        rows.append([name, ranks, f"{costs[0].cpu_s:.2f}", f"{held:.1f}"])
    return table(["what", "processes", "CPU s of one", "bytes a picture of all"], rows)


def of_classes(pictures: int, several: list[int]) -> list[str]:
    """Rows of what comparing student and teacher costs by their classes."""
    rows = []
    for classes in several:
        cost = measured(partial(compared, pictures, classes))[0]
        sent = len(pickle.dumps(compared(min(pictures, 10 * BATCH), classes)))
        per_picture = cost.cpu_s / pictures * 1e6
        held = cost.held_bytes / 1e6
        rows.append([classes, f"{per_picture:.0f}", f"{held:.1f}", f"{sent / 1e3:.0f}"])
    return table(["classes", "CPU us a picture", "MB held", "kB that a rank sends"], rows)


def written(folder: Path, steps: int) -> None:
    """Records and ``metrics.csv`` of a run of so many steps, by kd's own writers."""
    (folder / "records").mkdir()
    writer = Writer(folder / "records/phases.rank0.jsonl", {"rank": 0, "world_size": 1})
    metrics = MetricsCSV(folder)
    for step in range(steps):
        epoch = step // 1000
        row = {"kind": "step", "step": step, "epoch": epoch, "t": 0.02 * step, "total": 0.02}
        writer.write(row | {"data_wait": 0.001, "forward": 0.006, "backward": 0.01})
        if step % 10 == 0:
            metrics.log_metrics({"epoch": epoch, "train/loss": 2 + 1 / (step + 1)}, step)
        if step % 1000 == 0:
            metrics.log_metrics({"epoch": epoch, "val/acc1": 0.5}, step)
            metrics.save()
    metrics.save()
    writer.close()


def of_steps(several: list[int]) -> list[str]:
    """Rows of what a run's own logs cost: on disk, and to read for a report."""
    rows = []
    for steps in several:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            cost = measured(partial(written, folder, steps))[0]
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            reading = measured(partial(read_run, folder))[0]
        written_us = cost.cpu_s / steps * 1e6
        numbers = [written_us, size / 1e6, reading.cpu_s, reading.held_bytes / 1e6]
        rows.append([steps, *(f"{number:.2f}" for number in numbers)])
    columns = ["CPU us a step, written", "MB on disk", "CPU s, read", "MB held, read"]
    return table(["steps", *columns], rows)


def rows_of(words: list[str]) -> list[str]:
    """The lines of one table, by the words of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grows", choices=["pictures", "classes", "steps"])
    parser.add_argument("sizes", type=int, nargs="+")
    given = parser.parse_args(words)
    match given.grows, given.sizes:
        case "pictures", [count, classes, together]:
            return of_pictures(count, classes, together)
        case "classes", [pictures, *several] if several:
            return of_classes(pictures, several)
        case "steps", several:
            return of_steps(several)
    raise SystemExit(f"{given.grows}: not so many numbers; see --help")


if __name__ == "__main__":
    for line in rows_of(sys.argv[1:]):
        print(line, flush=True)
