"""How the cost of a run grows with its pictures, classes, processes and steps; no picture is drawn, nothing is trained.

    python scripts/bench/scaling.py pictures 14200000 21841 8      # pictures, classes, processes of one machine
    python scripts/bench/scaling.py classes 50000 1000 21841       # validation pictures, numbers of classes
    python scripts/bench/scaling.py processes 2 8 32               # numbers of processes
    python scripts/bench/scaling.py steps 10000 1000000            # numbers of steps

Each row is measured in a process of its own: CPU seconds, and bytes of its own memory that stay while its result is held
(what the processes of a machine share, names, targets and places of pictures, is there once: about 31 bytes a picture) or,
of ``steps``, bytes on disk. Times are of the machine that runs it; bytes and messages are not.
"""

import argparse
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy

from kd import processes
from kd.callbacks.metrics_csv import MetricsCSV
from kd.data.sampler import EvalBatches, TrainBatches
from kd.data.sources import FileSplit
from kd.data.sources.shards import PICTURE, ShardSplit
from kd.report.records import Writer, read_run
from kd.tasks.fidelity import Fidelity

BATCH = 64
ROUNDS = 60
"""Meetings of processes whose median time is shown."""


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


def ordered(ids: np.ndarray) -> Any:
    """The order of an epoch, held while its batches are asked for."""
    batches = iter(TrainBatches(len(ids), BATCH, seed=0))
    next(batches)
    return batches


def balanced(ids: np.ndarray) -> Any:
    """The same with ``data.balance_classes``."""
    batches = iter(TrainBatches(len(ids), BATCH, seed=0, classes=ids))
    next(batches)
    return batches


def validated(ids: np.ndarray) -> Any:
    """The batches of a validation of as many pictures."""
    batches = iter(EvalBatches(len(ids), BATCH))
    next(batches)
    return batches


OF_PICTURES: dict[str, Callable[[np.ndarray], Any]] = {
    "list of files": listed,
    "index of a pack": indexed,
    "order of an epoch": ordered,
    "balanced order": balanced,
    "validation": validated,
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
    lines = ["| what | processes | CPU s of one | bytes a picture of all |", "|---|---:|---:|---:|"]
    cases = [(name, 1) for name in OF_PICTURES] + [("list of files", together)]
    for name, ranks in cases:
        costs = measured(partial(OF_PICTURES[name], targets), ranks)
        held = sum(cost.held_bytes for cost in costs) / count
        lines.append(f"| {name} | {ranks} | {costs[0].cpu_s:.2f} | {held:.1f} |")
    return lines


def of_classes(pictures: int, several: list[int]) -> list[str]:
    """Rows of what comparing student and teacher costs by their classes."""
    lines = [
        "| classes | CPU us a picture | MB held | kB that a rank sends |",
        "|---:|---:|---:|---:|",
    ]
    for classes in several:
        cost = measured(partial(compared, pictures, classes))[0]
        sent = len(pickle.dumps(compared(min(pictures, 10 * BATCH), classes)))
        per_picture = cost.cpu_s / pictures * 1e6
        held = cost.held_bytes / 1e6
        lines.append(f"| {classes} | {per_picture:.0f} | {held:.1f} | {sent / 1e3:.0f} |")
    return lines


class Meeting(NamedTuple):
    """What a question to all processes costs each of them."""

    sent: int
    """Messages of one process."""
    seconds: float
    ring_s: float
    """Of gloo's own sum over all, which passes a ring."""


def meet(rank: int, world_size: int, store: str, out: Any) -> None:
    """A process of several that ask each other whether to stop, and merge a number at the first one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    strategy = DDPStrategy(parallel_devices=[torch.device("cpu")] * world_size)
    strategy._local_rank = rank
    messages = 0
    isend = dist.isend

    def counted(*args: Any, **words: Any) -> Any:
        nonlocal messages
        messages += 1
        return isend(*args, **words)

    dist.isend = counted
    times: dict[str, list[float]] = {"asked": [], "ring": []}
    flag = torch.tensor(0)
    arms = {
        "asked": lambda: processes.any_process(strategy, False),
        "ring": lambda: dist.all_reduce(flag),
    }
    for _ in range(ROUNDS):
        for name, arm in arms.items():
            dist.barrier()
            start = time.perf_counter()
            arm()
            times[name].append(time.perf_counter() - start)
    merged = processes.merged_at_first(strategy, 1, int.__add__)
    if rank == 0:
        assert merged == world_size
        asked, ring = (statistics.median(times[name]) for name in arms)
        out.put(Meeting(messages // ROUNDS, asked, ring))
    dist.barrier()
    dist.destroy_process_group()


def of_processes(several: list[int]) -> list[str]:
    """Rows of what it costs that all processes agree whether to stop (after each ten batches)."""
    lines = [
        "| processes | messages of each | ms (all share this machine's cores) |",
        "|---:|---:|---:|",
    ]
    context = multiprocessing.get_context("fork")
    for world_size in several:
        out = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            store = f"{folder}/store"
            ranks = [
                context.Process(target=meet, args=(rank, world_size, store, out))
                for rank in range(world_size)
            ]
            for process in ranks:
                process.start()
            found = out.get()
            for process in ranks:
                process.join()
        ms, ring_ms = found.seconds * 1e3, found.ring_s * 1e3
        lines.append(f"| {world_size} | {found.sent} | {ms:.2f} | {ring_ms:.2f} |")
    return lines


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
    lines = [
        "| steps | CPU us a step, written | MB on disk | CPU s, read | MB held, read |",
        "|---:|---:|---:|---:|---:|",
    ]
    for steps in several:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            cost = measured(partial(written, folder, steps))[0]
            size = 0
            for parent, _, files in os.walk(folder):
                size += sum((Path(parent) / file).stat().st_size for file in files)
            reading = measured(partial(read_run, folder))[0]
        per_step = cost.cpu_s / steps * 1e6
        lines.append(
            f"| {steps} | {per_step:.0f} | {size / 1e6:.2f} | {reading.cpu_s:.2f} | {reading.held_bytes / 1e6:.1f} |"
        )
    return lines


def table(words: list[str]) -> list[str]:
    """The lines of one table, by the words of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grows", choices=["pictures", "classes", "processes", "steps"])
    parser.add_argument("sizes", type=int, nargs="+")
    given = parser.parse_args(words)
    match given.grows, given.sizes:
        case "pictures", [count, classes, together]:
            return of_pictures(count, classes, together)
        case "classes", [pictures, *several] if several:
            return of_classes(pictures, several)
        case "processes", several:
            return of_processes(several)
        case "steps", several:
            return of_steps(several)
    raise SystemExit(f"{given.grows}: not so many numbers; see --help")


if __name__ == "__main__":
    import sys

    for line in table(sys.argv[1:]):
        print(line, flush=True)
