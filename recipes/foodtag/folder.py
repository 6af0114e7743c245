"""The set as a folder of JPEGs: drawn once by several processes, checked by its sums whenever it is used."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from filelock import FileLock

from kd.machine import cores, python
from kd.progress import bar

from .dishes import CLASSES
from .photograph import VERSION, draw, portion_of

_SUMS = "SHA256SUMS"
_SEEDS = 1_000_000  # of each split
_FIRST_SEED = {"train": 0, "val": _SEEDS, "test": 2 * _SEEDS}
_QUALITY = 90  # of the JPEGs

# A worker is a program of its own: a fork could inherit a held lock, and multiprocessing's spawn would run the
# caller's main module and import torch again in every worker. It finds kd where this process has found it, and this
# package in the folder around it.
_WORKER = """\
import sys
sys.path[:] = sys.argv[1].split("\\n")
from foodtag.folder import draw_share
draw_share(*sys.argv[2:])
"""

Job = tuple[str, int, int]
"""One picture of a set: its split, label and seed."""


def check(**counts: int) -> None:
    """Checks numbers of pictures a class, by the settings' names.

    Raises:
        ValueError: one below 1, or so large that the seeds of two splits would meet.
    """
    for name, value in counts.items():
        if not 1 <= value <= _SEEDS:
            raise ValueError(f"{name} must be between 1 and {_SEEDS}, got {value}")


def build(cache_dir: Path, counts: Mapping[str, int], portions: bool = False) -> Path:
    """Makes sure that a set lies below ``cache_dir``, intact, and returns its folder: ``SPLIT/FOOD/SEED.jpg`` below.

    A damaged set is drawn again. One of several processes draws, under a lock; the others check what it has drawn.

    Args:
        cache_dir: where the set's folder is made; a lock beside it keeps other processes out.
        counts: pictures a class by split: of ``train`` and ``val``, or of ``test`` alone.
        portions: draw portions of any size (:func:`foodtag.portion_of`), not the usual one.

    Raises:
        ValueError: a number of pictures that :func:`check` refuses.
        RuntimeError: pictures could not be drawn.
    """
    check(**{f"{split}_per_class": count for split, count in counts.items()})
    cache_dir = Path(cache_dir).absolute()
    suffix = "-portions" if portions else ""
    sizes = "x".join(map(str, counts.values()))
    if "test" in counts:
        sizes = f"test{sizes}"
    root = cache_dir / f"foodtag-mini-{VERSION}-{sizes}{suffix}"
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{root}.lock"):
        if root.exists():
            damaged = _first_damaged(root)
            if damaged is None:
                return root
            print(f"FoodTag-mini is damaged ({root / damaged}): drawing it again", file=sys.stderr)
            shutil.rmtree(root)
        for leftover in cache_dir.glob(f"{root.name}.tmp-*"):  # by a build that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        # Drawn elsewhere, then renamed: a set that has its name is complete.
        unfinished = cache_dir / f"{root.name}.tmp-{os.getpid()}"
        try:
            _draw_all(unfinished, counts, portions)
            unfinished.rename(root)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return root


def _jobs(counts: Mapping[str, int]) -> list[Job]:
    """Every picture of a set, as (split, label, seed); a larger set holds a smaller one.

    Args:
        counts: pictures of each class by split; no two splits share a seed.
    """
    jobs = []
    for split, count in counts.items():
        first = _FIRST_SEED[split]
        for label in range(len(CLASSES)):
            jobs += [(split, label, seed) for seed in range(first, first + count)]
    return jobs


def _draw_all(root: Path, counts: Mapping[str, int], portions: bool) -> None:
    """Draws every picture below ``root``, by worker processes on the cores this process may use; writes the list of sums.

    Args:
        root: a new folder.
        counts: pictures of each class by split.
        portions: draw portions of any size, not the usual one.

    Raises:
        RuntimeError: a worker has ended before its share was drawn.
    """
    total = len(_jobs(counts))
    count = max(1, min(cores(), total // 20))  # workers, of 20 pictures or more each
    python_path = "\n".join([str(Path(__file__).parent.parent), *sys.path])
    command = python("-c", _WORKER, python_path)
    command += [str(root), json.dumps(dict(counts))]
    size = "portions" if portions else ""
    workers = []
    for share in range(count):
        arguments = [*command, str(share), str(count), size]
        worker = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        workers.append(worker)
    lines = _follow(workers, total)
    if len(lines) != total:
        raise RuntimeError(f"FoodTag-mini: {len(lines)} of {total} pictures were drawn in {root}")
    lines.sort(key=lambda line: line[66:])  # by the path
    (root / _SUMS).write_text("".join(lines))


def _follow(workers: Sequence[subprocess.Popen[str]], total: int) -> list[str]:
    """The lines that the workers print, one a picture, in the order of their arrival, beside a progress bar of ``total``.

    Ends once all workers have ended; after an error they are killed.
    """
    lines = []

    def follow_one(worker: subprocess.Popen[str]) -> None:
        """A thread for each worker: takes its lines until it ends."""
        for line in worker.stdout or ():
            lines.append(line)
            progress.update()

    try:
        with (
            bar(total=total, label="drawing FoodTag-mini") as progress,
            ThreadPoolExecutor(len(workers)) as threads,
        ):
            list(threads.map(follow_one, workers))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return lines


def draw_share(root: str, counts: str, share: str, shares: str, portions: str) -> None:
    """A worker's program: draws every ``shares``-th picture from number ``share`` on, below ``root``.

    Prints a line of the list of sums for each picture. All arguments are text, from a command line; ``counts`` is
    JSON, and ``portions`` is empty for portions of the usual size.
    """
    jobs = _jobs(json.loads(counts))
    jobs_of_worker = jobs[int(share) :: int(shares)]
    for split, label, seed in jobs_of_worker:
        name = f"{split}/{CLASSES[label]}/{seed:07d}.jpg"
        file = Path(root, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        portion = 1.0
        if portions:
            portion = portion_of(label, seed)
        picture = draw(label, seed, portion)
        picture.save(file, quality=_QUALITY)
        try:
            print(f"{_sha256(file)}  {name}", flush=True)
        except BrokenPipeError:  # the process that waits for the pictures is gone
            os._exit(1)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _read_sums(root: Path) -> dict[str, str]:
    """Sum of each picture by its path below ``root``; empty where the list can't be read.

    A line is as ``sha256sum`` writes it: 64 hex digits, two blanks, the path.
    """
    try:
        lines = (root / _SUMS).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return {line[66:]: line[:64] for line in lines}


def _first_damaged(root: Path) -> str | None:
    """The first path, below ``root``, that is missing, changed or extra, or that of the list of sums where it can't be read.

    None for an intact set. Reads every picture before the first damaged one.
    """
    sums = _read_sums(root)
    if not sums:
        return _SUMS
    expected_folders = {str(parent) for name in sums for parent in PurePosixPath(name).parents}
    on_disk = {path.relative_to(root).as_posix() for path in root.rglob("*")}
    on_disk -= expected_folders | {_SUMS}
    for name in sorted(sums.keys() | on_disk):
        if name not in sums or name not in on_disk:
            return name
        if _sha256(root / name) != sums[name]:
            return name
    return None
