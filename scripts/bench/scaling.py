"""Memory and CPU time of what a run holds of its pictures as these grow in number; no picture is drawn.

    python scripts/bench/scaling.py 1000000 21841 8      # pictures, classes, processes of one machine that list the same

Each row is measured in a process of its own: CPU seconds, and the bytes a picture of its own memory that stay while its
result is held. What all processes share, the names, targets and places of pictures, is there once: about 31 bytes a picture.
"""

import multiprocessing
import sys
import tempfile
import time
from typing import Any

import numpy as np
import psutil

from kd.data.sources import FileSplit
from kd.data.sources.shards import PICTURE, ShardSplit


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


ROWS = {
    "list of files": listed,
    "index of a pack": indexed,
}


def measure(make: Any, ids: np.ndarray, ready: Any, out: Any) -> None:
    """In a process of its own: puts CPU seconds and bytes, once all processes hold their results."""
    memory = psutil.Process().memory_full_info
    before, start = memory().uss, time.process_time()
    result = make(ids)
    seconds = time.process_time() - start
    ready.wait()
    out.put((seconds, memory().uss - before))
    ready.wait()
    del result


def row(name: str, ids: np.ndarray, processes: int) -> str:
    """A line of the table: the CPU seconds of one process, bytes a picture of all together."""
    out, ready = multiprocessing.SimpleQueue(), multiprocessing.Barrier(processes)
    for _ in range(processes):
        multiprocessing.Process(target=measure, args=(ROWS[name], ids, ready, out)).start()
    found = [out.get() for _ in range(processes)]
    held = sum(size for _, size in found) / len(ids)
    return f"{name:18} {processes:3} process(es) {found[0][0]:8.2f} s {held:8.1f} bytes a picture"


if __name__ == "__main__":
    count, classes, together = map(int, sys.argv[1:])
    targets = (np.arange(count) * classes // count).astype(np.int32)
    for label in ROWS:
        print(row(label, targets, 1), flush=True)
    print(row("list of files", targets, together))
